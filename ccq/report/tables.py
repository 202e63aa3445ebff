"""The paper's tables with our numbers beside the paper's. Bold is computed from the numbers, in its rows too."""

from __future__ import annotations

from collections.abc import Sequence

from ccq.report import paper as papers
from ccq.report.claims import LEAST, LEAST_GAP, LEAST_GATE, SWITCHED_FROM, Verdict, parse
from ccq.report.collect import Collection, Source, longest
from ccq.report.document import Block, Cell, Row, Table
from ccq.report.numbers import Estimate, Results
from ccq.report.paper import Column, Paper, eligible, leaders
from ccq.report.systems import SIZES, System, label_of, scale_label, seeds_label

SMALL_PRINT = (
    "Small print in a cell: the 95% interval of the mean over seeds (Student's t, cut at what is possible) where there "
    "are three seeds or more"
)
MISSING = Cell("missing", kind="missing", hover="not among the results")


def number(value: float, like: str = "") -> str:
    """With as many digits as the paper's cell, or two.

    >>> number(12.345), number(99.96, "100.0")
    ('12.35', '100.0')
    """
    return f"{value:.{len(like.partition('.')[2]) if like else 2}f}"


def marks(sources: Sequence[Source]) -> str:
    """Footnotes of a row; of three numbers or more in a row the first and the last."""
    numbers = sorted({source.number for source in sources})
    parts, at = [], 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        if end - at >= 2:
            parts.append(f"[{numbers[at]}–{numbers[end]}](#source-{numbers[at]})")
        else:
            parts += [f"[{number}](#source-{number})" for number in numbers[at : end + 1]]
        at = end + 1
    return " ".join(parts)


def our_cell(estimate: Estimate | None, like: str = "") -> Cell:
    if estimate is None:
        return MISSING
    parts = []
    seeds, samples = estimate.over_seeds, estimate.over_samples
    if seeds is not None:
        parts.append(f"95% over {len(estimate.by_seed)} seeds: {number(seeds[0])} to {number(seeds[1])}")
    elif len(estimate.values) > 1:
        parts.append(f"mean of {len(estimate.values)} runs")
    if samples is not None:
        what = "95% over samples" if len(estimate.values) == 1 else "95% over samples, mean of the runs' bounds"
        parts.append(f"{what}: {number(samples[0])} to {number(samples[1])}")
    shown = seeds or samples
    small = "" if shown is None else f"{number(shown[0], like)}–{number(shown[1], like)}"
    named = [f"{name} {number(b[0], like)}–{number(b[1], like)}"
             for name, b in (("seeds", seeds), ("samples", samples)) if b]  # fmt: skip
    told = [*parts, *(source.told for source in estimate.sources), *dict.fromkeys(estimate.notes)]
    mark = "†" if estimate.notes else ""
    return Cell(number(estimate.value, like) + mark, small, "\n".join(told), kind="ours", named=", ".join(named))


def score_table(name: str, paper: Paper, results: Results) -> Table:
    """A table of scores: a block a scale of the paper, and a block a size of ours."""
    table = paper.tables[name]
    columns = [*table.columns, *(c for c in table.more if any(results.estimate(s, c.where) for s in results.systems()))]
    suites = {column.where.partition(":")[0] for column in columns}
    ours = [s for s in results.systems() if any(results.runs(s, suite) for suite in suites)]
    rows_of_paper = list(dict.fromkeys(row.system for row in table.rows))
    if name == "ablations":
        ours = [s for s in ours if s.key in rows_of_paper]
    sizes = list(dict.fromkeys(system.size for system in ours))
    blocks = []
    for scale in table.scales:
        blocks.append(Block(f"The paper, {scale_label(scale)}", paper_rows(table, scale, columns)))
        if scale in sizes:
            blocks.append(our_block(table, scale, ours, columns, results, rows_of_paper))
    for size in sizes:
        if size not in table.scales:
            blocks.append(our_block(table, size, ours, columns, results, rows_of_paper))
    if not ours:
        blocks.append(Block("Here", [Row(Cell("all systems"), [Cell("not run yet", kind="missing")], "ours")]))
    notes = papers.footnotes(paper, name)
    noted = [note for s in ours for c in columns if (e := results.estimate(s, c.where)) for note in e.notes]
    notes += [f"† {note}" for note in dict.fromkeys(noted)]
    if name == "niah":
        notes += results.found.needle_notes()
        said = [note for s in results.found.of("eval", "niah") for note in s.content.get("notes") or ()]
        notes += [f"Here: {note}." for note in dict.fromkeys(said) if not note.startswith("keys and values")]
    if ours:
        notes.append(f"{SMALL_PRINT}, else over test samples; hover for both.")
    return Table(f"{table.title} ({table.label})", ["", *(heading(c) for c in columns)], blocks, notes, name=name)


