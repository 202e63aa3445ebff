"""What goes wrong with a user's model, prompt or file: the message says it all, so no traceback is shown."""

from __future__ import annotations


class AnalysisError(Exception):
    """Something is missing, damaged or does not fit; the message names it and what was expected."""
