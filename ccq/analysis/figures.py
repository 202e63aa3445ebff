"""Figures of the analyses, each drawn from a result alone, as PNG and SVG."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's: told apart by all eyes
BLUE, RED, GREEN, ORANGE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#7f7f7f"
STYLE: dict = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "ccq",
    "svg.fonttype": "none",  # text stays text: smaller, and can be searched
}
DIVERGING = "RdBu_r"  # blue: negative, red: positive; keeps its order for red-green blind eyes
SHOWN = "16"  # of the numbers of top directions
LINES = {  # group: (label, colour, line)
    "unique": ("needle, unique tokens", BLUE, "-"),
    "needle": ("needle, all tokens", BLUE, "--"),
    "planted": ("control: such things, not asked for", RED, "-"),
    "near": ("control: filler around the needle", GREEN, "-."),
    "rare": ("control: rare tokens of the filler", ORANGE, ":"),
}


@contextlib.contextmanager
def drawing(width: float, height: float, path: Path) -> Iterator[Figure]:
    """A figure that is saved as path.png and path.svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine())
        yield figure
        figure.savefig(path.with_suffix(".png"), dpi=160)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def alignment(result: dict, folder: Path, stem: str) -> list[Path]:
    """The paper's three figures, and the spectrum of Sigma; the paths of the PNG files."""
    paths = []
    for name, draw in (("depth", depth), ("histogram", histogram), ("heads", heads), ("spectrum", spectrum)):
        path = folder / f"{stem}_{name}"
        draw(result, path)
        paths.append(path.with_suffix(".png"))
    return paths


def numbers(values: Any) -> np.ndarray:
    """null is NaN, which is not drawn."""
    return np.array(values, dtype=np.float64)


def title(result: dict, what: str) -> str:
    return f"{result['model']['name']}: {what}"


def isotropic(part: dict) -> str:
    share = part["of_isotropic_keys"]
    text = ", ".join(f"{x:.2f}" for x in (share if isinstance(share, list) else [share]))
    return f"top {'/'.join(map(str, part['directions']))} directions; keys without structure: {text}"


def depth(result: dict, path: Path) -> None:
    points = result["points"]
    with drawing(4.2 * len(points), 3.9, path) as figure:
        panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
        for axes, content in zip(panels, points.values(), strict=True):
            part, layers = content["top"][SHOWN], content["layers"]
            axes.axhline(0, color="black", lw=0.8)
            for group, (label, colour, line) in LINES.items():
                mean = numbers(part[group]["by_layer"])
                axes.plot(layers, mean, line, color=colour, lw=1.6, label=label, marker="o", ms=2.5)
                if group == "unique":
                    band = numbers(part[group]["deviation_by_layer"])
                    axes.fill_between(layers, mean - band, mean + band, color=colour, alpha=0.15, lw=0)
            axes.set_title(f"keys {content['what']}\n{isotropic(part)}", fontsize=8.5)
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("gap to all distractors")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(title(result, "gap of alignment by depth (band: deviation between prompts)"), fontsize=10)


def histogram(result: dict, path: Path) -> None:
    points = result["points"]
    shown = {
        "distractor": ("distractors", GREY),
        "unique": ("needle, unique tokens", BLUE),
        "planted": ("control: planted", RED),
    }
    with drawing(4.2 * len(points), 3.3, path) as figure:
        panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
        for axes, content in zip(panels, points.values(), strict=True):
            part = content["top"][SHOWN]
            for group, (label, colour) in shown.items():
                counts = numbers(part["histogram"][group])
                edges = np.linspace(0, 1, len(counts) + 1)
                density = counts / max(counts.sum(), 1) * len(counts)
                axes.stairs(density, edges, color=colour, lw=1.6, label=label, fill=False)
                if group == "distractor":
                    axes.stairs(density, edges, color=colour, alpha=0.3, fill=True, lw=0)
            share = part["of_isotropic_keys"]
            for x in share if isinstance(share, list) else [share]:
                axes.axvline(x, color="black", ls=":", lw=1, label="keys without structure")
            axes.set_title(f"keys {content['what']}", fontsize=8.5)
            axes.set(xlabel=f"share of energy in the top {'/'.join(map(str, part['directions']))}", xlim=(0, 1))
        panels[0].set_ylabel("density over layers, heads, prompts")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(title(result, "alignment of tokens"), fontsize=10)


