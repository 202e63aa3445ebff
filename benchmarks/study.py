"""The tables of docs/study.md from the runs in benchmarks/study, by the rules of that page.

    python benchmarks/study.py            # print them
    python benchmarks/study.py --write    # put them into docs/study.md

A run is a folder ROW-seedN with `config.json` (which says what it is of), `log.jsonl`, `provenance.json` and `eval/`.
Those in `earlier/` are of older code and were run again: they are shown, not counted.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ccq.evaluate.statistics import chance, error_of_mean, holm, student
from ccq.files import read_text
from ccq.report.claims import FAILS, FEW, HOLDS, LEAST, NOT_RUN, UNTESTABLE
from ccq.systems import Identity

ROOT = Path(__file__).parent.parent
RUNS, PAGE = ROOT / "benchmarks" / "study", ROOT / "docs" / "study.md"
# Gated DeltaNet's rates were searched before the study, by the same rule on the same text
SWEEPS = (RUNS / "sweep", ROOT / "benchmarks" / "results" / "nano" / "needles" / "sweep")
PLACE = re.compile(r"(<!-- study: (?P<name>\w+) -->\n).*?(<!-- /study -->)", re.DOTALL)
LEAST_SEEDS = 3
LOWER, HIGHER = "lower", "higher"
ROWS = (
    "gla-unit", "ccq-gla", "gla-projected", "gla-projected-decay", "gla-projected-twice", "gated-deltanet",
    "ccq-gated-deltanet", "gated-deltanet-projected-decay",
)  # fmt: skip
# (claim, measure, row, what it is compared with), in the order of the page; "best": the read that tier 1 finds for GLA
CLAIMS = (
    ("S1", "perplexity", "ccq-gla", "gla-unit"),
    ("S2", "perplexity", "gla-projected-decay", "gla-unit"),
    ("S3", "perplexity", "gla-projected-decay", "ccq-gla"),
    ("S4", "perplexity", "gla-projected", "gla-unit"),
    ("S5", "perplexity", "gla-projected-decay", "gla-projected"),
    ("S6", "perplexity", "gla-projected-twice", "gla-projected-decay"),
    ("S7", "perplexity", "ccq-gated-deltanet", "gated-deltanet"),
    ("S8", "perplexity", "gated-deltanet-projected-decay", "gated-deltanet"),
    ("S9", "needles", "gla-projected-decay", "gla-unit"),
    ("S10", "needles", "gated-deltanet-projected-decay", "gated-deltanet"),
    ("S11", "perplexity", "best", "gla-other-head"),
    ("S12", "perplexity", "best", "ccq-gla-free-scale"),
)
DECIDE = {"S1", "S2", "S3", "S7", "S8", "S9", "S10"}  # marked D on the page: five seeds, the others three
BETTER = {"perplexity": LOWER, "needles": HIGHER}
RATES = ("1e-3", "2e-3", "4e-3")
READS = ("none", "paper", "projected")  # of tier 6


@dataclass(frozen=True)
class Run:
    path: Path

    def read(self, name: str) -> dict:
        return json.loads(read_text(self.path / name))

    @cached_property
    def config(self) -> dict:
        return self.read("config.json")

    @cached_property
    def identity(self) -> Identity:
        return Identity(**self.config["identity"])

    @cached_property
    def log(self) -> list[dict]:
        return [json.loads(line) for line in read_text(self.path / "log.jsonl").splitlines()]

    @property
    def counts(self) -> bool:
        """A repeat, or a run of older code, is shown only."""
        return not self.identity.repeat and self.path.parent == RUNS

    @property
    def remark(self) -> str:
        return "" if self.counts else " (repeat)" if self.identity.repeat else " (not counted)"

    @property
    def commit(self) -> str:
        return self.read("provenance.json")[0]["commit"][:7]

    def perplexity(self, step: int | None = None) -> float:
        """On the validation text: after the last step, or after `step`."""
        found = {row["step"]: row["valid_perplexity"] for row in self.log if "valid_perplexity" in row}
        return found[max(found) if step is None else step]

    def scores(self, suite: str) -> dict[str, float] | None:
        path = self.path / "eval" / f"{suite}.json"
        return (
            {name: s["value"] for name, s in self.read(f"eval/{suite}.json")["scores"].items()}
            if path.exists()
            else None
        )

    @property
    def needles(self) -> float | None:
        """Per cent right, the mean of the twelve settings."""
        scores = self.scores("niah")
        return None if scores is None else sum(scores.values()) / len(scores)

    def held_out(self, length: int) -> float | None:
        """Perplexity on windows of this length, the geometric mean of the corpora."""
        scores = self.scores("length")
        found = [math.log(x) for name, x in (scores or {}).items() if re.fullmatch(rf"\w+/{length}", name)]
        return math.exp(sum(found) / len(found)) if found else None

    @property
    def angle(self) -> float | None:
        """Degrees between q and q_clean at the end of training, the mean of the layers."""
        found = [row["angle"] for row in self.log if row.get("angle")]
        return sum(found[-1]) / len(found[-1]) if found else None


def runs() -> list[Run]:
    """All, in the order of the rows."""
    found = [Run(path) for place in (RUNS, RUNS / "earlier") for path in place.glob("*-seed*")]
    place = {name: at for at, name in enumerate(ROWS)}
    order = [(place.get(r.identity.system, len(ROWS)), r.identity.system, r.identity.seed, not r.counts) for r in found]
    return [run for _, run in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def by_seed(found: list[Run], system: str, measure: str) -> dict[int, float]:
    mine = [run for run in found if run.identity.system == system and run.counts]
    values = {run.identity.seed: run.perplexity() if measure == "perplexity" else run.needles for run in mine}
    return {seed: value for seed, value in sorted(values.items()) if value is not None}


def best_read(found: list[Run]) -> str:
    """Of GLA's reads in tier 1 that have all three seeds: the lowest mean perplexity over seeds 0, 1 and 2."""
    reads = {row: by_seed(found, row, "perplexity") for row in ROWS if "gla" in row and row != "gla-unit"}
    means = {row: sum(x[s] for s in range(3)) / 3 for row, x in reads.items() if {0, 1, 2} <= x.keys()}
    return min(means, key=means.__getitem__, default="")


