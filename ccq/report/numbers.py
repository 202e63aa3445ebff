"""Scores over runs: the mean over seeds, and two intervals that are never mixed, over test samples and over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ccq.evaluate.statistics import student
from ccq.report.collect import Collection, Source, last_of, rate_of
from ccq.report.systems import System

SEEDS = 3  # runs below which no interval over seeds is given

Interval = tuple[float, float]


def seed_interval(values: Sequence[float]) -> Interval | None:
    """95% interval of the mean of runs that differ in their seed, mean +- t s / sqrt(n); None below three runs.

    >>> [round(x, 2) for x in seed_interval([1.0, 2.0, 3.0])]
    [-0.48, 4.48]
    """
    n = len(values)
    if n < SEEDS:
        return None
    mean = sum(values) / n
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    half = student(n - 1) * deviation / math.sqrt(n)
    return mean - half, mean + half


def mean_bounds(intervals: Sequence[Interval]) -> Interval:
    low, high = (sum(bounds) / len(intervals) for bounds in zip(*intervals, strict=True))
    return low, high


@dataclass
class Estimate:
    """A score of a system: one value a run."""

    values: list[float]
    sources: list[Source]
    samples: list[Interval | None]  # of each run, over test samples
    notes: list[str]
    possible: Interval = (0.0, 100.0)  # what values can be: per cent, unless told

    @property
    def value(self) -> float:
        """The mean over seeds."""
        return sum(self.by_seed.values()) / len(self.by_seed)

    @property
    def by_seed(self) -> dict[int | None, float]:
        """A mean for each seed: a run that was repeated, or evaluated twice, counts once. One whose seed is not known
        may be any of them, and counts where there is no other."""
        return {seed: sum(values) / len(values) for seed, values in self._of_seeds(self.values).items()}

    def _of_seeds(self, things: list) -> dict[int | None, list]:
        """What each run has, by the seeds that count."""
        seeds: dict[int | None, list] = {}
        for source, thing in zip(self.sources, things, strict=True):
            seeds.setdefault(source.seed, []).append(thing)
        if len(seeds) > 1:
            seeds.pop(None, None)
        return seeds

    @property
    def over_seeds(self) -> Interval | None:
        """Cut at what is possible."""
        bounds = seed_interval(list(self.by_seed.values()))
        return None if bounds is None else (max(bounds[0], self.possible[0]), min(bounds[1], self.possible[1]))

    @property
    def tokens(self) -> int | None:
        """That each was trained on, where known."""
        return next((source.tokens for source in self.sources if source.tokens is not None), None)

    @property
    def over_samples(self) -> Interval | None:
        """Of one run its own; of several runs of a seed, and of several seeds, the mean of their bounds."""
        seeds = self._of_seeds(self.samples).values()
        if any(interval is None for runs in seeds for interval in runs):
            return None
        return mean_bounds([mean_bounds(runs) for runs in seeds])


def seed_differences(one: Estimate, two: Estimate) -> dict[int | None, float]:
    """{seed: one - two} of the seeds that both have."""
    theirs = two.by_seed
    return {seed: value - theirs[seed] for seed, value in one.by_seed.items() if seed in theirs}


def scores_like(scores: dict, pattern: str) -> list[str]:
    """Names that match. Of several lengths WikiText's shortest comes first, which is what the models are trained on,
    and LongBench's longest, which cuts least away."""
    found = [name for name in scores if fnmatchcase(name, pattern)]
    wikitext = pattern.startswith("wikitext")
    return sorted(found, key=lambda name: [int(p) for p in name.split("/") if p.isdigit()], reverse=not wikitext)


VALID = "valid:perplexity"  # of a run on its validation data, where evaluations have "suite:score"


def validations(found: Collection) -> list[Source]:
    """The last validation of each finished run on text, as if it were an evaluation."""
    made = []
    for run in found.of("run"):
        values = [record for record in run.records if record.get("valid_perplexity") is not None]
        if run.system is not None and values and int(values[-1]["step"]) >= int(run.content["steps"]):
            score = {"value": float(values[-1]["valid_perplexity"]), "interval": None, "aggregate": "perplexity"}
            content = {"scores": {"perplexity": score}}
            made.append(replace(run, kind="eval", detail="valid", content=content, run=run))
    return made


