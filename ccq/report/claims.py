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

from ccq.evaluate.statistics import student
from ccq.files import stored
from ccq.report.collect import Collection, Source, text_of_gate
from ccq.report.numbers import SEEDS, Results, mean_bounds, once, scores_like, seed_differences, seed_interval
from ccq.report.paper import HERE, Paper
from ccq.report.systems import SIZES, WITH_CONVOLUTION, System, label_of, scale_label

if TYPE_CHECKING:
    from ccq.report.recall import Recall

HOLDS, FAILS, FEW, UNTESTABLE = "holds", "does not", "not enough runs", "not testable"
NOT_RUN = "not run"
LEAST = {"higher": 1.0, "lower": 0.1}  # gain that counts: a point of accuracy; of perplexity, the only score to fall
LEAST_GAP, LEAST_GATE = 0.01, 0.01  # a tenth of the paper's gap of alignment, and of what its gate opens further
SWITCHED_FROM = 4096  # tokens from which the paper switches its cleaning off
BATCH = 8  # of the paper's inference
BACKBONES = {"gla": "ccq-gla", "gated-deltanet": "ccq-gated-deltanet"}


@dataclass
class Verdict:
    claim: dict
    paper: str
    ours: str
    verdict: str
    detail: str = ""  # why
    sources: list[Source] = field(default_factory=list)
    short: str = ""  # `ours` in fewer words, where it goes on for long


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
        return Verdict(claim, told, str(chosen), UNTESTABLE, limit + chosen.quick, chosen.sources)
    if claim.get("every"):
        return every(claim, told, chosen, better)
    verdict, detail = decide(chosen.differences, better, LEAST[better])
    return Verdict(claim, told, str(chosen), verdict, detail + chosen.quick, chosen.sources)


def every(claim: dict, told: str, chosen: Pairing, better: str) -> Verdict:
    """Each score by itself: holds where all do, does not where one does not."""
    pairs = {score: list(found.values()) for score, found in chosen.known.items()}
    counts = Counter(decide(differences, better, LEAST[better])[0] for differences in pairs.values())
    means = [sum(differences) / len(differences) for differences in pairs.values()]
    gains = sum(mean < 0 if better == "lower" else mean > 0 for mean in means)
    runs = min(map(len, pairs.values()))
    ours = f"{signed(min(means))} to {signed(max(means))} at {chosen.where_trained}, {better} on {gains} of "
    ours += f"{len(chosen.where)}, {runs} seed{'s' if runs > 1 else ''}"
    ours += f", {within([seed_interval(differences) for differences in pairs.values()])}"
    if len(pairs) < len(chosen.where):
        verdict = FEW
    else:
        verdict = FAILS if counts[FAILS] else HOLDS if counts[HOLDS] == len(pairs) else FEW
    detail = f"one by one: {', '.join(f'{v} on {counts[v]}' for v in (HOLDS, FAILS, FEW) if counts[v])}"
    return Verdict(claim, told, ours, verdict, detail + chosen.quick, chosen.sources)


def within(bounds: list[tuple[float, float] | None]) -> str:
    """Of several numbers with an interval over seeds each, where all of these lie."""
    known = [b for b in bounds if b is not None]
    if len(known) < len(bounds) or not known:
        return "no intervals over seeds"
    return f"intervals over seeds within {interval((min(low for low, _ in known), max(high for _, high in known)))}"


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
    limits = {id(p): nothing_or_all([x for row in p[3:] if (e := row.estimate()) for x in e.values]) for p in pairs}
    chosen = max(pairs, key=lambda p: (not limits[id(p)], len(p[0]), p[2], p[1] == "128"))
    differences, size, steps, one, two = chosen
    verdict, detail = decide(differences, "higher", LEAST["higher"])
    if limits[id(chosen)]:
        verdict, detail = UNTESTABLE, limits[id(chosen)]
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


def nothing_or_all(values: list[float]) -> str:
    """Why shares of right answers, in percent, say nothing of two systems: neither has any, or both have all."""
    if values and max(values) < LEAST["higher"]:
        return "no run of either gets any right at this size"
    return "every run of both gets all right" if values and min(values) > 100 - LEAST["higher"] else ""


