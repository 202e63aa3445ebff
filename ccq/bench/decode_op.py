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

import itertools
from collections.abc import Callable, Sequence

import torch

from ccq.bench.op import measure_ceilings
from ccq.bench.results import make_parser, row_of, write
from ccq.bench.tables import RANGE, newest, row_kind, spread, timed
from ccq.bench.timing import graph_time
from ccq.ops import Cleaning, CovarianceState, decode_step
from ccq.report.collect import Collection
from ccq.report.table import NOT_RUN, Block, Cell, Row, Table, marks
from ccq.systems import SYSTEMS
from ccq.tables import LiveTable

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

    def call(self, variant: str) -> Callable[[], object]:
        q, k, v, g, beta = self.q, self.k, self.v, self.g, self.beta
        if variant == "fla":
            return self.fla

        def unit():
            return decode_step(q, k, v, next(self.turn)[0], g, beta, unit_qk=True)

        def ours():
            recurrent, covariance, _ = next(self.turn)
            return decode_step(q, k, v, recurrent, g, beta, cleaning=Cleaning(covariance, gate=self.gate))

        def projected():
            recurrent, _, covariance = next(self.turn)
            cleaning = Cleaning(covariance, gate=self.gate, step="projected", log_decay=g)
            return decode_step(q, k, v, recurrent, g, beta, cleaning=cleaning)

        return {"unit": unit, "ours": ours, "projected": projected}[variant]

    def fla(self):
        """fla's kernel at T = 1, with its own normalisation for Gated DeltaNet."""
        from fla.modules.norm.l2norm import l2norm
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.gla import fused_recurrent_gla

        q, k, v, g = (x.unsqueeze(1) for x in (self.q, self.k, self.v, self.g))
        start = {"initial_state": next(self.turn)[0], "output_final_state": True}
        if self.backbone == "gla":
            return fused_recurrent_gla(l2norm(q), l2norm(k), v, g, **start)
        assert self.beta is not None
        beta = self.beta.unsqueeze(1)
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, use_qk_l2norm_in_kernel=True, **start)


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser(
        "decode-op", __doc__, backbones="gla,gdn", variants=",".join(VARIANTS), batches="1,8,32,128", heads=6,
        key_size=256, value_size=512,
    ).parse_args(argv)  # fmt: skip
    ceilings = measure_ceilings()
    rows: list[dict] = []
    columns = ("layer", "with", "batch", "us", "ratio", "MiB", "TB/s", "of a copy")
    with LiveTable("one token of a layer; ratios to the backbone with unit q and k", *columns) as table:
        for backbone in args.backbones.split(","):
            for batch in (int(n) for n in args.batches.split(",")):
                layer = Layer(backbone, batch, args.heads, args.key_size, args.value_size)
                for variant in args.variants.split(","):
                    with torch.no_grad():
                        timing = graph_time(layer.call(variant), inner=4 * layer.copies, repeats=20)
                    moved = layer.bytes(variant in ("ours", "projected"))
                    rate = moved / (1e-3 * timing.median)
                    row = {
                        "backbone": backbone, "variant": variant, "B": batch, "H": args.heads, "K": args.key_size,
                        "V": args.value_size, "dtype": "bfloat16", "ms": timing._asdict(), "bytes": moved,
                        "byte_per_s": rate, "copies": layer.copies,
                    }  # fmt: skip
                    rows.append(row)
                    control = row_of(rows, backbone=backbone, B=batch, variant="unit") or row
                    ratio = timing.median / control["ms"]["median"]
                    table.add(
                        backbone, variant, batch, f"{1e3 * timing.median:.2f}", f"{ratio:.3f}", f"{moved / 2**20:.1f}",
                        f"{rate / 1e12:.2f}", f"{rate / ceilings['byte_per_s']:.2f}",
                    )  # fmt: skip
    write(args, {"timing": "CUDA graph", "ceilings": ceilings, "rows": rows})
    return 0


def tables(found: Collection) -> list[Table]:
    """A layer's state update and read for one token, of the newest file."""
    source = newest(found, "decode-op")
    if source is None:
        return []
    measured = {(r["backbone"], r["variant"], r["B"]): r for r in source.content["rows"]}
    batches = sorted({r["B"] for r in source.content["rows"]})
    copy = source.content["ceilings"]["byte_per_s"]
    rows = []
    for backbone, system in (("gla", "gla"), ("gdn", "gated-deltanet")):
        names = {"ours": f"ccq-{system}", "projected": f"{system}-projected-decay"}
        for variant, by in (("fla", ", by fla"), ("unit", ", by ccq"), ("ours", ""), ("projected", "")):
            if not any((backbone, variant, batch) in measured for batch in batches):
                continue
            cells = []
            for batch in batches:
                row, base = measured.get((backbone, variant, batch)), measured.get((backbone, "unit", batch))
                if row is None:
                    cells.append(NOT_RUN)
                    continue
                text, small = spread(row["ms"], 1e3, 1)
                if variant in names and base is not None:
                    text += f" ({row['ms']['median'] / base['ms']['median']:.2f}×)"
                cells.append(timed(f"{text}, {row['byte_per_s'] / copy:.0%}", small, source))
            name = names.get(variant, system)
            rows.append(Row(Cell(SYSTEMS[name].label + by), cells, row_kind(name)))
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
