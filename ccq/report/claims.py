"""The claims of claims.toml judged on the results at hand."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ccq.bench.tables import CLEANED, MEASURES
from ccq.evaluate.compare import difference, samples_of
from ccq.evaluate.requests import EvaluationError
from ccq.evaluate.statistics import chance, error_of_mean, holm
from ccq.files import read_toml
from ccq.names import grouped, plural
from ccq.report.collect import Collection, Source
from ccq.report.paper import HERE, Paper
from ccq.report.results import (
    SEEDS,
    Interval,
    Results,
    asked_otherwise,
    distinct,
    interval_of,
    mean,
    mean_bounds,
    once,
    seed_interval,
    settings_like,
)
from ccq.report.table import change, needle, scale_label, signed, trained_as
from ccq.systems import SIZES, SYSTEMS, Identity

HOLDS, FAILS, FEW, UNTESTABLE, NOT_RUN = "supported", "not supported", "undecided", "not testable here", "not run"
MOST = 100  # seeds that an undecided claim may be said to need
LEAST = {"higher": 1.0, "lower": 0.1}  # gain that counts: a point of accuracy; of perplexity, the only score to fall
LEAST_GAP, LEAST_GATE = 0.01, 0.01  # a tenth of the paper's gap of alignment, and of what its gate opens further
SWITCHED_FROM = 4096  # tokens from which the paper switches its cleaning off
SUBJECT = attrgetter("subject")  # of an analysis: system and size, whatever the seed


@dataclass
class Verdict:
    verdict: str
    detail: str = ""  # why
    ours: str = NOT_RUN
    sources: list[Source] = field(default_factory=list)
    short: str = ""  # `ours` in fewer words, where it goes on for long
    chance: float | None = None  # p of a claim about scores that has an interval over seeds
    claim: dict = field(default_factory=dict)
    says: str = ""  # in full
    paper: str = ""
    tests: int = 0  # claims about scores that were tested with it
    survives: bool = False  # Holm's correction for that many
    needs: int = 0  # seeds of each that would decide it; 0: not known, or more than MOST

    @property
    def named(self) -> str:
        return f"{self.verdict} (needs {self.needs} seeds)" if self.verdict == FEW and self.needs else self.verdict

    @property
    def why(self) -> str:
        """The detail, and what testing many claims does to one that its interval decides."""
        if self.chance is None or self.chance > 0.05:
            return self.detail
        holds = "survives" if self.survives else "does not survive"
        return f"{self.detail}; p = {self.chance:.2g}, {holds} Holm's correction for {plural(self.tests, 'test')}"


@functools.cache
def read() -> dict[str, list]:
    return read_toml(HERE / "claims.toml")


def load() -> list[dict]:
    """One by one: those about scores stand in lists, with what they share."""
    found = []
    for entry in read()["claims"]:
        shared = {name: value for name, value in entry.items() if name != "scores"}
        for says, system, control, *headline in entry.get("scores", ()):
            one = {"kind": "score", "says": says, "system": system, "control": control, "headline": bool(headline)}
            found.append(shared | one)
        found += [] if "scores" in entry else [entry]
    return found


def rules() -> list[str]:
    """By what a claim is judged, in words."""
    told = {"least": LEAST, "most": MOST, "gap": LEAST_GAP, "gate": LEAST_GATE, "from": SWITCHED_FROM}
    return [note.format(**told) for note in read()["notes"]]


def judge(found: Collection, results: Results, paper: Paper) -> list[Verdict]:
    judges = {"score": score, "cost": cost, "alignment": alignment, "gate": gate, "intervention": intervention}
    verdicts: list[Verdict] = []
    before = ""
    for claim in load():
        verdict = judges[claim["kind"]](claim, found, results, paper)
        before = before if claim["says"].startswith("...") else claim["says"]  # which a claim may go on from
        verdict.claim, verdict.paper = claim, papers(claim, paper)
        verdict.says = claim["says"] if before == claim["says"] else f"{before} {claim['says']}"
        verdicts.append(verdict)
    tested = [v for v in verdicts if v.chance is not None]
    for verdict, survives in zip(tested, holm([v.chance or 0.0 for v in tested]), strict=True):
        verdict.tests, verdict.survives = len(tested), survives
    return verdicts


def papers(claim: dict, paper: Paper) -> str:
    """What the paper has: a difference of scores at each scale, what CCQ adds to a cost, else what the claim says."""
    if claim["kind"] == "cost":
        measure = MEASURES[claim["measure"]]
        added = [f"{change(measure.papers(s))} on {SYSTEMS[SYSTEMS[s].family].label}" for s in CLEANED]
        return f"{', '.join(added)} ({paper.tables[measure.table].where_run})"
    if "table" not in claim:
        return claim["paper"].format(**paper.facts)
    table, parts = paper.tables[claim["table"]], []
    for scale in table.scales:
        one, two = (table.value(scale, claim[who], claim["column"]) for who in ("system", "control"))
        if one is not None and two is not None:
            parts.append(f"{signed(one - two)} at {scale_label(scale)}")
    return f"{', '.join(parts)} ({table.label})" if parts else "not compared"


def interval(bounds: Interval | None, digits: int = 2) -> str:
    return "" if bounds is None else f"[{signed(bounds[0], digits)}, {signed(bounds[1], digits)}]"


def score(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    if "table" in claim:
        column = paper.tables[claim["table"]].column(claim["column"])
        where, better = [column.where], column.better
    else:
        where, better = claim["where"], claim["better"]
    rows = [row for row in results.rows(*(place.partition(":")[0] for place in where)) if row.system == claim["system"]]
    pairs = [Pairing(results, row, Identity(claim["control"], row.variant, row.size), where) for row in rows]
    pairings = [pairing for pairing in pairs if pairing.differences]
    if not pairings:
        return Verdict(NOT_RUN, f"takes {SYSTEMS[claim['system']].label} and {SYSTEMS[claim['control']].label}")
    fit = [pairing for pairing in pairings if pairing.row.size in claim.get("scales", [pairing.row.size])]
    if not fit:
        why = f"below {scale_label(claim['scales'][0])}: {claim['reason']}"
        return Verdict(UNTESTABLE, why, str(pairings[0]), pairings[0].sources)
    # where some answers are right and some wrong; then most seeds; then what the paper's models are; then the largest
    place = {size: -at for at, size in enumerate(SIZES)}
    chosen = max(fit, key=lambda p: (not p.limit(better), len(p.differences), not p.row.variant,
                                     place.get(p.row.size, -len(SIZES)), p.tokens))  # fmt: skip
    if limit := chosen.limit(better):
        return Verdict(UNTESTABLE, limit + chosen.quick, str(chosen), chosen.sources)
    if claim.get("every"):
        return every(chosen, better)
    return tested(chosen, [chosen.differences], better, *decide(chosen.differences, better, LEAST[better]), str(chosen))


def every(chosen: Pairing, better: str) -> Verdict:
    """Each score by itself: supported where all are, not supported where one is not."""
    pairs = [list(found.values()) for found in chosen.known.values()]
    counts = Counter(decide(differences, better, LEAST[better])[0] for differences in pairs)
    means = [mean(differences) for differences in pairs]
    gains = sum(x < 0 if better == "lower" else x > 0 for x in means)
    ours = f"{signed(min(means))} to {signed(max(means))} at {chosen.where_trained}, {better} on {gains} of "
    ours += f"{len(chosen.where)}, {plural(min(map(len, pairs)), 'seed')}"
    ours += f", {within([seed_interval(differences) for differences in pairs])}"
    if len(pairs) < len(chosen.where):
        verdict = FEW
    else:
        verdict = FAILS if counts[FAILS] else HOLDS if counts[HOLDS] == len(pairs) else FEW
    detail = f"one by one: {', '.join(f'{v} on {counts[v]}' for v in (HOLDS, FAILS, FEW) if counts[v])}"
    return tested(chosen, pairs, better, verdict, detail, ours)


def tested(
    chosen: Pairing, pairs: Sequence[Sequence[float]], better: str, verdict: str, detail: str, ours: str
) -> Verdict:
    """With p, and the seeds that it needs: all pairs must be told from zero, so the weakest counts."""
    p = max(map(chance, pairs)) if min(map(len, pairs)) >= SEEDS else None
    needs = [needed(differences, better, LEAST[better]) for differences in pairs]
    told = detail + chosen.quick
    return Verdict(verdict, told, ours, chosen.sources, chance=p, needs=max(needs) if all(needs) else 0)


def within(bounds: list[Interval | None]) -> str:
    """Of several numbers with an interval over seeds each, where all of these lie."""
    known = [b for b in bounds if b is not None]
    if len(known) < len(bounds) or not known:
        return "no intervals over seeds"
    return f"intervals over seeds within {interval((min(low for low, _ in known), max(high for _, high in known)))}"


class Pairing:
    """Two rows of one size in some scores: the difference of each seed that both have, a mean over the scores."""

    def __init__(self, results: Results, row: Identity, control: Identity, where: list[str]) -> None:
        self.row, self.where, self.where_trained = row, where, trained_as(row)
        both = {place: (results.estimate(row, place), results.estimate(control, place)) for place in where}
        self.estimates = {place: (one, two) for place, (one, two) in both.items()
                          if one and two and one.by_seed.keys() & two.by_seed.keys()}  # fmt: skip
        self.known = {place: {seed: x - two.by_seed[seed] for seed, x in one.by_seed.items() if seed in two.by_seed}
                      for place, (one, two) in self.estimates.items()}  # fmt: skip
        tables = list(self.known.values())
        self.seeds = [seed for seed in tables[0] if all(seed in table for table in tables)] if tables else []
        self.differences = [mean(table[seed] for table in tables) for seed in self.seeds]

    @property
    def tokens(self) -> int:
        return max(one.tokens or 0 for one, _ in self.estimates.values())

    def limit(self, better: str) -> str:
        """Why the scores say nothing of the two."""
        for one, two in self.estimates.values():
            if differ := asked_otherwise(one.sources, two.sources):
                return differ
            if one.tokens is not None and two.tokens is not None and one.tokens != two.tokens:
                return f"trained for {one.tokens:,} against {two.tokens:,} tokens"
        values = [value for both in self.estimates.values() for estimate in both for value in estimate.values]
        if better == "higher" and max(values) < LEAST["higher"]:  # shares of right answers, in percent
            return "no run of either side gets any sample right"
        if better == "higher" and min(values) > 100 - LEAST["higher"]:
            return "every run of both sides gets all samples right"
        return ""

    @property
    def sources(self) -> list[Source]:
        return distinct(s for both in self.estimates.values() for estimate in both for s in estimate.sources)

    @property
    def quick(self) -> str:
        """Small print where not all samples of a suite were asked."""
        limits = {s.content.get("limit") for s in self.sources if s.content.get("quick_look")}
        return f"; first {', '.join(map(str, sorted(limits, key=str)))} samples" if limits else ""

    def __str__(self) -> str:
        number = len(self.differences)
        parts = [f"{signed(mean(self.differences))} at {self.where_trained}"]
        if bounds := seed_interval(self.differences):
            parts.append(f"{interval(bounds)} over {number} seeds")
        else:
            parts.append(f"{plural(number, 'seed')}, so no interval over seeds")
        if len(self.known) == 1 and (samples := self.over_samples()):
            parts.append(f"{interval(samples)} over samples")
        if len(self.where) > 1:
            parts.append(f"mean of {len(self.known)} of {len(self.where)}")
        return ", ".join(parts)

    def over_samples(self) -> Interval | None:
        """Paired, where the samples are there; of several seeds, and of several runs of one, the mean of the bounds."""
        [(where, (one, two))] = self.estimates.items()
        if where.startswith("recall:"):  # a sweep keeps how many samples had n right, not which: as of two sets
            bounds = [estimate.over_samples or (0.0, 0.0) for estimate in (one, two)]
            middle, half = mean(self.differences), math.hypot(*((high - low) / 2 for low, high in bounds))
            return middle - half, middle + half
        seeds = []
        for seed in self.seeds:
            tried = [sample_difference(control.source, record.source, where.partition(":")[2])
                     for control in two.of_seeds[seed] for record in one.of_seeds[seed]]  # fmt: skip
            found = [bounds for bounds in tried if bounds is not None]
            if not found:
                return None
            seeds.append(mean_bounds(found))
        return mean_bounds(seeds) if seeds else None


def sample_difference(control: Source, source: Source, pattern: str) -> Interval | None:
    """95% interval of source - control over the test samples that both have; None where they were not kept."""
    try:
        group = settings_like(source.content["scores"], pattern)[0]
        tables = [samples_of(each.path, each.content) for each in (control, source)]
        found = difference(group, source.content["scores"][group], *tables)
    except (EvaluationError, LookupError, ValueError, TypeError):
        return None
    return None if not found or not found["interval"] else (found["interval"][0], found["interval"][1])


def decide(differences: Sequence[float], better: str, least: float) -> tuple[str, str]:
    """On the paired differences of each seed; `least` is the smallest gain that counts.

    That a few runs do not tell a difference from zero does not say that there is none: only an interval that ends
    below `least` does.

    >>> decide([3.0, 3.1, 2.9], "higher", 1.0)[0], decide([-3.0, -3.1, -2.9], "higher", 1.0)[0]
    ('supported', 'not supported')
    >>> decide([0.2, -0.1, 0.1], "higher", 1.0)[0], decide([9.0, -9.0, 1.0], "higher", 1.0)[0]
    ('not supported', 'undecided')
    """
    bounds = seed_interval([-x if better == "lower" else x for x in differences])
    if bounds is None:
        return FEW, f"an interval over seeds needs {SEEDS} runs per side"
    return judged(bounds, least, "over seeds")


def needed(differences: Sequence[float], better: str, least: float) -> int:
    """Seeds that would decide if more of them came out as these did, with their mean and spread; 0 above MOST.

    >>> needed([3.0, -1.0, 3.0], "higher", 1.0), needed([3.0], "higher", 1.0), needed([3.0, 3.1, 2.9], "higher", 1.0)
    (10, 3, 3)
    """
    have = len(differences)
    if have < SEEDS:
        return SEEDS
    middle = mean(differences) if better == "higher" else -mean(differences)
    spread = error_of_mean(differences) * math.sqrt(have)
    for seeds in range(have, MOST + 1):
        bounds = interval_of(middle, spread / math.sqrt(seeds), seeds)
        if bounds is not None and judged(bounds, least, "")[0] != FEW:
            return seeds
    return 0


def judged(bounds: Interval, least: float, over: str) -> tuple[str, str]:
    """On a 95% interval of the gain."""
    if bounds[0] > 0:
        return HOLDS, f"the interval {over} excludes zero"
    if bounds[1] < 0:
        return FAILS, f"in the opposite direction: the interval {over} excludes zero"
    if bounds[1] < least:
        return FAILS, f"the interval {over} excludes a gain of {least:g}"
    return FEW, f"the interval {over} contains zero and a gain of {least:g}"


def cost(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    """What CCQ adds to its control, beside what it adds in the paper to the backbone without unit q and k."""
    measure = MEASURES[claim["measure"]]
    parts, kept, sources = [], [], []
    for system in CLEANED:
        if measured := measure.measured(found, system):
            ratio, limit = measure.value(measured[0]) / measure.value(measured[1]), measure.papers(system)
            sources.append(measured[2])
            kept.append(ratio >= limit if measure.rate else ratio <= limit)
            parts.append(f"{change(ratio)} on {SYSTEMS[SYSTEMS[system].control or ''].label}")
    if not parts:
        return Verdict(NOT_RUN, "this benchmark is not among the results")
    if len(parts) < len(CLEANED) and all(kept):  # one that costs more is enough to say so
        return Verdict(FEW, "takes both backbones", ", ".join(parts), distinct(sources))
    hardware = ", ".join(dict.fromkeys(source.hardware for source in sources))
    detail = "no more than the paper's" if all(kept) else "more than the paper's"
    ours = f"{', '.join(parts)} ({hardware}, one GPU)"
    return Verdict(HOLDS if all(kept) else FAILS, detail, ours, distinct(sources))


def together(verdicts: list[tuple[str, str]], what: str = "model") -> tuple[str, str]:
    """Of each model by itself: supported where it is for all, not supported where it is not for one. What cannot be
    tested counts where nothing else can."""
    told = [v for v in verdicts if v[0] != UNTESTABLE] or verdicts
    if len(told) == 1:
        return told[0]
    counts = Counter(verdict for verdict, _ in verdicts)
    worst = min((verdict for verdict, _ in told), key=(FAILS, UNTESTABLE, FEW, HOLDS).index)
    shown = ", ".join(f"{v} in {counts[v]}" for v in (HOLDS, FAILS, FEW, UNTESTABLE) if counts[v])
    return worst, f"{what} by {what}: {shown}"


def of_enough_seeds(verdicts: list[tuple[int, tuple[str, str]]]) -> tuple[str, str]:
    """`together`, given how many seeds each model has: one that has too few for any verdict counts where all have."""
    told = [verdict for seeds, verdict in verdicts if seeds >= SEEDS] or [verdict for _, verdict in verdicts]
    verdict, detail = together(told)
    left = len(verdicts) - len(told)
    return verdict, f"{detail}; {left} with fewer than {SEEDS} seeds not counted" if left else detail


def alignment(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    sources = once(s for s in found.of("analysis", "alignment") if not s.content.get("settings", {}).get("untrained"))
    if not sources:
        return Verdict(NOT_RUN, "`ccq analyze alignment` was not run")
    parts, verdicts, gaps = [], [], []
    for source in sources:
        part = source.content["points"]["projection"]["top"]["16"]
        gap, prompts = part[claim["group"]], len(source.content.get("prompts") or ())
        verdicts.append(gap_verdict(part, gap, prompts, by_layer=claim["group"] == "unique"))
        if verdicts[-1][0] != UNTESTABLE:
            gaps.append(gap)
        bounds = interval_of(gap["mean"], gap["error_of_mean"], prompts)
        spread = "" if bounds is None else f" ± {(bounds[1] - bounds[0]) / 2:.3f} over prompts"
        middle = "not known" if gap["mean"] is None else f"{signed(gap['mean'], 3)}{spread}"
        parts.append(f"{source.title}: {gap['negative_layers']} of {len(gap['by_layer'])}, mean {middle}")
    verdict, detail = together(verdicts)
    means = [gap["mean"] for gap in gaps if gap["mean"] is not None]
    short = ""
    if len(gaps) > 1 and means:
        negative, layers = sum(gap["negative_layers"] for gap in gaps), sum(len(gap["by_layer"]) for gap in gaps)
        short = f"negative at {negative} of {layers} layers of {len(gaps)} models, whose means are "
        short += f"{signed(min(means), 3)} to {signed(max(means), 3)}"
    return Verdict(verdict, detail, "; ".join(parts), sources, short)


def gap_verdict(part: dict, gap: dict, prompts: int, by_layer: bool) -> tuple[str, str]:
    """On the interval over prompts of the mean over layers, or of each layer; a gap is good below zero."""
    shares = part["of_isotropic_keys"]
    if min(shares if isinstance(shares, list) else [shares]) >= 1:
        return UNTESTABLE, "its heads have no other directions than the top ones"
    means, errors = [gap["mean"]], [gap["error_of_mean"]]
    if by_layer:
        root = math.sqrt(max(prompts, 1))
        means, errors = gap["by_layer"], [None if d is None else d / root for d in gap["deviation_by_layer"]]
    verdicts = []
    for middle, error in zip(means, errors, strict=True):
        bounds = interval_of(middle, error, prompts)
        if bounds is None:
            return FEW, f"an interval over prompts needs {SEEDS} prompts with such tokens"
        verdicts.append(judged((-bounds[1], -bounds[0]), LEAST_GAP, "over prompts"))
    return together(verdicts, "layer")


def text_of_gate(source: Source) -> str:
    """What `ccq analyze gate` read as ordinary text."""
    text = (source.content.get("settings") or {}).get("text")
    return {"filler": "our filler", None: "text"}.get(text, f"the text {text}")


def gate(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    sources = [s for s in found.of("analysis", "gate") if "lam" in s.content]
    if not sources:
        return Verdict(NOT_RUN, "`ccq analyze gate` was not run")
    parts, verdicts, needs = [], [], []
    for label, mine in grouped(sources, SUBJECT).items():
        runs = grouped(mine, attrgetter("seed"))  # a model that was analysed twice, or trained again, is one run
        if len(runs) > 1:
            runs.pop(None, None)  # it may be any of them
        means = {
            seed: [mean(mean(x for row in s.content["lam"][place] for x in row) for s in same)
                   for place in ("retrieval", "text")]
            for seed, same in runs.items()
        }  # fmt: skip
        further = [retrieval - text for seed, (retrieval, text) in means.items() if seed is not None]
        verdicts.append((len(further), decide(further, "higher", LEAST_GATE)))
        needs.append(needed(further, "higher", LEAST_GATE))
        retrieval, text = (mean(column) for column in zip(*means.values(), strict=True))
        name, count = (label, f" ({len(further)} seeds)") if len(further) > 1 else (mine[0].title, "")
        if bounds := seed_interval(further):
            count = f", {interval(bounds, 3)} further over {len(further)} seeds"
        texts = " and ".join(dict.fromkeys(text_of_gate(source) for source in mine))
        parts.append(f"{name}: {retrieval:.3f} against {text:.3f} on {texts}{count}")
    return Verdict(*of_enough_seeds(verdicts), "; ".join(parts), sources, needs=max(needs) if all(needs) else 0)


def intervention(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    """How much retrieval of the claim's needles changes, by length, when the cleaning is switched off."""
    changes: dict[Source, dict[str, float]] = {}
    finds: dict[Source, list[str]] = {}
    for source in found.of("analysis", "intervene"):
        rows = {row["intervention"]: row["suites"].get("niah", {}) for row in source.content["rows"]}
        none, off = ({name: x for name, x in rows.get(which, {}).items() if name.split("/")[0] in claim["tasks"]
                      and x is not None} for which in ("none", "off"))  # fmt: skip
        if shared := sorted(none.keys() & off.keys(), key=needle):
            changes[source] = {name: off[name] - none[name] for name in shared}
            finds[source] = [name for name in shared if max(off[name], none[name]) > 0]
    if not changes:
        return Verdict(NOT_RUN, f"`ccq analyze intervene --off` was not run on {' and '.join(claim['tasks'])}")
    at_most = float(paper.facts[claim["at_most"]].value)
    parts, verdicts = [], []
    for mine in grouped(changes, SUBJECT).values():
        found_by_any = {name for source in mine for name in finds[source]}  # else nothing can be missed
        runs = [(s.seed, {name: x for name, x in changes[s].items() if name in found_by_any}) for s in mine]
        bounds = switched(runs)
        verdicts.append((len({s.seed for s in mine} - {None}), missed(bounds, at_most)))
        for source in mine:
            moved = {name: changes[source][name] for name in finds[source]}
            if not moved:
                parts.append(f"{source.title}: retrieves none either way")
                continue
            most = max(moved, key=lambda name: abs(moved[name]))
            samples = over_samples_of(source, most)
            lengths = {needle(name)[1] for name in moved}
            told = f"{source.title}: at most {abs(moved[most]):.1f} over {plural(len(lengths), 'length')}"
            told += f" at which it retrieves any, up to {max(lengths):,} tokens"
            parts.append(told + (f", {interval(samples)} over samples" if samples else ""))
        if bounds and all(bounds):
            parts.append(f"{mine[0].subject}, from {SWITCHED_FROM:,} tokens on: {within(bounds)}")
    needs = SEEDS if all(count < SEEDS for count, _ in verdicts) else 0
    return Verdict(*of_enough_seeds(verdicts), "; ".join(parts), distinct(changes), needs=needs)


