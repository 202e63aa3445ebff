"""The long table of results: one record a number, which tables, figures and claims select from.

A row of a table is a system with a variant and a size: its runs differ in the seed alone. A number of a row is the mean
over seeds. It has two intervals that are never mixed: over test samples, and over seeds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

import numpy as np

from ccq.evaluate.compare import HOW
from ccq.evaluate.statistics import error_of_mean, student
from ccq.names import grouped
from ccq.report.collect import Collection, Source
from ccq.systems import SIZES, Identity

SEEDS = 3  # runs below which no interval over seeds is given
DRAWS = 1000  # of the bootstrap over the test samples of a sweep
VALID = "valid:perplexity"  # of a run on its validation data
RECALL = "recall:average"  # of a run of a sweep: mean over the test slices

Interval = tuple[float, float]
mean = fmean


def seed_interval(values: Sequence[float]) -> Interval | None:
    """95% interval of the mean of runs that differ in their seed, mean +- t s / sqrt(n); None below three runs.

    >>> [round(x, 2) for x in seed_interval([1.0, 2.0, 3.0])]
    [-0.48, 4.48]
    """
    return interval_of(mean(values), error_of_mean(values), len(values)) if len(values) >= SEEDS else None


def interval_of(middle: float | None, error: float | None, count: int) -> Interval | None:
    """95% interval of a mean of `count` values whose error is known; None below three."""
    if middle is None or error is None or count < SEEDS:
        return None
    half = student(count - 1) * error
    return middle - half, middle + half


def mean_bounds(intervals: Sequence[Interval]) -> Interval:
    low, high = (mean(bounds) for bounds in zip(*intervals, strict=True))
    return low, high


@dataclass(frozen=True, eq=False)
class Record:
    """One number of one model."""

    row: Identity  # of the table: system, variant, size
    suite: str  # of `ccq eval`, "valid" of a run, "recall" of a sweep
    setting: str  # which score
    value: float | None
    source: Source
    weights: str  # what tells models apart: one model evaluated twice is no second run
    validation: float | None = None  # of its training, the more the better
    possible: Interval = (0.0, 100.0)  # what values can be: per cent, unless told
    known: Interval | None = None  # over test samples, where the file gives it
    slices: tuple[dict, ...] = ()  # ... or what it is drawn from
    of: tuple[str, ...] = ()  # of an average: the settings that it is over
    notes: tuple[str, ...] = ()

    @property
    def seed(self) -> int | None:
        return self.source.seed

    @functools.cached_property
    def interval(self) -> Interval | None:
        """95%, over test samples."""
        if not self.slices:
            return self.known
        low, high = np.quantile(np.mean([drawn(part) for part in self.slices], axis=0), (0.025, 0.975))
        return float(low), float(high)


def drawn(part: dict) -> np.ndarray:
    """Accuracy of a slice in percent, its test samples drawn again and again: from how many of them had n right."""
    right, times = np.array(part["histogram"], dtype=np.int64).T
    count = times.sum()
    # a stream of its own for each slice: they are other samples, and must not go up and down together
    rng = np.random.default_rng([part.get("length", 0), part.get("pairs", 0)])
    counts = rng.multinomial(count, times / count, size=DRAWS)
    return 100 * (counts @ right) / (part["pairs"] * count if "pairs" in part else part["asked"])


def row_of(identity: Identity, size: str | None = None) -> Identity:
    return Identity(identity.system, identity.variant, identity.size if size is None else size)


def of_evaluations(found: Collection) -> Iterator[Record]:
    for source in found.of("eval"):
        weights = source.content["model"].get("hash") or str(source.path)
        for name, score in source.content["scores"].items():
            bounds = score.get("interval")
            notes = [score["note"]] if score.get("note") else []
            if score.get("few"):
                documents = f" of {score['documents']} documents" if "documents" in score else ""
                notes.append(f"only {score['n']} windows{documents}")
            yield Record(
                row_of(source.identity), source.detail, name,
                None if score["value"] is None else float(score["value"]), source, weights,
                None if source.run is None else validation(source.run),
                (1.0, math.inf) if score.get("aggregate") == "perplexity" else (0.0, 100.0),
                (bounds[0], bounds[1]) if bounds and None not in bounds else None, notes=tuple(notes),
                of=tuple(score.get("of") or ()),
            )  # fmt: skip


def of_runs(found: Collection) -> Iterator[Record]:
    """The last validation of each finished run on text."""
    for run in found.of("run"):
        values = [record for record in run.records if record.get("valid_perplexity") is not None]
        if values and int(values[-1]["step"]) >= int(run.content["steps"]):
            last = float(values[-1]["valid_perplexity"])
            yield Record(row_of(run.identity), "valid", "perplexity", last, run, str(run.path), validation(run),
                         (1.0, math.inf))  # fmt: skip


def validation(run: Source) -> float | None:
    """How well a run did on its validation data: the more the better."""
    if (perplexity := run.last("valid_perplexity")) is not None:
        return -perplexity
    return run.last("valid_accuracy")


# recall tasks that are not MQAR as zoology's paper has it, by the size of their recipes
TASKS = {"mqar-overwrite": "MQAR with overwritten keys", "mad-noisy": "MAD, noisy", "mad-fuzzy": "MAD, fuzzy"}


def slice_name(part: dict) -> str:
    """
    >>> slice_name({"length": 64, "pairs": 4}), slice_name({"length": 128, "motif": 3})
    ('64-4', '128 tokens, keys of at most 3')
    """
    if "pairs" in part:
        return f"{part['length']}-{part['pairs']}"
    return f"{part['length']} tokens, keys of at most {part['motif']}"


def of_sweeps(found: Collection) -> Iterator[Record]:
    """Test accuracy of each run of `ccq sweep`, of a slice and the mean over all of them."""
    made: dict[tuple, tuple] = {}
    for file in sorted(found.of("sweep"), key=lambda s: s.when, reverse=True):  # the newest first
        decays = file.content.get("chosen_decay", {})
        for run in file.content["runs"]:
            if run.get("decay") != decays.get(run["row"]):  # of MAD's grid: the rate is chosen among those of one decay
                continue
            identity = Identity(**run["identity"])
            width, steps, task = run["model"]["hidden_size"], run["steps"], TASKS.get(run.get("size", ""), "")
            row = row_of(identity, f"{task and f'{task}, '}width {width}, {steps:,} steps")
            order = (task, width, steps, row.order, identity.seed or 0, identity.repeat)
            source = replace(file, content=run | {"tier": file.content["tier"]}, identity=identity)
            # a run that is there already is in a file that was made again
            made.setdefault((row, run["lr"], identity.seed, identity.repeat), (order, row, source))
    for _, row, source in sorted(made.values(), key=lambda item: item[0]):
        slices = {slice_name(part): part for part in source.content["test"]["slices"]}
        parts = [("average", tuple(slices.values())), *((name, (part,)) for name, part in slices.items())]
        for setting, of in parts:
            value = 100 * mean(part["accuracy"] for part in of)
            yield Record(row, "recall", setting, value, source, source.content["name"],
                         source.content["valid"]["accuracy"], slices=of,
                         of=tuple(slices) if setting == "average" else ())  # fmt: skip


def comparable(records: list[Record]) -> list[Record]:
    """The records, each average taken over what all models of its size were asked, and saying so where that is less."""
    asked = grouped((r for r in records if r.of), lambda r: (r.suite, r.setting, r.row.size))
    values = {(id(r.source), r.setting): r for r in records if not r.of and r.value is not None}
    made = []
    for record in records:
        alike = asked.get((record.suite, record.setting, record.row.size), ())
        shared = [name for name in record.of if all(name in other.of for other in alike)]
        if shared == list(record.of):
            made.append(record)
        elif parts := [part for name in shared if (part := values.get((id(record.source), name)))]:
            note = f"mean over the {len(shared)} that all were asked of {len(record.of)}: {', '.join(shared)}"
            made.append(replace(record, value=mean(part.value or 0.0 for part in parts), known=None,
                                slices=tuple(x for part in parts for x in part.slices),
                                notes=(*record.notes, note)))  # fmt: skip
    return made


def asked_how(source: Source) -> dict[str, Any]:
    """How an evaluation was asked, as far as it says; the sizing that is called full was once called largest."""
    settings = source.content.get("settings") or {}
    known = {name: settings[name] for name in HOW if name in settings} if source.kind == "eval" else {}
    return known | ({"sizing": "full"} if known.get("sizing") == "largest" else {})


def asked_otherwise(one: Iterable[Source], two: Iterable[Source]) -> str:
    """What two sides were not asked alike, in words; "" if they were."""
    sides = [[asked_how(source) for source in side] for side in (one, two)]
    for name in HOW:
        told = [sorted({str(how[name]) for how in side if name in how}) for side in sides]
        if all(told) and told[0] != told[1]:
            return f"evaluated differently: {name} {', '.join(told[0])} against {', '.join(told[1])}"
    return ""


@dataclass
class Estimate:
    """A score of a row: one value a run."""

    records: list[Record]
    notes: list[str]

    @property
    def values(self) -> list[float]:
        return [record.value for record in self.records if record.value is not None]

    @property
    def sources(self) -> list[Source]:
        return [record.source for record in self.records]

    @functools.cached_property
    def of_seeds(self) -> dict[int | None, list[Record]]:
        """Runs by the seeds that count: one whose seed is not known may be any, and counts where there is no other."""
        seeds = grouped(self.records, lambda record: record.seed)
        if len(seeds) > 1:
            seeds.pop(None, None)
        return seeds

    @functools.cached_property
    def by_seed(self) -> dict[int | None, float]:
        """A mean for each seed: a run that was repeated, or evaluated twice, counts once."""
        return {seed: mean(r.value for r in runs if r.value is not None) for seed, runs in self.of_seeds.items()}

    @property
    def value(self) -> float:
        """The mean over seeds."""
        return mean(self.by_seed.values())

    @property
    def over_seeds(self) -> Interval | None:
        """Cut at what is possible."""
        bounds, possible = seed_interval(list(self.by_seed.values())), self.records[0].possible
        return None if bounds is None else (max(bounds[0], possible[0]), min(bounds[1], possible[1]))

    @functools.cached_property
    def over_samples(self) -> Interval | None:
        """Of one run its own; of several runs of a seed, and of several seeds, the mean of their bounds."""
        seeds = []
        for runs in self.of_seeds.values():
            bounds = [record.interval for record in runs if record.interval is not None]
            if len(bounds) < len(runs):
                return None
            seeds.append(mean_bounds(bounds))
        return mean_bounds(seeds)

    @property
    def tokens(self) -> int | None:
        """That each was trained on, where known."""
        return next((s.identity.tokens for s in self.sources if s.identity.tokens is not None), None)


def settings_like(settings: Iterable[str], pattern: str) -> list[str]:
    """Names that match. Of several lengths WikiText's shortest comes first, which is what the models are trained on,
    and LongBench's longest, which cuts least away."""
    found = [name for name in settings if fnmatchcase(name, pattern)]
    wikitext = pattern.startswith("wikitext")
    return sorted(found, key=lambda name: [int(p) for p in name.split("/") if p.isdigit()], reverse=not wikitext)


