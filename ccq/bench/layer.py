"""`ccq bench layer`: the paper's per-layer table. fla's layers at the 1.3B shape, alone and with CCQ.

    fla        the layer as fla has it (its Gated DeltaNet normalises q and k, its GLA does not)
    unit       with unit q and k: the control that CCQ is to be set against
    composed   CCQ from fla's ops
    ours       CCQ by this package
    projected  the projected step over a covariance that decays with the memory, by this package

CCQ is put where the layer calls its recurrence, so that all else is fla's own code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ccq.bench import op
from ccq.bench.results import NOTE, WARM, make_parser, row_of, write
from ccq.bench.tables import LAYERS, RANGE, find, noted, quoted, spread, timed
from ccq.bench.timing import graph_time, wall_time
from ccq.report.collect import Collection
from ccq.report.paper import load
from ccq.report.table import NOT_IN_PAPER, NOT_RUN, Block, Cell, Row, Table, marks
from ccq.systems import SYSTEMS
from ccq.tables import LiveTable

HIDDEN, HEADS, KEY, VALUE = 2048, 6, 256, 512
RECURRENCES: dict[str, Callable] = {}
VARIANTS = ("fla", "unit", "composed", "ours", "projected")
CLEANED = ("composed", "ours", "projected")
PASSES = (("forward and backward", 4096), ("forward", 4096), ("forward", 8192))


def make_layer(backbone: str, variant: str) -> nn.Module:
    """An fla layer whose recurrence gets q and k through `variant`."""
    import fla.layers.gated_deltanet as gdn
    import fla.layers.gla as gla
    from fla.modules.norm.l2norm import l2norm

    torch.manual_seed(0)
    module, name = (gla, "chunk_gla") if backbone == "gla" else (gdn, "chunk_gated_delta_rule")
    if backbone == "gla":
        layer: nn.Module = gla.GatedLinearAttention(
            hidden_size=HIDDEN, expand_k=HEADS * KEY / HIDDEN, expand_v=HEADS * VALUE / HIDDEN, num_heads=HEADS
        )
    else:
        layer = gdn.GatedDeltaNet(hidden_size=HIDDEN, head_dim=KEY, num_heads=HEADS, expand_v=VALUE / KEY)
    layer = layer.cuda().bfloat16()
    recurrence = RECURRENCES.setdefault(name, getattr(module, name))  # fla's own, whatever an earlier layer put there
    linear = nn.Linear(HEADS * KEY, HEADS, device="cuda") if variant in CLEANED else None  # fp32
    layer.add_module("ccq_gate", linear)

    def read(q: Tensor, k: Tensor, **rest):
        if variant == "unit" and backbone == "gla":
            q, k = l2norm(q), l2norm(k)
        elif linear is not None:
            if variant == "ours":
                q, k = op.gated(q, k, linear.weight, linear.bias)
            elif variant == "projected":
                with torch.no_grad():
                    g = rest["g"].float()
                    if backbone == "gdn":  # fla makes the decay in its kernel
                        g = -rest["A_log"].float().exp() * nn.functional.softplus(g + rest["dt_bias"])
                q, k = op.projected(q, k, linear.weight, linear.bias, g.mean(-1) if g.ndim == 4 else g)
            else:
                q, k = op.composed(q, k, linear(q.flatten(2).float()).sigmoid())
            if backbone == "gdn":
                rest["use_qk_l2norm_in_kernel"] = False
        return recurrence(q=q, k=k, **rest)

    def enter(*_: object) -> None:
        setattr(module, name, read)

    layer.register_forward_pre_hook(enter)
    return layer


def calls(layer: nn.Module, length: int, backward: bool) -> Callable[[], None]:
    x = torch.randn(1, length, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
    g = torch.randn_like(x)
    leaves = [x, *layer.parameters()] if backward else []

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        torch.autograd.grad(layer(x)[0], leaves, g)

    return both if backward else forward


def peak_memory(call: Callable[[], None]) -> int:
    call()
    torch.cuda.synchronize()
    gc.collect()  # what earlier calls left behind must not be freed in the middle of this one
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main(argv: Sequence[str] | None = None) -> int:
    options = {"backbones": "gla,gdn", "variants": ",".join(VARIANTS), "warm": WARM, "note": NOTE}
    args = make_parser("layer", __doc__, **options).parse_args(argv)
    rows: list[dict] = []
    columns = ("layer", "with", "pass", "tokens", "graph ms", "ratio", "wall ms", "ratio", "peak MiB", "ratio",
               "paper ms")  # fmt: skip
    with LiveTable("a layer at the 1.3B shape, batch 1; ratios to the backbone with unit q and k", *columns) as table:
        for backbone in args.backbones.split(","):
            for variant in args.variants.split(","):
                if backbone == "gdn" and variant == "unit":
                    continue  # fla's Gated DeltaNet is that
                layer = make_layer(backbone, variant)
                for name, length in PASSES:
                    backward = name != "forward"
                    call = calls(layer, length, backward)
                    if args.warm:
                        call()
                        torch.cuda.synchronize()
                        continue
                    row: dict = {
                        "backbone": backbone, "variant": variant, "B": 1, "T": length, "dtype": "bfloat16",
                        "pass": name,
                        "graph_ms": graph_time(call, inner=3)._asdict(), "wall_ms": wall_time(call)._asdict(),
                        "peak_bytes": peak_memory(call),
                        "paper_ms": paper_ms(backbone, variant, name, length),
                    }  # fmt: skip
                    rows.append(row)
                    alone = "unit" if backbone == "gla" and variant != "fla" else "fla"
                    control = row_of(rows, backbone=backbone, variant=alone, T=length, **{"pass": name})
                    assert control is not None
                    graph, wall = row["graph_ms"]["median"], row["wall_ms"]["median"]
                    table.add(
                        backbone, variant, row["pass"], length,
                        f"{graph:.3f}", f"{graph / control['graph_ms']['median']:.3f}",
                        f"{wall:.3f}", f"{wall / control['wall_ms']['median']:.3f}",
                        f"{row['peak_bytes'] / 2**20:.0f}", f"{row['peak_bytes'] / control['peak_bytes']:.3f}",
                        row["paper_ms"] or "-",
                    )  # fmt: skip
    if not args.warm:
        shape = {"hidden": HIDDEN, "heads": HEADS, "key": KEY, "value": VALUE}
        write(args, {"note": args.note, "shape": shape, "rows": rows})
    return 0


def paper_ms(backbone: str, variant: str, name: str, length: int) -> float | None:
    """The paper's cell, on an H200."""
    return load().tables["layer"].value("1.3b", LAYERS.get((backbone, variant), ""), heading(name, length))


