"""`ccq bench op`: the operator alone, beside the same composed of fla's ops and a lower bound.

The floor is the larger of two times: the FLOPs that the chunkwise algorithm needs over the rate of a large bf16
product, and the bytes that must move (q, k, lam in, q_clean, k_bar out, and the same again with gradients) over the
bandwidth of a large elementwise kernel. Both rates are measured in the same run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ccq.bench.results import graph_time, make_parser, run
from ccq.bench.tables import RANGE, changed, newest, noted, timed
from ccq.ops import Gate, clean_query
from ccq.report.collect import Collection
from ccq.report.table import NOT_RUN, Block, Cell, Row, Table, marks

PASSES = ("forward", "forward and backward")
CHUNK = 64  # of the FLOP count: the least that a product's tile allows


def floor_seconds(tokens: int, size: int, backward: bool, ceilings: dict[str, float]) -> float:
    """FLOPs: k k^T below the diagonal and a read of it, scores and their sum over half a chunk; three times with
    backward."""
    flop = (size * size + 2 * size * size + 2 * CHUNK * size) * (3 if backward else 1)
    moved = 2 * size * (9 if backward else 4) + 4
    return tokens * max(flop / ceilings["flop_per_s"], moved / ceilings["byte_per_s"])


def measure_ceilings() -> dict[str, float]:
    """FLOP/s of a large bf16 product and bytes/s (read and written) of a large elementwise kernel."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    return {
        "flop_per_s": 2 * 8192**3 / (1e-3 * graph_time(lambda: a @ b, inner=3)["median"]),
        "byte_per_s": 2 * x.nbytes / (1e-3 * graph_time(lambda: torch.add(x, 1.0, out=y), inner=3)["median"]),
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


def ours(q: Tensor, k: Tensor, *lam: Tensor, **how) -> tuple[Tensor, Tensor]:
    """With lam, or with weight and bias of the gate."""
    return clean_query(q, k, Gate(*lam) if len(lam) == 2 else lam[0], backend="triton", **how)[:2]


projected = functools.partial(ours, step="projected")  # over a covariance that forgets, with log_decay
FUNCTIONS: dict[str, Callable] = {
    "ours": ours, "with gate": ours, "projected, decayed": projected, "composed": composed
}  # fmt: skip


def calls(name: str, batch: int, length: int, heads: int, size: int) -> tuple[Callable, Callable]:
    """Forward, and forward with backward, of one of FUNCTIONS on fixed inputs."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, length, heads, size)
    q, k, g, h = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    lam = [torch.rand(shape[:-1], device="cuda", generator=generator)]
    if name in ("with gate", "projected, decayed"):
        lam = [torch.randn(heads, heads * size, device="cuda") / size, torch.zeros(heads, device="cuda")]
    function = FUNCTIONS[name]
    if name == "projected, decayed":  # the backbone's decay, which gets no gradient from here
        log_decay = torch.nn.functional.logsigmoid(torch.randn(shape[:-1], device="cuda", generator=generator) + 4)
        function = functools.partial(function, log_decay=log_decay)
    return both_passes(function, [x.requires_grad_() for x in (q, k, *lam)], [g, h])


def both_passes(function: Callable, leaves: list[Tensor], gradients) -> tuple[Callable, Callable]:
    """A call of the function, and one that also asks for the gradients of what it is given."""

    def forward() -> None:
        with torch.no_grad():
            function(*leaves)

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, gradients)

    return forward, both


def measured(args, ceilings: dict[str, float]) -> Iterator[dict]:
    for shape in args.shapes.split(","):
        batch, length = map(int, shape.split("x"))
        for name in FUNCTIONS if args.composed else list(FUNCTIONS)[:-1]:
            for backward, call in enumerate(calls(name, batch, length, args.heads, args.key_size)):
                floor = floor_seconds(batch * length * args.heads, args.key_size, bool(backward), ceilings)
                yield {
                    "name": name, "pass": PASSES[backward], "B": batch, "T": length, "H": args.heads,
                    "K": args.key_size, "dtype": "bfloat16", "ms": graph_time(call, inner=3),
                    "floor_ms": 1e3 * floor,
                }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    shapes = ("1x4096,8x4096,1x8192,1x65536", "BxT, ... (%(default)s)")
    also = (False, "also the one composed from fla's ops")
    args = make_parser("op", __doc__, shapes=shapes, heads=6, key_size=256, composed=also).parse_args(argv)
    rates = measure_ceilings()
    title = f"milliseconds; floor at {rates['flop_per_s'] / 1e12:.0f} TFLOP/s, {rates['byte_per_s'] / 1e12:.2f} TB/s"
    return run(args, title, measured(args, rates), timing="CUDA graph", ceilings=rates)


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
        times = {key: changed("ms", scale=1e3)(row, None) for key, row in here.items()}
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
