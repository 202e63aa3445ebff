"""What an error says of a name that is not known."""

from __future__ import annotations

import difflib


def nearest(name: object, known: tuple[str, ...]) -> str:
    """' Did you mean ...?' for a name that is not known.

    >>> nearest("tritn", ("chunk", "triton")), nearest("x", ("chunk", "triton"))
    (" Did you mean 'triton'?", '')
    """
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
