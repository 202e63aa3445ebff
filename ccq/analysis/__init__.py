"""`ccq analyze`: measure keys, gates and the effect of cleaning in a trained model."""

from __future__ import annotations

from collections.abc import Sequence

from ccq.cli import TABLES, choose, function_at
from ccq.errors import UserError

KINDS = TABLES["analyze"]


class AnalysisError(UserError):
    """A model, prompt or file is missing, damaged or does not fit; the message names it and what was expected."""


def main(argv: Sequence[str]) -> int:
    """Run the analysis that `argv` names."""
    return function_at(KINDS[choose("ccq analyze", __doc__, "kind", KINDS, argv)][0])(argv[1:])
