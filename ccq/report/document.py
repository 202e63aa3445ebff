"""A page as a list of parts, which html.py and markdown.py write out: one content, two forms.

Text may hold **bold**, `code` and [words](address); all else is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cell:
    text: str
    small: str = ""  # below the text: an interval
    hover: str = ""  # where the number comes from
    bold: bool = False
    kind: str = ""  # "missing", "paper", "ours", a verdict: how it looks
    named: str = ""  # instead of `small` where nothing can be hovered over: the intervals by name


@dataclass
class Row:
    label: Cell
    cells: list[Cell]
    kind: str = ""  # "paper", "ours", "control"


@dataclass
class Block:
    """Rows of a table that belong together, under a heading of their own."""

    title: str
    rows: list[Row]


@dataclass
class Heading:
    text: str
    level: int = 2
    anchor: str = ""


@dataclass
class Text:
    text: str
    kind: str = ""  # "lead", "note"


@dataclass
class Equation:
    html: str
    plain: str


@dataclass
class Items:
    items: list[str]
    kind: str = ""  # "notice": what a reader must know first
    title: str = ""


@dataclass
class Table:
    caption: str
    head: list[str]
    blocks: list[Block]
    notes: list[str] = field(default_factory=list)  # footnotes
    stack: bool = False  # on a narrow screen a row becomes a card instead of scrolling
    name: str = ""


@dataclass
class Panel:
    title: str
    draw: Callable[[Any], None]  # on matplotlib's Axes


@dataclass
class Figure:
    """Small panels: side by side on a wide screen, one below the other on a phone, one image as a file."""

    name: str
    title: str
    caption: str
    panels: list[Panel]
    legend: list[tuple[str, str, str, str]] = field(default_factory=list)  # label, colour, line, marker of each
    columns: int = 3
    size: tuple[float, float] = (3.4, 2.6)  # of a panel, inches
    alt: str = ""


@dataclass
class Details:
    summary: str
    parts: list[Any]


@dataclass
class Columns:
    """Side by side on a wide screen, one below the other on a narrow one."""

    columns: list[list[Any]]
    kind: str = ""  # "hero", "cards"


Part = Columns | Heading | Text | Equation | Items | Table | Figure | Details


@dataclass
class Document:
    title: str
    parts: list[Any]
    foot: str = ""


def figures_of(parts: list[Any]) -> list[Figure]:
    """All figures, also those inside columns and details."""
    found = []
    for part in parts:
        if isinstance(part, Figure):
            found.append(part)
        elif isinstance(part, Columns):
            found += [figure for column in part.columns for figure in figures_of(column)]
        elif isinstance(part, Details):
            found += figures_of(part.parts)
    return found
