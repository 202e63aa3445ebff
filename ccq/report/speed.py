"""Speed: what `ccq bench` and benchmarks/ measured, beside the paper's numbers where it has them."""

from __future__ import annotations

from ccq.report.claims import CONTROLS, change
from ccq.report.collect import Collection, Source
from ccq.report.document import Block, Cell, Row, Table
from ccq.report.paper import Paper
from ccq.report.paper import Table as PaperTable
from ccq.report.systems import label_of, scale_label
from ccq.report.tables import MISSING, marks

PASSES = (("forward and backward", 4096), ("forward", 4096), ("forward", 8192))
SHORT = {"gla": "gla", "gated-deltanet": "gdn"}
RANGE = "Small print in a cell: the range that was measured."


def spread(timing: dict, scale: float = 1.0, digits: int = 2) -> tuple[str, str]:
    """Median, and the range that the file gives."""
    return (f"{scale * timing['median']:.{digits}f}",
            f"{scale * timing['low']:.{digits}f}–{scale * timing['high']:.{digits}f}")  # fmt: skip


def layer_table(paper: Paper, found: Collection) -> Table:
    table = paper.tables["layer"]
    columns = (part for c in table.columns for part in (f"{c.heading}, paper", "here"))
    head = ["one layer, ms", *columns, "peak memory"]
    rows, notes = [], []
    sources = found.of("bench", "layer")
    for backbone in SHORT:
        alone = "unit" if backbone == "gla" else "fla"
        entries = [(backbone, "fla", label_of(backbone))]
        if backbone == "gla":
            entries.append(("", "unit", label_of("gla-unit")))
        entries += [("", "composed", f"{label_of('ccq-' + backbone)}, composed from fla")]
        entries += [(f"ccq-{backbone}", "ours", label_of(f"ccq-{backbone}"))]
        for system, variant, text in entries:
            cells, cleaned = [], variant in ("ours", "composed")
            for column, (name, tokens) in zip(table.columns, PASSES, strict=True):
                cells.append(layer_of_paper(table, system, backbone, column.heading))
                mine, control = (
                    find(sources, backbone=SHORT[backbone], variant=which, T=tokens, **{"pass": name})
                    for which in (variant, alone)
                )
                if mine is None:
                    cells.append(MISSING)
                    continue
                value, small = spread(mine[0]["graph_ms"])
                if control is not None and cleaned:
                    value += f" ({mine[0]['graph_ms']['median'] / control[0]['graph_ms']['median']:.2f}×)"
                cells.append(Cell(value, small, mine[1].told, kind="ours"))
            mine, control = (
                find(sources, backbone=SHORT[backbone], variant=which, T=4096, **{"pass": "forward and backward"})
                for which in (variant, alone)
            )
            if mine is None:
                cells.append(MISSING)
            else:
                ratio = f" ({mine[0]['peak_bytes'] / control[0]['peak_bytes']:.2f}×)" if control and cleaned else ""
                cells.append(Cell(f"{mine[0]['peak_bytes'] / 2**30:.2f} GiB{ratio}", "", mine[1].told, kind="ours"))
            rows.append(Row(Cell(text), cells, "ours" if variant == "ours" else ""))
    if sources:
        notes.append(
            f"Here: CUDA-graph time of one GPU, the median; in brackets over the backbone with unit q and k"
            f"{noted(sources)}. {marks(sources)} The paper's is wall clock on one H200, its ratios over GLA without "
            "unit q and k."
        )
        notes.append(RANGE)
    return Table(f"{table.title} ({table.label})", head, [Block("", rows)], notes, name="layer")


def layer_of_paper(table: PaperTable, system: str, backbone: str, heading: str) -> Cell:
    told = table.cell("1.3b", system, heading) if system else None
    if told is None:
        return Cell("–", kind="missing", hover="not in the paper")
    base = table.value("1.3b", backbone, heading)
    ratio = f" ({told.value / base:.2f}×)" if system.startswith("ccq") and told.value and base else ""
    return Cell(f"{told.shown}{ratio}", kind="paper", hover=f"{table.label}: one GPU, wall clock")


def noted(sources: list[Source]) -> str:
    """What whoever measured it has to say of it."""
    notes = dict.fromkeys(source.content["note"] for source in sources if source.content.get("note"))
    return f" ({'; '.join(notes)})" if notes else ""