def heads(result: dict, path: Path) -> None:
    points = result["points"]
    tables = [numbers(grid(content["top"][SHOWN]["unique"]["by_head"])) for content in points.values()]
    limit = max((float(np.nanmax(np.abs(table))) for table in tables if np.isfinite(table).any()), default=1.0)
    rows, columns = max(table.shape[0] for table in tables), max(table.shape[1] for table in tables)
    width = min(14.0, len(points) * max(2.4, 0.42 * columns + 1.0) + 1.0)
    with drawing(width, max(2.6, 0.2 * rows + 1.4), path) as figure:
        panels = figure.subplots(1, len(points), squeeze=False)[0]
        for axes, content, table in zip(panels, points.values(), tables, strict=True):
            image = heat(axes, table, content["layers"], limit, annotate=columns <= 16)
            axes.set_title(
                content["what"].replace(" read", "\nread").replace(" projection", "\nprojection"), fontsize=8
            )
        panels[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(panels), shrink=0.8, label="gap (blue: off the top directions)")
        figure.suptitle(title(result, "gap by layer and head"), fontsize=10)


def heat(
    axes: Any,
    table: np.ndarray,
    layers: list[int],
    limit: float,
    annotate: bool,
    colours: str = DIVERGING,
    low: float | None = None,
    digits: int = 2,
) -> Any:
    """Rows are layers, the deepest on top; columns heads; colours from `low` (or -limit) to limit."""
    low = -limit if low is None else low
    image = axes.imshow(table, cmap=colours, vmin=low, vmax=limit, aspect="auto", origin="lower")
    if annotate:
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                colour = "white" if dark else "black"
                axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=5.5, color=colour)
    step = max(1, len(layers) // 12)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_xticks(range(table.shape[1]), [str(head) for head in range(table.shape[1])], fontsize=6)
    axes.set_xlabel("head")
    for side in axes.spines.values():
        side.set_visible(False)
    return image


def grid(rows: list[list]) -> list[list]:
    """Rows of one length, for layers that differ in their heads."""
    longest = max(map(len, rows))
    return [row + [None] * (longest - len(row)) for row in rows]


def spectrum(result: dict, path: Path) -> None:
    points = result["points"]
    with drawing(4.2 * len(points), 3.5, path) as figure:
        panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
        colours = matplotlib.colormaps["viridis"]
        for axes, content in zip(panels, points.values(), strict=True):
            layers = content["layers"]
            for layer, values in zip(layers, content["spectrum"]["by_layer"], strict=True):
                depth = layer / max(1, max(layers))
                axes.plot(range(1, len(values) + 1), values, color=colours(0.9 * depth), lw=0.9)
            for size in content["head_sizes"]:
                axes.axhline(1 / size, color="black", ls=":", lw=1)
                axes.annotate(f"isotropic: 1/{size}", (1, 1 / size), (0, 3), textcoords="offset points", fontsize=7)
            axes.axvline(16, color=GREY, lw=0.8, ls="--")
            axes.set(xscale="log", yscale="log", xlabel="eigenvalue of Sigma, by rank")
            ticks = [2**i for i in range(7)]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xticks([], minor=True)
            axes.set_title(f"keys {content['what']}", fontsize=8.5)
        panels[0].set_ylabel("share of the trace")
        last = max(max(content["layers"]) for content in points.values())
        scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, last), colours)
        figure.colorbar(scale, ax=list(panels), label="layer", shrink=0.8, ticks=MaxNLocator(integer=True))
        figure.suptitle(title(result, "spectrum of Sigma, mean over heads and prompts"), fontsize=10)


