"""Tables as plain data; templates/html.j2 and templates/markdown.j2 write them out.

Text may hold **bold**, `code` and [words](#place); all else is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ccq.files import read_toml
from ccq.systems import SYSTEMS, Identity

if TYPE_CHECKING:
    from ccq.report.collect import Source

WORDS = read_toml(Path(__file__).with_name("words.toml"))


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
    kind: str = ""  # "paper", "ours"


@dataclass
class Block:
    """Rows that belong together, under a heading of their own; folded: what was not run."""

    title: str
    rows: list[Row]
    folded: bool = False


@dataclass
class Table:
    name: str
    caption: str
    head: list[str]
    blocks: list[Block]
    notes: list[str] = field(default_factory=list)
    stack: bool = False  # on a narrow screen a row becomes a card instead of scrolling

    @property
    def paper_only(self) -> bool:
        kinds = {cell.kind for block in self.blocks if not block.folded for row in block.rows for cell in row.cells}
        return "paper" in kinds and "ours" not in kinds


NOT_RUN = Cell("not run", kind="missing")
NOT_IN_PAPER = Cell("–", kind="missing", hover="not in the paper")


def trimmed(table: Table) -> Table:
    """Without the columns that nobody ran."""
    rows = [row for block in table.blocks for row in block.rows if len(row.cells) == len(table.head) - 1]
    used = [at for at in range(len(table.head) - 1) if not rows or any(r.cells[at].kind != "missing" for r in rows)]
    for row in rows:
        row.cells = [row.cells[at] for at in used]
    return replace(table, head=[table.head[0], *(table.head[at + 1] for at in used)])


def not_run(labels: Sequence[str]) -> list[Block]:
    """The folded rows of what a table could have and does not."""
    return [Block("Not run", [Row(Cell(label), [NOT_RUN]) for label in labels], folded=True)] if labels else []


def marks(sources: Sequence[Source]) -> str:
    """Footnotes of a row; of three numbers or more in a row the first and the last."""
    runs: list[list[int]] = []
    for number in sorted({source.number for source in sources}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [span for run in runs for span in ([run] if len(run) > 2 else [[n] for n in run])]
    return " ".join(f"[{s[0]}{f'–{s[-1]}' if len(s) > 1 else ''}](#source-{s[0]})" for s in spans)


def analysis_row(label: str, sources: Sequence[Source], values: Sequence[str], small: str = "") -> Row:
    told = "\n".join(source.told for source in sources)
    return Row(Cell(f"{label} {marks(sources)}", small), [Cell(text, hover=told, kind="ours") for text in values])


def row_kind(system: str) -> str:
    return "ours" if system in SYSTEMS and SYSTEMS[system].options.get("clean") else ""


def number(value: float, like: str = "") -> str:
    """With as many digits as the paper's cell, or two.

    >>> number(12.345), number(99.96, "100.0")
    ('12.35', '100.0')
    """
    return f"{value:.{len(like.partition('.')[2]) if like else 2}f}"


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def change(ratio: float) -> str:
    """
    >>> change(0.837), change(1.1)
    ('−16.3%', '+10.0%')
    """
    return f"{signed(100 * (ratio - 1), 1)}%"


def human(count: float) -> str:
    """
    >>> human(15e9), human(98_304_000)
    ('15B', '98.3M')
    """
    for unit, text in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{text}"
    return f"{count:g}"


def tokens_label(count: int) -> str:
    """
    >>> tokens_label(512), tokens_label(4096)
    ('512', '4K')
    """
    return f"{count // 1024}K" if count >= 1024 else str(count)


def scale_label(scale: str) -> str:
    """
    >>> scale_label("500m"), scale_label("nano")
    ('500M', 'nano')
    """
    return scale.upper() if scale[:1].isdigit() else scale


def trained_as(row: Identity) -> str:
    """Size and variant."""
    return ", ".join(filter(None, (scale_label(row.size) or "unknown size", row.variant)))


def needle(name: str) -> tuple[str, int]:
    """Task and length of a score of S-NIAH."""
    task, length = name.split("/")
    return task, int(length)