def operator_table(found: Collection) -> Table | None:
    """The cleaning alone, of the newest file."""
    sources = found.of("bench", "op")
    if not sources:
        return None
    source = max(sources, key=lambda s: s.when)
    passes = ("forward", "forward and backward")
    rows = []
    for batch, length in dict.fromkeys((r["B"], r["T"]) for r in source.content["rows"]):
        here = {(r["name"], r["pass"]): r for r in source.content["rows"] if (r["B"], r["T"]) == (batch, length)}
        times = {key: spread(row["ms"], 1e3, 0) for key, row in here.items()}
        cells = []
        for name, which in (("ours", passes[0]), ("with gate", passes[0]), ("ours", passes[1])):
            time = times.get((name, which))
            cells.append(Cell(*time, source.told, kind="ours") if time else MISSING)
        theirs = [times.get(("composed", which)) for which in passes]
        cells.append(Cell(", ".join(t[0] for t in theirs if t), "", source.told) if all(theirs) else MISSING)
        floors = [here["ours", which]["floor_ms"] for which in passes]
        cells.append(Cell(", ".join(f"{1e3 * floor:.0f}" for floor in floors), "", source.told))
        rows.append(Row(Cell(f"batch {batch}, {length:,} tokens"), cells))
    head = ["cleaning alone, µs", "forward", "with the gate", "forward and backward", "composed from fla", "floor"]
    first = source.content["rows"][0]
    notes = [
        f"CUDA-graph time on one GPU, {first['H']} heads of {first['K']}, {first['dtype']}{noted([source])}. Two "
        "numbers: forward, forward and backward. The floor is the larger of the FLOPs over the rate of a large "
        f"product, and the bytes over the bandwidth of a large copy. {marks([source])}",
        RANGE,
    ]
    return Table("Cleaning alone, microseconds (not in the paper)", head, [Block("", rows)], notes, name="op")


def decode_operator_table(found: Collection) -> Table | None:
    """A layer's state update and read for one token, of the newest file."""
    sources = found.of("bench", "decode-op")
    if not sources:
        return None
    source = max(sources, key=lambda s: s.when)
    measured = {(r["backbone"], r["variant"], r["B"]): r for r in source.content["rows"]}
    batches = sorted({r["B"] for r in source.content["rows"]})
    copy = source.content["ceilings"]["byte_per_s"]
    rows = []
    for backbone, short in SHORT.items():
        for variant, title in (("fla", "by fla"), ("unit", "by ccq"), ("ours", "")):
            cells = []
            for batch in batches:
                row, base = measured.get((short, variant, batch)), measured.get((short, "unit", batch))
                if row is None:
                    cells.append(MISSING)
                    continue
                text, small = spread(row["ms"], 1e3, 1)
                if variant == "ours" and base is not None:
                    text += f" ({row['ms']['median'] / base['ms']['median']:.2f}×)"
                cells.append(Cell(f"{text}, {row['byte_per_s'] / copy:.0%}", small, source.told, kind="ours"))
            text = f"{label_of(backbone)}, {title}" if title else label_of(f"ccq-{backbone}")
            rows.append(Row(Cell(text), cells, "" if title else "ours"))
    first = source.content["rows"][0]
    notes = [
        f"CUDA-graph time on one GPU, {first['H']} heads of {first['K']}/{first['V']}, {first['dtype']} inputs, fp32 "
        f"states, none of them in the cache. In brackets: over the backbone by ccq. In percent: of the "
        f"{copy / 1e12:.1f} TB/s at which this GPU copies, counting each state once in and once out. {marks([source])}",
        RANGE,
    ]
    head = ["one token of a layer, µs", *(f"batch {batch}" for batch in batches)]
    title = "One token of a layer, microseconds (not in the paper)"
    return Table(title, head, [Block("", rows)], notes, name="decode-op")


def find(sources: list[Source], **wanted: object) -> tuple[dict, Source] | None:
    """The newest row that has these values."""
    for source in sorted(sources, key=lambda s: s.when, reverse=True):
        for row in source.content["rows"]:
            if all(row.get(key) == value for key, value in wanted.items()):
                return row, source
    return None


SPEED_ROWS = ("gla", "gla-unit", "ccq-gla", "gated-deltanet", "ccq-gated-deltanet")


