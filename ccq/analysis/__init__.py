"""`ccq analyze`: measure keys, gates and the effect of cleaning in a trained model."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ccq.cli import choose
from ccq.errors import UserError

# name: (module of this package, what it is)
KINDS = {
    "alignment": ("alignment", "do needle keys lie off the directions of most variance? for any causal LM"),
    "gate": ("gates", "mean lam by layer and head, on text and needle prompts"),
    "intervene": ("intervene", "evaluate a model with cleaning off, or lam fixed or scaled, also by layer"),
    "margin": ("margin", "scores of needle and distractors with and without cleaning, by layer and head"),
}


class AnalysisError(UserError):
    """A model, prompt or file is missing, damaged or does not fit; the message names it and what was expected."""


def main(argv: Sequence[str]) -> int:
    """Run the analysis that `argv` names."""
    kind = choose("ccq analyze", __doc__, "kind", {name: text for name, (_, text) in KINDS.items()}, argv)
    return importlib.import_module(f"ccq.analysis.{KINDS[kind][0]}").main(argv[1:])
