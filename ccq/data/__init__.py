"""From text to batches: tokenizer, token shards, the order of training; recall data and needle documents."""

from ccq.errors import UserError


class DataError(UserError, ValueError):
    """Data that is missing, damaged, foreign or not as asked for; the message names it."""