def heading(column: Column) -> str:
    arrow = {"lower": "\u00a0↓", "higher": "\u00a0↑"}.get(column.better, "")
    return column.heading.replace(" ", "\u00a0") + arrow


def paper_rows(table: papers.Table, scale: str, columns: list[Column]) -> list[Row]:
    rows = [row for row in table.rows if row.scale == scale]
    among = "all" if table.bold == "none" else table.bold
    tops = [
        leaders({row.system: row.cells[at].value for row in rows if eligible(row.system, among)}, column.better)
        for at, column in enumerate(table.columns)
    ]
    made = []
    for row in rows:
        cells = [
            Cell(cell.shown, bold=row.system in tops[at], kind="paper", hover=f"{table.label} of the paper")
            for at, cell in enumerate(row.cells)
        ]
        cells += [Cell("–", kind="missing", hover="not in the paper")] * (len(columns) - len(cells))
        made.append(Row(Cell(label_of(row.system)), cells, "paper"))
    return made


def our_block(
    table: papers.Table, size: str, ours: list[System], columns: list[Column], results: Results, expected: list[str]
) -> Block:
    here = [system for system in ours if system.size == size]
    among = "all" if table.bold == "none" else table.bold
    estimates = {system: [results.estimate(system, column.where) for column in columns] for system in here}
    tops = []
    for at, column in enumerate(columns):
        values = {s: e[at].value if e[at] else None for s, e in estimates.items() if eligible(s.name, among)}  # type: ignore[union-attr]
        tops.append(leaders(values, column.better))
    likes = [next((row.cells[at].text for row in table.rows), "") for at in range(len(table.columns))]
    likes += [likes[-1]] * (len(columns) - len(likes))
    rows = []
    present = {system.key for system in here}
    if size in SIZES[SIZES.index("nano") + 1 :]:  # nobody sets out to train the paper's seven so small
        expected = []
    order = [*here, *(parse(key, size) for key in expected if key not in present)]
    for system in sorted(order, key=lambda s: s.order):
        if system not in estimates:
            rows.append(Row(Cell(label_of(system.key)), [Cell("not run", kind="missing")], "ours"))
            continue
        cells = []
        for at, estimate in enumerate(estimates[system]):
            cell = our_cell(estimate, likes[at])
            cell.bold = system in tops[at]
            cells.append(cell)
        sources = [s for e in estimates[system] if e is not None for s in e.sources]
        number_of_runs = max((len(e.values) for e in estimates[system] if e is not None), default=0)
        label = f"{system.label} {marks(sources)}"
        rows.append(Row(Cell(label, f"{number_of_runs} runs" if number_of_runs > 1 else ""), cells, "ours"))
    return Block(f"Here, {scale_label(size) or 'size unknown'}", rows)


def config_table(paper: Paper, found: Collection) -> Table:
    """Layers, width and tokens: the paper's models, and the runs here."""
    table = paper.tables["configs"]
    blocks = [Block(f"The paper, {scale_label(scale)}", paper_rows(table, scale, list(table.columns)))
              for scale in table.scales]  # fmt: skip
    groups: dict[tuple, list[Source]] = {}
    for run in sorted(longest(found.of("run")), key=lambda r: (r.system.order if r.system else (), r.seed or 0)):
        groups.setdefault((run.system, run.content["steps"], run.content["optimizer"]["lr"]), []).append(run)
    rows = []
    for (system, steps, lr), runs in groups.items():
        config, model, told = runs[0].content, runs[0].content["model"], "\n".join(run.told for run in runs)
        each = config["data"].get("batch", 0) * (config["data"].get("length", 0) or 0)
        tokens = human(each * steps) if config["data"].get("source") == "tokens" else "recall samples"
        seed = seeds_label(run.seed for run in runs)
        cells = [
            Cell(str(model["num_hidden_layers"]), kind="ours", hover=told),
            Cell(str(model["hidden_size"]), kind="ours", hover=told),
            Cell(tokens, f"{min(run.last_step for run in runs):,} of {steps:,} steps, lr {lr:g}", told, kind="ours"),
        ]
        rows.append(Row(Cell(f"{system.label}, {scale_label(system.size)}{seed} {marks(runs)}"), cells, "ours"))
    blocks.append(Block("Here", rows or [Row(Cell("all systems"), [Cell("not run yet", kind="missing")], "ours")]))
    return Table(f"{table.title} ({table.label})", ["", *(c.heading for c in table.columns)], blocks, name="configs")


def human(count: float) -> str:
    """
    >>> human(15e9), human(98_304_000)
    ('15B', '98.3M')
    """
    for unit, text in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{text}"
    return f"{count:g}"


# -- what was run, and what it says ------------------------------------------------------------------------------------


