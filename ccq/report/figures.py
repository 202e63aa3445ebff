"""The figures: what each panel shows, and how panels become inline SVG, and SVG and PNG files."""

from __future__ import annotations

import functools
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ccq.report.collect import Collection, Source, longest, text_of_gate
from ccq.report.document import Figure, Panel
from ccq.report.numbers import Results, once
from ccq.report.paper import Paper
from ccq.report.systems import WITH_CONVOLUTION, System, scale_label, tokens_label

# Okabe and Ito's palette; INK becomes the page's own text colour, the others a lighter tone on a dark page
INK, GREY = "#000000", "#7f7f7f"
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
STYLE: dict = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "ccq",
    "font.family": "sans-serif",
}
# system: (colour, line, marker); with CCQ solid, without dashed, its control dotted: colour is never alone
LINES = {
    "transformer": (GREY, "-.", "x"),
    "mamba2": (PURPLE, "-.", "^"),
    "gla": (SKY, "--", "s"),
    "gla-unit": (GREEN, ":", "D"),
    "ccq-gla": (BLUE, "-", "o"),
    "gla-hedgehog": (GREY, ":", "v"),
    "gated-deltanet": (ORANGE, "--", "s"),
    "ccq-gated-deltanet": (RED, "-", "o"),
}
# variants that stand beside those: the colour of the system's kin, a line and a marker of their own
VARIANTS = {
    "ccq-gla-open": (PURPLE, "-", "P"),
    "ccq-gla-no-decay": (BLUE, "--", "*"),
    "ccq-gla-uncentred": (BLUE, "-.", "d"),
    "ccq-gla-fixed-lam": (BLUE, ":", "h"),
    "ccq-gla-stats": (SKY, "-", "<"),
    "ccq-gated-deltanet-open": (RED, "-.", "P"),
    "ccq-gated-deltanet-uncentred": (RED, "--", "d"),
    "ccq-gated-deltanet-fixed-lam": (RED, ":", "h"),
    "gla-unit-equal-state": (GREEN, "-.", ">"),
    "gla-current-key": (SKY, ":", "X"),
    "deltanet": (ORANGE, ":", "v"),
}
# lines and markers of other variants, in the colour of their system; and of other systems
ASIDE = (("-.", "v"), (":", "^"), ("-.", "<"), (":", ">"), ("-.", "*"), (":", "X"), ("-.", "h"))
OTHERS = ((PURPLE, "-", "P"), (GREEN, "--", "X"), (GREY, "-", "*"), (SKY, "-.", "d"))


def line_of(system: System) -> dict[str, Any]:
    known = LINES | VARIANTS | {f"{name}, {WITH_CONVOLUTION}": (*LINES[name][:2], "+") for name in LINES}
    chance = sum(map(ord, system.key))
    if system.key in known:
        colour, line, marker = known[system.key]
    elif system.name in LINES:
        colour, (line, marker) = LINES[system.name][0], ASIDE[chance % len(ASIDE)]
    else:
        colour, line, marker = OTHERS[chance % len(OTHERS)]
    return {"color": colour, "ls": line, "marker": marker, "ms": 4, "lw": 1.6}


def legend_of(systems: Sequence[System]) -> list[tuple[str, str, str, str]]:
    """Sizes have panels of their own: a label does not say them."""
    entries = []
    for system in systems:
        style = line_of(system)
        entries.append((system.label, style["color"], style["ls"], style["marker"]))
    return list(dict.fromkeys(entries))


# -- how a figure is written ------------------------------------------------------------------------------------------


COLOURS = {INK: "ink", BLUE: "blue", SKY: "sky", GREEN: "green", ORANGE: "orange", RED: "red", PURPLE: "purple",
           GREY: "grey"}  # names of style.css  # fmt: skip


def page_colour(colour: str) -> str:
    return f"var(--{COLOURS[colour]})"


