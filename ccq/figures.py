"""Figures: how they are drawn and written, the lines of systems, and those of `ccq analyze`, which the report has too.

A figure has small panels: side by side on a wide screen, one below the other on a phone, one PNG as a file.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from ccq.systems import SYSTEMS, Identity

# Okabe and Ito's palette, told apart by all eyes; INK becomes the page's own text colour
INK, GREY = "#000000", "#7f7f7f"
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
BROWN, OLIVE = "#7a4a2b", "#8a8a00"  # two more than the palette has
COLOURS = {INK: "ink", BLUE: "blue", SKY: "sky", GREEN: "green", ORANGE: "orange", RED: "red", PURPLE: "purple",
           GREY: "grey", BROWN: "brown", OLIVE: "olive"}  # names in report/style.css  # fmt: skip
FAMILIES = {"gla": BLUE, "gated-deltanet": RED, "mamba2": PURPLE, "transformer": GREY, "linear-attention": GREEN,
            "retnet": SKY, "deltanet": ORANGE, "kda": BROWN, "mesa-30": OLIVE}  # fmt: skip
OTHERS = ((INK, "--"), (INK, ":"), (INK, "-."), (GREEN, "-."), (SKY, ":"))  # models that are not ours
Dashes = str | tuple[int, tuple[int, ...]]
# of variants, which keep the marker of their system, hollow
ASIDE: tuple[Dashes, ...] = (
    (0, (1, 1)), (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (5, 2, 2, 2)), (0, (2, 3)), (0, (9, 1, 1, 1)),
)  # fmt: skip
STYLE: dict = {
    "font.size": 9, "font.family": "sans-serif", "legend.frameon": False, "legend.fontsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5, "axes.titleweight": "bold",
    "axes.grid": True, "grid.color": GREY, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: smaller, and can be searched
    "svg.hashsalt": "ccq",
}  # fmt: skip
DPI = 160

Draw = Callable[[Any], None]  # on matplotlib's Axes
Line = tuple[str, str, Dashes, str]  # label, colour, dashes, marker


@dataclass
class Panel:
    title: str
    draw: Draw


@dataclass
class Figure:
    name: str
    title: str
    caption: str
    panels: list[Panel]
    legend: Sequence[Line] = ()
    columns: int = 3
    size: tuple[float, float] = (3.4, 2.6)  # of a panel, inches


def line_of(row: Identity) -> dict[str, Any]:
    """One colour a family; dashes and marker tell its systems apart, other dashes and a hollow marker a variant."""
    picked = sum(map(ord, row.variant or row.system))  # the same on every machine
    dashes: Dashes
    if row.system in SYSTEMS:
        colour, (dashes, marker) = FAMILIES[SYSTEMS[row.system].family], SYSTEMS[row.system].line
    else:
        (colour, dashes), marker = OTHERS[picked % len(OTHERS)], "p"
    if row.variant:
        dashes = ASIDE[picked % len(ASIDE)]
    fill = "none" if row.variant else "full"
    return {"color": colour, "ls": dashes, "marker": marker, "fillstyle": fill, "ms": 4, "lw": 1.6}


def legend_of(rows: Sequence[Identity]) -> list[Line]:
    """Sizes have panels of their own: a label does not say them."""
    lines = [(row.label, line_of(row)) for row in sorted(rows, key=lambda row: row.order[1:])]
    return list(dict.fromkeys((label, line["color"], line["ls"], line["marker"]) for label, line in lines))


# -- how a figure is written -------------------------------------------------------------------------------------------


def svg(panel: Panel, size: tuple[float, float]) -> str:
    """One panel as SVG text."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout=ConstrainedLayoutEngine(), facecolor="none")
        axes = canvas.subplots()
        axes.set_facecolor("none")
        panel.draw(axes)
        axes.set_title(textwrap.fill(panel.title, 44))
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def inline(text: str, prefix: str, alt: str) -> str:
    """SVG for an HTML page: no prologue, names of its own, colours of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for name in (r'\bid="', 'href="#', r"url\(#"):
        text = re.sub(f"({name})", rf"\1{prefix}-", text)
    for colour, name in COLOURS.items():
        text = re.sub(colour, f"var(--{name})", text, flags=re.IGNORECASE)
    # what matplotlib leaves black by saying nothing
    text = text.replace('<text style="', '<text style="fill: var(--ink); ')
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{alt}">', text)
    return re.sub(r"\n\s*", "\n", text)


def sample(line: Line) -> str:
    """A line of the legend as a small SVG in the colours of the page."""
    from matplotlib.markers import MarkerStyle

    _, colour, dashes, marker = line
    named = {"--": (6, 3), ":": (2, 3), "-.": (7, 3, 2, 3), "-": ()}
    variant = not isinstance(dashes, str)
    dash = " ".join(map(str, dashes[1] if not isinstance(dashes, str) else named[dashes]))
    style = MarkerStyle(marker)
    path: Any = style.get_path().transformed(style.get_transform()).to_polygons(closed_only=False) if marker else []
    shape = " ".join("M" + "L".join(f"{17 + 7 * x:.1f} {6 - 7 * y:.1f}" for x, y in part) for part in path)
    return (
        f'<svg viewBox="0 0 34 12" width="34" height="12" aria-hidden="true" style="color: var(--{COLOURS[colour]})" '
        f'stroke="currentColor" fill="{"none" if variant or not style.is_filled() else "currentColor"}">'
        f'<path d="M1 6L33 6" stroke-width="2" stroke-dasharray="{dash or "none"}"/><path d="{shape}"/></svg>'
    )


def save(figure: Figure, path: Path) -> Path:
    """All panels as one PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = min(figure.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    width, height = figure.size
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(columns * width, rows * height), layout=ConstrainedLayoutEngine())
        grid = list(canvas.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(grid, figure.panels, strict=False):
            panel.draw(axes)
            axes.set_title(textwrap.fill(panel.title, 44))
        for axes in grid[len(figure.panels) :]:
            axes.set_visible(False)
        if figure.legend:
            lines = [Line2D([], [], color=c, ls=dashes, marker=marker, ms=4,
                            fillstyle="full" if isinstance(dashes, str) else "none")
                     for _, c, dashes, marker in figure.legend]  # fmt: skip
            labels = [entry[0] for entry in figure.legend]
            for across in range(len(labels), 0, -1):  # as many beside each other as fit
                legend = canvas.legend(lines, labels, loc="outside lower center", ncols=across)
                if legend.get_window_extent().width <= canvas.bbox.width or across == 1:
                    break
                legend.remove()
            canvas.set_figheight(rows * height + 0.16 * (-(-len(labels) // across) - 1))
        canvas.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


# -- what `ccq analyze` found ------------------------------------------------------------------------------------------

TOP = "16"  # of the numbers of top directions: the paper's
GROUPS = {  # of tokens: label, colour, dashes
    "distractor": ("distractors", GREY, "-"),
    "unique": ("needle, unique tokens", BLUE, "-"),
    "needle": ("needle, all tokens", SKY, "--"),
    "planted": ("control: such things, not asked for", RED, "-."),
    "near": ("control: filler around the needle", GREEN, "-."),
    "rare": ("control: rare tokens of the filler", ORANGE, ":"),
}
PLACES = {"text": (GREY, "-"), "filler": (SKY, "--"), "needle": (GREEN, "--"), "question": (ORANGE, ":"),
          "retrieval": (RED, "-")}  # fmt: skip


def of_analysis(result: dict) -> list[Figure]:
    """The figures of one result file."""
    name = result["model"]["name"]
    if result["kind"] == "alignment":
        return of_alignment([(f"{name}, keys {point['what']}", point) for point in result["points"].values()])
    if result["kind"] == "margin":
        tables = [
            (f"{what}{step}", grid(result[f"{key}_{measure}"]))
            for key, step in (("shift", ""), ("projected_shift", ", projected step"))
            for what, measure in (("mean less mean", "mean"), ("best less best", "best"))
            if f"{key}_{measure}" in result
        ]
        panels = [Panel(what, partial(heat, table, result["layers"], digits=3)) for what, table in tables]
        title = f"{name}: change of the needle's margin by cleaning"
        return [Figure("", title, "Red: wider.", panels, columns=2, size=heat_size([table for _, table in tables]))]
    figures = []
    if "lam" in result:
        figures.append(of_gates([(name, [result])], tuple(PLACES)))
        figures[0].panels += [
            Panel(f"lam at {place}", partial(heat, lam, result["layers"], colours="viridis", low=0.0))
            for place, lam in ((place, grid(result["lam"][place])) for place in ("text", "retrieval"))
        ]
        if "angle" in result:
            figures[0].panels.append(Panel("how far q is turned", partial(of_angles, result)))
    if "training" in result:
        panel = Panel(f"{name}: lam over training", partial(of_layers, result["training"]))
        figures.append(Figure("training", panel.title, "", [panel], size=(6, 3.6)))
    return figures


def of_alignment(points: Sequence[tuple[str, dict]]) -> list[Figure]:
    """The paper's three figures, and the spectrum of Sigma: a panel each for keys caught somewhere in some model."""
    heads = [grid(point["top"][TOP]["unique"]["by_head"]) for _, point in points]

    def made(name: str, title: str, caption: str, draw: Callable, groups: Sequence[str] = ()) -> Figure:
        legend = [(*GROUPS[group], "") for group in groups]
        return Figure(
            name, title, caption, [Panel(what, partial(draw, point)) for what, point in points], legend, size=(4.0, 2.9)
        )

    groups = ("unique", "needle", "planted", "near", "rare")
    return [
        made("depth", "Gap of alignment, by depth", "Below zero: needle keys lie off the top 16 directions of the key "
             "covariance, which is what cleaning assumes. Band: deviation between prompts.", depth, groups),
        made("histogram", "Alignment of tokens, all layers pooled", "Share of a key's centred energy in the top 16 "
             "directions. Dotted: keys without structure.", histogram, ("distractor", "unique", "planted")),
        Figure("heads", "Gap by layer and head", "Blue: negative, as assumed; red: positive.",
               [Panel(what, partial(heat, table, point["layers"]))
                for (what, point), table in zip(points, heads, strict=True)],
               size=heat_size(heads)),
        made("spectrum", "Spectrum of Sigma, mean over heads and prompts", "Dotted: isotropic keys; dashed: the top "
             "16. Dark: the first layers.", spectrum),
    ]  # fmt: skip


def numbers(values: Any) -> np.ndarray:
    """null is NaN, which is not drawn."""
    return np.array(values, dtype=np.float64)


def grid(rows: list[list]) -> np.ndarray:
    """Rows of one length, for layers that differ in their heads."""
    longest = max(map(len, rows))
    return numbers([row + [None] * (longest - len(row)) for row in rows])


def whole(axes: Any) -> None:
    """Ticks at layers, not between them."""
    axes.xaxis.get_major_locator().set_params(integer=True)


def depth(point: dict, axes: Any) -> None:
    axes.axhline(0, color=INK, lw=0.8)
    part, layers = point["top"][TOP], point["layers"]
    for group in ("unique", "needle", "planted", "near", "rare"):
        if group in part:
            _, colour, dashes = GROUPS[group]
            gap = numbers(part[group]["by_layer"])
            axes.plot(layers, gap, color=colour, ls=dashes, marker="o", ms=2.5, lw=1.5)
            if group == "unique":
                band = numbers(part[group]["deviation_by_layer"])
                axes.fill_between(layers, gap - band, gap + band, color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="layer", ylabel="gap to all distractors")
    whole(axes)


def histogram(point: dict, axes: Any) -> None:
    part = point["top"][TOP]
    for group in ("distractor", "unique", "planted"):
        if group in part["histogram"]:
            _, colour, dashes = GROUPS[group]
            counts = numbers(part["histogram"][group])
            density = counts / max(counts.sum(), 1) * len(counts)
            axes.stairs(density, np.linspace(0, 1, len(counts) + 1), color=colour, ls=dashes, lw=1.5)
    shares = part["of_isotropic_keys"]
    for share in shares if isinstance(shares, list) else [shares]:
        axes.axvline(share, color=INK, ls=":", lw=1)
    axes.set(xlabel="share in the top 16", ylabel="density", xlim=(0, 1))


def heat_size(tables: Sequence[np.ndarray]) -> tuple[float, float]:
    """Of a panel that has room for the largest."""
    rows, columns = (max(table.shape[at] for table in tables) for at in (0, 1))
    return min(7.0, max(3.4, 0.42 * columns + 1.4)), min(7.0, max(2.6, 0.2 * rows + 1.4))


def heat(
    table: np.ndarray, layers: list[int], axes: Any, colours: str = "RdBu_r", low: float | None = None, digits: int = 2
) -> None:
    """Rows are layers, the deepest on top; columns heads; colours from `low` to the largest, else alike about zero."""
    limit = (float(np.nanmax(np.abs(table))) if np.isfinite(table).any() else 0.0) or 1.0
    image = axes.pcolormesh(table, cmap=colours, vmin=-limit if low is None else low, vmax=limit, edgecolors="none")
    if table.shape[1] <= 16 and len(layers) <= 32:
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "#010101"  # not the page's ink
                axes.text(column + 0.5, row + 0.5, f"{value:.{digits}f}", ha="center", va="center", fontsize=5.5,
                          color=colour)  # fmt: skip
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    axes.set_xticks(np.arange(table.shape[1]) + 0.5, [str(head) for head in range(table.shape[1])], fontsize=7)
    step = max(1, len(layers) // 12)
    axes.set_yticks(np.arange(0, len(layers), step) + 0.5, [str(layer) for layer in layers[::step]], fontsize=7)
    axes.set(xlabel="head", ylabel="layer")
    axes.grid(visible=False)


def spectrum(point: dict, axes: Any) -> None:
    colours, layers = matplotlib.colormaps["viridis"], point["layers"]
    for layer, values in zip(layers, point["spectrum"]["by_layer"], strict=True):
        axes.plot(range(1, len(values) + 1), values, color=colours(0.9 * layer / max(1, max(layers))), lw=0.9)
    for size in point["head_sizes"]:
        axes.axhline(1 / size, color=INK, ls=":", lw=1)
    axes.axvline(int(TOP), color=GREY, lw=0.8, ls="--")
    axes.set(xscale="log", yscale="log", xlabel="eigenvalue of Sigma, by rank", ylabel="share of the trace")
    ticks = [2**i for i in range(7)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def of_gates(groups: Sequence[tuple[str, list[dict]]], places: Sequence[str]) -> Figure:
    """lam by layer: a panel a model, thin lines its seeds."""

    def draw(seeds: list[dict], axes: Any) -> None:
        layers = seeds[0]["layers"]
        for place in places:
            colour, dashes = PLACES[place]
            means = np.array([[np.mean(heads) for heads in seed["lam"][place]] for seed in seeds])
            if len(seeds) > 1:
                axes.plot(layers, means.T, color=colour, ls=dashes, lw=0.8, alpha=0.5)
            axes.plot(layers, means.mean(0), color=colour, ls=dashes, marker="o", ms=3)
        if len(seeds) == 1 and all(seeds[0].get("of_bias") or [None]):
            axes.plot(layers, [np.mean(row) for row in seeds[0]["of_bias"]], "_", color=INK, ms=9)
        axes.set(xlabel="layer", ylabel="mean lam", ylim=(0, 1.05))
        whole(axes)

    caption = "Mean gate over heads; thin: each seed; _ : sigmoid of the bias alone."
    legend = [(place, *PLACES[place], "o") for place in places]
    panels = [Panel(title, partial(draw, seeds)) for title, seeds in groups]
    return Figure("layers", "How much is cleaned, by layer", caption, panels, legend, size=(4.0, 2.8))


def of_angles(result: dict, axes: Any) -> None:
    """The angle between q and q_clean by layer: median and 95%."""
    for place in ("text", "retrieval"):
        colour, dashes = PLACES[place]
        angle = result["angle"][place]
        axes.plot(result["layers"], angle["median"], color=colour, ls=dashes, marker="o", ms=3)
        axes.fill_between(result["layers"], angle["median"], angle["high"], color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="layer", ylabel="degrees: median, up to 95%", ylim=(0, None))
    whole(axes)


def of_layers(training: dict, axes: Any) -> None:
    """lam of each layer over training, and where weight decay alone would carry it."""
    lam, colours = numbers(training["lam"]), matplotlib.colormaps["viridis"]
    last = lam.shape[1] - 1
    for layer in range(last + 1):
        label = f"layer {layer}" if layer in (0, last) else None
        axes.plot(training["step"], lam[:, layer], color=colours(0.9 * layer / max(1, last)), lw=1, label=label)
    if training["decay_alone"] is not None:
        axes.plot(training["step"], training["decay_alone"], "--", color=RED, lw=2, label="weight decay alone")
    axes.set(xlabel="step", ylabel="mean lam", ylim=(0, None))
    axes.legend()
