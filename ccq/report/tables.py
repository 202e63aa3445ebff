"""Tables of scores, training and claims: the paper's with our numbers beside its own. Bold is computed.

What has tables of its own has them beside its code: see OWNERS in page.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ccq.names import grouped, plural
from ccq.report.claims import NOT_RUN, Verdict, rules
from ccq.report.collect import Collection, Source
from ccq.report.paper import Column, Paper, leader
from ccq.report.paper import Table as PaperTable
from ccq.report.results import VALID, Estimate, Results, by_size, mean, row_of
from ccq.report.table import (
    NOT_IN_PAPER,
    WORDS,
    Block,
    Cell,
    Row,
    Table,
    human,
    marks,
    not_run,
    number,
    row_kind,
    scale_label,
)
from ccq.report.table import NOT_RUN as EMPTY
from ccq.systems import SYSTEMS, Identity


def our_cell(estimate: Estimate | None, like: str = "") -> Cell:
    if estimate is None:
        return EMPTY
    runs, over = len(estimate.values), {"seeds": estimate.over_seeds, "samples": estimate.over_samples}
    what = {"seeds": f"95% over {len(estimate.by_seed)} seeds",
            "samples": "95% over samples" + (", mean of the runs' bounds" if runs > 1 else "")}  # fmt: skip
    told = [f"mean of {runs} runs"] if runs > 1 and over["seeds"] is None else []
    told += [f"{what[name]}: {number(b[0])} to {number(b[1])}" for name, b in over.items() if b]
    told += [*(source.told for source in estimate.sources), *dict.fromkeys(estimate.notes)]
    spans = {name: f"{number(b[0], like)}–{number(b[1], like)}" for name, b in over.items() if b}
    named = ", ".join(f"{name} {span}" for name, span in spans.items())
    text = number(estimate.value, like) + ("†" if estimate.notes else "")
    return Cell(text, next(iter(spans.values()), ""), "\n".join(told), kind="ours", named=named)


def score_rows(
    rows: Sequence[Identity],
    columns: Sequence[Column],
    results: Results,
    likes: Sequence[str],
    counts: Callable[[str], bool] = bool,  # whether the best of a column may be this system
) -> list[Row]:
    """Our rows of one size; the best of each column in bold, as it is shown."""
    estimates = {row: [results.estimate(row, column.where) for column in columns] for row in rows}
    best = []
    for at, (column, like) in enumerate(zip(columns, likes, strict=True)):
        known = {row: e for row, mine in estimates.items() if (e := mine[at]) and counts(row.system)}
        best.append(leader({row: float(number(e.value, like)) for row, e in known.items()}, column.better))
    made = []
    for row, mine in estimates.items():
        cells = [replace(our_cell(e, like), bold=row == top) for e, like, top in zip(mine, likes, best, strict=True)]
        sources = [source for e in mine if e for source in e.sources]
        runs = max((len(e.values) for e in mine if e), default=0)
        label = Cell(f"{row.label} {marks(sources)}", f"{runs} runs" if runs > 1 else "")
        made.append(Row(label, cells, row_kind(row.system)))
    return made


def score_table(name: str, paper: Paper, results: Results) -> Table:
    """A table of scores: a block a scale of the paper, and a block a size of ours."""
    table = paper.tables[name]
    asked = [*table.columns, *table.more]
    of_paper = list(dict.fromkeys(system for _, system in table.rows))
    ours = results.rows(*{column.where.partition(":")[0] for column in asked})
    if name == "ablations":
        ours = [row for row in ours if row.key in of_paper]
    columns = [c for c in asked if any(results.estimate(row, c.where) for row in ours)] or list(table.columns)
    sizes = by_size(ours)
    first = next(iter(table.rows.values()))
    likes = [first[table.columns.index(c)].text if c in table.columns else first[-1].text for c in columns]
    blocks: list[Block] = []
    folded = []
    for size in dict.fromkeys((*table.scales, *sizes)):
        if size in table.scales:
            blocks.append(Block(f"The paper, {scale_label(size)}", paper_rows(table, size, columns)))
        if size in sizes:
            blocks.append(Block(title_of(size), score_rows(sizes[size], columns, results, likes, table.counts)))
            present = {row.key for row in sizes[size]}
            if size in ("1.3b", "500m", "nano"):  # nobody sets out to train the paper's seven any smaller
                folded += [f"{SYSTEMS[key].label}, {scale_label(size)}" for key in of_paper if key not in present]
    if not ours:
        folded = ["all systems"]
    notes = list(table.notes)
    if left := [column.heading for column in table.columns if column not in columns]:
        notes.append(f"Columns of the paper's table without results here are left out: {', '.join(left)}.")
    noted = [note for row in ours for c in columns if (e := results.estimate(row, c.where)) for note in e.notes]
    notes += [f"† {note}" for note in dict.fromkeys(noted)]
    if name == "niah":
        notes += results.found.needle_notes()
        said = [note for s in results.found.of("eval", "niah") for note in s.content.get("notes") or ()]
        notes += [f"Here: {note}." for note in dict.fromkeys(said)]
    if ours:
        notes.append(WORDS["scores"])
    arrows = {"lower": " ↓", "higher": " ↑"}
    head = ["", *(f"{c.heading}{arrows.get(c.better, '')}".replace(" ", "\u00a0") for c in columns)]
    return Table(name, f"{table.title} ({table.label})", head, [*blocks, *not_run(folded)], notes)


def paper_rows(table: PaperTable, scale: str, columns: Sequence[Column]) -> list[Row]:
    rows = table.of(scale)
    made = {system: Row(Cell(SYSTEMS[system].label), [], "paper") for system in rows}
    for column in columns:
        shown = {
            system: cells[table.columns.index(column)] for system, cells in rows.items() if column in table.columns
        }
        top = leader({system: cell.value for system, cell in shown.items() if table.counts(system)}, column.better)
        for system, row in made.items():
            told = NOT_IN_PAPER
            if cell := shown.get(system):
                told = Cell(cell.shown, bold=system == top, kind="paper", hover=f"{table.label} of the paper")
            row.cells.append(told)
    return list(made.values())


def trained(found: Collection) -> dict[tuple[Identity, int, float], list[Source]]:
    """Runs by row, steps and rate; of each row the longest: shorter ones are those of a sweep over rates."""
    runs = sorted(found.of("run"), key=lambda run: (run.identity.order, run.seed or 0))
    groups = grouped(runs, lambda run: (row_of(run.identity), int(run.content["steps"]), run.rate or 0.0))
    most = {row: max(steps for other, steps, _ in groups if other == row) for row, _, _ in groups}
    return {key: runs for key, runs in groups.items() if key[1] == most[key[0]]}


def models_table(paper: Paper, found: Collection, results: Results) -> Table:
    """The paper's models, and the runs here: a row a system, size, number of steps and learning rate."""
    table = paper.tables["configs"]
    head = ["", *(c.heading for c in table.columns), "validation perplexity", "seeds", "rate", "steps", "parameters",
            "embeddings", "state, MiB"]  # fmt: skip
    blocks: dict[str, list[Row]] = {}
    for scale in table.scales:
        blocks[f"The paper, {scale_label(scale)}"] = rows = paper_rows(table, scale, table.columns)
        for of_paper in rows:
            of_paper.cells += [NOT_IN_PAPER] * (len(head) - 1 - len(of_paper.cells))
    for (row, steps, lr), runs in trained(found).items():
        data, model, told = runs[0].content["data"], runs[0].content["model"], "\n".join(run.told for run in runs)
        same = [run for run in found.of("run") if row_of(run.identity) == row and int(run.content["steps"]) < steps]
        tried = sorted(same, key=lambda run: run.rate or 0.0)
        estimate = results.estimate(row, VALID)
        whole = estimate is not None and all(source in runs for source in estimate.sources)
        last = [value for run in runs if (value := run.last("valid_perplexity")) is not None]
        tokens = human(runs[0].identity.tokens or 0) if data.get("source") == "tokens" else "recall samples"
        done = min(run.last_step for run in runs)
        sizes = sizes_of(runs[0])
        cells = [
            *(Cell(str(model[name]), kind="ours", hover=told) for name in ("num_hidden_layers", "hidden_size")),
            Cell(tokens, "", told, kind="ours"),
            our_cell(estimate) if whole else Cell(f"{mean(last):.2f}", kind="ours") if last else EMPTY,
            Cell(", ".join(sorted({str(run.seed) for run in runs}))),
            Cell(f"{lr:g}", rates(tried)),
            Cell(f"{steps:,}", "" if done >= steps else f"{done:,} done"),
            *(Cell(text) for text in sizes),
        ]
        label = Cell(f"{row.label} {marks([*runs, *tried])}")
        ours = blocks.setdefault(title_of(row.size), [])
        ours.append(Row(label, cells, row_kind(row.system)))
    notes = ["State: of a sequence of the training length, including the covariance.", WORDS["models"]]
    made = [Block(title, rows) for title, rows in blocks.items()]
    made += [] if found.of("run") else not_run(["all systems"])
    return Table("models", f"{table.title} ({table.label}), and how each was trained", head, made, notes)