@dataclass(frozen=True)
class Verdict:
    name: str
    differences: dict[int, float]
    interval: tuple[float, float] | None
    p: float | None
    verdict: str


Pair = tuple[str, dict[int, float], dict[int, float]]  # which way is better; row and control, by seed


def pairs(found: list[Run]) -> dict[str, Pair]:
    """What each claim of the page compares."""
    made = {}
    for name, measure, row, control in CLAIMS:
        one, two = (by_seed(found, best_read(found) if x == "best" else x, measure) for x in (row, control))
        made[name] = (BETTER[measure], one, two)
    return made


def judge(claims: dict[str, Pair]) -> list[Verdict]:
    """Claims by the rules of the page; Holm's correction runs over all that have three seeds. Others are not tested."""
    drafts = []
    for name, (better, one, two) in claims.items():
        differences = {seed: one[seed] - two[seed] for seed in one if seed in two}
        values = list(differences.values())
        bounds = p = None
        verdict = FEW if values else NOT_RUN
        shared = [x[seed] for x in (one, two) for seed in differences]
        if len(values) >= LEAST_SEEDS:
            middle, half = sum(values) / len(values), student(len(values) - 1) * error_of_mean(values)
            bounds = (middle - half, middle + half)
            gain = -bounds[0] if better == LOWER else bounds[1]  # the largest that the interval allows
            if better == HIGHER and (max(shared) < LEAST[better] or min(shared) > 100 - LEAST[better]):
                verdict = UNTESTABLE
            else:
                p = chance(values)
                verdict = FAILS if gain < LEAST[better] else FEW
        drafts.append((name, differences, bounds, p, verdict, better))
    tested = [draft for draft in drafts if draft[3] is not None]
    survive = dict(zip((draft[0] for draft in tested), holm([draft[3] for draft in tested]), strict=True))
    found_verdicts = []
    for name, differences, bounds, p, verdict, better in drafts:
        right_way = bounds is not None and (bounds[1] < 0 if better == LOWER else bounds[0] > 0)
        found_verdicts.append(
            Verdict(name, differences, bounds, p, HOLDS if survive.get(name) and right_way else verdict)
        )
    return found_verdicts


