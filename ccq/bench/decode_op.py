"""`ccq bench decode-op`: one token of a layer's state update and read, with and without cleaning.

    fla        fla's fused recurrent kernel, which writes its states to new memory
    unit       `decode_step` with unit q and k and no cleaning: the backbone's own update and read
    ours       `decode_step` with gate and cleaning
    projected  the same with the projected step, the covariance decaying with the memory

The floor is the states' bytes, read once and written once (of the covariance the lower triangle), over the bandwidth of
a large elementwise kernel measured in the same run. Each call works on one of several copies of the states, so that
none is found in the cache.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch

from ccq.bench.op import measure_ceilings
from ccq.bench.results import graph_time, make_parser, run
from ccq.bench.tables import BACKBONES, LAYERS, RANGE, beside, changed, newest, times
from ccq.ops import Cleaning, CovarianceState, decode_step
from ccq.report.collect import Collection
from ccq.report.table import Block, Cell, Row, Table, marks, row_kind
from ccq.systems import SYSTEMS

VARIANTS = ("fla", "unit", "ours", "projected")
CACHE = 60 * 2**20  # bytes of an H200's L2


class Layer:
    """Inputs of one token and `copies` of the states of one layer."""

    def __init__(self, backbone: str, batch: int, heads: int, key: int, value: int):
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        self.backbone = backbone
        self.q, self.k, self.v = normal(batch, heads, key), normal(batch, heads, key), normal(batch, heads, value)
        decay = (batch, heads, key) if backbone == "gla" else (batch, heads)
        self.g = torch.nn.functional.logsigmoid(normal(*decay, dtype=torch.float32))
        self.beta = None if backbone == "gla" else normal(batch, heads).sigmoid()
        self.gate = (normal(heads, heads * key, dtype=torch.float32) / 50, torch.full((heads,), -4.6, device="cuda"))
        recurrent = 4 * batch * heads * key * value
        self.copies = max(2, -(-2 * CACHE // recurrent))
        self.states = [
            (
                torch.zeros(batch, heads, key, value, device="cuda"),
                CovarianceState.zeros(batch, heads, key, device="cuda"),
                CovarianceState.zeros(batch, heads, key, device="cuda", decayed=True),
            )
            for _ in range(self.copies)
        ]
        self.turn = itertools.cycle(self.states)

    def bytes(self, cleaned: bool) -> int:
        """What must move: the states in and out, of the symmetric C_t one triangle."""
        recurrent, covariance, _ = self.states[0]
        size = self.q.shape[-1]
        triangle = covariance.second_moment.nbytes * (size + 1) / (2 * size)
        return int(2 * (recurrent.nbytes + (triangle + covariance.key_sum.nbytes if cleaned else 0)))

    def step(self, variant: str) -> torch.Tensor:
        recurrent, covariance, decayed = next(self.turn)
        if variant == "fla":
            return self.fla(recurrent)
        cleaning = None
        if variant == "ours":
            cleaning = Cleaning(covariance, gate=self.gate)
        elif variant == "projected":
            cleaning = Cleaning(decayed, gate=self.gate, step="projected", log_decay=self.g)
        return decode_step(self.q, self.k, self.v, recurrent, self.g, self.beta, unit_qk=True, cleaning=cleaning)

    def fla(self, recurrent: torch.Tensor) -> torch.Tensor:
        """fla's kernel at T = 1, with its own normalisation for Gated DeltaNet."""
        from fla.modules.norm.l2norm import l2norm
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.gla import fused_recurrent_gla

        q, k, v, g = (x.unsqueeze(1) for x in (self.q, self.k, self.v, self.g))
        start = {"initial_state": recurrent, "output_final_state": True}
        if self.beta is None:
            return fused_recurrent_gla(l2norm(q), l2norm(k), v, g, **start)
        beta = self.beta.unsqueeze(1)
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, use_qk_l2norm_in_kernel=True, **start)


@torch.no_grad()
def measured(args) -> Iterator[dict]:
    for backbone in args.backbones.split(","):
        for batch in map(int, args.batches.split(",")):
            layer = Layer(backbone, batch, args.heads, args.key_size, args.value_size)
            for variant in args.variants.split(","):
                timing = graph_time(functools.partial(layer.step, variant), inner=4 * layer.copies, repeats=20)
                moved = layer.bytes(variant in ("ours", "projected"))
                yield {
                    "backbone": backbone, "variant": variant, "B": batch, "H": args.heads, "K": args.key_size,
                    "V": args.value_size, "dtype": "bfloat16", "ms": timing, "bytes": moved,
                    "byte_per_s": moved / (1e-3 * timing["median"]), "copies": layer.copies,
                }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser(
        "decode-op", __doc__, backbones=",".join(BACKBONES), variants=",".join(VARIANTS), batches="1,8,32,128", heads=6,
        key_size=256, value_size=512,
    ).parse_args(argv)  # fmt: skip
    title = "one token of a layer, beside the backbone with unit q and k"
    return run(
        args, title, measured(args), lambda row: {"backbone": row["backbone"], "B": row["B"], "variant": "unit"},
        timing="CUDA graph", ceilings=measure_ceilings(),
    )  # fmt: skip


def tables(found: Collection) -> list[Table]:
    """A layer's state update and read for one token, of the newest file."""
    source = newest(found, "decode-op")
    if source is None:
        return []
    batches = sorted({r["B"] for r in source.content["rows"]})
    copy = source.content["ceilings"]["byte_per_s"]
    rows = []
    for (backbone, variant), name in LAYERS.items():
        if not any((r["backbone"], r["variant"]) == (backbone, variant) for r in source.content["rows"]):
            continue
        by = {"fla": ", by fla", "unit": ", by ccq"}.get(variant, "")

        def cell(row: dict, unit: dict | None, by: str = by) -> tuple[str, str]:
            text, small = changed("ms", ".1f", 1e3, ratio=None if by else times)(row, unit)
            return f"{text}, {row['byte_per_s'] / copy:.0%}", small

        at = {"backbone": backbone, "variant": variant}
        line = [beside([source], cell, {"variant": "unit"}, **at, B=batch) for batch in batches]
        label = SYSTEMS[SYSTEMS[name].family if by else name].label + by
        rows.append(Row(Cell(label), line, row_kind(name)))
    first = source.content["rows"][0]
    notes = [
        f"CUDA-graph time on one GPU, {first['H']} heads of {first['K']}/{first['V']}, {first['dtype']} inputs, fp32 "
        f"states, none of them in the cache. In brackets: over the backbone by ccq. In percent: of the "
        f"{copy / 1e12:.1f} TB/s at which this GPU copies, counting each state once in and once out. {marks([source])}",
        RANGE,
    ]
    head = ["one token of a layer, µs", *(f"batch {batch}" for batch in batches)]
    title = "One token of a layer, microseconds (not in the paper)"
    return [Table("decode-op", title, head, [Block("", rows)], notes)]
