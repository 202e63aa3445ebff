"""Training: one readable loop for a laptop, one GPU and many, which never loses work."""

from ccq.errors import UserError


class RunError(UserError, RuntimeError):
    """A run that cannot start or go on; the message says why, and what is left of it."""
