"""`ccq analyze`: where keys lie, what the gate does, and what the cleaning changes in a trained model."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ccq.names import nearest

# name: (module of this package, what it is)
KINDS = {
    "alignment": ("alignment", "do needle keys lie off the directions of most variance? any causal LM"),
    "gate": ("gates", "mean lam by layer and head, on text and where a needle is retrieved; its course in training"),
    "intervene": ("intervene", "a suite of `ccq eval` with cleaning off, lam fixed or scaled, layer by layer"),
    "margin": ("margin", "scores of needle and distractors with and without cleaning, by layer and head"),
}


def main(argv: Sequence[str]) -> int:
    """Run the analysis that `argv` names."""
    parser = argparse.ArgumentParser(
        prog="ccq analyze",
        description=(__doc__ or "").splitlines()[0],
        epilog="kinds:\n" + "\n".join(f"  {name:<10} {text}" for name, (_, text) in KINDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", help="one of those below; `ccq analyze KIND --help` says more", metavar="KIND")
    kind = parser.parse_args(argv[:1]).kind
    if kind not in KINDS:
        parser.error(f"unknown kind {kind!r}.{nearest(kind, tuple(KINDS))} They are: {', '.join(KINDS)}.")
    from ccq.analysis.errors import AnalysisError
    from ccq.evaluate.errors import EvaluationError
    from ccq.shipped import ModelError

    try:
        return importlib.import_module(f"ccq.analysis.{KINDS[kind][0]}").main(argv[1:])
    except (AnalysisError, EvaluationError, ModelError) as error:
        print(f"ccq analyze {kind}: {error}", file=sys.stderr)
        return 1
