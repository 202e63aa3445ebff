"""The report's figures: one a question (perplexity, needles, recall, cost), with intervals, then what stands behind."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ccq.bench.tables import CLEANED, MEASURES
from ccq.evaluate import length, niah
from ccq.figures import BLUE, GREY, Figure, Lines, Panel, lines_of, of_alignment, of_gates
from ccq.names import grouped
from ccq.report.claims import text_of_gate
from ccq.report.collect import Collection, Source
from ccq.report.paper import Paper
from ccq.report.results import RECALL, VALID, Estimate, Results, by_size, mean, once
from ccq.report.table import WORDS, scale_label, tokens_label
from ccq.report.tables import trained
from ccq.systems import SYSTEMS, Identity

BAND = "95% interval over seeds if there are three, else over test samples."


def figures(found: Collection, results: Results, paper: Paper) -> dict[str, Figure]:
    """All that there is anything to draw for, by name."""
    made = [perplexity(results), needles(results), recall(results), cost(found), extrapolation(results),
            training(found, results), *diagnostics(found, paper), gates(found, paper)]  # fmt: skip
    return {figure.name: figure for figure in made if figure is not None and figure.panels}


def dots(axes: Any, points: Sequence[tuple[Identity, Estimate]], xlabel: str) -> None:
    """A row a system: its value, and the interval."""
    for y, (row, estimate) in enumerate(reversed(points)):
        style = lines_of([row])[row.label] | {"ls": "", "ms": 6}
        if bounds := estimate.over_seeds or estimate.over_samples:
            axes.plot(bounds, [y, y], color=style["color"], lw=2, alpha=0.5)
        axes.plot([estimate.value], [y], **style)
    axes.set_yticks(range(len(points)), [textwrap.fill(row.label, 30) for row, _ in reversed(points)], fontsize=8)
    axes.set(xlabel=xlabel, ylim=(-0.6, len(points) - 0.4))
    axes.grid(axis="y", visible=False)


def of_rows(results: Results, name: str, title: str, caption: str, xlabel: str, *scores: str) -> Figure:
    """A panel a score and size, with a row a system; as high as the most rows take."""
    panels, most = [], 0
    for where in scores:
        for size, rows in by_size(results.rows(where.partition(":")[0])).items():
            points = [(row, estimate) for row in rows if (estimate := results.estimate(row, where))]
            if points:
                panels.append(Panel(scale_label(size), partial(dots, points=points, xlabel=xlabel)))
                most = max(most, len(points))
    return Figure(name, title, caption, panels, columns=2, size=(4.2, 0.9 + 0.28 * most))


def perplexity(results: Results) -> Figure:
    caption = "At the end of training; lower is better. Bars: 95% interval over seeds if there are three."
    return of_rows(results, "perplexity", "Perplexity", caption, "validation perplexity", VALID)


def recall(results: Results) -> Figure:
    """Of what `ccq sweep` trained, and of what `ccq eval` asked."""
    caption = f"Mean over the test slices; higher is better. Not in the paper. Bars: {BAND}"
    return of_rows(results, "recall", "Recall (MQAR)", caption, "queries answered, %", RECALL, "mqar:average")


Curves = list[tuple[Identity, list[tuple[int, Estimate]]]]


def draw_curves(curves: Curves, lines: Lines, ylabel: str, axes: Any) -> None:
    for row, points in curves:
        style, lengths = lines[row.label], [n for n, _ in points]
        axes.plot(lengths, [e.value for _, e in points], **style)
        bands = [e.over_seeds or e.over_samples for _, e in points]
        if all(bands):
            low, high = zip(*[band for band in bands if band], strict=True)
            axes.fill_between(lengths, low, high, color=style["color"], alpha=0.12, lw=0)
    ticks = sorted({n for _, points in curves for n, _ in points})
    if ticks[-1] > 8 * ticks[0]:  # else the short lengths lie on each other
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    ticks = ticks[:: max(1, len(ticks) // 5)]
    axes.set_xticks(ticks, [tokens_label(n) for n in ticks])
    axes.set(xlabel="tokens", ylabel=ylabel)


def curves_of(results: Results, rows: Sequence[Identity], suite: str, pattern: str) -> Curves:
    return [(row, points) for row in rows if (points := results.curve(row, suite, pattern))]


def by_length(
    results: Results, suite: str, tasks: dict[str, dict], axis: str, curves: Callable[..., Curves] = curves_of
) -> tuple[list[Panel], Lines]:
    """A panel for each task of a suite that was run, and each size of model; and the lines of all."""
    panels, rows = [], results.rows(suite)
    lines, sizes = lines_of(rows), by_size(rows)
    for size, mine in sizes.items():
        for task, known in tasks.items():
            if found := curves(results, mine, suite, f"{task}/{{}}"):
                told = f"{known['title']}, {scale_label(size)}" if len(sizes) > 1 else known["title"]
                panels.append(Panel(told, partial(draw_curves, found, lines, axis)))
    return panels, lines


def needles(results: Results) -> Figure:
    caption = f"Higher is better. Bands: {BAND}"
    return Figure("needles", "Needles found, by length", caption, *by_length(results, "niah", niah.KNOWN, "found, %"))


def extrapolation(results: Results) -> Figure:
    drawn = []

    def same_text(results: Results, rows: Sequence[Identity], suite: str, pattern: str) -> Curves:
        """The sweep; but where windows were left out of it, each length reads other text: there the same tokens."""
        found = curves_of(results, rows, suite, pattern)
        if any(s.content.get("quick_look") for _, points in found for _, estimate in points for s in estimate.sources):
            same = curves_of(results, rows, suite, pattern.replace("/{}", "/same/{}"))
            if [row for row, _ in same] == [row for row, _ in found] and all(len(points) > 1 for _, points in same):
                drawn.append(pattern)
                return same
        return found

    panels, lines = by_length(results, "length", length.KNOWN, "perplexity", same_text)
    how = WORDS["extrapolation"] + (WORDS["extrapolation_same"] if drawn else "")
    caption = f"Lower is better. {how} Bands: {BAND}"
    return Figure("extrapolation", "Perplexity beyond the training length", caption, panels, lines)


def cost(found: Collection) -> Figure | None:
    """What CCQ adds, in percent: the paper's beside ours."""
    labels, paper, ours, ranges = [], [], [], []
    for measure in (MEASURES[name] for name in ("layer", "training", "prefill", "decode")):
        for system in CLEANED:
            labels.append(f"{measure.what}: {SYSTEMS[SYSTEMS[system].family].label}")
            paper.append(measure.added(measure.papers(system)))
            added, ends = math.nan, []
            if measured := measure.measured(found, system):
                added = measure.added(measure.value(measured[0]) / measure.value(measured[1]))
                if measure.timed:
                    one, two = (row[measure.timed] for row in measured[:2])
                    ends = [100 * (one[a] / two[b] - 1) for a, b in (("low", "high"), ("high", "low"))]
            ours.append(added)
            ranges.append((added - min([added, *ends]), max([added, *ends]) - added))
    if np.isnan(ours).all():
        return None

    def draw(axes: Any) -> None:
        places = np.arange(len(labels))[::-1]
        hatched = {"hatch": "///", "fill": False, "edgecolor": GREY, "label": "the paper"}
        thin = {"xerr": np.transpose(ranges), "color": BLUE, "ecolor": GREY, "error_kw": {"lw": 1.2}, "label": "here"}
        for shift, values, look in ((0.19, paper, hatched), (-0.19, ours, thin)):
            bars = axes.barh(places + shift, values, 0.36, lw=1, **look)
            told = ["" if np.isnan(value) else f"{value:.1f}%" for value in values]
            axes.bar_label(bars, told, padding=3, fontsize=7.5)
        axes.set_yticks(places, labels)
        axes.set(xlabel="added by CCQ, %")
        axes.margins(x=0.18)
        axes.grid(axis="y", visible=False)
        axes.legend(loc="center right")

    size = (4.6, 0.36 * len(labels) + 1.0)
    return Figure("overhead", "What CCQ costs", WORDS["cost"], [Panel("", draw)], size=size)


