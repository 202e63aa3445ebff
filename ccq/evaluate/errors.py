"""What goes wrong with a user's input, data or model: the message says it all, so no traceback is shown."""

from __future__ import annotations

from ccq.errors import UserError


class EvaluationError(UserError):
    """Something is missing, damaged or does not fit; the message names it and what was expected."""