class Pairing:
    """Two systems of one size in some scores: the difference of each seed that both have, a mean over the scores."""

    def __init__(self, results: Results, system: System, control: System, where: list[str]) -> None:
        self.system, self.control, self.where = system, control, where
        self.estimates = {score: both for score in where if (both := results.both(system, control, score))}
        self.known = {score: seed_differences(*both) for score, both in self.estimates.items()}
        tables = list(self.known.values())
        self.seeds = [seed for seed in tables[0] if all(seed in table for table in tables)] if tables else []
        self.differences = [sum(table[seed] for table in tables) / len(tables) for seed in self.seeds]

    @property
    def where_trained(self) -> str:
        size = scale_label(self.system.size) or "unknown size"
        return f"{size} with a {WITH_CONVOLUTION}" if WITH_CONVOLUTION in self.system.variant else size

    def limit(self, better: str) -> str:
        """Why the scores say nothing of the two."""
        for one, two in self.estimates.values():
            if one.tokens is not None and two.tokens is not None and one.tokens != two.tokens:
                return f"trained for {one.tokens:,} against {two.tokens:,} tokens"
        values = [value for both in self.estimates.values() for estimate in both for value in estimate.values]
        return nothing_or_all(values) if better == "higher" else ""

    @property
    def sources(self) -> list[Source]:
        return distinct([s for both in self.estimates.values() for estimate in both for s in estimate.sources])

    @property
    def quick(self) -> str:
        """Small print where not all samples of a suite were asked."""
        limits = {s.content.get("limit") for s in self.sources if s.content.get("quick_look")}
        return f"; first {', '.join(map(str, sorted(limits, key=str)))} samples" if limits else ""

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
        """Paired, where the samples are there; of several seeds, and of several runs of one, the mean of the bounds."""
        [(where, both)] = self.estimates.items()
        pattern = where.partition(":")[2]
        bounds = []
        for seed in self.seeds:
            mine, theirs = ([s for s in estimate.sources if s.seed == seed] for estimate in both)
            tried = [sample_difference(control, source, pattern) for control in theirs for source in mine]
            found = [interval for interval in tried if interval is not None]
            if not found:
                return None
            bounds.append(mean_bounds(found))
        return mean_bounds(bounds)


def sample_difference(control: Source, source: Source, pattern: str) -> tuple[float, float] | None:
    """95% interval of source - control over the test samples that both have; None where they were not kept."""
    from ccq.evaluate import sources
    from ccq.evaluate.compare import paired, paired_average
    from ccq.evaluate.errors import EvaluationError

    group = scores_like(source.content["scores"], pattern)[0]
    score = source.content["scores"][group]
    wanted = set(score["of"]) if score.get("aggregate") == "average" else {group}
    tables = []
    for each in (control, source):
        lines = each.path.with_suffix(".jsonl")
        if stored(lines) is None:
            return None
        rows: dict[str, list[dict]] = {}
        try:
            for row in sources.rows(lines, ["id", "group", "score"]):
                if row["group"] in wanted:
                    float(row["score"])
                    rows.setdefault(row["group"], []).append(row)
        except (EvaluationError, ValueError, TypeError):
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
    return judged(bounds, least, "over seeds")


def judged(bounds: tuple[float, float], least: float, over: str) -> tuple[str, str]:
    """On a 95% interval of the gain."""
    if bounds[0] > 0:
        return HOLDS, f"the interval {over} leaves out zero"
    if bounds[1] < 0:
        return FAILS, f"the other way round: the interval {over} leaves out zero"
    if bounds[1] < least:
        return FAILS, f"the interval {over} leaves out a gain of {least:g}"
    return FEW, f"the interval {over} holds zero and a gain of {least:g}"


def together(verdicts: list[tuple[str, str]], what: str = "model") -> tuple[str, str]:
    """Of each model by itself: holds where it does for all, does not where it does not for one. What cannot be tested
    counts where nothing else can."""
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
    if len(parts) < len(BACKBONES) and all(kept):  # one that costs more is enough to say so
        return Verdict(claim, told_text, ", ".join(parts), FEW, "takes both backbones", distinct(sources))
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
    for source in sorted(found.of("bench", kind), key=lambda s: s.when, reverse=True):
        rows = source.content["rows"]
        if measure == "layer":
            short = {"gla": "gla", "gated-deltanet": "gdn"}[backbone]
            alone = "unit" if backbone == "gla" else "fla"
            rows = {
                {"ours": cleaned, alone: control}.get(row["variant"], ""): row
                for row in rows
                if (row["backbone"], row["pass"], row["B"], row["T"]) == (short, "forward and backward", 1, 4096)
            }
        else:
            rows = {
                row["system"]: row
                for row in rows
                if row["size"] == "1.3b" and row.get("T", 4096) == 4096 and row.get("length", 4096) == 4096
                and row.get("B", BATCH) == BATCH
            }  # fmt: skip
        if cleaned in rows and control in rows and asked(rows[cleaned]) == asked(rows[control]):
            return value(rows[cleaned]) / value(rows[control]), label_of(control), source
    return None


def asked(row: dict) -> list:
    """What must be equal for two rows of a benchmark to be compared."""
    return [row.get(name) for name in ("B", "T", "length", "tokens", "prompt", "dtype")]


