"""`ccq bench`: what the operator costs on a GPU, beside its backbone and beside the floor."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ccq.ops.backends import nearest

KINDS = {
    "op": "the cleaning alone, against the same composed from fla's ops and against the floor",
    "layer": "fla's layers at the 1.3B shape, alone and with CCQ: the paper's per-layer table",
    "tune": "tile sizes of the kernels for this GPU",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names."""
    names = tuple(KINDS)
    kind = argv[0] if argv else ""
    if kind not in KINDS:
        print("usage: ccq bench KIND ...   (ccq bench KIND --help says more)", file=sys.stderr)
        print("\n".join(f"  {name:<10} {text}" for name, text in KINDS.items()), file=sys.stderr)
        if kind and kind not in ("-h", "--help"):
            print(f"unknown benchmark {kind!r}.{nearest(kind, names)}", file=sys.stderr)
        return 0 if kind in ("-h", "--help") else 2
    import torch

    if not torch.cuda.is_available() and "--help" not in argv:
        print(f"ccq bench {kind} needs an NVIDIA GPU; `make bench` measures on a CPU.", file=sys.stderr)
        return 1
    return importlib.import_module(f"ccq.bench.{kind}").main(argv[1:])
