"""`ccq bench op`: the cleaning alone, against the same composed from fla's ops and against the floor.

The floor is the larger of two times: the FLOPs that the chunkwise algorithm needs over the rate of a large bf16
product, and the bytes that must move (q, k, lam in, q_clean, k_bar out, and the same again with gradients) over the
bandwidth of a large elementwise kernel. Both rates are measured in the same run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ccq.bench.results import make_parser, write
from ccq.bench.tables import RANGE, newest, noted, spread, timed
from ccq.bench.timing import graph_time
from ccq.ops import Gate, clean_query
from ccq.report.collect import Collection
from ccq.report.table import NOT_RUN, Block, Cell, Row, Table, marks
from ccq.tables import LiveTable

PASSES = ("forward", "forward and backward")
CHUNK = 64  # of the FLOP count: the least that a product's tile allows


def floor_flop(tokens: int, size: int, backward: bool) -> float:
    """k k^T below the diagonal and a read of it, scores and their sum over half a chunk; three times with backward."""
    forward = size * size + 2 * size * size + 2 * CHUNK * size
    return tokens * forward * (3 if backward else 1)


def floor_bytes(tokens: int, size: int, backward: bool) -> float:
    return tokens * (2 * size * (9 if backward else 4) + 4)


def measure_ceilings() -> dict[str, float]:
    """FLOP/s of a large bf16 product and bytes/s (read and written) of a large elementwise kernel."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    return {
        "flop_per_s": 2 * 8192**3 / (1e-3 * graph_time(lambda: a @ b, inner=3).median),
        "byte_per_s": 2 * x.nbytes / (1e-3 * graph_time(lambda: torch.add(x, 1.0, out=y), inner=3).median),
    }


def composed(q: Tensor, k: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """CCQ from what fla offers: its linear attention without decay, with the keys as values, and PyTorch around it."""
    from fla.modules.norm.l2norm import l2norm
    from fla.ops.simple_gla import chunk_simple_gla

    q, k = l2norm(q), l2norm(k)
    total = chunk_simple_gla(q, k, k, scale=1.0)[0].float()
    t = torch.arange(1, q.shape[1] + 1, device=q.device, dtype=torch.float32)[:, None, None]
    key_sum = k.float().cumsum(1)
    y = total / t - key_sum * (key_sum * q).sum(-1, keepdim=True) / t.square()
    return (q - lam[..., None] * y).to(q.dtype), k


def ours(q: Tensor, k: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    return clean_query(q, k, lam, backend="triton")[:2]


def gated(q: Tensor, k: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return clean_query(q, k, Gate(weight, bias), backend="triton")[:2]


def projected(q: Tensor, k: Tensor, weight: Tensor, bias: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The projected step over a covariance that forgets."""
    return clean_query(q, k, Gate(weight, bias), backend="triton", step="projected", log_decay=log_decay)[:2]


def calls(function: Callable, batch: int, length: int, heads: int, size: int) -> tuple[Callable, Callable]:
    """Forward, and forward with backward, on fixed inputs."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, length, heads, size)
    q, k, g, h = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    lam = torch.rand(shape[:-1], device="cuda", generator=generator)
    inputs = [q, k, lam]
    if function in (gated, projected):
        inputs[2:] = torch.randn(heads, heads * size, device="cuda") / size, torch.zeros(heads, device="cuda")
    leaves = [x.clone().requires_grad_() for x in inputs]
    if function is projected:  # the backbone's decay, which gets no gradient from here
        log_decay = torch.nn.functional.logsigmoid(torch.randn(shape[:-1], device="cuda", generator=generator) + 4)
        function = functools.partial(projected, log_decay=log_decay)

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, [g, h])

    return forward, both


def main(argv: Sequence[str] | None = None) -> int:
    shapes = ("1x4096,8x4096,1x8192,1x65536", "BxT, ... (%(default)s)")
    also = (False, "also the one composed from fla's ops")
    args = make_parser("op", __doc__, shapes=shapes, heads=6, key_size=256, composed=also).parse_args(argv)
    functions: list[tuple[str, Callable]] = [("ours", ours), ("with gate", gated), ("projected, decayed", projected)]
    functions += [("composed", composed)] if args.composed else []
    ceilings = measure_ceilings()
    rows = []
    title = (
        f"microseconds; floor at {ceilings['flop_per_s'] / 1e12:.0f} TFLOP/s, {ceilings['byte_per_s'] / 1e12:.2f} TB/s"
    )
    with LiveTable(title, "cleaning", "pass", "batch", "tokens", "us", "floor", "over it") as table:
        for shape in args.shapes.split(","):
            batch, length = (int(n) for n in shape.split("x"))
            tokens = batch * length * args.heads
            for name, function in functions:
                for backward, call in enumerate(calls(function, batch, length, args.heads, args.key_size)):
                    timing = graph_time(call, inner=3)
                    floor = max(
                        floor_flop(tokens, args.key_size, bool(backward)) / ceilings["flop_per_s"],
                        floor_bytes(tokens, args.key_size, bool(backward)) / ceilings["byte_per_s"],
                    )
                    row = {
                        "name": name, "pass": PASSES[backward], "B": batch, "T": length, "H": args.heads,
                        "K": args.key_size, "dtype": "bfloat16", "ms": timing._asdict(),
                        "floor_ms": 1e3 * floor,
                    }  # fmt: skip
                    rows.append(row)
                    us = 1e3 * timing.median
                    table.add(
                        name, row["pass"], batch, length, f"{us:.1f}", f"{1e6 * floor:.1f}", f"{1e-6 * us / floor:.2f}"
                    )
    write(args, {"timing": "CUDA graph", "ceilings": ceilings, "rows": rows})
    return 0


def tables(found: Collection) -> list[Table]:
    """The cleaning alone, of the newest file."""
    source = newest(found, "op")
    if source is None:
        return []
    beside = {"projected, decayed": "projected, decayed, gate", "composed": "composed from fla"}
    measured = {r["name"] for r in source.content["rows"]}
    beside = {name: heading for name, heading in beside.items() if name in measured}
    rows = []
    for batch, length in dict.fromkeys((r["B"], r["T"]) for r in source.content["rows"]):
        here = {(r["name"], r["pass"]): r for r in source.content["rows"] if (r["B"], r["T"]) == (batch, length)}
        times = {key: spread(row["ms"], 1e3, 0) for key, row in here.items()}
        shown = (("ours", PASSES[0]), ("with gate", PASSES[0]), ("ours", PASSES[1]))
        cells = [timed(*times[key], source) if key in times else NOT_RUN for key in shown]
        for name in beside:
            both = [times[name, which][0] for which in PASSES if (name, which) in times]
            cells.append(timed(", ".join(both), "", source) if both else NOT_RUN)
        floors = [1e3 * here["ours", which]["floor_ms"] for which in PASSES]
        cells.append(timed(", ".join(f"{floor:.0f}" for floor in floors), "", source))
        rows.append(Row(Cell(f"batch {batch}, {length:,} tokens"), cells))
    first = source.content["rows"][0]
    notes = [
        f"CUDA-graph time on one GPU, {first['H']} heads of {first['K']}, {first['dtype']}{noted([source])}. Two "
        "numbers: forward, forward and backward. The floor is the larger of the FLOPs over the rate of a large "
        f"product, and the bytes over the bandwidth of a large copy. {marks([source])}",
        RANGE,
    ]
    head = ["cleaning alone, µs", "forward", "with the gate", "forward and backward", *beside.values(), "floor"]
    return [Table("op", "Cleaning alone, microseconds (not in the paper)", head, [Block("", rows)], notes)]