def counted(records: Sequence[Record]) -> list[Record]:
    """Those of one row that make one number: of the longest training (shorter runs are those of a sweep over rates), at
    the rate that validated best, and of each seed and each repeat of it one set of weights."""
    most = max((r.source.identity.tokens or 0 for r in records), default=0)
    records = [r for r in records if r.source.identity.tokens in (None, most)]
    rates = grouped((r for r in records if r.source.rate is not None), lambda r: r.source.rate or 0.0)
    reached = {
        rate: mean(-math.inf if r.validation is None else r.validation for r in of) for rate, of in rates.items()
    }
    best = max(rates, key=lambda rate: (reached[rate], -rate), default=None)
    records = [r for r in records if r.source.rate in (None, best)]
    kept = []
    for mine in grouped(records, lambda r: (r.seed, r.source.identity.repeat)).values():
        # several: most samples, then the newest
        chosen = max(mine, key=lambda r: ((r.source.content.get("samples") or {}).get("count") or 0, r.source.when))
        kept += [r for r in mine if r.weights == chosen.weights]
    return kept


def once(sources: Iterable[Source]) -> list[Source]:
    """Without those of a run that was repeated, where the first is there."""
    sources = list(sources)
    first = {(source.subject, source.seed) for source in sources if not source.identity.repeat}
    return [s for s in sources if not s.identity.repeat or (s.subject, s.seed) not in first]


