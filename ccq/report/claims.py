"""The paper's claims (claims.toml) judged on the results at hand: holds, does not, not enough runs, not testable."""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ccq.report.collect import Collection, Source
from ccq.report.numbers import SEEDS, Results, scores_like, seed_interval
from ccq.report.paper import HERE, Paper
from ccq.report.systems import SIZES, WITH_CONVOLUTION, System, label_of, scale_label

if TYPE_CHECKING:
    from ccq.report.recall import Recall

HOLDS, FAILS, FEW, UNTESTABLE = "holds", "does not", "not enough runs", "not testable"
NOT_RUN = "not run"
LEAST = {"higher": 1.0, "lower": 0.1}  # gain that counts: a point of accuracy; of perplexity, the only score to fall
BACKBONES = {"gla": "ccq-gla", "gated-deltanet": "ccq-gated-deltanet"}


@dataclass
class Verdict:
    claim: dict
    paper: str
    ours: str
    verdict: str
    detail: str = ""  # why
    sources: list[Source] = field(default_factory=list)


@functools.cache
def load(path: Path = HERE / "claims.toml") -> tuple[dict, ...]:
    return tuple(tomllib.loads(path.read_text())["claims"])


def judge(found: Collection, results: Results, paper: Paper, recall: Recall) -> list[Verdict]:
    judges = {"score": score, "cost": cost, "alignment": alignment, "gate": gate, "intervention": intervention}
    return [
        recalls(claim, recall) if claim["kind"] == "recall" else judges[claim["kind"]](claim, found, results, paper)
        for claim in load()
    ]


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def interval(bounds: tuple[float, float] | None, digits: int = 2) -> str:
    return "" if bounds is None else f"[{signed(bounds[0], digits)}, {signed(bounds[1], digits)}]"


def parse(key: str, size: str, more: str = "") -> System:
    name, _, variant = key.partition(", ")
    return System(name, ", ".join(filter(None, (more, variant))), size)


def paper_difference(claim: dict, paper: Paper) -> str:
    """The paper's difference at each scale, from its table."""
    if "table" not in claim:
        return claim["paper"]
    table, parts = paper.tables[claim["table"]], []
    for scale in table.scales:
        one, two = (table.value(scale, claim[who], claim["column"]) for who in ("system", "control"))
        if one is not None and two is not None:
            parts.append(f"{signed(one - two)} at {scale_label(scale)}")
    return f"{', '.join(parts)} ({table.label})" if parts else "not compared"


