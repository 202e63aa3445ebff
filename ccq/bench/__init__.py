"""`ccq bench`: measure the cost of CCQ in whole models on a GPU, beside the backbone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ccq.cli import choose

# name: (module of this package and function, what it is)
KINDS = {
    "prefill": ("inference:prefill", "prefill of whole models"),
    "decode": ("inference:decode", "decoding with whole models, with and without CUDA graphs"),
    "train": ("train:main", "whole training steps at 32K tokens over sequence lengths: tokens/s, MFU and memory"),
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names."""
    told = {name: text for name, (_, text) in KINDS.items()}
    kind, rest = choose("ccq bench", __doc__, "kind", told, argv), argv[1:]
    import torch

    if not torch.cuda.is_available() and not {"-h", "--help"} & set(rest):
        print(f"ccq bench {kind} needs an NVIDIA GPU; `make bench` measures on a CPU.", file=sys.stderr)
        return 1
    module, _, function = KINDS[kind][0].partition(":")
    return getattr(importlib.import_module(f"ccq.bench.{module}"), function)(rest)
