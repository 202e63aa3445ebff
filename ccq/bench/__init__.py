"""`ccq bench`: measure what CCQ costs on a GPU, beside the backbone: whole models, and in a clone kernels alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ccq.cli import TABLES, choose, function_at

KINDS, IN_A_CLONE = TABLES["bench"], TABLES["clone"]
SCRIPTS = Path(__file__).parents[2] / "benchmarks"  # of a clone; a wheel has none


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names."""
    every = KINDS | IN_A_CLONE
    kind, rest = choose("ccq bench", __doc__, "kind", every, argv), argv[1:]
    import torch

    if kind in IN_A_CLONE:
        if not (SCRIPTS / f"{every[kind][0].partition(':')[0]}.py").exists():
            print(f"ccq bench {kind} needs a clone of the repository, which has it in benchmarks/", file=sys.stderr)
            return 1
        sys.path.insert(0, str(SCRIPTS))
    if not torch.cuda.is_available() and not {"-h", "--help"} & set(rest):
        print(f"ccq bench {kind} needs an NVIDIA GPU; `make bench` measures on a CPU.", file=sys.stderr)
        return 1
    return function_at(every[kind][0])(rest) or 0