def counted(sources: Sequence[Source]) -> list[Source]:
    """Those of one system that make one number: of the longest training (shorter runs are those of a sweep), at the
    rate that validated best, and of each seed one set of weights, with those trained again as its repeats."""
    most = max((source.tokens for source in sources if source.tokens is not None), default=None)
    sources = [source for source in sources if source.tokens in (None, most)]
    rates: dict[float, list[Source]] = {}
    for source in sources:
        if source.run is not None:
            rates.setdefault(rate_of(source.run), []).append(source.run)
    best = max(rates, key=lambda rate: (validation(rates[rate]), -rate), default=None)
    sources = [source for source in sources if source.run is None or rate_of(source.run) == best]
    kept = []
    for seed in dict.fromkeys(source.seed for source in sources):
        mine = [source for source in sources if source.seed == seed]
        first = [source for source in mine if not is_repeat(source)]
        if first:  # several: most samples, then the newest
            chosen = max(first, key=lambda s: ((s.content.get("samples") or {}).get("count") or 0, s.when))
            mine = [source for source in mine if source not in first or weights_of(source) == weights_of(chosen)]
        kept += mine
    return kept


def validation(runs: list[Source]) -> float:
    """How well runs did on their validation data, a mean: the more the better."""
    for name, sign in (("valid_perplexity", -1.0), ("valid_accuracy", 1.0)):
        values = [value for run in runs if (value := last_of(run, name)) is not None]
        if values:
            return sign * sum(values) / len(values)
    return -math.inf


def weights_of(source: Source) -> Any:
    """What tells models apart: one model evaluated twice is no second run."""
    return (source.content.get("model") or {}).get("hash") or str(source.path)


def is_repeat(source: Source) -> bool:
    """Whether a run was made once more with its seed, on purpose."""
    return source.identity is not None and source.identity.repeat > 0


def once(sources: Iterable[Source]) -> list[Source]:
    """Without those of a run that was made again, where the first is there."""
    sources = list(sources)
    first = {(source.subject, source.seed) for source in sources if not is_repeat(source)}
    return [source for source in sources if not is_repeat(source) or (source.subject, source.seed) not in first]


POSSIBLE = {"perplexity": (1.0, math.inf)}  # by how samples make a score; else per cent


class Results:
    """Scores of evaluations by system. A model that was changed at inference is none: it has a table of its own."""

    def __init__(self, found: Collection) -> None:
        self.found = found
        self.by_system: dict[System, dict[str, list[Source]]] = {}
        for source in found.evaluated():
            assert source.system is not None
            self.by_system.setdefault(source.system, {}).setdefault(source.detail, []).append(source)
        for source in validations(found):
            assert source.system is not None
            self.by_system.setdefault(source.system, {}).setdefault(source.detail, []).append(source)

    def systems(self, suite: str | None = None) -> list[System]:
        """Those that have results (in a suite), in the order of the tables."""
        found = [system for system, suites in self.by_system.items() if suite is None or suite in suites]
        return sorted(found, key=lambda system: system.order)

    def runs(self, system: System, suite: str) -> list[Source]:
        return self.by_system.get(system, {}).get(suite, [])

    def estimate(self, system: System, where: str) -> Estimate | None:
        """The score `where` ("suite:score", with * for any length) of a system; None where no run has it."""
        suite, _, pattern = where.partition(":")
        values, sources, samples, notes, possible = [], [], [], [], (0.0, 100.0)
        runs = [run for run in self.runs(system, suite) if scores_like(run.content["scores"], pattern)]
        whole = [run for run in runs if not run.content.get("quick_look")] or runs  # a quick look, if no other
        left = sorted({run.seed for run in runs if run.seed is not None} - {run.seed for run in whole})
        if left:
            notes.append(f"quick looks left out, of seed{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}")
        runs = whole
        used = counted(runs)
        for source in used:
            names = scores_like(source.content["scores"], pattern)
            score = source.content["scores"][names[0]]
            possible = POSSIBLE.get(score.get("aggregate"), possible)
            if score["value"] is None:
                notes.append(f"{source.name}: {names[0]} is not a finite number")
                continue
            values.append(float(score["value"]))
            sources.append(source)
            interval = score.get("interval")
            samples.append((interval[0], interval[1]) if interval and None not in interval else None)
            if score.get("note"):
                notes.append(score["note"])
            if score.get("few"):
                documents = f" of {score['documents']} documents" if "documents" in score else ""
                notes.append(f"only {score['n']} windows{documents}")
        for run in runs:
            if run not in used and run.seed in {source.seed for source in used if source.tokens == run.tokens}:
                notes.append(f"{run.name}, of the same seed, is left out: other weights, or another rate")
        return Estimate(values, sources, samples, notes, possible) if values else None

    def both(self, system: System, control: System, where: str) -> tuple[Estimate, Estimate] | None:
        """The score of a system and of its control, where both have it for a seed."""
        one, two = self.estimate(system, where), self.estimate(control, where)
        return None if one is None or two is None or not seed_differences(one, two) else (one, two)