def sizes_of(run: Source) -> list[str]:
    """Parameters of the body and of the embeddings, and MiB of the state."""
    from ccq.model.config import CCQConfig
    from ccq.model.info import info

    try:
        found = info(CCQConfig(**run.content["model"]), run.content["data"]["length"])
    except (TypeError, ValueError, KeyError):  # a config of another version
        return ["–"] * 3
    return [human(found.body), human(found.embedding), f"{found.state_bytes / 2**20:.2f}"]


def rates(tried: list[Source]) -> str:
    """What a sweep over learning rates gave."""
    known = [(run.rate, value) for run in tried if (value := run.last("valid_perplexity")) is not None]
    tokens = dict.fromkeys(human(run.identity.tokens or 0) for run in tried)
    return f"{', '.join(f'{lr:g}: {x:.1f}' for lr, x in known)} after {', '.join(tokens)}" if known else ""


SHOWN = 12  # scores of a repeated run


def repeats_table(results: Results) -> Table | None:
    """One row run several times with one seed: what differs is neither data nor seed."""
    blocks, spreads = [], []
    for (row, suite), records in results.index.items():
        estimates = [results.estimate(row, f"{suite}:{name}") for name in dict.fromkeys(r.setting for r in records)]
        counted = {(r.seed, r.setting, r.weights): r for estimate in estimates if estimate for r in estimate.records}
        for seed, mine in grouped(counted.values(), lambda record: record.seed).items():
            settings = grouped(mine, lambda record: record.setting)
            most = max(map(len, settings.values()))
            if seed is not None and most > 1:
                runs = {name: known for name, known in settings.items() if len(known) == most}
                values = {name: sorted(r.value or 0.0 for r in known) for name, known in runs.items()}
                spreads += [known[-1] - known[0] for known in values.values()]
                sources = marks([record.source for known in runs.values() for record in known])
                title = f"{row.label}, {scale_label(row.size)}, seed {seed}, {most} runs: {suite} {sources}"
                blocks.append(Block(title, spread_rows(values)))
    if not blocks:
        return None
    says = "A smaller difference between two systems may be chance."
    if not any(spreads):
        says = "They do not differ, so differences between seeds come from the seed."
    notes = [f"Runs of one config and one seed. {says} In other tables a repeated seed counts once, as the mean."]
    return Table("repeats", "Run to run", ["", "values", "spread"], blocks, notes)