def cell(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def table(head: str, rows: list[list[str]]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def runs_table(found: list[Run]) -> str:
    rows = [
        [
            f"`{run.identity.system}`", f"{run.identity.seed}{run.remark}", run.commit,
            f"{run.config['optimizer']['lr']:g}", cell(run.perplexity(500), 1), cell(run.perplexity(), 2),
            cell(run.held_out(4096), 2), cell(run.held_out(16384), 2), cell(run.needles, 1), cell(run.angle, 2, "°"),
        ]
        for run in found
    ]  # fmt: skip
    head = (
        "| row | seed | commit | rate | after 500 steps | at the end | held out, 4K | held out, 16K | needles | angle |"
    )
    return table(head, rows)


def claims_table(found: list[Run]) -> str:
    rows = []
    for v in judge(pairs(found)):
        each = ", ".join(f"{x:+.2f}" for x in v.differences.values()) or "-"
        bounds = (
            "-" if v.interval is None else f"{sum(v.interval) / 2:+.2f} [{v.interval[0]:+.2f}, {v.interval[1]:+.2f}]"
        )
        have, planned = len(v.differences), 5 if v.name in DECIDE else LEAST_SEEDS
        unfinished = v.verdict == FEW or 0 < have < planned
        verdict = f"{v.verdict} ({have} of {planned} seeds)" if unfinished else v.verdict
        rows.append([v.name, each, bounds, "-" if v.p is None else f"{v.p:.2f}", verdict])
    return table("| claim | row minus control, by seed | mean, 95% interval | p | verdict |", rows)


def searched(system: str) -> list[Path]:
    """The runs that chose the rate of a row."""
    places = SWEEPS if "deltanet" in system else SWEEPS[:1]
    found = [[place / f"{system.replace('-', '_')}-{rate}" for rate in RATES] for place in places]
    return next((tried for tried in found if all(path.exists() for path in tried)), [])


def sweep_table() -> str:
    """Validation perplexity after 25M tokens, by rate."""
    rows = [
        [f"`{system}`", Run(tried[0]).commit, *(cell(Run(path).perplexity(), 1) for path in tried)]
        for system in ROWS
        if (tried := searched(system))
    ]
    return table(f"| row | commit | {' | '.join(RATES)} |", rows)


def continued_table() -> str:
    """Tier 6: validation perplexity of finished models, and after 25M tokens more by each read."""
    rows = []
    for path in sorted((RUNS / "continued").glob("*-none-seed*")):
        row, seed = path.name.split("-none-seed")
        none, *cleaned = (Run(RUNS / "continued" / f"{row}-{read}-seed{seed}") for read in READS)
        begun = Run(RUNS / f"{row}-seed{seed}")
        differences = [f"{run.perplexity():.2f} ({run.perplexity() - none.perplexity():+.2f})" for run in cleaned]
        angles = [cell(run.angle, 2, "°") for run in cleaned]
        name = f"`{begun.identity.system}`"
        rows.append(
            [name, seed, none.commit, cell(begun.perplexity(), 2), cell(none.perplexity(), 2), *differences, *angles]
        )
    reads = "paper's read | projected read | angle, paper's | angle, projected"
    return table(f"| model | seed | commit | finished | trained on | {reads} |", rows)


def filled(text: str) -> str:
    """The page with its tables made anew."""
    found = runs()
    tables = {"runs": runs_table(found), "claims": claims_table(found), "sweep": sweep_table()}
    tables["continued"] = continued_table()
    return PLACE.sub(lambda place: f"{place[1]}{tables[place['name']]}\n{place[3]}", text)


def show(page: Path, place: re.Pattern[str], filled: Callable[[str], str]) -> None:
    """Print the tables of a page made anew, or put them into it: --write."""
    text = filled(page.read_text())
    if "--write" in sys.argv[1:]:
        page.write_text(text)
    else:
        print("\n\n".join(match[0] for match in place.finditer(text)))


if __name__ == "__main__":
    show(PAGE, PLACE, filled)