def inference_table(paper: Paper, found: Collection) -> Table:
    table = paper.tables["inference"]
    head = [
        "",
        "4K prefill, ms, paper",
        "here",
        "decode, tokens/s, paper",
        "here: `generate`",
        "here: graph step",
        "ms",
    ]
    prefills, decodes = found.of("bench", "prefill"), found.of("bench", "decode")
    rows = []
    for system in SPEED_ROWS:
        first = find(prefills, system=system, size="1.3b", B=8, T=4096)
        then = find(decodes, system=system, size="1.3b", B=8)
        told = [table.cell("1.3b", system, c.heading) for c in table.columns]
        shown = [Cell(c.shown, kind="paper", hover="one GPU, Appendix C") if c
                 else Cell("–", kind="missing", hover="not in the paper") for c in told]  # fmt: skip
        cells = [shown[0], MISSING, shown[1], MISSING, MISSING, MISSING]
        if first:
            value, small = spread(first[0]["wall_ms"], digits=0)
            cells[1] = Cell(value + over(prefills, system, lambda r: r["wall_ms"]["median"], first[0]), small,
                            first[1].told, kind="ours")  # fmt: skip
        if then:
            rate = over(decodes, system, lambda r: r["generate_tok_s"], then[0])
            step = over(decodes, system, lambda r: r["step_tok_s"], then[0])
            cells[3] = Cell(f"{then[0]['generate_tok_s']:.0f}{rate}", "", then[1].told, kind="ours")
            cells[4] = Cell(f"{then[0]['step_tok_s']:.0f}{step}", "", then[1].told, kind="ours")
            cells[5] = Cell(*spread(then[0]["step_ms"]), then[1].told, kind="ours")
        rows.append(Row(Cell(label_of(system)), cells, "ours" if system.startswith("ccq") else ""))
    notes = []
    if prefills or decodes:
        notes.append(
            f"Here: one GPU, bf16, random weights; in brackets what CCQ changes{noted([*prefills, *decodes])}. "
            f"`generate` is what a user gets, the step is one CUDA graph. {marks([*prefills, *decodes])}"
        )
        notes.append(RANGE)
    return Table(f"{table.title}, one GPU ({table.label})", head, [Block("", rows)], notes, name="inference")


def over(sources: list[Source], system: str, value, row: dict) -> str:
    """What CCQ changes over its control, in brackets."""
    control = CONTROLS.get(system.removeprefix("ccq-")) if system.startswith("ccq-") else None
    base = find(sources, system=control, size=row["size"], B=row["B"], T=row.get("T")) if control else None
    return f" ({change(value(row) / value(base[0]))})" if base else ""


def training_table(paper: Paper, found: Collection) -> Table:
    table = paper.tables["training"]
    head = ["", "tokens/s a GPU, paper (8 GPUs)", "here (one GPU)", "peak GiB a GPU, paper (8 GPUs)", "here (one GPU)"]
    sources = found.of("bench", "train")
    rows = []
    for system in (*SPEED_ROWS, "transformer"):
        mine = find(sources, system=system, size="1.3b", length=4096)
        told = [table.cell("1.3b", system, c.heading) for c in table.columns]
        shown = [Cell(f"{c.value:,.0f}" if at == 0 and c.value else c.shown, kind="paper", hover="8 GPUs, FSDP") if c
                 else Cell("–", kind="missing", hover="not in the paper") for at, c in enumerate(told)]  # fmt: skip
        cells = [shown[0], MISSING, shown[1], MISSING]
        if mine:
            row, source = mine
            control = CONTROLS.get(system.removeprefix("ccq-")) if system.startswith("ccq-") else None
            base = find(sources, system=control, size="1.3b", length=4096) if control else None
            for at, key, form in ((1, "tokens_per_second", ",.0f"), (3, "peak_gib", ".1f")):
                text = f"{row[key]:{form}}" + (f" ({change(row[key] / base[0][key])})" if base else "")
                cells[at] = Cell(text, "", source.told, kind="ours")
        rows.append(Row(Cell(label_of(system)), cells, "ours" if system.startswith("ccq") else ""))
    notes = [
        "The paper's numbers are of one GPU of eight (FSDP, 64K tokens a GPU and step); ratios compare, rates do not."
    ]
    if sources:
        row = sources[-1].content["rows"][0]
        notes.append(f"Here: {row['tokens']:,} tokens a step on one GPU{noted(sources)}. {marks(sources)}")
    return Table(f"{table.title} ({table.label})", head, [Block("", rows)], notes, name="training")


