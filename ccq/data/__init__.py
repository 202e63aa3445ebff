"""From text to batches: tokenizer, token shards, the order of training; recall data and needle documents."""

from __future__ import annotations


class DataError(ValueError):
    """Data that is missing, damaged, foreign or not as asked for; the message names it."""
