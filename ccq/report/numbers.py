"""Scores over runs: the mean over seeds, and two intervals that are never mixed, over test samples and over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ccq.report.collect import Collection, Source, longest
from ccq.report.systems import System

SEEDS = 3  # runs below which no interval over seeds is given
# 97.5% quantiles of Student's t for 2, 3, ... degrees of freedom; past the end the normal's
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

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
    t = STUDENT[n - 3] if n - 3 < len(STUDENT) else 1.96
    return mean - t * deviation / math.sqrt(n), mean + t * deviation / math.sqrt(n)


@dataclass
class Estimate:
    """A score of a system: one value a run."""

    values: list[float]
    sources: list[Source]
    samples: list[Interval | None]  # of each run, over test samples
    notes: list[str]

    @property
    def value(self) -> float:
        """The mean over seeds."""
        return sum(self.by_seed.values()) / len(self.by_seed)

    @property
    def by_seed(self) -> dict[int | None, float]:
        """A mean for each seed: a run that was repeated, or evaluated twice, counts once."""
        seeds: dict[int | None, list[float]] = {}
        for source, value in zip(self.sources, self.values, strict=True):
            seeds.setdefault(source.seed, []).append(value)
        return {seed: sum(values) / len(values) for seed, values in seeds.items()}

    @property
    def over_seeds(self) -> Interval | None:
        return seed_interval([value for seed, value in self.by_seed.items() if seed is not None])

    @property
    def over_samples(self) -> Interval | None:
        """Of one run its own; of several the mean of their bounds."""
        known = [interval for interval in self.samples if interval is not None]
        if len(known) < len(self.values):
            return None
        return sum(low for low, _ in known) / len(known), sum(high for _, high in known) / len(known)


def scores_like(scores: dict, pattern: str) -> list[str]:
    """Names that match. Of several lengths WikiText's shortest comes first, which is what the models are trained on,
    and LongBench's longest, which cuts least away."""
    found = [name for name in scores if fnmatchcase(name, pattern)]
    wikitext = pattern.startswith("wikitext")
    return sorted(found, key=lambda name: [int(p) for p in name.split("/") if p.isdigit()], reverse=not wikitext)


VALID = "valid:perplexity"  # of a run on its validation data, where evaluations have "suite:score"


def validations(found: Collection) -> list[Source]:
    """The last validation of each finished run on text, as if it were an evaluation."""
    finished = {}
    for run in found.of("run"):
        values = [record for record in run.records if record.get("valid_perplexity") is not None]
        if run.system is not None and values and int(values[-1]["step"]) >= int(run.content["steps"]):
            finished[id(run)] = float(values[-1]["valid_perplexity"])
    made = []
    for run in longest([run for run in found.of("run") if id(run) in finished]):
        score = {"value": finished[id(run)], "interval": None}
        content = {"scores": {"perplexity": score}, "run": run.content}
        made.append(replace(run, kind="eval", detail="valid", content=content))
    return made


class Results:
    """Scores of evaluations by system."""

    def __init__(self, found: Collection) -> None:
        self.found = found
        self.by_system: dict[System, dict[str, list[Source]]] = {}
        for source in found.of("eval"):
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
        values, sources, samples, notes = [], [], [], []
        runs = self.runs(system, suite)
        for source in [run for run in runs if not run.content.get("quick_look")] or runs:  # a quick look, if no other
            names = scores_like(source.content["scores"], pattern)
            if not names:
                continue
            score = source.content["scores"][names[0]]
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
                notes.append(f"only {score['n']} windows")
        return Estimate(values, sources, samples, notes) if values else None

    def pairs(self, system: System, control: System, where: str) -> dict[int | None, float]:
        """{seed: system - control} of the runs whose seeds are equal."""
        one, two = self.estimate(system, where), self.estimate(control, where)
        if one is None or two is None:
            return {}
        return {seed: value - two.by_seed[seed] for seed, value in one.by_seed.items() if seed in two.by_seed}
