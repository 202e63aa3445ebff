"""Names, numbers, errors and times as people write and read them; and things by what they share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Thing = TypeVar("Thing")
Key = TypeVar("Key", bound=Hashable)


def grouped(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """
    >>> grouped(["one", "two", "three"], len)
    {3: ['one', 'two'], 5: ['three']}
    """
    groups: dict[Key, list[Thing]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


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


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, without the pages that may follow."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(7300)
    ('1:15', '2:01:40')
    """
    if not seconds < 1e7:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def plural(count: int, word: str, words: str = "") -> str:
    """
    >>> plural(1, "step"), plural(2000, "step"), plural(2, "micro-batch", "micro-batches")
    ('1 step', '2,000 steps', '2 micro-batches')
    """
    return f"{count:,} {word if count == 1 else words or word + 's'}"


def positive(text: str) -> int:
    """The type of an option. A list, of which only a part could count, is refused."""
    with contextlib.suppress(ValueError):
        if int(text) > 0:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected one whole number above 0, got {text!r}")