def alignment(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    sources = once(s for s in found.of("analysis", "alignment") if not s.content.get("settings", {}).get("untrained"))
    if not sources:
        return Verdict(claim, claim["paper"], NOT_RUN, FEW, "`ccq analyze alignment` was not run")
    parts, verdicts, gaps = [], [], []
    for source in sources:
        part = source.content["points"]["projection"]["top"]["16"]
        gap, prompts = part[claim["group"]], len(source.content.get("prompts") or ())
        verdicts.append(gap_verdict(part, gap, prompts, by_layer=claim["group"] == "unique"))
        if verdicts[-1][0] != UNTESTABLE:
            gaps.append(gap)
        bounds = mean_interval(gap["mean"], gap["error_of_mean"], prompts)
        spread = "" if bounds is None else f" ± {(bounds[1] - bounds[0]) / 2:.3f} over prompts"
        mean = "not known" if gap["mean"] is None else f"{signed(gap['mean'], 3)}{spread}"
        parts.append(f"{source.title}: {gap['negative_layers']} of {len(gap['by_layer'])}, mean {mean}")
    verdict, detail = together(verdicts)
    means = [gap["mean"] for gap in gaps if gap["mean"] is not None]
    short = ""
    if len(gaps) > 1 and means:
        negative, layers = sum(gap["negative_layers"] for gap in gaps), sum(len(gap["by_layer"]) for gap in gaps)
        short = f"negative at {negative} of {layers} layers of {len(gaps)} models, whose means are "
        short += f"{signed(min(means), 3)} to {signed(max(means), 3)}"
    return Verdict(claim, claim["paper"], "; ".join(parts), verdict, detail, sources, short)


def gap_verdict(part: dict, gap: dict, prompts: int, by_layer: bool) -> tuple[str, str]:
    """On the interval over prompts of the mean over layers, or of each layer; a gap is good below zero."""
    shares = part["of_isotropic_keys"]
    if min(shares if isinstance(shares, list) else [shares]) >= 1:
        return UNTESTABLE, "the top directions are all that its heads have"
    means, errors = [gap["mean"]], [gap["error_of_mean"]]
    if by_layer:
        root = math.sqrt(max(prompts, 1))
        means, errors = gap["by_layer"], [None if d is None else d / root for d in gap["deviation_by_layer"]]
    verdicts = []
    for mean, error in zip(means, errors, strict=True):
        bounds = mean_interval(mean, error, prompts)
        if bounds is None:
            return FEW, f"an interval over prompts takes {SEEDS} that have such tokens"
        verdicts.append(judged((-bounds[1], -bounds[0]), LEAST_GAP, "over prompts"))
    return together(verdicts, "layer")


def mean_interval(mean: float | None, error: float | None, count: int) -> tuple[float, float] | None:
    """95% interval of a mean of `count` values whose error is known."""
    if mean is None or error is None or count < SEEDS:
        return None
    half = student(count - 1) * error
    return mean - half, mean + half


def gate(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    sources = [s for s in found.of("analysis", "gate") if "lam" in s.content]
    if not sources:
        return Verdict(claim, claim["paper"], NOT_RUN, FEW, "`ccq analyze gate` was not run")
    parts, verdicts = [], []
    for label, mine in by_model(sources).items():
        runs: dict[int | None, list[Source]] = {}  # a model that was analysed twice, or trained again, is one run
        for source in mine:
            runs.setdefault(source.seed, []).append(source)
        if len(runs) > 1:
            runs.pop(None, None)  # it may be any of them
        means = {
            seed: [sum(mean_of(s.content["lam"][place]) for s in same) / len(same) for place in ("retrieval", "text")]
            for seed, same in runs.items()
        }
        further = [retrieval - text for seed, (retrieval, text) in means.items() if seed is not None]
        verdicts.append((len(further), decide(further, "higher", LEAST_GATE)))
        retrieval, text = (sum(column) / len(means) for column in zip(*means.values(), strict=True))
        name, count = (label, f" ({len(further)} seeds)") if len(further) > 1 else (mine[0].title, "")
        if bounds := seed_interval(further):
            count = f", {interval(bounds, 3)} further over {len(further)} seeds"
        texts = " and ".join(dict.fromkeys(text_of_gate(source) for source in mine))
        parts.append(f"{name}: {retrieval:.3f} against {text:.3f} on {texts}{count}")
    verdict, detail = of_enough_seeds(verdicts)
    return Verdict(claim, claim["paper"], "; ".join(parts), verdict, detail, sources)


def by_model(sources: list[Source]) -> dict[str, list[Source]]:
    """Analyses of one system and size, whatever their seeds."""
    groups: dict[str, list[Source]] = {}
    for source in sources:
        known = source.system is not None and source.system.known
        name = f"{source.system.label}, {source.system.size}" if known and source.system else source.title
        groups.setdefault(name, []).append(source)
    return groups


def mean_of(rows: list[list[float]]) -> float:
    values = [x for row in rows for x in row]
    return sum(values) / len(values)


def intervention(claim: dict, found: Collection, results: Results, paper: Paper) -> Verdict:
    """How much retrieval of the claim's needles changes, by length, when the cleaning is switched off."""
    changes, finds = {}, {}
    for source in found.of("analysis", "intervene"):
        rows = {row["intervention"]: row["suites"].get("niah", {}) for row in source.content["rows"]}
        none, off = ({name: x for name, x in rows.get(which, {}).items() if name.split("/")[0] in claim["tasks"]
                      and x is not None} for which in ("none", "off"))  # fmt: skip
        if shared := sorted(none.keys() & off.keys(), key=needle):
            changes[source] = {name: off[name] - none[name] for name in shared}
            finds[source] = [name for name in shared if max(off[name], none[name]) > 0]
    if not changes:
        asked = " and ".join(claim["tasks"])
        return Verdict(claim, claim["paper"], NOT_RUN, FEW, f"`ccq analyze intervene --off` was not run on {asked}")
    parts, verdicts = [], []
    for mine in by_model(list(changes)).values():
        found_by_any = {name for source in mine for name in finds[source]}  # else nothing can be missed
        runs = [(s.seed, {name: x for name, x in changes[s].items() if name in found_by_any}) for s in mine]
        verdicts.append((len({s.seed for s in mine} - {None}), missed(runs, claim["at_most"])))
        for source in mine:
            moved = {name: changes[source][name] for name in finds[source]}
            if not moved:
                parts.append(f"{source.title}: finds none either way")
                continue
            most = max(moved, key=lambda name: abs(moved[name]))
            samples = over_samples_of(source, most)
            lengths = {needle(name)[1] for name in moved}
            told = f"{source.title}: at most {abs(moved[most]):.1f} over {len(lengths)} length"
            told += f"{'s' if len(lengths) > 1 else ''} at which it finds any, up to {max(lengths):,} tokens"
            parts.append(told + (f", {interval(samples)} over samples" if samples else ""))
        if (bounds := list(switched(runs).values())) and all(bounds):
            parts.append(f"{mine[0].subject}, from {SWITCHED_FROM:,} tokens on: {within(bounds)}")
    verdict, detail = of_enough_seeds(verdicts)
    return Verdict(claim, claim["paper"], "; ".join(parts), verdict, detail, distinct(list(changes)))


def needle(name: str) -> tuple[str, int]:
    """Task and length of a score of S-NIAH."""
    task, length = name.split("/")
    return task, int(length)


def switched(runs: list[tuple[int | None, dict[str, float]]]) -> dict[str, tuple[float, float] | None]:
    """Of runs of one model (seed, {score: change}): the interval over seeds of each score at the lengths that the
    paper's claim is about; None where there are too few."""
    seeds: dict[str, dict[int, list[float]]] = {}  # [score][seed]
    for seed, changes in runs:
        for name, change_ in changes.items():
            if needle(name)[1] >= SWITCHED_FROM:
                of_score = seeds.setdefault(name, {})
                if seed is not None:
                    of_score.setdefault(seed, []).append(change_)
    return {name: seed_interval([sum(x) / len(x) for x in known.values()]) for name, known in seeds.items()}


def missed(runs: list[tuple[int | None, dict[str, float]]], at_most: float) -> tuple[str, str]:
    """Whether the intervals of `switched` stay within `at_most`."""
    bounds = list(switched(runs).values())
    if not bounds:
        return UNTESTABLE, f"it finds none at {SWITCHED_FROM:,} tokens or more, with or without"
    known_bounds = [b for b in bounds if b is not None]
    if any(low > at_most or high < -at_most for low, high in known_bounds):
        return FAILS, f"at a length the interval over seeds lies beyond {at_most:g}"
    if len(known_bounds) < len(bounds):
        return FEW, f"an interval over seeds takes {SEEDS} runs"
    if all(-at_most <= low and high <= at_most for low, high in known_bounds):
        return HOLDS, f"the interval over seeds is within {at_most:g} at every length"
    return FEW, f"the interval over seeds holds more than {at_most:g}"


def over_samples_of(source: Source, score: str) -> tuple[float, float] | None:
    """95% interval of what switching off changes, from the samples that `ccq analyze intervene` leaves beside it."""
    both = []
    for which in ("none", "off"):
        path = source.path.parent / which / "niah.json"
        try:
            content = json.loads(path.read_text())
            content["scores"][score]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        both.append(Source("eval", "niah", path, content))
    return sample_difference(both[0], both[1], score)
