"""Figures: how they are drawn and written, the lines of systems, and those of `ccq analyze`, which the report has too.

A figure has small panels: side by side on a wide screen, one below the other on a phone, one PNG as a file.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from ccq.systems import SYSTEMS, Identity

# Okabe and Ito's palette, told apart by all eyes; INK becomes the page's own text colour
INK, GREY = "#000000", "#7f7f7f"
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
BROWN, OLIVE = "#7a4a2b", "#8a8a00"  # two more than the palette has
NAMES = {INK: "ink", BLUE: "blue", SKY: "sky", GREEN: "green", ORANGE: "orange", RED: "red", PURPLE: "purple",
         GREY: "grey", BROWN: "brown", OLIVE: "olive"}  # in report/style.css  # fmt: skip
FAMILIES = {"gla": BLUE, "gated-deltanet": RED, "mamba2": PURPLE, "transformer": GREY, "linear-attention": GREEN,
            "retnet": SKY, "deltanet": ORANGE, "kda": BROWN, "mesa-30": OLIVE}  # fmt: skip
# of rows of a family in turn: its colour itself, nearer to the ink, nearer to the page; and what they are on the page
MIXED = ((1.0, "ink", 0.0), (0.5, "ink", 0.0), (0.62, "page", 1.0))
TONES = {
    colour: [to_hex(tuple(share * x + (1 - share) * other for x in to_rgb(colour))) for share, _, other in MIXED]  # type: ignore[arg-type]
    for colour in NAMES
}
ON_PAGE = {
    tone: f"color-mix(in srgb, var(--{name}) {share:.0%}, var(--{other}))" if share < 1 else f"var(--{name})"
    for colour, name in reversed(NAMES.items())  # ink itself last: it has no darker tone
    for tone, (share, other, _) in reversed(list(zip(TONES[colour], MIXED, strict=True)))
}
DASHES: tuple[Any, ...] = (
    (0, (1, 1)), (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (5, 2, 2, 2)), (0, (2, 3)), (0, (9, 1, 1, 1)),
)  # fmt: skip
STYLE: dict = {
    "font.size": 9, "font.family": "sans-serif", "legend.frameon": False, "legend.fontsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5, "axes.titleweight": "bold",
    "axes.grid": True, "grid.color": GREY, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: smaller, and can be searched
    "svg.hashsalt": "ccq",
}  # fmt: skip

Draw = Callable[[Any], None]  # on matplotlib's Axes
Lines = dict[str, dict[str, Any]]  # label: matplotlib's options of a line


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
    legend: Lines = field(default_factory=dict)
    columns: int = 3
    size: tuple[float, float] = (3.4, 2.6)  # of a panel, inches


def lines_of(rows: Iterable[Identity]) -> Lines:
    """One colour a family; the rows of a variant take its tones in turn, and each row dashes that no other has, its
    system's if they are free. A variant keeps the marker of its system, hollow.

    Sizes have panels of their own: a label does not say them.
    """
    lines: Lines = {}
    used: Counter = Counter()  # tones of a variant, dashes of a family and of a tone
    for row in sorted({row.label: row for row in rows}.values(), key=lambda row: row.order[1:]):
        known = SYSTEMS.get(row.system)
        family, (own, marker) = (known.family, known.line) if known else ("", ("--", "p"))
        colour = TONES[FAMILIES.get(family, INK)][used[family, row.variant] % len(MIXED)]
        free = enumerate(DASHES if row.variant else (own, *DASHES))
        *_, dashes = min((used[colour, each], used[family, each], at, each) for at, each in free)
        used.update([(family, row.variant), (family, dashes), (colour, dashes)])
        lines[row.label] = {"color": colour, "ls": dashes, "marker": marker, "ms": 4, "lw": 1.6,
                            "fillstyle": "none" if row.variant else "full"}  # fmt: skip
    return lines


def draw(panel: Panel, axes: Any) -> None:
    panel.draw(axes)
    axes.set_title(textwrap.fill(panel.title, 44))


def svg(panel: Panel, size: tuple[float, float], prefix: str, alt: str) -> str:
    """One panel as SVG for an HTML page: no prologue, names of its own, colours of the page."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout=ConstrainedLayoutEngine(), facecolor="none")
        axes = canvas.subplots()
        axes.set_facecolor("none")
        draw(panel, axes)
    return inline(canvas, prefix, f'role="img" aria-label="{alt}"')


def sample(style: dict[str, Any], prefix: str) -> str:
    """A line of the legend as a small SVG."""
    canvas = Canvas(figsize=(0.5, 0.17), facecolor="none")
    canvas.add_artist(Line2D([0.02, 0.5, 0.98], [0.5] * 3, markevery=[1], **style))
    return inline(canvas, prefix, 'width="36" height="12" aria-hidden="true"')


