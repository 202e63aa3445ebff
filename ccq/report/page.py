"""What the report says, in its order: what CCQ is, whether it helped, what was run; then the paper's tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import ccq
from ccq.report import analyses, claims, docs, figures, html, markdown, runs, speed, tables
from ccq.report import paper as papers
from ccq.report import recall as recalls
from ccq.report.claims import FAILS, FEW, HOLDS, Verdict
from ccq.report.collect import Collection
from ccq.report.document import Columns, Details, Document, Equation, Heading, Items, Text, figures_of
from ccq.report.numbers import Results
from ccq.report.systems import System, label_of, seeds_label

TITLE = "CCQ: a query that is cleaned before it reads"
WHAT = (
    "Linear attention keeps all it has read in one matrix of fixed size, and every stored key answers every query. "
    "What is common in the context drowns what is rare. **Curvature-Conditioned Query (CCQ)** shrinks the query along "
    "the directions in which the stored keys vary most, and only then reads. What is written, and how, stays as it is."
)
EQUATION = Equation(
    "<var>q</var><sub><var>t</var></sub><sup>clean</sup> = <var>q</var><sub><var>t</var></sub> − "
    "<var>λ</var><sub><var>t</var></sub> Σ<sub><var>t</var></sub> <var>q</var><sub><var>t</var></sub>"
    "<br><small>Σ<sub><var>t</var></sub> = mean(<var>k k</var><sup>⊤</sup>) − mean(<var>k</var>) "
    "mean(<var>k</var>)<sup>⊤</sup>, over keys up to <var>t</var></small>",
    "q_clean_t = q_t - lam_t * Sigma_t q_t\nSigma_t = mean(k k^T) - mean(k) mean(k)^T, over the keys up to t",
)
GATE = (
    "λ is a learned gate between 0 and 1, one a token and head; queries and keys have unit length. With λ = 0 it is "
    "the backbone with unit q and k, and that is what a gain must be measured against."
)
NOTHING = (
    "**There is nothing here yet.** No result was found, so this page shows the paper's numbers alone. Results come "
    "from `ccq train`, `ccq eval`, `ccq analyze` and `ccq bench`; `ccq report FOLDER... -o report` then puts them here."
)


# what a file that is JSON, and not what it should be, makes of a page
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def build(found: Collection) -> Document:
    """The page. Results of which none can be made (other versions, damage that is still JSON) are left out by name."""
    try:
        return rehearsed(assemble(found))
    except DAMAGE:
        return assemble(without_unusable(found))


def rehearsed(document: Document) -> Document:
    """The page, once it is known that it can be written: some damage shows only in a cell, or in a line drawn."""
    markdown.page(document)
    for table in docs.tables_of(document.parts).values():
        html.table(table)
    for figure in figures_of(document.parts):
        if figure.name != "picture":  # which no result is in
            figures.rehearse(figure)
    return document


def without_unusable(found: Collection) -> Collection:
    """Results less those of which no page can be made by themselves; they are named."""
    usable, problems = [], list(found.problems)
    for source in found.sources:
        try:
            rehearsed(assemble(Collection([source])))
            usable.append(source)
        except DAMAGE as error:
            told = (str(error) or "no more is said").splitlines()[0]
            problems.append(f"{source.name} lacks what it should have and is left out: {type(error).__name__} {told}.")
    return replace(found, sources=usable, problems=problems)


def assemble(found: Collection) -> Document:
    paper, results, recall = papers.load(), Results(found), recalls.Recall(found)
    verdicts = claims.judge(found, results, paper, recall)
    parts: list[Any] = [
        Columns([[Text(WHAT, "lead"), EQUATION, Text(GATE)], [figures.picture()]], "hero"),
        Columns(
            [
                [Heading("Did it help here?", 2), *did_it_help(found, verdicts, results)],
                [Heading("What was run here", 2), *what_was_run(found)],
            ],
            "cards",
        ),
    ]
    if notes := found.notices():
        parts.append(Items(notes, "notice", "Before you compare numbers"))
    parts += [Heading("The paper's claims", 2, "claims"), tables.claims_table(verdicts)]
    parts += [Heading("Models", 2, "models"), tables.config_table(paper, found)]
    parts += [*optional(runs.runs_table(found, results)), *optional(figures.training(found))]
    parts += optional(runs.repeats_table(results))
    parts += [Heading("Language modelling", 2, "language"), tables.score_table("lm", paper, results)]
    parts += [Heading("Needles", 2, "needles"), tables.score_table("niah", paper, results)]
    parts += optional(figures.needles(results))
    parts += [Heading("Past the training length", 2, "length"), *length(results)]
    parts += [Heading("LongBench", 2, "longbench"), tables.score_table("longbench", paper, results)]
    parts += recalled(recall, results)
    parts += [Heading("Ablations", 2, "ablations"), tables.score_table("ablations", paper, results)]
    parts += optional(analyses.intervention_table(found))
    parts += [
        Heading("Speed", 2, "speed"),
        *optional(figures.overhead(costs(found, paper))),
        speed.layer_table(paper, found),
        *optional(speed.operator_table(found)),
        speed.training_table(paper, found),
        *optional(figures.throughput(found)),
        *optional(speed.lengths_table(found)),
        speed.inference_table(paper, found),
        *optional(speed.decode_operator_table(found)),
        *optional(speed.evaluation_table(found)),
        *optional(speed.goals_table(found)),
    ]
    parts += [Heading("Where keys lie, and what the gate does", 2, "keys"), *keys(found, paper)]
    parts += [Heading("Sources", 2, "sources"), *sources(found)]
    foot = (
        f"Made by `ccq report`, ccq {ccq.__version__}. The paper: Le, Nguyen, Nguyen, Luu, *Don't Read Everything: A "
        "Curvature-Conditioned Query for Linear Attention*. Its numbers are quoted as facts; this implementation is "
        "independent of its authors."
    )
    return Document(TITLE, parts, foot.replace("*", ""))


def optional(part: Any) -> list[Any]:
    return [] if part is None else [part]


def what_was_run(found: Collection) -> list[Any]:
    if not found.sources:
        return [Text(NOTHING)]
    items = []
    trained = found.of("run")
    if trained:
        names = Counter(f"{run.system.label}, {run.system.size}" for run in trained if run.system)
        items.append(f"**{plural(len(trained), 'training run')}**: {counted(names)}")
    sweeps = found.of("sweep")
    if sweeps:
        count = sum(len(source.content["runs"]) for source in sweeps)
        items.append(f"**{plural(count, 'run')} of a sweep** (recall) in {plural(len(sweeps), 'file')}")
    evals = found.of("eval")
    if evals:
        models = Counter(source.system.label for source in evals if source.system)
        suites = ", ".join(dict.fromkeys(source.detail for source in evals))
        items.append(f"**{plural(len(evals), 'evaluation')}** ({suites}): {counted(models)}")
    analyses = found.of("analysis")
    if analyses:
        seeds: dict[str, list[int | None]] = {}
        for source in analyses:
            named = source.title != source.subject  # a model that only has a name may have its seed in it
            seeds.setdefault(f"{source.detail} of {source.subject}", []).append(source.seed if named else None)
        told = "; ".join(name + seeds_label(mine) for name, mine in seeds.items())
        items.append(f"**{plural(len(analyses), 'analysis', 'analyses')}**: {told}")
    benches = found.of("bench")
    if benches:
        machines: dict[str, list[str]] = {}
        for source in benches:
            machines.setdefault(source.hardware, []).append(source.detail)
        where = "; ".join(f"{', '.join(dict.fromkeys(kinds))} on {machine}" for machine, kinds in machines.items())
        items.append(f"**{plural(len(benches), 'benchmark')}**: {where}")
    if not evals and not trained and not sweeps:
        items.append("Nothing was trained or evaluated yet.")
    dates = sorted({source.date for source in found.sources if source.date != "unknown"})
    if dates:
        items.append(f"Dates: {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else ""))
    return [Items(items)]


def counted(names: Counter) -> str:
    return "; ".join(name + (f" ({count})" if count > 1 else "") for name, count in names.items())


def plural(count: int, word: str, words: str = "") -> str:
    return f"{count} {word if count == 1 else words or word + 's'}"


def did_it_help(found: Collection, verdicts: list[Verdict], results: Results) -> list[Any]:
    """The answer in one sentence, then the headline claims and those that are decided."""
    quality = [v for v in verdicts if v.claim["kind"] in ("score", "recall")]
    tried = [v for v in quality if v.ours != claims.NOT_RUN]
    decided = [v for v in tried if v.verdict in (HOLDS, FAILS)]
    shown = [v for v in verdicts if (v.claim.get("headline") and v.ours != claims.NOT_RUN) or v in decided] or tried[:4]
    parts: list[Any] = []
    if not found.sources:
        return [Text("Nothing was run, so nothing can be said.")]
    measured = in_short(results)
    if not tried and measured:
        parts.append(
            Text(
                "**These results are too few to say.** No claim about what CCQ gains is judged by what is here. "
                "What was measured, a mean over all that was asked, in percent:"
            )
        )
        parts.append(Items(measured))
    elif not tried:
        parts.append(
            Text(
                "**Not known yet.** No pair of models, one with CCQ and one without, has been trained and evaluated "
                "among these results, so they say nothing about whether CCQ helps."
                + (" What they do say:" if shown else "")
            )
        )
    else:
        count = Counter(v.verdict for v in tried)
        verbs = (HOLDS, "holds", "hold"), (FAILS, "does not", "do not"), (FEW, "needs more runs", "need more runs")
        said = [f"{count[verdict]} {one if count[verdict] == 1 else many}" for verdict, one, many in verbs]
        left = len(tried) - count[HOLDS] - count[FAILS] - count[FEW]
        if left:
            said.append(f"{left} cannot be tested at this size")
        word = "claim" if len(tried) == 1 else "claims"
        listed = "What is decided, and the main ones:" if decided else "The main ones:"
        parts.append(
            Text(f"**Of {len(tried)} {word} about quality that were tried here, {', '.join(said)}.** {listed}")
        )
    words = {FAILS: "Does not hold"}
    items = []
    for v in shown:
        word = words.get(v.verdict, v.verdict.capitalize())
        items.append(f"**{word}**: {full(v, verdicts)}. Here: {v.short or v.ours}. The paper: {v.paper}.")
    return parts + ([Items(items)] if items else [])


def in_short(results: Results) -> list[str]:
    """Recall and needles of each size that has models with CCQ and without, a line each."""
    lines = []
    for suite, what in (("mqar", "Recall (MQAR)"), ("niah", "Needles")):
        sizes: dict[str, list[System]] = {}
        for system in results.systems(suite):
            sizes.setdefault(system.size, []).append(system)
        for size, systems in sizes.items():
            if len({system.name.startswith("ccq-") for system in systems}) < 2:
                continue
            told = []
            for system in systems:
                runs = results.runs(system, suite)
                values = [x["value"] for run in runs for name, x in run.content["scores"].items() if name != "average"]
                told.append(f"{system.label} {mean_of(values)}")
            count = max(len(results.runs(system, suite)) for system in systems)
            lines.append(f"**{what}, {size}**: {'; '.join(told)} ({plural(count, 'run')} each at most)")
    return lines


def mean_of(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f}" if known else "–"


def full(verdict: Verdict, verdicts: list[Verdict]) -> str:
    """What a claim says; one that goes on from a claim before it needs that before it."""
    says = verdict.claim["says"]
    if not says.startswith("..."):
        return says
    before = [v.claim["says"] for v in verdicts[: verdicts.index(verdict)]]
    return f"{next(other for other in reversed(before) if not other.startswith('...'))} {says}"


def length(results: Results) -> list[Any]:
    figure = figures.extrapolation(results)
    text = (
        "The paper reads perplexity at 4K to 20K tokens on six corpora; all models are trained at 4K. It gives curves, "
        "no table: at 1.3B each CCQ variant is 1 to 2.5 below its backbone at 20K on every corpus, and at 500M "
        "CCQ-Gated DeltaNet is lowest throughout; the Transformer is off the scale (above 1,700 on code at 20K)."
    )
    return [Text(text), figure if figure else Text("Here: not run yet.", "soft")]


def recalled(recall: recalls.Recall, results: Results) -> list[Any]:
    """Multi-query associative recall: what `ccq sweep mqar` trained, and what `ccq eval --suite mqar` asked."""
    parts = [
        *optional(recalls.sweep_table(recall)),
        *recalls.figures_of(recall),
        *optional(recalls.slice_table(recall)),
        *optional(tables.recall_table(results)),
        *optional(figures.recall(results)),
    ]
    return [Heading("Recall", 2, "recall"), *(parts or [Text("Here: not run yet.", "soft")])]


def costs(found: Collection, paper: papers.Paper) -> list[tuple[str, float | None, float | None]]:
    """(what, paper's, ours): time added, in percent."""
    bars: list[tuple[str, float | None, float | None]] = []
    for measure, table, column, name in (
        ("layer", "layer", "forward and backward, 4K", "a layer, 4K"),
        ("training", "training", "tokens/s a GPU", "training"),
        ("prefill", "inference", "4K prefill, ms", "prefill, 4K"),
        ("decode", "inference", "decode, tokens/s", "decode"),
    ):
        for backbone, cleaned in claims.BACKBONES.items():
            one, two = (paper.tables[table].value("1.3b", system, column) for system in (cleaned, backbone))
            assert one is not None
            assert two is not None
            rate = "tokens/s" in column
            told = 100 * ((two / one if rate else one / two) - 1)
            measured = claims.measured_cost(found, measure, backbone)
            ours = None
            if measured is not None:
                ours = 100 * ((1 / measured[0] if rate else measured[0]) - 1)
            bars.append((f"{name}: {label_of(backbone)}", told, ours))
    return bars


def keys(found: Collection, paper: papers.Paper) -> list[Any]:
    parts: list[Any] = [
        Text(
            "CCQ assumes that the key one looks for lies off the directions in which the keys vary most. `ccq analyze "
            "alignment` measures it on any model: the share of a key's centred energy in the top 16 directions, needle "
            "minus distractors. `ccq analyze gate` measures how much a trained model cleans."
        )
    ]
    drawn = [*figures.diagnostics(found, paper), *optional(figures.gates(found))]
    told = [f"{fact['what']}: {minus(fact['value'])} ({fact['where']})" for name, fact in paper.facts.items()
            if name.startswith(("gap", "lam", "off"))]  # fmt: skip
    tabled = (analyses.gap_table(found, paper), analyses.control_table(found), analyses.margin_table(found))
    drawn += [part for table in tabled for part in optional(table)]
    parts += drawn or [Text("Here: not run yet.", "soft")]
    parts.append(Details("What the paper's text gives", [Items(told)]))
    return parts


def minus(value: float) -> str:
    return str(value).replace("-", "−")


def sources(found: Collection) -> list[Any]:
    parts: list[Any] = []
    if found.sources:
        parts.append(tables.source_table(found))
    else:
        parts.append(Text("None."))
    if found.ignored:
        parts.append(
            Details(f"JSON files that are no results of ours: {len(found.ignored)}", [Items(found.ignored[:50])])
        )
    return parts
