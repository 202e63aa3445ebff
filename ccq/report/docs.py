"""Tables of Markdown files from the results: `ccq report RESULTS... --docs README.md docs/*.md`

What stands between two comments is replaced:

    <!-- ccq report: layer -->      the table of that name on the page, in one line where its numbers come from
    <!-- ccq report: results -->    all that the page says
    <!-- /ccq report -->            the end of either
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ccq.names import nearest
from ccq.report import markdown
from ccq.report.document import Columns, Details, Document, Table

WHOLE = "results"
PLACE = re.compile(r"(<!-- ccq report: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- /ccq report -->)", re.DOTALL)
MARK = re.compile(r" ?\[(\d+)(?:–(\d+))?\]\(#source-\d+\)")  # a footnote of the page


SMALL = "Small print"  # how a note begins that explains what is left out here


class DocsError(ValueError):
    """A file asks for what the page does not have."""


def tables_of(parts: list[Any]) -> dict[str, Table]:
    """All tables by name, also those inside columns and details."""
    found: dict[str, Table] = {}
    for part in parts:
        if isinstance(part, Table):
            found[part.name] = part
        elif isinstance(part, Columns):
            for column in part.columns:
                found |= tables_of(column)
        elif isinstance(part, Details):
            found |= tables_of(part.parts)
    return found


def filled(text: str, document: Document) -> str:
    """`text` with each marked place filled from the page; nothing else changes."""
    tables = tables_of(document.parts)

    def fill(place: re.Match) -> str:
        name = place["name"]
        if name == WHOLE:
            content = "\n\n".join(map(markdown.render, document.parts))
        elif name in tables:
            content = short(tables[name], tables.get("sources"))
        elif name in OPTIONAL:
            content = "Not run yet."
        else:
            known = (WHOLE, *dict.fromkeys((*tables, *OPTIONAL)))
            raise DocsError(f"ccq report: {name}: no such table.{nearest(name, known)} There are: {', '.join(known)}.")
        return f"{place[1]}{content}\n{place[4]}"

    return PLACE.sub(fill, text)


# tables that the page has only where there are results for them
OPTIONAL = ("runs", "repeats", "op", "lengths", "decode-op", "goals", "gap", "control", "margin", "intervene", "recall",
            "mqar", "mqar-slices", "sources")  # fmt: skip


def asks_for_all(text: str) -> bool:
    return any(place["name"] == WHOLE for place in PLACE.finditer(text))


def short(table: Table, sources: Table | None) -> str:
    """A table within a text of its own: its caption at its head, no small print, its sources by name below it."""
    width = len(table.head)
    head = [table.head[0] or table.caption.partition(" (")[0], *table.head[1:]]
    lines = [f"| {' | '.join(markdown.words(cell) for cell in head)} |", "|---" * width + "|"]
    numbers: set[int] = set()

    def said(text: str) -> str:
        for first, last in MARK.findall(text):
            numbers.update(range(int(first), int(last or first) + 1))
        return markdown.words(MARK.sub("", text)).strip()

    for block in table.blocks:
        if block.title:
            lines.append(f"| *{said(block.title)}* |" + " |" * (width - 1))
        for row in block.rows:
            label = said(row.label.text)
            cells = [f"**{said(cell.text)}**" if cell.bold else said(cell.text) for cell in row.cells]
            cells += [""] * (width - 1 - len(cells))
            lines.append(f"| {f'**{label}**' if row.kind == 'ours' else label} | {' | '.join(cells)} |")
    below = [said(note) for note in table.notes if not note.startswith(SMALL)]
    if origin := origin_of(numbers, sources):
        below.append(origin)
    return "\n".join([*lines, "", " ".join(below)]).rstrip()


def origin_of(numbers: set[int], sources: Table | None) -> str:
    """Files by name, with the commit, hardware and date that they share."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for row in sources.blocks[0].rows if sources is not None else ():
        if int(row.label.text) in numbers:
            _, file, commit, hardware, date = row.cells
            packages = ", ".join(part for part in commit.small.split(", ") if not part.startswith("ccq "))
            shared.setdefault((hardware.text, packages, f"commit {commit.text}", date.text), []).append(file.text)
    parts = [f"{', '.join(files)} ({'; '.join(filter(None, about))})" for about, files in shared.items()]
    return f"From {'; '.join(parts)}." if parts else ""


def fill(path: Path, document: Document) -> list[Path]:
    """Fill a file in place; what was written: the file, and the figures where it shows the whole page."""
    from ccq.report import figures
    from ccq.report.document import figures_of

    text = path.read_text(encoding="utf-8")
    if not PLACE.search(text):
        raise DocsError(f"{path}: expected a place to fill, <!-- ccq report: NAME --> ... <!-- /ccq report -->")
    path.write_text(filled(text, document), encoding="utf-8")
    written = [path]
    if asks_for_all(text):
        for figure in figures_of(document.parts):
            written += figures.save(figure, path.parent / "figures", ("png",))
    return written