def inline(canvas: Canvas, prefix: str, attributes: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        canvas.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue().partition("<svg")[2]
    text = re.sub(r'[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" {attributes}>', text, count=1)
    for name in (r'\bid="', 'href="#', r"url\(#"):
        text = re.sub(f"({name})", rf"\1{prefix}-", text)
    for colour, name in ON_PAGE.items():
        text = text.replace(colour, name)
    # what matplotlib leaves black by saying nothing
    text = text.replace('<text style="', '<text style="fill: var(--ink); ')
    return re.sub(r"\n\s*", "\n", text)


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
            draw(panel, axes)
        for axes in grid[len(figure.panels) :]:
            axes.set_visible(False)
        if figure.legend:
            lines = [Line2D([], [], **style | {"ms": 4}) for style in figure.legend.values()]
            for across in range(len(lines), 0, -1):  # as many beside each other as fit
                legend = canvas.legend(lines, list(figure.legend), loc="outside lower center", ncols=across)
                if legend.get_window_extent().width <= canvas.bbox.width or across == 1:
                    break
                legend.remove()
            canvas.set_figheight(rows * height + 0.16 * (-(-len(lines) // across) - 1))
        canvas.savefig(path, dpi=160, metadata={"Software": None})
    return path


TOP = "16"  # of the numbers of top directions: the paper's
GAPS, POOLED = ("unique", "needle", "planted", "near", "rare"), ("distractor", "unique", "planted")
GROUPS = {  # of tokens
    "distractor": ("distractors", {"color": GREY, "ls": "-"}),
    "unique": ("needle, unique tokens", {"color": BLUE, "ls": "-"}),
    "needle": ("needle, all tokens", {"color": SKY, "ls": "--"}),
    "planted": ("control: such things, not asked for", {"color": RED, "ls": "-."}),
    "near": ("control: filler around the needle", {"color": GREEN, "ls": "-."}),
    "rare": ("control: rare tokens of the filler", {"color": ORANGE, "ls": ":"}),
}
PLACES: Lines = {
    "text": {"color": GREY, "ls": "-"}, "filler": {"color": SKY, "ls": "--"}, "needle": {"color": GREEN, "ls": "--"},
    "question": {"color": ORANGE, "ls": ":"}, "retrieval": {"color": RED, "ls": "-"},
}  # fmt: skip


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
    figure = of_gates([(name, [result])], tuple(PLACES))
    figure.panels += [
        Panel(f"lam at {place}", partial(heat, lam, result["layers"], colours="viridis", low=0.0))
        for place, lam in ((place, grid(result["lam"][place])) for place in ("text", "retrieval"))
    ]
    figure.panels.append(Panel("how far q is turned", partial(of_angles, result)))
    return [figure]


def of_alignment(points: Sequence[tuple[str, dict]]) -> list[Figure]:
    """The paper's three figures, and the spectrum of Sigma: a panel each for keys caught somewhere in some model."""
    heads = [grid(point["top"][TOP]["unique"]["by_head"]) for _, point in points]

    def made(name: str, title: str, caption: str, draw: Callable, groups: Sequence[str] = ()) -> Figure:
        panels = [Panel(what, partial(draw, point)) for what, point in points]
        return Figure(name, title, caption, panels, dict(GROUPS[group] for group in groups), size=(4.0, 2.9))

    return [
        made("depth", "Gap of alignment, by depth", "Below zero: needle keys lie off the top 16 directions of the key "
             "covariance, which is what cleaning assumes. Band: deviation between prompts.", depth, GAPS),
        made("histogram", "Alignment of tokens, all layers pooled", "Share of a key's centred energy in the top 16 "
             "directions. Dotted: keys without structure.", histogram, POOLED),
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
    for group in GAPS:
        if group in part:
            gap = numbers(part[group]["by_layer"])
            axes.plot(layers, gap, marker="o", ms=2.5, lw=1.5, **GROUPS[group][1])
            if group == "unique":
                band = numbers(part[group]["deviation_by_layer"])
                axes.fill_between(layers, gap - band, gap + band, color=BLUE, alpha=0.15, lw=0)
    axes.set(xlabel="layer", ylabel="gap to all distractors")
    whole(axes)


def histogram(point: dict, axes: Any) -> None:
    part = point["top"][TOP]
    for group in POOLED:
        if group in part["histogram"]:
            counts = numbers(part["histogram"][group])
            density = counts / max(counts.sum(), 1) * len(counts)
            axes.stairs(density, np.linspace(0, 1, len(counts) + 1), lw=1.5, **GROUPS[group][1])
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
    legend = {place: PLACES[place] | {"marker": "o", "ms": 3} for place in places}

    def draw(seeds: list[dict], axes: Any) -> None:
        layers = seeds[0]["layers"]
        for place, style in legend.items():
            means = np.array([[np.mean(heads) for heads in seed["lam"][place]] for seed in seeds])
            if len(seeds) > 1:
                axes.plot(layers, means.T, lw=0.8, alpha=0.5, **PLACES[place])
            axes.plot(layers, means.mean(0), **style)
        if len(seeds) == 1 and all(seeds[0].get("of_bias") or [None]):
            axes.plot(layers, [np.mean(row) for row in seeds[0]["of_bias"]], "_", color=INK, ms=9)
        axes.set(xlabel="layer", ylabel="mean lam", ylim=(0, 1.05))
        whole(axes)

    caption = "Mean gate over heads; thin: each seed; _ : sigmoid of the bias alone."
    panels = [Panel(title, partial(draw, seeds)) for title, seeds in groups]
    return Figure("layers", "How much is cleaned, by layer", caption, panels, legend, size=(4.0, 2.8))


def of_angles(result: dict, axes: Any) -> None:
    """The angle between q and q_clean by layer: median and 95%."""
    for place in ("text", "retrieval"):
        style, angle = PLACES[place], result["angle"][place]
        axes.plot(result["layers"], angle["median"], marker="o", ms=3, **style)
        axes.fill_between(result["layers"], angle["median"], angle["high"], color=style["color"], alpha=0.15, lw=0)
    axes.set(xlabel="layer", ylabel="degrees: median, up to 95%", ylim=(0, None))
    whole(axes)
