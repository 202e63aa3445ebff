"""Claims of report/claims.toml about what `ccq analyze` measures: where keys lie, what gates do, what is missed."""

from __future__ import annotations

import json
import math
from operator import attrgetter

from ccq.evaluate.statistics import student
from ccq.names import grouped, plural
from ccq.report.claims import (
    FAILS,
    FEW,
    HOLDS,
    NOT_RUN,
    UNTESTABLE,
    Verdict,
    decide,
    interval,
    judged,
    needed,
    of_enough_seeds,
    sample_difference,
    together,
    within,
)  # fmt: skip
from ccq.report.collect import Collection, Source
from ccq.report.paper import Paper
from ccq.report.results import SEEDS, Interval, Results, distinct, mean, once, seed_interval
from ccq.report.table import needle, signed

LEAST_GAP, LEAST_GATE = 0.01, 0.01  # a tenth of the paper's gap of alignment, and of what its gate opens further
SWITCHED_FROM = 4096  # tokens from which the paper switches its cleaning off
SUBJECT = attrgetter("subject")  # of an analysis: system and size, whatever the seed


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
        bounds = mean_interval(gap["mean"], gap["error_of_mean"], prompts)
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
        bounds = mean_interval(middle, error, prompts)
        if bounds is None:
            return FEW, f"an interval over prompts needs {SEEDS} prompts with such tokens"
        verdicts.append(judged((-bounds[1], -bounds[0]), LEAST_GAP, "over prompts"))
    return together(verdicts, "layer")


def mean_interval(middle: float | None, error: float | None, count: int) -> Interval | None:
    """95% interval of a mean of `count` values whose error is known."""
    if middle is None or error is None or count < SEEDS:
        return None
    half = student(count - 1) * error
    return middle - half, middle + half


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
        verdicts.append((len({s.seed for s in mine} - {None}), missed(runs, at_most)))
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
        if (bounds := list(switched(runs).values())) and all(bounds):
            parts.append(f"{mine[0].subject}, from {SWITCHED_FROM:,} tokens on: {within(bounds)}")
    needs = SEEDS if all(count < SEEDS for count, _ in verdicts) else 0
    return Verdict(*of_enough_seeds(verdicts), "; ".join(parts), distinct(changes), needs=needs)


def switched(runs: list[tuple[int | None, dict[str, float]]]) -> dict[str, Interval | None]:
    """Of runs of one model (seed, {score: change}): the interval over seeds of each score at the lengths that the
    paper's claim is about; None where there are too few."""
    seeds: dict[str, dict[int, list[float]]] = {}  # [score][seed]
    for seed, changes in runs:
        for name, moved in changes.items():
            if needle(name)[1] >= SWITCHED_FROM:
                of_score = seeds.setdefault(name, {})
                if seed is not None:
                    of_score.setdefault(seed, []).append(moved)
    return {name: seed_interval([mean(x) for x in known.values()]) for name, known in seeds.items()}


def missed(runs: list[tuple[int | None, dict[str, float]]], at_most: float) -> tuple[str, str]:
    """Whether the intervals of `switched` stay within `at_most`."""
    bounds = list(switched(runs).values())
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
            content = json.loads(path.read_text())
            content["scores"][score]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        both.append(Source("eval", "niah", path, content))
    return sample_difference(both[0], both[1], score)
