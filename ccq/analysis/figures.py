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

# Okabe and Ito's: told apart by all eyes
BLUE, RED, GREEN, ORANGE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#7f7f7f"
STYLE: dict = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "ccq"}
DIVERGING = "RdBu_r"  # blue: negative, red: positive; keeps its order for red-green blind eyes
SHOWN = "16"  # of the numbers of top directions
LINES = {  # group: (label, colour, line)
    "unique": ("needle, unique tokens", BLUE, "-"),
    "needle": ("needle, all tokens", BLUE, "--"),
    "novel": ("needle, only the new thing", GREEN, "-."),
    "planted": ("control: such things planted, not asked for", RED, "-"),
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


def heat(axes: Any, table: np.ndarray, layers: list[int], limit: float, annotate: bool) -> Any:
    """Rows are layers, the deepest on top; columns heads."""
    image = axes.imshow(table, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="auto", origin="lower")
    if annotate:
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                colour = "white" if abs(value) > 0.65 * limit else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=5.5, color=colour)
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
        figure.colorbar(scale, ax=list(panels), label="layer", shrink=0.8)
        figure.suptitle(title(result, "spectrum of Sigma, mean over heads and prompts"), fontsize=10)
