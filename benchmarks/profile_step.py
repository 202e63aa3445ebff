"""`ccq bench profile`: time of a training step, a prefill and a decode step by kind of kernel.

A kernel of ours or of fla belongs to the class of the module that defines it, any other to that of its name. What is
left of the wall clock is idle: the GPU waits for the host.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ccq.bench.results import FLA, model_parser, tokens, write
from ccq.tables import show

CLASSES = (
    "weight products",
    "recurrence",
    "cleaning",
    "convolution",
    "norms and elementwise",
    "loss",
    "optimizer",
    "idle",
)
MODULES = {  # the first that a module's name begins with
    "ccq.ops.clean": "cleaning",
    "ccq.ops.recurrence": "recurrence",
    "fla.ops": "recurrence",
    "fla.modules.conv": "convolution",
    "fla.modules.causal_conv1d": "convolution",
    "fla.modules.fused_cross_entropy": "loss",
    "fla.modules": "norms and elementwise",
    "ccq.mixers": "norms and elementwise",
}
NAMES = {  # of kernels that nobody here wrote
    "weight products": "gemm|gemv|cutlass|nvjet|cublas|splitK",
    "loss": "cross_entropy|softmax|nll_loss",
    "optimizer": "multi_tensor_apply|adam|foreach",
    "recurrence": "flash|fmha|attention",
}


OWN = {  # of a decode step: what their module does not say
    "conv_step_kernel": "convolution",
    "project_kernel": "weight products",
    "swiglu_kernel": "weight products",
    "covariance_kernel": "cleaning",
    "again_kernel": "cleaning",
}


def own_kernels() -> dict[str, str]:
    """The class of every Triton kernel that is imported, by its name."""
    found = {}
    for name, module in list(sys.modules.items()):
        kind = next((kind for begin, kind in MODULES.items() if name.startswith(begin)), None)
        if kind is None:
            continue
        for kernel in list(vars(module).values()):
            while hasattr(kernel, "fn"):  # what compiles, tunes and specialises it
                kernel = kernel.fn
            if getattr(kernel, "__module__", None) == name and hasattr(kernel, "__name__"):
                found[kernel.__name__] = OWN.get(kernel.__name__, kind)
    return found


def class_of(kernel: str, own: dict[str, str]) -> str:
    """
    >>> class_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", {})
    'weight products'
    >>> class_of("chunk_fwd_kernel_o", {"chunk_fwd_kernel_o": "recurrence"})
    'recurrence'
    """
    if kernel in own:
        return own[kernel]
    return next((kind for kind, names in NAMES.items() if re.search(names, kernel, re.I)), "norms and elementwise")


def busy(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them lasts.

    >>> busy([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def profiled(call: Callable[[], Any], steps: int, warmup: int) -> dict:
    """Milliseconds of a call by class, and the kernels that take most of them."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        call()
    end.record()
    torch.cuda.synchronize()
    wall = begin.elapsed_time(end) / steps  # without the profiler, which makes launches slower
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    kernels = [event for event in prof.events() or [] if event.device_type.name == "CUDA"]
    own, by_class = own_kernels(), dict.fromkeys(CLASSES, 0.0)
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        ms = (event.time_range.end - event.time_range.start) / 1e3 / steps
        by_class[class_of(event.name, own)] += ms
        by_name.setdefault(event.name, []).append(ms)
    by_class["idle"] = max(0.0, wall - busy([(e.time_range.start, e.time_range.end) for e in kernels]) / 1e3 / steps)
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        "wall_ms": wall,
        "launches": len(kernels) / steps,
        "ms": by_class,
        "kernels": [
            {"name": name[:120], "class": class_of(name, own), "ms": sum(each), "launches": len(each) / steps}
            for name, each in top
        ],
    }


@contextlib.contextmanager
def training(system: str, args) -> Iterator[Callable[[], Any]]:
    from ccq.bench.models import config_of, trainer_of
    from ccq.bench.train import batch_of
    from ccq.train.loop import own_stream
    from ccq.train.world import join

    with join("cuda") as world, own_stream(world):
        config = config_of(system, args.size)
        for name, value in (pair.split("=") for pair in args.set.split(",") if pair):
            setattr(config.model, name, type(getattr(config.model, name) or 0)(value))
        trainer = trainer_of(system, config, world)
        trainer.captures &= system not in FLA  # its model asks the host for things
        batch = batch_of(args.batch * args.length, args.length, trainer.config.model.vocab_size, 0)
        batch = batch._replace(input_ids=batch.input_ids.pin_memory(), labels=batch.labels.pin_memory())
        yield lambda: trainer.step([batch])


@contextlib.contextmanager
def prefill(system: str, args) -> Iterator[Callable[[], Any]]:
    from ccq.bench.models import random_model

    model = random_model(system, args.size)
    prompt = tokens(model, args.batch, args.length)
    with torch.inference_mode():
        yield lambda: model(prompt, use_cache=True, logits_to_keep=1)


@contextlib.contextmanager
def decode(system: str, args) -> Iterator[Callable[[], Any]]:
    from ccq.bench.models import random_model

    model = random_model(system, args.size)
    prompt = tokens(model, args.batch, 512)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
        last = prompt[:, -1].contiguous()
        for _ in range(3):
            model.decode(last, cache.states, cache.rows)
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            model.decode(last, cache.states, cache.rows)
        yield graph.replay


PARTS = {"train": training, "prefill": prefill, "decode": decode}


def main(argv: Sequence[str] | None = None) -> None:
    args = model_parser(
        "profile", __doc__, length=4096, parts=(",".join(PARTS), "of these, with commas between"),
        set=("", "options of the trained model, as conv_size=4"),
        steps=(5, "that are looked at (default: %(default)s)"),
    ).parse_args(argv)  # fmt: skip
    rows: list[dict] = []
    for system in args.systems:
        for part in args.parts.split(","):
            if part == "decode" and system in FLA:
                continue  # it has no step that a graph could hold
            with PARTS[part](system, args) as call:
                found = profiled(call, args.steps, warmup=6)
            del call
            gc.collect()
            torch.cuda.empty_cache()
            shape = {"size": args.size, "B": args.batch, "T": args.length, "dtype": "bfloat16", "options": args.set}
            rows.append({"system": system, "part": part, **shape, **found})
    cells = [[r["wall_ms"], r["launches"], *(r["ms"][kind] for kind in CLASSES)] for r in rows]
    lines = [[r["system"], r["part"], *(f"{x:.2f}" for x in numbers)] for r, numbers in zip(rows, cells, strict=True)]
    show(["system", "part", "wall", "launches", *CLASSES], lines, "milliseconds by class of kernel", left=2, width=160)
    write(args, {"note": args.note, "rows": rows})
