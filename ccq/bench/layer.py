"""The report's table of a layer, fla's at the 1.3B shape: `python benchmarks/bench_kernels.py layer` measures it.

fla        the layer as fla has it (its Gated DeltaNet normalises q and k, its GLA does not)
unit       with unit q and k: the control that CCQ is to be set against
composed   CCQ from fla's ops
ours       CCQ by this package
projected  the projected step over a covariance that decays with the memory, by this package
"""

from __future__ import annotations

from ccq.bench.tables import BACKBONES, LAYERS, RANGE, beside, changed, find, noted, quoted, times
from ccq.report.collect import Collection
from ccq.report.paper import load
from ccq.report.table import NOT_IN_PAPER, Block, Cell, Row, Table, marks, row_kind
from ccq.systems import SYSTEMS

VARIANTS = ("fla", "unit", "composed", "ours", "projected")
CLEANED = ("composed", "ours", "projected")
ALONE = {"gla": "unit", "gdn": "fla"}  # with unit q and k; fla's Gated DeltaNet has them
PASSES = (("forward and backward", 4096), ("forward", 4096), ("forward", 8192))


def heading(name: str, length: int) -> str:
    return f"{name}, {length // 1024}K"


def tables(found: Collection) -> list[Table]:
    """The paper's per-layer table, with what was measured here beside it."""
    sources = found.of("bench", "layer")
    rows = []
    for backbone, variant in ((b, v) for b in BACKBONES for v in VARIANTS if (b, v) != ("gdn", "unit")):
        if variant == "projected" and find(sources, backbone=backbone, variant=variant) is None:
            continue  # not in the paper, and not run
        name = LAYERS.get((backbone, variant), LAYERS[backbone, "ours"])
        alone, ratio = {"variant": ALONE[backbone]}, times if variant in CLEANED else None
        milliseconds = changed("graph_ms", ".2f", ratio=ratio)
        gigabytes = changed("peak_bytes", ".2f", 2**-30, " GiB", ratio)
        line = []
        for column, length in PASSES:
            at = {"backbone": backbone, "variant": variant, "T": length, "pass": column}
            known = variant in ("fla", "unit", "ours")
            told = quoted("layer", name, heading(column, length), BACKBONES[backbone]) if known else NOT_IN_PAPER
            line += [told, beside(sources, milliseconds, alone, **at)]
        line.append(beside(sources, gigabytes, alone, **at | {"pass": PASSES[0][0], "T": PASSES[0][1]}))
        composed = variant == "composed"
        label = SYSTEMS[name].label + (", composed from fla" if composed else "")
        rows.append(Row(Cell(label), line, "" if composed else row_kind(name)))
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
