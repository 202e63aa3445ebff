"""Our candidate kernels for gated linear attention (gla_kernels.py) beside fla's, on a GPU.

    python benchmarks/gla_beside_fla.py --out FILE           # errors and times
    python benchmarks/gla_beside_fla.py --sweep --out FILE   # each kernel first in several sizes, the best one is taken

The candidate is worth its lines if it takes 2% off a training step at 1.3B, which is 14 ms: `saved_ms`, of forward and
backward of all layers.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import gla_kernels as ours
import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.jit import JITFunction

from ccq.bench.results import graph_time
from ccq.files import write_json
from ccq.ops.recurrence import chunk
from ccq.provenance import provenance

# of a training step: batch, tokens, heads, key and value size, layers
SHAPES = {
    "1.3b": (8, 4096, 6, 256, 512, 21),
    "1.3b-128": (8, 4096, 16, 128, 128, 22),
    "nano": (8, 4096, 3, 128, 256, 8),
}
DEVICE = "cuda"
TRIED: dict[str, dict[str, tuple[int, ...]]] = {
    "prepare": {"BK": (16, 32), "num_warps": (2, 4, 8), "num_stages": (1, 3)},
    "states": {"BK": (64, 128), "BV": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    "outputs": {"BK": (32, 64), "BV": (128, 256), "num_warps": (4, 8), "num_stages": (2, 3)},
    "between": {"BK": (64, 128), "BV": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)},
    "within": {"BK": (16,), "num_warps": (2, 4), "maxnreg": (168, 200, 255)},
}


def draw(shape: tuple[int, ...]) -> list[Tensor]:
    """q, k, v and log-decays in bf16. As in trained models, some channels forget 0.005 a token and some 3."""
    B, T, H, K, V, _ = shape
    torch.manual_seed(0)
    q, k, v, raw = (torch.randn(B, T, H, size, device=DEVICE) for size in (K, K, V, K))
    rates = torch.logspace(-2.3, 0.5, K, device=DEVICE)
    parts = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, rates * F.logsigmoid(raw))
    return [x.bfloat16().requires_grad_() for x in parts]


def fla(q, k, v, g, scale):
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, g, scale=scale)


def error(ref: Tensor, got: Tensor) -> float:
    return ((got.double() - ref).norm() / ref.norm()).item()


def errors(function: Callable, shape: tuple[int, ...]) -> dict[str, float]:
    """Of the output and all gradients of one sequence, against chunkwise PyTorch in fp64."""
    leaves = draw((1, *shape[1:]))
    do = torch.randn_like(leaves[2])
    names = ("o", "dq", "dk", "dv", "dg")

    def results(run, given):
        o = run(*given, shape[3] ** -0.5)[0]
        return [o, *torch.autograd.grad(o, given, do.to(o.dtype))]

    def exact(q, k, v, g, scale):
        return chunk.run(q, k, v, g, None, scale, None, False, None)

    ref = results(exact, [x.detach().double().requires_grad_() for x in leaves])
    return {name: error(a, b) for name, a, b in zip(names, ref, results(function, leaves), strict=True)}


def times(function: Callable, shape: tuple[int, ...]) -> dict[str, float]:
    leaves, scale = draw(shape), shape[3] ** -0.5
    do = torch.randn_like(leaves[2])

    def forward():
        with torch.no_grad():
            return function(*leaves, scale)

    def both():
        return torch.autograd.grad(function(*leaves, scale)[0], leaves, do)

    return {"forward_ms": graph_time(forward)["median"], "both_ms": graph_time(both)["median"]}


def calls(shape: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """One call of each kernel alone."""
    q, k, v, g = (x.detach() for x in draw(shape))
    do, scale, layout = torch.randn_like(v), shape[3] ** -0.5, ours.Layout(q, None)
    q_read, k_write, sums, A = ours.prepare(layout, q, k, g, scale, scores=True)
    seen, _ = ours.states(layout, k_write, v, sums, None, False)
    d_seen, _ = ours.states(layout, q_read, do, sums, None, False, reverse=True)
    dq, dk, both, dA = ours.between(layout, q, k, v, do, seen, d_seen)
    return {
        "prepare": lambda: ours.prepare(layout, q, k, g, scale, scores=True),
        "prepare, backward": lambda: ours.prepare(layout, q, k, g, scale),
        "states": lambda: ours.states(layout, k_write, v, sums, None, False),
        "states, reverse": lambda: ours.states(layout, q_read, do, sums, None, False, reverse=True),
        "outputs": lambda: ours.outputs(layout, q_read, v, A, seen),
        "outputs, reverse": lambda: ours.outputs(layout, k_write, do, A, d_seen, reverse=True),
        "between": lambda: ours.between(layout, q, k, v, do, seen, d_seen),
        "within": lambda: ours.within(layout, q, k, g, sums, dq, dk, both, dA, scale),
        "steep": lambda: ours.steep(layout, q, k, g, sums, A, scale),
    }


def bytes_moved(shape: tuple[int, ...], tokens: int) -> int:
    """By our kernels for a layer, forward and backward, if no tensor of a launch is moved twice; all are in bf16."""
    B, T, H, K, V, _ = shape
    keys, values, scores = (2 * B * T * H * size for size in (K, V, tokens))
    states = 2 * B * -(-T // tokens) * H * K * V
    prepare, run = 5 * keys, keys + values + states
    outputs = keys + states + 2 * values + scores
    between, within = 2 * (values + states + keys) + scores, 8 * keys + scores
    return (prepare + scores + run + outputs) + (prepare + 2 * run + outputs + between + within)


def choices(kernel: str) -> list[dict[str, int]]:
    """The sizes to try."""
    tried = TRIED[kernel]
    return [dict(zip(tried, values, strict=True)) for values in itertools.product(*tried.values())]


def compile_all(alone: dict[str, Callable[[], object]]) -> None:
    """Every size of every kernel, side by side: one after another they take far longer than what is measured."""
    run = JITFunction.run

    def compiled(self: JITFunction, *args, grid, warmup, **options):
        return run(self, *args, grid=grid, warmup=True, **options)

    untouched = dict(ours.SIZES)
    with (
        patch.object(JITFunction, "run", compiled),
        ThreadPoolExecutor() as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for kernel in TRIED:
            for tried in choices(kernel):
                ours.SIZES[kernel] = tried
                alone[kernel]()
    ours.SIZES.update(untouched)


def sweep(name: str, shape: tuple[int, ...], tokens: int) -> Iterator[dict]:
    """Every size of every kernel; leaves the fastest ones in place."""
    ours.CHUNK = tokens
    alone = calls(shape)
    compile_all(alone)
    for kernel in TRIED:
        found: list[tuple[float, dict[str, int]]] = []
        for tried in choices(kernel):
            ours.SIZES[kernel] = tried
            try:
                spent = graph_time(alone[kernel], inner=5, repeats=5, warmup=1)["median"]
            except Exception as problem:  # too much shared memory, or none of Triton's layouts
                yield {"shape": name, "chunk": tokens, "kernel": kernel, **tried, "error": type(problem).__name__}
                continue
            found.append((spent, tried))
            yield {"shape": name, "chunk": tokens, "kernel": kernel, **tried, "ms": spent}
        ours.SIZES[kernel] = min(found, key=lambda x: x[0])[1]


def measured(options: argparse.Namespace) -> Iterator[dict]:
    for name in options.shapes:
        shape, untouched = SHAPES[name], dict(ours.SIZES)
        row = {"shape": name, "kernels": "fla", **times(fla, shape), **errors(fla, shape)}
        yield row
        for tokens in map(int, options.chunks.split(",")):
            ours.CHUNK = tokens
            if options.sweep:
                yield from sweep(name, shape, tokens)
            alone = {kernel: graph_time(call, inner=5)["median"] for kernel, call in calls(shape).items()}
            mine = {"shape": name, "kernels": "ours", "chunk": tokens, **times(ours.gla, shape)}
            mine["tb_s"] = bytes_moved(shape, tokens) / mine["both_ms"] / 1e9
            saved = shape[-1] * (row["both_ms"] - mine["both_ms"])
            yield {**mine, **errors(ours.gla, shape), "saved_ms": saved, "alone_ms": alone, "sizes": dict(ours.SIZES)}
            ours.SIZES.update(untouched)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="with commas between (default: %(default)s)")
    parser.add_argument("--chunks", default="64", help="tokens of a chunk, with commas between (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="try several sizes of each kernel")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    if unknown := [name for name in options.shapes if name not in SHAPES]:
        parser.error(f"--shapes: there is no {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if not torch.cuda.is_available() and DEVICE == "cuda":
        parser.error("no NVIDIA GPU here")
    rows = []
    for row in measured(options):
        rows.append(row)
        print(row, flush=True)
        write_json(options.out, {**provenance(), "rows": rows})  # what is there stays, should the next one die


if __name__ == "__main__":
    main()