def claims_table(verdicts: list[Verdict]) -> Table:
    rows = []
    for verdict in verdicts:
        ours = f"{verdict.ours} {marks(verdict.sources)}".strip()
        hover = "\n".join(source.told for source in verdict.sources)
        rows.append(
            Row(
                Cell(verdict.claim["says"]),
                [
                    Cell(verdict.paper, kind="paper"),
                    Cell(ours, hover=hover, kind="missing" if verdict.ours == "not run" else "ours"),
                    Cell(verdict.verdict, verdict.detail, kind=f"verdict {verdict.verdict.replace(' ', '-')}"),
                ],
            )
        )
    notes = [
        "Claims about scores are judged on paired differences, seed by seed: **holds** where their 95% interval over "
        "seeds (Student's t, three runs or more) lies on the claimed side; **does not** where it leaves out any gain "
        f"that counts ({LEAST['higher']:g} point of accuracy, {LEAST['lower']:g} of perplexity); else **not enough "
        "runs**; **not testable** where neither gets any right, both get all, or they were trained for unequal tokens. "
        "Claims about cost hold where both backbones are measured, at the paper's batch and length, and it is no more "
        "than the paper's on either.",
        "Alignment is judged model by model on the 95% interval over prompts (Student's t), at every layer or in the "
        f"mean over layers: **holds** where it is below zero, **does not** where it leaves out a gap of {LEAST_GAP:g} "
        "below zero, in one model; **not testable** where a head has no more than the top directions. The gate is "
        f"judged as scores are, a gain of {LEAST_GATE:g} counting. Switching off **holds** where at every length of "
        f"{SWITCHED_FROM:,} tokens and more at which a model finds any the interval over seeds is within the paper's "
        "bound, **does not** where it lies beyond at one, and is **not testable** where there is no such length.",
    ]
    head = ["claim", "the paper", "here", "verdict"]
    caption = "Each claim, and what the results here say of it"
    return Table(caption, head, [Block("", rows)], notes, stack=True, name="claims")


def source_table(found: Collection) -> Table:
    """The footnotes: where each number comes from."""
    rows = []
    for source in found.sources:
        what = {"run": "training"}.get(source.kind, source.kind) + (f": {source.detail}" if source.detail else "")
        model = "" if source.system is None else source.system.label
        if source.seed is not None:
            model += f", seed {source.seed}"
        versions = source.origin.get("versions") or {}
        packages = ", ".join(f"{k} {v}" for k, v in versions.items() if k in ("ccq", "torch", "triton", "fla-core"))
        rows.append(
            Row(
                Cell(f"{source.number}"),
                [
                    Cell(what, model),
                    Cell(source.name, f"`{source.commands}`" if source.commands else ""),
                    Cell(source.commit, packages),
                    Cell(source.hardware),
                    Cell(source.date),
                ],
            )
        )
    head = ["", "what", "file", "commit", "hardware", "date"]
    notes = []
    if any(source.metrics_only for source in found.sources):
        notes.append(
            "metrics: where scores were taken from a model's answers. These files do not say where it gave them (the "
            "run that trained it is beside them); what it was asked is in their `settings`."
        )
    return Table("Where the numbers come from", head, [Block("", rows)], notes, stack=True, name="sources")


def recall_table(results: Results) -> Table | None:
    systems = results.systems("mqar")
    if not systems:
        return None
    names = list(dict.fromkeys(n for s in systems for run in results.runs(s, "mqar") for n in run.content["scores"]))
    names = sorted(names, key=lambda n: (n == "average", [int(p) for p in n.split("-") if p.isdigit()]))
    columns = [Column(name, f"mqar:{name}", "higher") for name in names]
    blocks = []
    for size in dict.fromkeys(s.size for s in systems):
        here = [s for s in systems if s.size == size]
        estimates = {s: [results.estimate(s, c.where) for c in columns] for s in here}
        tops = [leaders({s: e[at].value if e[at] else None for s, e in estimates.items()}, "higher")  # type: ignore[union-attr]
                for at in range(len(columns))]  # fmt: skip
        rows = []
        for system in here:
            cells = [our_cell(e) for e in estimates[system]]
            for at, cell in enumerate(cells):
                cell.bold = system in tops[at]
            runs = results.runs(system, "mqar")
            rows.append(Row(Cell(f"{system.label} {marks(runs)}", f"{len(runs)} runs" if len(runs) > 1 else ""), cells))
        blocks.append(Block(f"Here, {scale_label(size) or 'size unknown'}", rows))
    head = ["", *(n.replace("-", " tokens, ") + " pairs" if n != "average" else "average" for n in names)]
    return Table("Recall (MQAR): keys answered, % (not in the paper)", head, blocks, name="recall")