def spread_rows(values: dict[str, list[float]]) -> list[Row]:
    told = [(name, ", ".join(f"{x:.2f}" for x in known), f"{known[-1] - known[0]:.2g}")
            for name, known in list(values.items())[:SHOWN]]  # fmt: skip
    if more := [known[-1] - known[0] for known in list(values.values())[SHOWN:]]:
        told.append((f"{len(more)} more", "", f"at most {max(more):.2g}"))
    return [Row(Cell(name), [Cell(shown, kind="ours"), Cell(spread, kind="ours")]) for name, shown, spread in told]


def title_of(size: str) -> str:
    return size[:1].upper() + size[1:] if "width" in size else f"Here, {scale_label(size) or 'size unknown'}"


def claims_table(verdicts: list[Verdict]) -> Table:
    rows: dict[bool, list[Row]] = {False: [], True: []}  # those that were not run last
    for v in verdicts:
        told = "\n".join(source.told for source in v.sources)
        ours = Cell(f"{v.ours} {marks(v.sources)}".strip(), hover=told, kind="ours")
        verdict = Cell(v.named, v.why, kind=f"verdict {v.verdict.replace(' ', '-')}")
        rows[v.verdict == NOT_RUN].append(Row(Cell(v.says), [Cell(v.paper, kind="paper"), ours, verdict]))
    blocks = [Block("Not run" if left else "", mine, folded=left) for left, mine in rows.items() if mine]
    notes = list(rules())
    if tests := max((v.tests for v in verdicts), default=0):
        notes.append(WORDS["tests"].format(tests=plural(tests, "test")))
    caption = "The claims and what our results say"
    return Table("claims", caption, ["claim", "the paper", "here", "verdict"], blocks, notes, stack=True)


def source_table(found: Collection) -> Table:
    """The footnotes: where each number comes from."""
    rows = []
    for source in found.sources:
        what = {"run": "training"}.get(source.kind, source.kind) + (f": {source.detail}" if source.detail else "")
        model = source.identity.label + ("" if source.seed is None else f", seed {source.seed}")
        versions = source.origin.get("versions") or {}
        packages = ", ".join(f"{k} {v}" for k, v in versions.items() if k in ("ccq", "torch", "triton", "fla-core"))
        file = Cell(source.name, f"`{source.commands}`" if source.commands else "")
        cells = [Cell(what, model), file, Cell(source.commit, packages), Cell(source.hardware), Cell(source.date)]
        rows.append(Row(Cell(f"{source.number}"), cells))
    notes = []
    if any(source.metrics_only for source in found.sources):
        notes.append(
            "metrics: where scores were taken from a model's answers. These files do not say where it gave them (the "
            "run that trained it is beside them); what it was asked is in their `settings`."
        )
    head = ["", "what", "file", "commit", "hardware", "date"]
    return Table("sources", "Sources of all numbers", head, [Block("", rows)], notes, stack=True)
