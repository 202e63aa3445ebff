"""What goes wrong with a user's model, prompt or file: the message says it all, so no traceback is shown."""

from __future__ import annotations

from ccq.errors import UserError


class AnalysisError(UserError):
    """Something is missing, damaged or does not fit; the message names it and what was expected."""