def lengths_table(found: Collection) -> Table | None:
    """Training steps over the length of sequences, of the newest file: the numbers of the throughput figure."""
    sources = found.of("bench", "train")
    if not sources:
        return None
    source = max(sources, key=lambda s: s.when)
    measured = {(r["system"], r["size"], r["length"]): r for r in source.content["rows"]}
    lengths = sorted({length for _, _, length in measured})
    rows = []
    for system, size in dict.fromkeys((system, size) for system, size, _ in measured):
        control = CONTROLS.get(system.removeprefix("ccq-")) if system.startswith("ccq-") else None
        cells = []
        for length in lengths:
            row, base = measured.get((system, size, length)), measured.get((control or "", size, length))
            if row is None:
                cells.append(MISSING)
                continue
            ratio = f" ({change(row['tokens_per_second'] / base['tokens_per_second'])})" if base else ""
            used = "" if row.get("mfu") is None else f"MFU {row['mfu']:.0%}, "
            small = f"{used}{row['peak_gib']:.1f} GiB"
            cells.append(Cell(f"{row['tokens_per_second']:,.0f}{ratio}", small, source.told, kind="ours"))
        label = f"{label_of(system)}, {scale_label(size)}"
        rows.append(Row(Cell(label), cells, "ours" if system.startswith("ccq") else ""))
    first = source.content["rows"][0]
    notes = [
        f"Tokens a second on one GPU, {first['tokens']:,} tokens a step, {first['dtype']}{noted([source])}; in "
        f"brackets what CCQ changes. {marks([source])}",
        "Small print in a cell: the share of the GPU's peak FLOP/s, and the peak of memory.",
    ]
    head = ["", *(f"{length:,} tokens" for length in lengths)]
    return Table("Training over the length of sequences", head, [Block("", rows)], notes, name="lengths")


def evaluation_table(found: Collection) -> Table | None:
    """How long suites take, of the newest file."""
    sources = found.of("bench", "eval")
    if not sources:
        return None
    source = max(sources, key=lambda s: s.when)
    rows, notes = [], []
    for row in source.content["rows"]:
        cells = [
            f"{row['requests']:,}",
            f"{row['tokens']:,}",
            f"{row['seconds']:,.0f}",
            f"{row['samples_per_second']:,.1f}",
        ]
        label = f"{label_of(row['system'])}, {scale_label(row['size'])}: {row['suite']}"
        rows.append(Row(Cell(label), [Cell(text, "", source.told, kind="ours") for text in cells]))
        if both := row.get("both_ways"):
            notes.append(
                f"{label}: with the prefill of equal contexts shared, {both['changed_answers']:,} of "
                f"{both['contexts']:,} likeliest answers change in {row['dtype']}; {both['shared_seconds']:.1f} s "
                f"against {both['plain_seconds']:.1f} s."
            )
    notes.append(f"One GPU, random weights{noted([source])}. {marks([source])}")
    head = ["suite", "requests", "tokens", "seconds", "samples a second"]
    return Table("Answering a suite", head, [Block("", rows)], notes, name="evaluation")


GOALS = {"operator-cpu": "The operator on a CPU", "data-prepare": "`ccq data prepare`"}


def goals_table(found: Collection) -> Table | None:
    """What benchmarks that set themselves a goal found: ratios, since machines differ."""
    blocks, used = [], []
    for kind, title in GOALS.items():
        for source in found.of("bench", kind)[-1:]:
            used.append(source)
            rows = []
            for goal in source.content["goals"]:
                bound = f"≥ {goal['at_least']:g}" if goal["at_least"] is not None else f"≤ {goal['at_most']:g}"
                value = Cell(f"{goal['value']:.3g}", "", source.told, kind="ours")
                rows.append(Row(Cell(goal["name"]), [value, Cell(bound), Cell("met" if goal["ok"] else "missed")]))
            blocks.append(Block(f"{title} {marks([source])}", rows))
    if not blocks:
        return None
    notes = []
    for source in used:
        load, cores = source.content.get("load_before", 0), source.content.get("cores")
        if load > 0.5:
            notes.append(f"{source.name}: others were at work on the machine, load {load:g} on {cores} cores.")
    return Table("On a CPU: ratios and their goals", ["", "here", "goal", ""], blocks, notes, name="goals")
