"""Names: the one that was meant, and one for a file."""

from __future__ import annotations

import difflib
import re


def nearest(name: object, known: tuple[str, ...]) -> str:
    """' Did you mean ...?' for a name that is not known.

    >>> nearest("tritn", ("chunk", "triton")), nearest("x", ("chunk", "triton"))
    (" Did you mean 'triton'?", '')
    """
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def slug(name: str) -> str:
    """
    >>> slug("SmolLM2-135M Instruct")
    'smollm2_135m_instruct'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