def course(source: Source) -> dict[str, tuple[list, list]]:
    """(steps, values) of what a run logged: of `ccq train`, or one of a sweep."""
    if source.kind == "sweep":
        curve, gate = source.content["curve"], source.content.get("gate") or {}
        found = {"valid_accuracy": (curve["valid_step"], [100 * x for x in curve["valid_accuracy"]])}
        if gate.get("of_decay_alone") is not None:  # of a fixed lam there is nothing to see
            lam = [mean(x for x in layers if x is not None) for layers in gate["lam"]]
            found |= {"lam": (gate["step"], lam), "alone": (gate["step"], gate["of_decay_alone"])}
        return found
    found = {}
    for name in ("valid_accuracy", "valid_perplexity", "loss", "lam", "lam_of_decay_alone"):
        if having := [r for r in source.records if r.get(name)]:
            scale = 100 if name == "valid_accuracy" else 1
            means = name == "lam" and isinstance(having[0][name], list)  # over layers
            values = [mean(x or 0 for x in r[name]) if means else scale * r[name] for r in having]
            found["alone" if name.endswith("alone") else name] = ([r["step"] for r in having], values)
    return found


COURSES = {"valid_accuracy": "queries answered, %", "valid_perplexity": "validation perplexity", "loss": "loss"}


