"""`ccq bench`: measure what CCQ costs on a GPU, beside the backbone: whole models, and in a clone kernels alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ccq.cli import choose

SCRIPTS = Path(__file__).parents[2] / "benchmarks"  # of the repository; not in a wheel
# name: (module of this package, or of SCRIPTS, and function; what it is)
KINDS = {
    "prefill": ("inference:prefill", "prefill of whole models"),
    "decode": ("inference:decode", "decoding with whole models, with and without CUDA graphs"),
    "train": ("train:main", "whole training steps at 32K tokens over sequence lengths: tokens/s, MFU and memory"),
    "layer": ("bench_kernels:bench_layer", "layers of flash-linear-attention, alone and with CCQ (in a clone)"),
    "op": ("bench_kernels:bench_op", "the operator alone, beside a lower bound (in a clone)"),
    "decode-op": ("bench_kernels:bench_decode_op", "one token of a layer's state (in a clone)"),
    "profile": ("profile_step:main", "a training step, a prefill and a decode step by kind of kernel (in a clone)"),
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names."""
    told = {name: text for name, (_, text) in KINDS.items()}
    kind, rest = choose("ccq bench", __doc__, "kind", told, argv), argv[1:]
    import torch

    module, _, function = KINDS[kind][0].partition(":")
    if module not in ("inference", "train"):
        if not (SCRIPTS / f"{module}.py").exists():
            print(f"ccq bench {kind} needs a clone of the repository: it is benchmarks/{module}.py", file=sys.stderr)
            return 1
        sys.path.insert(0, str(SCRIPTS))
    else:
        module = f"ccq.bench.{module}"
    if not torch.cuda.is_available() and not {"-h", "--help"} & set(rest):
        print(f"ccq bench {kind} needs an NVIDIA GPU; `make bench` measures on a CPU.", file=sys.stderr)
        return 1
    return getattr(importlib.import_module(module), function)(rest) or 0