def switched(runs: list[tuple[int | None, dict[str, float]]]) -> list[Interval | None]:
    """Of runs of one model (seed, {score: change}): the interval over seeds of each score at the lengths that the
    paper's claim is about; None where there are too few."""
    seeds: dict[str, dict[int, list[float]]] = {}  # [score][seed]
    for seed, changes in runs:
        for name, moved in changes.items():
            if needle(name)[1] >= SWITCHED_FROM:
                of_score = seeds.setdefault(name, {})
                if seed is not None:
                    of_score.setdefault(seed, []).append(moved)
    return [seed_interval([mean(x) for x in known.values()]) for known in seeds.values()]


def missed(bounds: list[Interval | None], at_most: float) -> tuple[str, str]:
    """Whether the intervals of `switched` stay within `at_most`."""
    if not bounds:
        return UNTESTABLE, f"it retrieves nothing at {SWITCHED_FROM:,} tokens or more, with or without"
    known = [b for b in bounds if b is not None]
    if any(low > at_most or high < -at_most for low, high in known):
        return FAILS, f"at some length the interval over seeds lies beyond {at_most:g}"
    if len(known) < len(bounds):
        return FEW, f"an interval over seeds needs {SEEDS} runs"
    if all(-at_most <= low and high <= at_most for low, high in known):
        return HOLDS, f"the interval over seeds is within {at_most:g} at every length"
    return FEW, f"the interval over seeds contains more than {at_most:g}"


def over_samples_of(source: Source, score: str) -> Interval | None:
    """95% interval of what switching off changes, from the samples that `ccq analyze intervene` leaves beside it."""
    both = []
    for which in ("none", "off"):
        path = source.path.parent / which / "niah.json"
        try:
            content = json.loads(path.read_text("utf-8"))
            content["scores"][score]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        both.append(Source("eval", "niah", path, content))
    return sample_difference(both[0], both[1], score)