def training(found: Collection, results: Results) -> Figure:
    """A line a row: the mean over its runs."""
    rows: dict[Identity, list[Source]] = {}
    for (row, _, _), runs in trained(found).items():
        rows.setdefault(row, []).extend(run for run in runs if run.records)
    for row in results.rows("recall"):
        estimate = results.estimate(row, RECALL)
        rows[row] = estimate.sources if estimate else []
    courses = {row: [course(source) for source in sources] for row, sources in rows.items()}
    panels, lines = [], lines_of(row for row in rows if courses[row])
    for size, mine in by_size(list(rows)).items():
        having = {name: [row for row in mine if any(name in c for c in courses[row])] for name in (*COURSES, "lam")}
        shown = [name for name in ("valid_accuracy", "valid_perplexity") if having[name]] or ["loss"]
        for name in [*shown, "lam"]:
            if having[name]:
                title = f"{'the gate' if name == 'lam' else COURSES[name]}, {scale_label(size)}"
                mean_of = {row.label: courses[row] for row in having[name]}
                panels.append(Panel(title, partial(draw_course, mean_of, lines, name)))
    return Figure("training", "Training", WORDS["course"], panels, lines, columns=2, size=(4.0, 2.9))


def draw_course(courses: dict[str, list[dict]], lines: Lines, name: str, axes: Any) -> None:
    for label, runs in courses.items():
        style = lines[label] | {"ms": 3, "lw": 1.3}
        for what, look in ((name, style), ("alone", {"color": style["color"], "ls": ":", "lw": 1.1})):
            having = [run[what] for run in runs if what in run]
            if having and (what == name or name == "lam"):
                steps = having[0][0]
                same = [values for at, values in having if at == steps]
                axes.plot(steps, np.mean(same, axis=0), markevery=max(1, len(steps) // 8), **look)
    axes.set(xlabel="step", ylabel=COURSES.get(name, "mean lam"))
    if name == "valid_perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(0, None)


def diagnostics(found: Collection, paper: Paper) -> list[Figure]:
    """Where keys lie, caught the paper's way: at the projection."""
    points = [(s.title, s.content["points"]["projection"]) for s in found.of("analysis", "alignment")
              if "projection" in s.content["points"]]  # fmt: skip
    if not points:
        return []
    made = [replace(figure, name=f"alignment_{figure.name}") for figure in of_alignment(points)[:3]]
    facts = (paper.facts["gap_qwen3"], paper.facts["gap_gated_deltanet"])
    made[0].caption += WORDS["alignment"].format(means=" and ".join(f"{fact} ({fact.model})" for fact in facts))
    return made


def gates(found: Collection, paper: Paper) -> Figure | None:
    sources = once(s for s in found.of("analysis", "gate") if "lam" in s.content)
    if not sources:
        return None
    # runs that differ in the seed alone; without a seed, two of one name need not be one model
    rows = grouped(sources, lambda s: (s.subject, tuple(s.content["layers"]), s.path if s.seed is None else None))
    groups = []
    for seeds in rows.values():
        count = len({source.seed for source in seeds})
        title = seeds[0].title if count == 1 else f"{seeds[0].subject}, {count} seeds"
        groups.append((title, [source.content for source in seeds]))
    texts = ", ".join(dict.fromkeys(text_of_gate(source) for source in sources))
    told = {"text": paper.facts["lam_text"], "retrieval": paper.facts["lam_retrieval"]}
    caption = WORDS["gates"].format(texts=texts, **told)
    return replace(of_gates(groups, ("text", "filler", "retrieval")), name="gates", caption=caption, columns=2)