def heading(name: str, length: int) -> str:
    return f"{name}, {length // 1024}K"


def tables(found: Collection) -> list[Table]:
    """The paper's per-layer table, with what was measured here beside it."""
    sources = found.of("bench", "layer")
    rows = []
    for backbone, system in (("gla", "gla"), ("gdn", "gated-deltanet")):
        alone = "unit" if backbone == "gla" else "fla"

        def cell(
            variant: str, name: str, length: int, value: str, backbone: str = backbone, alone: str = alone
        ) -> Cell:
            mine, control = (
                find(sources, backbone=backbone, variant=which, T=length, **{"pass": name})
                for which in (variant, alone)
            )
            if mine is None:
                return NOT_RUN
            if value == "peak_bytes":
                text, small, of = f"{mine[0][value] / 2**30:.2f} GiB", "", lambda row: row["peak_bytes"]
            else:
                (text, small), of = spread(mine[0][value]), lambda row: row["graph_ms"]["median"]
            if control is not None and variant in CLEANED:
                text += f" ({of(mine[0]) / of(control[0]):.2f}×)"
            return timed(text, small, mine[1])

        for variant in VARIANTS:
            made = f"{system}-projected-decay" if variant == "projected" else f"ccq-{system}"
            name = LAYERS.get((backbone, variant), made)
            if (backbone, variant) == ("gdn", "unit"):
                continue  # fla's Gated DeltaNet is that
            if variant == "projected" and find(sources, backbone=backbone, variant=variant) is None:
                continue  # not in the paper, and not run
            composed = ", composed from fla" if variant == "composed" else ""
            cells = []
            for column in PASSES:
                told = (
                    NOT_IN_PAPER
                    if composed or variant == "projected"
                    else quoted("layer", name, heading(*column), ratio=system)
                )
                cells += [told, cell(variant, *column, "graph_ms")]
            cells.append(cell(variant, *PASSES[0], "peak_bytes"))
            rows.append(
                Row(Cell(SYSTEMS[name].label + composed), cells, "ours" if variant in ("ours", "projected") else "")
            )
    notes = []
    if sources:
        notes.append(
            f"Here: CUDA-graph time of one GPU, the median; in brackets over the backbone with unit q and k"
            f"{noted(sources)}. {marks(sources)} The paper's is wall clock on one H200, its ratios over GLA without "
            "unit q and k."
        )
        notes.append(RANGE)
    paper = load().tables["layer"]
    head = ["one layer, ms", *(part for c in paper.columns for part in (f"{c.heading}, paper", "here")), "peak memory"]
    return [Table("layer", f"{paper.title} ({paper.label})", head, [Block("", rows)], notes)]
