"""What `ccq sweep mqar` found: one row a system, at the learning rate that its validation samples chose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ccq.report.collect import Collection, Source
from ccq.report.document import Block, Cell, Figure, Panel, Row, Table
from ccq.report.figures import INK, legend_of, line_of
from ccq.report.numbers import Estimate, Interval
from ccq.report.paper import leaders
from ccq.report.systems import System
from ccq.report.tables import MISSING, SMALL_PRINT, marks, our_cell
from ccq.systems import Identity

DRAWS = 1000  # of the bootstrap


@dataclass
class Run:
    """One of a sweep."""

    content: dict[str, Any]
    source: Source  # its file, with this run's seed

    @functools.cached_property
    def slices(self) -> dict[tuple[int, int], dict]:
        return {(part["length"], part["pairs"]): part for part in self.content["test"]["slices"]}

    @functools.cached_property
    def drawn(self) -> dict[tuple[int, int], np.ndarray]:
        return {key: bootstrap(part) for key, part in self.slices.items()}


@dataclass
class RecallRow:
    """Runs of one system, size and number of steps."""

    system: System  # its size is the width of the model
    steps: int
    tried: dict[float, list[Run]] = field(default_factory=dict)  # by learning rate

    @property
    def rates(self) -> dict[float, float]:
        """Validation accuracy of each rate, mean over seeds."""
        return {
            lr: mean([run.content["valid"]["accuracy"] for run in runs if not run.content["repeat"]] or [0.0])
            for lr, runs in self.tried.items()
        }

    @property
    def lr(self) -> float:
        """The best on validation samples; of equal ones the smaller."""
        return max(self.rates.items(), key=lambda item: (item[1], -item[0]))[0]

    @property
    def runs(self) -> list[Run]:
        """At the chosen rate, each seed once."""
        return [run for run in self.tried[self.lr] if not run.content["repeat"]]

    @property
    def slices(self) -> list[tuple[int, int]]:
        return sorted({key for run in self.runs for key in run.slices})

    def estimate(self, part: tuple[int, int] | None = None) -> Estimate | None:
        """Test accuracy in percent, of a slice or the mean over all of them."""
        having = [run for run in self.runs if part is None or part in run.slices]
        if not having:
            return None
        values: list[float] = []
        samples: list[Interval | None] = []
        for run in having:
            keys = list(run.slices) if part is None else [part]
            values.append(100 * mean([run.slices[key]["accuracy"] for key in keys]))
            samples.append(over_samples([run.drawn[key] for key in keys]))
        return Estimate(values, [run.source for run in having], samples, [])

    def half_width(self) -> float:
        """Of the 95% interval over test samples."""
        estimate = self.estimate()
        bounds = None if estimate is None else estimate.over_samples
        return 0.0 if bounds is None else (bounds[1] - bounds[0]) / 2

    def by_seed(self) -> dict[int | None, float]:
        estimate = self.estimate()
        return {} if estimate is None else estimate.by_seed


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def bootstrap(part: dict) -> np.ndarray:
    """Accuracy of a slice in percent, its test samples drawn again and again: from how many of them had n right."""
    right, times = np.array(part["histogram"], dtype=np.int64).T
    count = times.sum()
    # a stream of its own for each slice: they are other samples, and must not go up and down together
    rng = np.random.default_rng([part.get("length", 0), part["pairs"]])
    counts = rng.multinomial(count, times / count, size=DRAWS)
    return 100 * (counts @ right) / (count * part["pairs"])


def over_samples(drawn: Sequence[np.ndarray]) -> Interval:
    """95% interval of the mean over slices."""
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    return float(low), float(high)


def system_of(run: dict) -> System:
    """System and variant, and the width."""
    identity = Identity(**run["identity"]) if "identity" in run else Identity(run["row"].replace("_", "-"))
    return System(identity.system, identity.variant, str(run["model"]["hidden_size"]))


@functools.cache
def expected(tier: str) -> tuple[System, ...]:
    """The rows of a tier of `ccq sweep mqar`."""
    from ccq.train.sweep import MAIN, ROWS

    return tuple(System(row.replace("_", "-")) for row in (ROWS if tier == "rows" else MAIN))


WIDTHS = ("64", "128", "256")  # that `ccq sweep mqar` has


class Recall:
    """All sweeps among the results."""

    def __init__(self, found: Collection) -> None:
        self.sources = found.of("sweep", "mqar")
        rows: dict[tuple, RecallRow] = {}
        seen = set()
        for source in sorted(self.sources, key=lambda s: s.origin.get("date") or "", reverse=True):  # the newest first
            for content in source.content["runs"]:
                system, steps, lr = system_of(content), content["steps"], content["lr"]
                key = (system, steps)
                name = (*key, lr, content["seed"], content["repeat"])
                if name in seen:  # the same run in a file that was made again
                    continue
                seen.add(name)
                run = Run(content, replace(source, seed=content["seed"], system=system))
                rows.setdefault(key, RecallRow(system, steps)).tried.setdefault(lr, []).append(run)
        for row in rows.values():
            for runs in row.tried.values():
                runs.sort(key=lambda run: (run.content["seed"], run.content["repeat"]))
        self.rows = sorted(rows.values(), key=lambda r: (int(r.system.size), r.steps, r.system.order))
        self.groups: dict[tuple[str, int], list[RecallRow]] = {}
        for row in self.rows:
            self.groups.setdefault((row.system.size, row.steps), []).append(row)

    def missing(self, size: str, steps: int) -> list[System]:
        """Rows that a sweep of this kind has and these results do not."""
        tiers = {run.source.content["tier"] for row in self.groups[size, steps] for run in row.runs}
        have = {row.system for row in self.groups[size, steps]}
        wanted = [replace(system, size=size) for tier in sorted(tiers) for system in expected(tier)]
        return [system for system in dict.fromkeys(wanted) if system not in have]

    def row(self, key: str, size: str, steps: int) -> RecallRow | None:
        return next((row for row in self.groups.get((size, steps), []) if row.system.key == key), None)

    def repeated(self) -> list[tuple[RecallRow, float, list[Run]]]:
        """(row, rate, runs) where one seed was run several times."""
        found = []
        for row in self.rows:
            for lr, runs in row.tried.items():
                for seed in dict.fromkeys(run.content["seed"] for run in runs):
                    mine = [run for run in runs if run.content["seed"] == seed]
                    if len(mine) > 1:
                        found.append((row, lr, mine))
        return found


def title(size: str, steps: int) -> str:
    return f"Width {size}, {steps:,} steps"


def sweep_table(recall: Recall) -> Table | None:
    """Equal treatment, shown: rate, steps, tokens, parameters, state; and the mean over test slices."""
    if not recall.rows:
        return None
    head = ["", "test accuracy, %", "seeds", "rate", "tokens", "parameters", "embeddings", "state, KiB", "of it Σ",
            "lam at the end"]  # fmt: skip
    blocks = []
    for (size, steps), group in recall.groups.items():
        estimates = {row.system: row.estimate() for row in group}
        tops = leaders({system: e.value if e else None for system, e in estimates.items()}, "higher")
        rows = []
        for row in group:
            first, told = row.runs[0].content, row.runs[0].source.told
            swept = f"best of {len(row.tried)}" if len(row.tried) > 1 else "chosen before"
            gates = [run.content["gate"]["lam"][-1] for run in row.runs if run.content.get("gate")]
            lam = f"{mean([mean([x for x in layer if x is not None]) for layer in gates]):.3f}" if gates else "–"
            cell = our_cell(row.estimate(), "0.0")
            cell.bold = row.system in tops
            facts = [
                cell,
                Cell(str(len(row.runs)), hover=told),
                Cell(f"{row.lr:.3g}", swept, "\n".join(f"{lr:.3g}: valid {a:.3f}" for lr, a in row.rates.items())),
                Cell(millions(first["tokens"])),
                Cell(millions(first["parameters"]["body"])),
                Cell(millions(first["parameters"]["embeddings"])),
                Cell(f"{first['state_bytes'] / 1024:,.1f}", hover="a sequence of 256 tokens, fp32, covariance counted"),
                Cell(f"{first['covariance_bytes'] / 1024:,.1f}" if first["covariance_bytes"] else "–"),
                Cell(lam),
            ]
            label = f"{row.system.label} {marks([run.source for run in row.runs])}"
            rows.append(Row(Cell(label), facts, "ours" if row.system.name.startswith("ccq") else ""))
        for system in recall.missing(size, steps):
            rows.append(Row(Cell(system.label), [Cell("not run", kind="missing")]))
        blocks.append(Block(title(size, steps), rows))
    for size in WIDTHS:
        if all(size != known for known, _ in recall.groups):
            blocks.append(Block(f"Width {size}", [Row(Cell("all rows"), [Cell("not run", kind="missing")])]))
    notes = [
        "Every row has the same data, steps and learning rates; the rate is chosen on validation samples, never on the "
        "test slices. Accuracy: mean over the test slices of the queries answered. State: of a sequence in fp32, the "
        "covariance counted; attention's at 256 tokens.",
        f"{SMALL_PRINT}, else over test samples (bootstrap); hover for both.",
        *spread_notes(recall),
    ]
    missing = [name for source in recall.sources for name in source.content["missing"]]
    if missing:
        notes.append(f"Missing, not run to the end: {', '.join(missing[:12])}{' ...' if len(missing) > 12 else ''}.")
    caption = "Recall (MQAR): what was trained, and how much it recalls (not in the paper)"
    return Table(caption, head, blocks, notes, name="mqar")


def spread_notes(recall: Recall) -> list[str]:
    notes = []
    for row, lr, runs in recall.repeated():
        values = sorted(100 * run.content["test"]["accuracy"] for run in runs)
        shown = ", ".join(f"{value:.2f}" for value in values)
        notes.append(
            f"Run to run: {row.system.label} (rate {lr:.3g}, {row.steps:,} steps) trained {len(runs)} times with seed "
            f"{runs[0].content['seed']} gave {shown}: a spread of {values[-1] - values[0]:.2f} points."
        )
    return notes


def millions(count: float) -> str:
    return f"{count / 1e6:,.2f}M" if count < 1e8 else f"{count / 1e6:,.0f}M"


def slice_table(recall: Recall) -> Table | None:
    if not recall.rows:
        return None
    slices = sorted({key for row in recall.rows for key in row.slices})
    blocks = []
    for (size, steps), group in recall.groups.items():
        estimates = {row.system: [row.estimate(key) for key in slices] for row in group}
        tops = [leaders({s: e[at].value if e[at] else None for s, e in estimates.items()}, "higher")  # type: ignore[union-attr]
                for at in range(len(slices))]  # fmt: skip
        rows = []
        for row in group:
            cells = [our_cell(estimate, "0.0") for estimate in estimates[row.system]]
            for at, cell in enumerate(cells):
                cell.bold = row.system in tops[at]
            kind = "ours" if row.system.name.startswith("ccq") else ""
            rows.append(Row(Cell(f"{row.system.label} {marks([run.source for run in row.runs])}"), cells, kind))
        blocks.append(Block(title(size, steps), rows or [Row(Cell("all rows"), [MISSING])]))
    head = ["", *(f"{length} tokens, {pairs} pairs" for length, pairs in slices)]
    return Table("Recall (MQAR) by test slice: queries answered, %", head, blocks, name="mqar-slices")


# -- figures -----------------------------------------------------------------------------------------------------------


def figures_of(recall: Recall) -> list[Figure]:
    return [figure for make in (course, against_state, gate) if (figure := make(recall)) is not None]


def course(recall: Recall) -> Figure | None:
    """Validation accuracy over training, mean over seeds."""
    if not recall.rows:
        return None
    panels = [Panel(title(*key), draw_course(group)) for key, group in recall.groups.items()]
    return Figure("mqar_course", "Recall over training", "Validation accuracy, mean over slices and seeds, at the rate "
                  "chosen.", panels, legend_of([replace(row.system, size="") for row in recall.rows]), columns=2,
                  size=(4.6, 3.3), alt="recall over training")  # fmt: skip


def draw_course(group: list[RecallRow]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for row in group:
            curves = [run.content["curve"] for run in row.runs]
            steps = curves[0]["valid_step"]
            same = [100 * np.array(c["valid_accuracy"]) for c in curves if c["valid_step"] == steps]
            axes.plot(steps, np.mean(same, axis=0), **(line_of(row.system) | {"ms": 3, "lw": 1.3}))
        axes.set(xlabel="step", ylabel="queries answered, %", ylim=(0, 103))

    return draw


def against_state(recall: Recall) -> Figure | None:
    if not recall.rows:
        return None

    def draw_group(group: list[RecallRow]) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            for row in group:
                estimate = row.estimate()
                if estimate is None:
                    continue
                style = line_of(row.system) | {"ls": "", "ms": 7}
                state = row.runs[0].content["state_bytes"] / 1024
                axes.plot([state], [estimate.value], **style)
                if bounds := estimate.over_seeds or estimate.over_samples:
                    axes.plot([state, state], bounds, color=style["color"], lw=1)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            states = sorted({round(row.runs[0].content["state_bytes"] / 1024, 1) for row in group})
            if len(states) <= 5:
                axes.set_xticks(states)
            axes.set(xlabel="state of a sequence, KiB", ylabel="queries answered, %")

        return draw

    panels = [Panel(title(*key), draw_group(group)) for key, group in recall.groups.items()]
    caption = (
        "Test accuracy, mean over slices; the state of a sequence in fp32 with the covariance counted, attention's at "
        "256 tokens. Bars: the 95% interval over seeds where there are three, else over test samples."
    )
    return Figure("mqar_state", "Recall against the size of the state", caption, panels,
                  legend_of([replace(row.system, size="") for row in recall.rows]), columns=2, size=(4.6, 3.3),
                  alt="recall against state")  # fmt: skip


def gate(recall: Recall) -> Figure | None:
    gated = {
        key: [row for row in group if any(learned(run) for run in row.runs)] for key, group in recall.groups.items()
    }
    gated = {key: group for key, group in gated.items() if group}
    if not gated:
        return None

    def draw_group(group: list[RecallRow]) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            for row in group:
                paths = [run.content["gate"] for run in row.runs if learned(run)]
                steps = paths[0]["step"]
                style = line_of(row.system) | {"marker": "", "lw": 1.6}
                means = [np.nanmean(np.array(p["lam"], dtype=float), axis=1) for p in paths if p["step"] == steps]
                axes.plot(steps, np.mean(means, axis=0), **style)
                axes.plot(steps, paths[0]["of_decay_alone"], color=style["color"], ls=":", lw=1.1)
            axes.axhline(0, color=INK, lw=0.5)
            axes.set(xlabel="step", ylabel="mean lam")

        return draw

    panels = [Panel(title(*key), draw_group(group)) for key, group in gated.items()]
    systems = [replace(row.system, size="") for group in gated.values() for row in group]
    caption = (
        "Mean lam over layers and seeds, at the rate chosen. Dotted: where weight decay of its bias alone, without any "
        "gradient, would carry it."
    )
    return Figure("mqar_gate", "The gate while it learns to recall", caption, panels,
                  [(label, colour, line, "") for label, colour, line, _ in legend_of(systems)], columns=2,
                  size=(4.6, 3.3), alt="gate over training")  # fmt: skip


def learned(run: Run) -> bool:
    path = run.content.get("gate") or {}
    return path.get("of_decay_alone") is not None
