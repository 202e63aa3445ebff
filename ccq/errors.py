"""What a user can mend."""


class UserError(Exception):
    """Something is missing, damaged or does not fit: the message says it all, so `ccq` shows no traceback."""