class Results:
    """The long table, with what is selected from it most."""

    def __init__(self, found: Collection) -> None:
        self.found = found
        self.records = comparable([*of_evaluations(found), *of_runs(found), *of_sweeps(found)])
        self.index = grouped(self.records, lambda record: (record.row, record.suite))
        self.estimate = functools.cache(self._estimate)

    def rows(self, *suites: str) -> list[Identity]:
        """Those that have results in one of the suites, in the order of the tables."""
        found = dict.fromkeys(row for row, suite in self.index if suite in suites)
        sizes = [*SIZES, *dict.fromkeys(row.size for row in found)]
        return sorted(found, key=lambda row: (sizes.index(row.size), row.order))

    def of(self, row: Identity, suite: str) -> list[Record]:
        return self.index.get((row, suite), [])

    def settings(self, suite: str) -> list[str]:
        return list(dict.fromkeys(record.setting for record in self.records if record.suite == suite))

    def _estimate(self, row: Identity, where: str) -> Estimate | None:
        """The score `where` ("suite:score", with * for any length) of a row; None where no run has it."""
        suite, _, pattern = where.partition(":")
        having = grouped(self.of(row, suite), lambda record: id(record.source)).values()  # by the run or file
        settings = [{record.setting: record for record in mine} for mine in having]
        runs = [mine[names[0]] for mine in settings if (names := settings_like(mine, pattern))]
        whole = [r for r in runs if not r.source.content.get("quick_look")] or runs  # a quick look, if no other
        notes = []
        rulers = [r for r in whole if asked_how(r.source).get("sizing") == "ruler"]
        if rulers and len(rulers) < len(whole):  # what the paper asked
            whole = rulers
            notes.append("with haystacks sized as RULER does; those sized otherwise are left out")
        if left := sorted({r.seed for r in runs if r.seed is not None} - {r.seed for r in whole}):
            notes.append(f"quick looks left out, of seed{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}")
        used = counted(whole)
        for record in used:
            if record.value is None:
                notes.append(f"{record.source.name}: {record.setting} is not a finite number")
            else:
                notes += record.notes
        same = {(r.seed, r.source.identity.tokens) for r in used}
        for record in whole:
            if record not in used and (record.seed, record.source.identity.tokens) in same and suite != "recall":
                notes.append(f"{record.source.name}, of the same seed, is left out: other weights, or another rate")
        kept = [record for record in used if record.value is not None]
        return Estimate(kept, notes) if kept else None

    def curve(self, row: Identity, suite: str, pattern: str) -> list[tuple[int, Estimate]]:
        """(length, estimate) of the scores called `pattern` with a length at its {}."""
        before, after = pattern.split("{}")
        middles = {r.setting.removeprefix(before).removesuffix(after) for r in self.of(row, suite)
                   if r.setting.startswith(before) and r.setting.endswith(after)}  # fmt: skip
        lengths = sorted(int(middle) for middle in middles if middle.isdigit())
        return [(n, estimate) for n in lengths if (estimate := self.estimate(row, f"{suite}:{pattern.format(n)}"))]


def by_size(rows: Sequence[Identity]) -> dict[str, list[Identity]]:
    return grouped(rows, lambda row: row.size)


def distinct(sources: Iterable[Source]) -> list[Source]:
    return sorted({source.number: source for source in sources}.values(), key=lambda source: source.number)
