"""Training runs as rows: how each was treated, what it knows at the end, and how much two runs of one seed differ."""

from __future__ import annotations

from ccq.report.collect import Collection, Source, last_of, longest, rate_of, sizes_of
from ccq.report.document import Block, Cell, Row, Table
from ccq.report.numbers import VALID, Results, counted, weights_of
from ccq.report.systems import System, scale_label
from ccq.report.tables import MISSING, human, marks, our_cell


def runs_table(found: Collection, results: Results) -> Table | None:
    """One row a system, size, number of steps and learning rate, of runs on text; a mean over their seeds."""
    trained = [run for run in found.of("run") if run.system and run.content["data"].get("source") == "tokens"]
    groups: dict[tuple, list[Source]] = {}
    for run in longest(trained):
        groups.setdefault((run.system, int(run.content["steps"]), rate_of(run)), []).append(run)
    if not groups:
        return None
    blocks: dict[str, list[Row]] = {}
    for (system, steps, lr), runs in sorted(
        groups.items(), key=lambda item: (item[0][0].order, -item[0][1], item[0][2])
    ):
        tried = sorted((run for run in trained if run.system == system and steps_of(run) < steps), key=rate_of)
        estimate = results.estimate(system, VALID)
        mine = {id(run) for run in runs}
        whole = estimate is not None and all(id(source.run) in mine for source in estimate.sources)
        last = [value for run in runs if (value := last_of(run, "valid_perplexity")) is not None]
        numbers = sizes_of(runs[0])
        cells = [
            our_cell(estimate) if whole else Cell(f"{sum(last) / len(last):.2f}", kind="ours") if last else MISSING,
            Cell(", ".join(sorted({str(run.seed) for run in runs}))),
            Cell(f"{lr:g}", rates(tried)),
            Cell(f"{steps:,}", "" if all(run.last_step >= steps for run in runs) else "not finished"),
            Cell(human(runs[0].tokens or 0)),
            *(Cell(human(n)) for n in numbers[:2]),
            Cell(f"{numbers[2] / 2**20:.2f}"),
        ] if numbers else [MISSING]  # fmt: skip
        label = Cell(f"{system.label} {marks([*runs, *tried])}")
        rows = blocks.setdefault(f"Here, {scale_label(system.size)}", [])
        rows.append(Row(label, cells, "ours" if system.name.startswith("ccq") else ""))
    head = ["", "validation perplexity", "seeds", "rate", "steps", "tokens", "parameters", "embeddings", "state, MiB"]
    notes = [
        "State: of a sequence of the training length, the covariance counted.",
        "Small print below a perplexity: the 95% interval of the mean over seeds (Student's t), where there are three; "
        "below a rate: validation perplexity at each rate that was tried, in shorter runs with a seed that counts "
        "nowhere else.",
    ]
    made = [Block(title, rows) for title, rows in blocks.items()]
    return Table("How each row was trained on text", head, made, notes, name="runs")


def steps_of(run: Source) -> int:
    return int(run.content["steps"])


def rates(tried: list[Source]) -> str:
    """What a sweep over learning rates gave."""
    known = [(rate_of(run), value) for run in tried if (value := last_of(run, "valid_perplexity")) is not None]
    if not known:
        return ""
    tokens = dict.fromkeys(human(run.tokens or 0) for run in tried)
    return f"{', '.join(f'{lr:g}: {value:.1f}' for lr, value in known)} after {', '.join(tokens)}"


SHOWN = 12  # scores of a repeated run


def repeats_table(results: Results) -> Table | None:
    """One row run several times with one seed: what differs is neither data nor seed."""
    blocks, spreads = [], []
    for system, suites in results.by_system.items():
        for suite, sources in suites.items():
            used = counted(sources)
            for seed in dict.fromkeys(source.seed for source in used):
                different = {weights_of(source): source for source in used if source.seed == seed}
                if seed is not None and len(different) > 1:
                    values = shared_values(list(different.values()))
                    spreads += [max(known) - min(known) for known in values.values()]
                    blocks.append(repeated(system, suite, seed, list(different.values()), values))
    if not blocks:
        return None
    says = (
        "They do not differ: what separates seeds is the seed's doing alone."
        if spreads and not any(spreads)
        else "What separates two systems by less than this is not told from chance."
    )
    notes = [f"Runs of one config and one seed. {says}"]
    return Table("Run to run", ["", "values", "spread"], blocks, notes, name="repeats")


def shared_values(sources: list[Source]) -> dict[str, list[float]]:
    """The scores that all have, in order."""
    scores = [source.content["scores"] for source in sources]
    known = {name: [each.get(name, {}).get("value") for each in scores] for name in scores[0]}
    return {name: sorted(map(float, values)) for name, values in known.items() if None not in values}


def repeated(system: System, suite: str, seed: int, sources: list[Source], values: dict[str, list[float]]) -> Block:
    rows = []
    for name, known in list(values.items())[:SHOWN]:
        shown = Cell(", ".join(f"{x:.2f}" for x in known), kind="ours")
        rows.append(Row(Cell(name), [shown, Cell(f"{known[-1] - known[0]:.2g}", kind="ours")]))
    if more := [known[-1] - known[0] for known in list(values.values())[SHOWN:]]:
        most = Cell(f"at most {max(more):.2g}", kind="ours")
        rows.append(Row(Cell(f"{len(more)} more"), [Cell("", kind="ours"), most]))
    title = f"{system.label}, {scale_label(system.size)}, seed {seed}, {len(sources)} runs: {suite} {marks(sources)}"
    return Block(title, rows)