def gate(result: dict, folder: Path, stem: str) -> list[Path]:
    """lam by layer and place, by layer and head, and over training: what of it the result has."""
    paths = []
    if "lam" in result:
        path = folder / f"{stem}_layers"
        shown = {"text": (GREY, "-"), "needle": (GREEN, "--"), "question": (ORANGE, ":"), "retrieval": (BLUE, "-")}
        with drawing(9.5, 3.8, path) as figure:
            lines, text, retrieval = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
            for place, (colour, line) in shown.items():
                mean = [np.mean(row) for row in result["lam"][place]]
                lines.plot(result["layers"], mean, line, color=colour, marker="o", ms=3, label=place)
            if all(result["of_bias"]):
                bias = [np.mean(row) for row in result["of_bias"]]
                lines.plot(result["layers"], bias, "_", color="black", ms=9, label="sigmoid(bias) alone")
            lines.set(xlabel="layer", ylabel="mean lam", ylim=(0, 1.05 * lines.dataLim.ymax))
            lines.xaxis.set_major_locator(MaxNLocator(integer=True))
            lines.legend(frameon=False, fontsize=8)
            top = max(np.max(row) for place in ("text", "retrieval") for row in result["lam"][place])
            for axes, place in ((text, "text"), (retrieval, "retrieval")):
                table = numbers(grid(result["lam"][place]))
                image = heat(axes, table, result["layers"], top, table.shape[1] <= 16, "viridis", 0.0)
                axes.set_title(f"lam at {place}", fontsize=8.5)
            figure.colorbar(image, ax=[text, retrieval], shrink=0.8, label="lam")
            figure.suptitle(title(result, "how much is cleaned"), fontsize=10)
        paths.append(path.with_suffix(".png"))
    if "training" in result:
        path = folder / f"{stem}_training"
        training = result["training"]
        with drawing(6, 3.6, path) as figure:
            axes = figure.subplots()
            lam = numbers(training["lam"])
            colours = matplotlib.colormaps["viridis"]
            for layer in range(lam.shape[1]):
                depth = layer / max(1, lam.shape[1] - 1)
                ends = layer in (0, lam.shape[1] - 1)
                label = f"layer {layer}" if ends else None
                axes.plot(training["step"], lam[:, layer], color=colours(0.9 * depth), lw=1, label=label)
            if training["decay_alone"] is not None:
                axes.plot(training["step"], training["decay_alone"], "--", color=RED, lw=2, label="weight decay alone")
            axes.set(xlabel="step", ylabel="mean lam", ylim=(0, None))
            axes.legend(frameon=False, fontsize=8)
            axes.set_title(title(result, "lam over training"), fontsize=10)
        paths.append(path.with_suffix(".png"))
    return paths


def margin(result: dict, folder: Path, stem: str) -> Path:
    """Where cleaning widens the margin, by layer and head."""
    path = folder / stem
    tables = [numbers(grid(result[name])) for name in ("shift_mean", "shift_best")]
    columns = tables[0].shape[1]
    with drawing(
        min(14.0, 2 * max(2.4, 0.42 * columns + 1.0) + 1.5), max(2.8, 0.2 * len(tables[0]) + 1.4), path
    ) as fig:
        panels = fig.subplots(1, 2)
        for axes, table, what in zip(panels, tables, ("mean minus mean", "best minus best"), strict=True):
            limit = float(np.nanmax(np.abs(table))) or 1.0
            image = heat(axes, table, result["layers"], limit, columns <= 16, digits=3)
            axes.set_title(what, fontsize=8.5)
            fig.colorbar(image, ax=axes, shrink=0.8)
        panels[0].set_ylabel("layer")
        fig.suptitle(title(result, "change of the needle's margin by cleaning (red: wider)"), fontsize=10)
    return path.with_suffix(".png")