def svg(draw: Callable[[Any], None], size: tuple[float, float], title: str = "") -> str:
    """One panel as SVG text."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout=ConstrainedLayoutEngine(), facecolor="none")
        axes = canvas.subplots()
        axes.set_facecolor("none")
        draw(axes)
        if title:
            axes.set_title(title)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def rehearse(figure: Figure) -> None:
    """Draw and lay out every panel, and write nothing: what cannot be drawn raises."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        for panel in figure.panels:
            canvas = Canvas(figsize=figure.size)
            panel.draw(canvas.subplots())
            canvas.draw_without_rendering()


def inline(text: str, prefix: str, alt: str) -> str:
    """SVG for an HTML page: no prologue, names of its own, colours of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    for colour, name in COLOURS.items():
        text = re.sub(colour, f"var(--{name})", text, flags=re.IGNORECASE)
    # what matplotlib leaves black by saying nothing
    text = text.replace('<text style="', '<text style="fill: var(--ink); ').replace("<text ", '<text class="t" ')
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{alt}">', text)
    return re.sub(r"\n\s*", "\n", text)


def save(figure: Figure, folder: Path, endings: Sequence[str] = ("svg", "png")) -> list[Path]:
    """All panels as one image, for papers: NAME.svg and NAME.png."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    folder.mkdir(parents=True, exist_ok=True)
    columns = min(figure.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    width, height = figure.size
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(columns * width, rows * height), layout=ConstrainedLayoutEngine())
        grid = list(canvas.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(grid, figure.panels, strict=False):
            panel.draw(axes)
            axes.set_title(panel.title)
        for axes in grid[len(figure.panels) :]:
            axes.set_visible(False)
        if figure.legend:
            from matplotlib.lines import Line2D

            lines = [Line2D([], [], color=c, ls=line, marker=marker, ms=4) for _, c, line, marker in figure.legend]
            labels = [entry[0] for entry in figure.legend]
            for across in range(len(labels), 0, -1):  # as many beside each other as fit
                legend = canvas.legend(lines, labels, loc="outside lower center", ncols=across)
                if legend.get_window_extent().width <= canvas.bbox.width or across == 1:
                    break
                legend.remove()
            canvas.set_figheight(rows * height + 0.16 * (-(-len(labels) // across) - 1))
        paths = [folder / f"{figure.name}.{ending}" for ending in endings]
        for path in paths:
            vector = path.suffix == ".svg"
            canvas.savefig(path, dpi=160, metadata={"Date": None} if vector else {"Software": None})
            canvas.set_layout_engine("none")  # it has its places now
    return paths


# -- what CCQ does, in two dimensions ----------------------------------------------------------------------------------


def example(lam: float = 1.0) -> dict[str, np.ndarray]:
    """Unit keys around +-u and one needle, in the plane; Sigma, q and q_clean = q - lam Sigma q from them."""
    angle = np.deg2rad(np.concatenate([np.linspace(-16, 20, 13), 180 + np.linspace(-18, 14, 11)]))
    needle = np.deg2rad(78.0)
    keys = np.stack([np.cos([*angle, needle]), np.sin([*angle, needle])], 1)
    sigma = keys.T @ keys / len(keys) - np.outer(keys.mean(0), keys.mean(0))
    at = np.deg2rad(38.0)
    q = np.array([np.cos(at), np.sin(at)])
    q_clean = q - lam * sigma @ q
    return {"keys": keys, "q": q, "q_clean": q_clean, "before": keys @ q, "after": keys @ q_clean}


def picture() -> Figure:
    found = example()

    def space(axes: Any) -> None:
        keys = found["keys"]
        turn = np.linspace(0, 2 * np.pi, 200)
        axes.plot(np.cos(turn), np.sin(turn), color=GREY, lw=0.6, alpha=0.5)
        axes.plot([-1.25, 1.25], [0, 0], color=GREY, lw=1, ls=":")
        axes.text(0, -0.22, "keys vary most this way", color=GREY, fontsize=8, ha="center")
        axes.plot(*keys[:-1].T, "o", color=GREY, ms=4.5, alpha=0.9)
        axes.plot(*keys[-1], "*", color=RED, ms=13)
        axes.text(keys[-1, 0] - 0.08, keys[-1, 1] + 0.1, "needle", color=RED, ha="right", fontsize=9)
        for name, colour, label, dx, dy in (("q", BLUE, "q", 0.06, 0.0), ("q_clean", GREEN, "q_clean", -0.06, 0.1)):
            axes.annotate("", found[name], (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2.2,
                                                               "shrinkA": 0, "shrinkB": 0})  # fmt: skip
            x, y = found[name]
            axes.text(x + dx, y + dy, label, color=colour, fontsize=10, ha="left" if dx > 0 else "right")
        axes.set(xlim=(-1.3, 1.3), ylim=(-0.5, 1.35), aspect="equal")
        axes.axis("off")

    def scores(axes: Any) -> None:
        others = len(found["keys"]) - 1
        rows = [("after", "q_clean", GREEN, 0), ("before", "q", BLUE, 1)]
        for name, label, _, y in rows:
            values = found[name]
            axes.plot(values[:others], np.full(others, y), "o", color=GREY, ms=4.5, alpha=0.8)
            axes.plot(values[-1:], [y], "*", color=RED, ms=13)
            axes.text(-1.0, y + 0.2, f"read with {label}", fontsize=8.5, color=BLUE if name == "before" else GREEN)
        axes.set(yticks=[], ylim=(-0.45, 1.5), xlabel="score of each stored key")
        axes.spines["left"].set_visible(False)

    return Figure(
        name="picture",
        title="What CCQ does",
        caption="Computed by the equation: 24 keys (grey) lie along one direction, the needle off it. Read with q, "
        "grey keys score best; q_clean is q shrunk along that direction, and the needle comes out on top. Were the "
        "needle on it too, cleaning would hurt.",
        panels=[Panel("In the space of keys", space), Panel("Scores", scores)],
        columns=2,
        size=(2.6, 2.1),
        alt="keys, needle, query and cleaned query; scores before and after",
    )


# -- evaluations -------------------------------------------------------------------------------------------------------


def curves(results: Results, suite: str, pattern: str, systems: Sequence[System]) -> list[tuple[System, list, list]]:
    """(system, lengths, estimates) of the scores called `pattern` with a length at its {}."""
    found = []
    for system in systems:
        lengths: set[int] = set()
        before, after = pattern.split("{}")
        for source in results.runs(system, suite):
            for name in source.content["scores"]:
                middle = name[len(before) : len(name) - len(after)]
                if name.startswith(before) and name.endswith(after) and middle.isdigit():
                    lengths.add(int(middle))
        points = [(n, results.estimate(system, f"{suite}:{pattern.format(n)}")) for n in sorted(lengths)]
        known = [(n, estimate) for n, estimate in points if estimate is not None]
        if known:
            found.append((system, [n for n, _ in known], [estimate for _, estimate in known]))
    return found


def draw_curves(lines: list[tuple[System, list, list]], ylabel: str) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for system, lengths, estimates in lines:
            style = line_of(system)
            axes.plot(lengths, [e.value for e in estimates], **style)
            bands = [e.over_seeds or e.over_samples for e in estimates]
            if all(bands):
                low, high = zip(*bands, strict=True)
                axes.fill_between(lengths, low, high, color=style["color"], alpha=0.12, lw=0)
        ticks = sorted({n for _, lengths, _ in lines for n in lengths})
        if ticks[-1] > 8 * ticks[0]:  # else the short lengths lie on each other
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        axes.set_xticks(ticks[:: max(1, len(ticks) // 5)])
        axes.set_xticklabels([tokens_label(n) for n in ticks[:: max(1, len(ticks) // 5)]])
        axes.set(xlabel="tokens", ylabel=ylabel)

    return draw


CORPORA = {
    "govreport": "GovReport",
    "qmsum": "QMSum",
    "narrativeqa": "NarrativeQA",
    "qasper": "Qasper",
    "pg19": "PG19",
    "code": "code (for CodeParrot)",
    "elife": "eLife (not in the paper)",
    "book": "Dubliners (not in the paper)",
}
BAND = "Bands: the 95% interval over seeds where there are three, else over test samples."


def by_length(results: Results, suite: str, titles: dict[str, str], axis: str, lines: Callable = curves) -> list[Panel]:
    """A panel for each task of a suite that was run, and each size of model."""
    panels = []
    for size, systems in by_size(results.systems(suite)).items():
        for task, title in titles.items():
            found = lines(results, suite, f"{task}/{{}}", systems)
            if found:
                panels.append(Panel(f"{title}{size}", draw_curves(found, axis)))
    return panels


def by_size(systems: Sequence[System]) -> dict[str, list[System]]:
    """What a title must say of the size, if there are several: those that have it."""
    sizes = list(dict.fromkeys(system.size for system in systems))
    return {
        f", {scale_label(size)}" if len(sizes) > 1 else "": [s for s in systems if s.size == size] for size in sizes
    }


def extrapolation(results: Results) -> Figure | None:
    drawn = []

    def same_text(results: Results, suite: str, pattern: str, systems: Sequence[System]) -> list:
        """The sweep; but where windows were left out of it, each length reads other text: there the same tokens."""
        found = curves(results, suite, pattern, systems)
        sources = [source for _, _, estimates in found for estimate in estimates for source in estimate.sources]
        if any(source.content.get("quick_look") for source in sources):
            same = curves(results, suite, pattern.replace("/{}", "/same/{}"), systems)
            if [line[0] for line in same] == [line[0] for line in found] and all(len(line[1]) > 1 for line in same):
                drawn.append(pattern)
                return same
        return found

    panels = by_length(results, "length", CORPORA, "perplexity", same_text)
    if not panels:
        return None
    how = "The sweep of the paper's Figures 3 and 4; their values are not printed."
    if drawn:
        how += (
            " Where a model read only the first windows of each length, which is more text the longer they are: the "
            "same 2,048 tokens at every length, the last of each of the longest windows, given what stands before them."
        )
    return Figure(
        "extrapolation",
        "Perplexity past the training length",
        f"Lower is better. {how} {BAND}",
        panels,
        legend_of(results.systems("length")),
        alt="perplexity by length",
    )


NEEDLES = {
    "niah_single_1": "S-NIAH-1: pass-key",
    "niah_single_2": "S-NIAH-2: number",
    "niah_single_3": "S-NIAH-3: uuid",
    "niah_book": "number in a book (not RULER's)",
}


def needles(results: Results) -> Figure | None:
    panels = by_length(results, "niah", NEEDLES, "found, %")
    if not panels:
        return None
    systems = legend_of(results.systems("niah"))
    return Figure("needles", "Needles found, by length", f"Higher is better. {BAND}", panels, systems, alt="found")


def recall(results: Results) -> Figure | None:
    systems = [s for s in results.systems("mqar") if results.runs(s, "mqar")]
    if not systems:
        return None
    slices = list(dict.fromkeys(
        name for s in systems for run in results.runs(s, "mqar") for name in run.content["scores"] if name != "average"
    ))  # fmt: skip

    def draw(axes: Any, systems: list[System]) -> None:
        for system in systems:
            points = [results.estimate(system, f"mqar:{name}") for name in slices]
            known = [(at, e) for at, e in enumerate(points) if e is not None]
            axes.plot([at for at, _ in known], [e.value for _, e in known], **line_of(system))
        axes.set_xticks(range(len(slices)), [name.replace("-", "\n") for name in slices], fontsize=7)
        axes.set(xlabel="tokens, pairs", ylabel="keys answered, %", ylim=(0, 103))

    panels = [
        Panel(size.removeprefix(", "), functools.partial(draw, systems=mine)) for size, mine in by_size(systems).items()
    ]
    return Figure("recall", "Recall (MQAR), by slice", "Higher is better. Not in the paper.", panels,
                  legend_of(systems),
                  size=(5.2, 3.2), alt="recall by slice")  # fmt: skip


# -- training ----------------------------------------------------------------------------------------------------------


def training(found: Collection) -> Figure | None:
    runs = longest([run for run in found.of("run") if run.records])
    shown = {
        "valid_accuracy": ("Recall while training", "validation accuracy"),
        "valid_perplexity": ("Perplexity while training", "validation perplexity"),
    }
    panels: list[Panel] = []
    for size, systems in by_size(sorted({run.system for run in runs if run.system}, key=lambda s: s.order)).items():
        mine = [run for run in runs if run.system in systems]
        before = len(panels)
        for name, (title, ylabel) in shown.items():
            having = [run for run in mine if any(record.get(name) is not None for record in run.records)]
            if having:
                panels.append(Panel(f"{title}{size}", draw_course(having, name, ylabel)))
        if len(panels) == before:
            having = [run for run in mine if any(record.get("loss") is not None for record in run.records)]
            if having:
                panels.append(Panel(f"Loss while training{size}", draw_course(having, "loss", "loss")))
        gated = [run for run in mine if any(record.get("lam") for record in run.records)]
        if gated:
            panels.append(Panel(f"The gate{size}", draw_gate(gated)))
    if not panels:
        return None
    return Figure(
        "training", "Training", "The gate: mean lam over layers. Dotted: where weight decay of its bias alone, without "
        "any gradient, would carry it; a gate that follows it has not learned to open.", panels,
        legend_of(sorted({run.system for run in runs if run.system}, key=lambda s: s.order)), columns=2,
        size=(4.0, 2.9), alt="curves of training",
    )  # fmt: skip


def draw_course(runs: list[Source], name: str, ylabel: str) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for run in runs:
            assert run.system is not None
            points = [(r["step"], r[name]) for r in run.records if r.get(name) is not None]
            style = line_of(run.system) | {"ms": 3, "lw": 1.3}
            axes.plot(*zip(*points, strict=True), **style)
        axes.set(xlabel="step", ylabel=ylabel)
        if ylabel.endswith("perplexity"):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")

    return draw


def draw_gate(runs: list[Source]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for run in runs:
            assert run.system is not None
            steps = [r["step"] for r in run.records if r.get("lam")]
            lam = [r["lam"] if isinstance(r["lam"], list) else [r["lam"]] for r in run.records if r.get("lam")]
            means = [sum(x or 0 for x in row) / len(row) for row in lam]
            style = line_of(run.system) | {"lw": 1.5}
            axes.plot(steps, means, markevery=max(1, len(steps) // 8), **style)
            alone = [(r["step"], r["lam_of_decay_alone"]) for r in run.records if r.get("lam_of_decay_alone")]
            if alone:
                axes.plot(*zip(*alone, strict=True), color=style["color"], ls=":", lw=1.2)
        axes.set(xlabel="step", ylabel="mean lam", ylim=(0, None))

    return draw


# -- speed -------------------------------------------------------------------------------------------------------------


def throughput(found: Collection) -> Figure | None:
    """The paper's efficiency figure: tokens/s of training over the length of sequences, at constant tokens a step."""
    sources = found.of("bench", "train")
    if not sources:
        return None
    rows = sources[-1].content["rows"]

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(row["system"] for row in rows):
            system = System(name)
            points = sorted((row["length"], row["tokens_per_second"] / 1e3) for row in rows if row["system"] == name)
            axes.plot(*zip(*points, strict=True), **line_of(system))
        axes.set_xscale("log", base=2)
        ticks = sorted({row["length"] for row in rows})
        axes.set_xticks(ticks, [tokens_label(n) for n in ticks])
        axes.minorticks_off()
        axes.set(xlabel="tokens of a sequence", ylabel="thousand tokens/s", ylim=(0, None))

    return Figure("throughput", "Training throughput, one GPU",
                  f"{rows[0]['tokens']:,} tokens a step, {sources[-1].hardware}. The paper's Figure 5 has no printed "
                  "values.", [Panel("", draw)],
                  legend_of([System(name) for name in dict.fromkeys(row["system"] for row in rows)]),
                  size=(5.2, 3.2), alt="training throughput")  # fmt: skip


def overhead(bars: list[tuple[str, float | None, float | None]]) -> Figure | None:
    """What CCQ adds, in percent: (what, paper's, ours)."""
    if not any(ours is not None for _, _, ours in bars):
        return None

    def draw(axes: Any) -> None:
        places = np.arange(len(bars))[::-1]
        for shift, at, colour, label, hatch in ((0.19, 1, GREY, "the paper", "///"), (-0.19, 2, BLUE, "here", "")):
            known = [(place, bar[at]) for place, bar in zip(places, bars, strict=True) if bar[at] is not None]
            if not known:
                continue
            drawn = axes.barh(
                [place + shift for place, _ in known], [x for _, x in known], 0.36, label=label, color=colour,
                hatch=hatch, edgecolor=colour, fill=not hatch, lw=1,
            )  # fmt: skip
            axes.bar_label(drawn, fmt="%.1f%%", padding=3, fontsize=7.5)
        axes.set_yticks(places, [bar[0] for bar in bars])
        axes.set(xlabel="added by CCQ, %")
        axes.margins(x=0.18)
        axes.grid(axis="y", visible=False)
        axes.legend(loc="center right")

    return Figure(
        "overhead", "What CCQ costs", "Time that a token or step takes more with CCQ than without. The paper's is over "
        "its GLA without unit q and k; here over the backbone with unit q and k. Shorter is better.",
        [Panel("", draw)], size=(4.6, 0.42 * len(bars) + 1.0), alt="added time",
    )  # fmt: skip


# -- where keys lie ----------------------------------------------------------------------------------------------------

POINT, TOP = "projection", "16"  # the paper's way
GROUPS = {  # of tokens: what the page calls them, colour, line
    "distractor": ("distractors", GREY, "-"),
    "unique": ("needle, unique tokens", BLUE, "-"),
    "needle": ("needle, all tokens", SKY, "--"),
    "planted": ("control: planted, not asked for", RED, "-."),
}
PLACES = {"text": (GREY, "-"), "filler": (SKY, "--"), "retrieval": (RED, "-")}


def legend_of_groups(*groups: str) -> list[tuple[str, str, str, str]]:
    return [(*GROUPS[group], "") for group in groups]


def diagnostics(found: Collection, paper: Paper) -> list[Figure]:
    sources = [s for s in found.of("analysis", "alignment") if POINT in s.content["points"]]
    if not sources:
        return []
    depth, pooled, heads = [], [], []
    for source in sources:
        name, point = textwrap.fill(source.title, 36), source.content["points"][POINT]
        depth.append(Panel(name, draw_depth(point)))
        pooled.append(Panel(name, draw_histogram(point)))
        heads.append(Panel(name, draw_heads(point)))
    facts = paper.facts
    return [
        Figure("alignment_depth", "Gap of alignment, by depth",
               "Below zero: needle keys lie off the top 16 directions of the key covariance, which is what cleaning "
               f"assumes. The paper's means: −{-facts['gap_qwen3']['value']} (Qwen3-4B) and "
               f"−{-facts['gap_gated_deltanet']['value']} (Gated DeltaNet 500M). The control, equally rare tokens that "
               "no question asks for, shows how much of it is rarity. Band: deviation between prompts.", depth,
               legend_of_groups("unique", "needle", "planted"), size=(4.0, 2.9), alt="gap by layer"),
        Figure("alignment_tokens", "Alignment of tokens, all layers pooled",
               "Share of a key's centred energy in the top 16 directions.", pooled,
               legend_of_groups("distractor", "unique", "planted"), size=(4.0, 2.7),
               alt="histograms of alignment"),
        Figure("alignment_heads", "Gap by layer and head", "Blue: negative, as assumed; red: positive.", heads,
               size=(4.0, 3.6), alt="gap by layer and head"),
    ]  # fmt: skip


def known(values: list) -> np.ndarray:
    return np.array([np.nan if x is None else x for x in values], dtype=float)


def draw_depth(point: dict) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        axes.axhline(0, color=INK, lw=0.8)
        for group in ("unique", "needle", "planted"):
            _, colour, line = GROUPS[group]
            if group not in point["top"][TOP]:
                continue
            gap = point["top"][TOP][group]
            mean, spread = known(gap["by_layer"]), known(gap["deviation_by_layer"])
            axes.plot(point["layers"], mean, color=colour, ls=line, marker="o", ms=2.5, lw=1.5)
            if group == "unique":
                axes.fill_between(point["layers"], mean - spread, mean + spread, color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="layer", ylabel="gap")
        axes.xaxis.get_major_locator().set_params(integer=True)

    return draw


def draw_histogram(point: dict) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        counts = point["top"][TOP]["histogram"]
        for group in ("distractor", "unique", "planted"):
            _, colour, line = GROUPS[group]
            if group in counts:
                values = known(counts[group])
                axes.stairs(values / max(values.sum(), 1) * len(values), np.linspace(0, 1, len(values) + 1),
                            color=colour, ls=line, lw=1.5, fill=False)  # fmt: skip
        axes.set(xlabel="share in the top 16", ylabel="density", xlim=(0, 1))

    return draw


def draw_heads(point: dict) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        rows = point["top"][TOP]["unique"]["by_head"]
        widest = max(map(len, rows))
        table = np.array([[np.nan if x is None else x for x in row] + [np.nan] * (widest - len(row)) for row in rows])
        limit = float(np.nanmax(np.abs(table))) if np.isfinite(table).any() else 1.0
        image = axes.pcolormesh(table, cmap="RdBu_r", vmin=-limit, vmax=limit, edgecolors="none")
        axes.figure.colorbar(image, ax=axes, shrink=0.8)
        axes.set_xticks(np.arange(widest) + 0.5, [str(i) for i in range(widest)], fontsize=7)
        step = max(1, len(rows) // 8)
        axes.set_yticks(np.arange(0, len(rows), step) + 0.5, [str(x) for x in point["layers"][::step]], fontsize=7)
        axes.set(xlabel="head", ylabel="layer")
        axes.grid(visible=False)

    return draw


def gates(found: Collection) -> Figure | None:
    sources = once(s for s in found.of("analysis", "gate") if "lam" in s.content)
    if not sources:
        return None

    rows: dict[tuple, list[Source]] = {}  # runs that differ in the seed alone
    for source in sources:
        alone = source.path if source.seed is None else None  # two of one name need not be one model
        rows.setdefault((source.subject, tuple(source.content["layers"]), alone), []).append(source)

    def panel(seeds: list[Source]) -> Panel:
        def draw(axes: Any) -> None:
            for place, (colour, line) in PLACES.items():
                means = np.array([[sum(heads) / len(heads) for heads in s.content["lam"][place]] for s in seeds])
                if len(seeds) > 1:
                    axes.plot(seeds[0].content["layers"], means.T, color=colour, ls=line, lw=0.8, alpha=0.5)
                axes.plot(seeds[0].content["layers"], means.mean(0), color=colour, ls=line, marker="o", ms=3)
            axes.set(xlabel="layer", ylabel="mean lam", ylim=(0, 1.05))
            axes.xaxis.get_major_locator().set_params(integer=True)

        count = len({source.seed for source in seeds})
        return Panel(seeds[0].title if count == 1 else f"{seeds[0].subject}, {count} seeds", draw)

    texts = ", ".join(dict.fromkeys(text_of_gate(source) for source in sources))
    return Figure("gates", "How much is cleaned, by layer",
                  f"Mean gate over heads on text ({texts}), on the filler of needle prompts, and where a needle is "
                  "retrieved; thin: each seed. The paper: 0.29 on text, 0.40 at retrieval (mean over layers).",
                  [panel(seeds) for seeds in rows.values()],
                  [(place, *style, "o") for place, style in PLACES.items()], columns=2, size=(4.0, 2.8),
                  alt="gate by layer")  # fmt: skip
