"""`ccq bench`: measure what CCQ costs on a GPU, beside the backbone: whole models, and in a clone kernels alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ccq.cli import choose

# name: (module and function, what it is)
KINDS = {
    "prefill": ("ccq.bench.inference:prefill", "prefill of whole models"),
    "decode": ("ccq.bench.inference:decode", "decoding with whole models, with and without CUDA graphs"),
    "train": ("ccq.bench.train:main", "training steps of whole models over sequence lengths: tokens/s, MFU, memory"),
}
SCRIPTS = Path(__file__).parents[2] / "benchmarks"  # of a clone; a wheel has none
IN_A_CLONE = {
    "layer": ("bench_kernels:bench_layer", "layers of flash-linear-attention, alone and with CCQ (in a clone)"),
    "op": ("bench_kernels:bench_op", "the operator alone, beside a lower bound (in a clone)"),
    "decode-op": ("bench_kernels:bench_decode_op", "one token of a layer's state (in a clone)"),
    "profile": ("profile_step:main", "a training step, a prefill and a decode step by kind of kernel (in a clone)"),
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names."""
    every = KINDS | IN_A_CLONE
    kind, rest = choose("ccq bench", __doc__, "kind", {name: what for name, (_, what) in every.items()}, argv), argv[1:]
    import torch

    module, _, function = every[kind][0].partition(":")
    if kind in IN_A_CLONE:
        if not (SCRIPTS / f"{module}.py").exists():
            print(f"ccq bench {kind} needs a clone of the repository, which has it in benchmarks/", file=sys.stderr)
            return 1
        sys.path.insert(0, str(SCRIPTS))
    if not torch.cuda.is_available() and not {"-h", "--help"} & set(rest):
        print(f"ccq bench {kind} needs an NVIDIA GPU; `make bench` measures on a CPU.", file=sys.stderr)
        return 1
    return getattr(importlib.import_module(module), function)(rest) or 0