def score(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    told = paper_difference(claim, paper)
    if "table" in claim:
        column = paper.tables[claim["table"]].columns[paper.tables[claim["table"]].at(claim["column"])]
        where, better = [column.where], column.better
    else:
        where, better = claim["where"], claim["better"]
    pairings = [
        Pairing(results, parse(claim["system"], size, more), parse(claim["control"], size, more), where)
        for size in dict.fromkeys(system.size for system in results.systems())
        for more in ("", WITH_CONVOLUTION)
    ]
    pairings = [pairing for pairing in pairings if pairing.differences]
    allowed = claim.get("scales")
    fit = [pairing for pairing in pairings if not allowed or pairing.system.size in allowed]
    if not fit and allowed:
        ours = str(pairings[0]) if pairings else NOT_RUN
        return Verdict(claim, told, ours, UNTESTABLE, f"below {scale_label(allowed[0])}: {claim['reason']}")
    if not fit:
        return Verdict(claim, told, NOT_RUN, FEW, f"takes {label_of(claim['system'])} and {label_of(claim['control'])}")
    place = {size: at for at, size in enumerate(SIZES)}
    # where some answers are right and some wrong; then most seeds; then without what the paper's models do not have
    chosen = max(
        fit,
        key=lambda p: (
            not p.limit(better), len(p.differences), WITH_CONVOLUTION not in p.system.variant,
            -place.get(p.system.size, len(SIZES)),
        ),
    )  # fmt: skip
    if limit := chosen.limit(better):
        return Verdict(claim, told, str(chosen), UNTESTABLE, limit, chosen.sources)
    if claim.get("every"):
        return every(claim, told, chosen, better)
    verdict, detail = decide(chosen.differences, better, LEAST[better])
    return Verdict(claim, told, str(chosen), verdict, detail, chosen.sources)


def every(claim: dict, told: str, chosen: Pairing, better: str) -> Verdict:
    """Each score by itself: holds where all do, does not where one does not."""
    pairs = {score: list(found.values()) for score, found in chosen.known.items()}
    counts = Counter(decide(differences, better, LEAST[better])[0] for differences in pairs.values())
    means = [sum(differences) / len(differences) for differences in pairs.values()]
    gains = sum(mean < 0 if better == "lower" else mean > 0 for mean in means)
    runs = min(map(len, pairs.values()))
    ours = f"{signed(min(means))} to {signed(max(means))} at {chosen.where_trained}, {better} on {gains} of "
    ours += f"{len(chosen.where)}, {runs} seed{'s' if runs > 1 else ''}"
    if len(pairs) < len(chosen.where):
        verdict = FEW
    else:
        verdict = FAILS if counts[FAILS] else HOLDS if counts[HOLDS] == len(pairs) else FEW
    detail = f"one by one: {', '.join(f'{v} on {counts[v]}' for v in (HOLDS, FAILS, FEW) if counts[v])}"
    return Verdict(claim, told, ours, verdict, detail, chosen.sources)


def recalls(claim: dict, recall: Recall) -> Verdict:
    """System minus control in the mean over the test slices of a sweep, seed by seed."""
    pairs = []
    for size, steps in recall.groups:
        one, two = (recall.row(claim[who], size, steps) for who in ("system", "control"))
        if one is not None and two is not None:
            theirs = two.by_seed()
            differences = [value - theirs[seed] for seed, value in one.by_seed().items() if seed in theirs]
            if differences:
                pairs.append((differences, size, steps, one, two))
    if not pairs:
        took = f"takes {label_of(claim['system'])} and {label_of(claim['control'])}"
        return Verdict(claim, claim["paper"], NOT_RUN, FEW, took)
    differences, size, steps, one, two = max(pairs, key=lambda p: (len(p[0]), p[2], p[1] == "128"))
    verdict, detail = decide(differences, "higher", LEAST["higher"])
    middle = sum(differences) / len(differences)
    parts = [f"{signed(middle)} points at width {size}, {steps:,} steps"]
    if bounds := seed_interval(differences):
        parts.append(f"{interval(bounds)} over {len(differences)} seeds")
    else:
        parts.append(f"{len(differences)} seed{'s' if len(differences) > 1 else ''}, so no interval over seeds")
    halves = [row.half_width() for row in (one, two)]
    half = math.hypot(*halves)  # as of two sets of samples: what is kept does not pair them
    parts.append(f"{interval((middle - half, middle + half))} over samples")
    sources = [run.source for row in (one, two) for run in row.runs]
    return Verdict(claim, claim["paper"], ", ".join(parts), verdict, detail, distinct(sources))


class Pairing:
    """Two systems of one size in some scores: the difference of each seed that both have, a mean over the scores."""

    def __init__(self, results: Results, system: System, control: System, where: list[str]) -> None:
        self.results, self.system, self.control, self.where = results, system, control, where
        each = {score: results.pairs(system, control, score) for score in where}
        self.known = {score: pairs for score, pairs in each.items() if pairs}
        tables = list(self.known.values())
        self.seeds = [seed for seed in tables[0] if all(seed in table for table in tables)] if tables else []
        self.differences = [sum(table[seed] for table in tables) / len(tables) for seed in self.seeds]

    @property
    def where_trained(self) -> str:
        size = scale_label(self.system.size) or "unknown size"
        return f"{size} with a {WITH_CONVOLUTION}" if WITH_CONVOLUTION in self.system.variant else size

    def limit(self, better: str) -> str:
        """Why a share of right answers says nothing of the two: neither has any, or both have all."""
        found = [self.results.estimate(which, score) for which in (self.system, self.control) for score in self.known]
        values = [value for estimate in found if estimate is not None for value in estimate.values]
        if better != "higher" or not values:
            return ""
        if max(values) < LEAST[better]:
            return "no run of either gets any right at this size"
        return "every run of both gets all right" if min(values) > 100 - LEAST[better] else ""

    @property
    def sources(self) -> list[Source]:
        suites = dict.fromkeys(score.partition(":")[0] for score in self.known)
        return distinct(
            [s for which in (self.system, self.control) for w in suites for s in self.results.runs(which, w)]
        )

    def __str__(self) -> str:
        number = len(self.differences)
        parts = [f"{signed(sum(self.differences) / number)} at {self.where_trained}"]
        if bounds := seed_interval(self.differences):
            parts.append(f"{interval(bounds)} over {number} seeds")
        else:
            parts.append(f"{number} seed{'s' if number > 1 else ''}, so no interval over seeds")
        if len(self.known) == 1 and (samples := self.over_samples()):
            parts.append(f"{interval(samples)} over samples")
        if len(self.where) > 1:
            parts.append(f"mean of {len(self.known)} of {len(self.where)}")
        return ", ".join(parts)

    def over_samples(self) -> tuple[float, float] | None:
        """Paired bootstrap where the samples are there; of several seeds the mean of the bounds."""
        suite, _, pattern = next(iter(self.known)).partition(":")
        runs = [
            {source.seed: source for source in self.results.runs(which, suite)} for which in (self.control, self.system)
        ]
        bounds = []
        for seed in self.seeds:
            found = sample_difference(runs[0][seed], runs[1][seed], pattern)
            if found is None:
                return None
            bounds.append(found)
        return sum(low for low, _ in bounds) / len(bounds), sum(high for _, high in bounds) / len(bounds)


def sample_difference(control: Source, source: Source, pattern: str) -> tuple[float, float] | None:
    """95% interval of source - control over the test samples that both have; None where they were not kept."""
    from ccq.evaluate.compare import paired, paired_average

    group = scores_like(source.content["scores"], pattern)[0]
    score = source.content["scores"][group]
    wanted = set(score["of"]) if score.get("aggregate") == "average" else {group}
    tables = []
    for each in (control, source):
        lines = each.path.with_suffix(".jsonl")
        if not lines.exists():
            return None
        rows: dict[str, list[dict]] = {}
        try:
            for line in lines.read_text().splitlines():
                row = json.loads(line)
                if row["group"] in wanted:
                    float(row["score"]), row["id"]
                    rows.setdefault(row["group"], []).append(row)
        except (ValueError, KeyError, TypeError):
            return None
        tables.append(rows)
    if not all(name in rows for rows in tables for name in wanted):
        return None
    if score.get("aggregate") == "average":
        found = paired_average(score["of"], *tables)
    else:
        found = paired(tables[0][group], tables[1][group], score["aggregate"])
    return None if not found or not found["interval"] else (found["interval"][0], found["interval"][1])


def decide(differences: list[float], better: str, least: float) -> tuple[str, str]:
    """On the paired differences of each seed; positive is good after `sign`, and `least` the smallest gain that counts.

    That a few runs do not tell a difference from zero does not say that there is none: only an interval that ends
    below `least` does.

    >>> decide([3.0, 3.1, 2.9], "higher", 1.0)[0], decide([-3.0, -3.1, -2.9], "higher", 1.0)[0]
    ('holds', 'does not')
    >>> decide([0.2, -0.1, 0.1], "higher", 1.0)[0], decide([9.0, -9.0, 1.0], "higher", 1.0)[0]
    ('does not', 'not enough runs')
    """
    sign = -1.0 if better == "lower" else 1.0
    bounds = seed_interval([sign * x for x in differences])
    if bounds is None:
        return FEW, f"an interval over seeds takes {SEEDS} runs of each"
    if bounds[0] > 0:
        return HOLDS, "the interval over seeds leaves out zero"
    if bounds[1] < 0:
        return FAILS, "the other way round: the interval over seeds leaves out zero"
    if bounds[1] < least:
        return FAILS, f"the interval over seeds leaves out a gain of {least:g}"
    return FEW, f"the interval over seeds holds zero and a gain of {least:g}"


def distinct(sources: list[Source]) -> list[Source]:
    return sorted({source.number: source for source in sources}.values(), key=lambda source: source.number)


def cost(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    """What CCQ adds to its control, beside what it adds in the paper to the backbone without unit q and k."""
    table = paper.tables[claim["table"]]
    better = table.columns[table.at(claim["column"])].better
    limits, told, parts, kept, sources = {}, [], [], [], []
    for backbone, cleaned in BACKBONES.items():
        one, two = (table.value("1.3b", system, claim["column"]) for system in (cleaned, backbone))
        assert one is not None
        assert two is not None
        limits[backbone] = one / two
        told.append(f"{change(one / two)} on {label_of(backbone)}")
    gpus = "one GPU" if table.gpus == 1 else f"{table.gpus} GPUs"
    told_text = f"{', '.join(told)} ({table.label}; {gpus})"
    for backbone in BACKBONES:
        measured = measured_cost(found, claim["measure"], backbone)
        if measured is None:
            continue
        ratio, over, source = measured
        sources.append(source)
        kept.append(ratio >= limits[backbone] if better == "higher" else ratio <= limits[backbone])
        parts.append(f"{change(ratio)} on {over}")
    if not parts:
        return Verdict(claim, told_text, NOT_RUN, FEW, "no such benchmark among the results")
    hardware = ", ".join(dict.fromkeys(source.hardware for source in sources))
    detail = "no more than the paper's" if all(kept) else "more than the paper's"
    ours = f"{', '.join(parts)} ({hardware}, one GPU)"
    return Verdict(claim, told_text, ours, HOLDS if all(kept) else FAILS, detail, distinct(sources))


def change(ratio: float) -> str:
    """
    >>> change(0.837), change(1.1)
    ('−16.3%', '+10.0%')
    """
    return f"{100 * (ratio - 1):+.1f}%".replace("-", "−")


CONTROLS = {"gla": "gla-unit", "gated-deltanet": "gated-deltanet"}  # that a cost is taken over


def measured_cost(found: Collection, measure: str, backbone: str) -> tuple[float, str, Source] | None:
    """(with CCQ over control, what the control is, where it is from), of the newest benchmark that has both."""
    cleaned, control = BACKBONES[backbone], CONTROLS[backbone]
    kind, value = {
        "layer": ("layer", lambda row: row["graph_ms"]["median"]),
        "training": ("train", lambda row: row["tokens_per_second"]),
        "memory": ("train", lambda row: row["peak_gib"]),
        "prefill": ("prefill", lambda row: row["wall_ms"]["median"]),
        "decode": ("decode", lambda row: row["generate_tok_s"]),
    }[measure]
    for source in sorted(found.of("bench", kind), key=lambda s: s.date, reverse=True):
        rows = source.content["rows"]
        if measure == "layer":
            short = {"gla": "gla", "gated-deltanet": "gdn"}[backbone]
            alone = "unit" if backbone == "gla" else "fla"
            rows = {
                {"ours": cleaned, alone: control}.get(row["variant"], ""): row
                for row in rows
                if (row["backbone"], row["pass"], row["T"]) == (short, "forward and backward", 4096)
            }
        else:
            rows = {
                row["system"].replace("_", "-"): row
                for row in rows
                if row["size"] == "1.3b" and row.get("T", 4096) == 4096 and row.get("length", 4096) == 4096
            }
        if cleaned in rows and control in rows:
            return value(rows[cleaned]) / value(rows[control]), label_of(control), source
    return None


def alignment(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    sources = [s for s in found.of("analysis", "alignment") if not s.content.get("settings", {}).get("untrained")]
    if not sources:
        return Verdict(claim, claim["paper"], NOT_RUN, FEW, "`ccq analyze alignment` was not run")
    parts, kept = [], []
    every = claim["group"] == "unique"  # at every layer; else on the mean, against chance
    for source in sources:
        gap = source.content["points"]["projection"]["top"]["16"][claim["group"]]
        layers, error = len(gap["by_layer"]), gap["error_of_mean"]
        bound = None if error is None else 1.96 * error
        kept.append(gap["negative_layers"] == layers if every else bound is not None and gap["mean"] + bound < 0)
        spread = "" if bound is None else f" ± {bound:.3f} over prompts"
        parts.append(f"{source.title}: {gap['negative_layers']} of {layers}, mean {signed(gap['mean'], 3)}{spread}")
    if every:
        detail = "at every layer of every model" if all(kept) else "not at every layer"
    else:
        detail = "the interval of each mean is below zero" if all(kept) else "not told from zero in every model"
    return Verdict(claim, claim["paper"], "; ".join(parts), HOLDS if all(kept) else FAILS, detail, sources)


def gate(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    sources = [s for s in found.of("analysis", "gate") if "lam" in s.content]
    if not sources:
        return Verdict(claim, claim["paper"], NOT_RUN, FEW, "`ccq analyze gate` was not run")
    groups: dict[str, list[Source]] = {}
    for source in sources:
        groups.setdefault(f"{source.system.label}, {source.system.size}" if source.system else "", []).append(source)
    parts, verdicts = [], []
    for label, mine in groups.items():
        text, retrieval = ([mean_of(s.content["lam"][place]) for s in mine] for place in ("text", "retrieval"))
        verdicts.append(decide([r - t for r, t in zip(retrieval, text, strict=True)], "higher", 0.01))
        count = f" ({len(mine)} runs)" if len(mine) > 1 else ""
        name = label if len(mine) > 1 else mine[0].title
        parts.append(f"{name}: {sum(retrieval) / len(mine):.3f} against {sum(text) / len(mine):.3f}{count}")
    worst = min(verdicts, key=lambda v: (FAILS, FEW, HOLDS).index(v[0]))
    return Verdict(claim, claim["paper"], "; ".join(parts), worst[0], worst[1], sources)


def mean_of(rows: list[list[float]]) -> float:
    values = [x for row in rows for x in row]
    return sum(values) / len(values)


def intervention(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    """The largest change of pass-key retrieval when the cleaning is switched off."""
    parts, kept, sources = [], [], []
    for source in found.of("analysis", "intervene"):
        rows = {row["intervention"]: row["suites"].get("niah", {}) for row in source.content["rows"]}
        moved = [
            abs(rows["off"][name] - value)
            for name, value in rows.get("none", {}).items()
            if name.startswith("niah_single_1/") and name in rows.get("off", {}) and max(value, rows["off"][name]) > 0
        ]  # where nothing is found either way, nothing can be missed
        if moved:
            sources.append(source)
            kept.append(max(moved) <= claim["at_most"])
            lengths = f"{len(moved)} length{'s' if len(moved) > 1 else ''} at which it finds any"
            parts.append(f"{source.title}: at most {max(moved):.1f} over {lengths}")
    if not parts:
        return Verdict(claim, claim["paper"], NOT_RUN, FEW, "`ccq analyze intervene --off` was not run on niah")
    verdict = HOLDS if all(kept) else FAILS
    return Verdict(claim, claim["paper"], "; ".join(parts), verdict, "", sources)
