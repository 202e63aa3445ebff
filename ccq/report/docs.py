"""Tables of Markdown files from the results: `ccq report RESULTS... --docs README.md docs/*.md`

What stands between two comments is replaced:

    <!-- ccq report: layer -->      the table of that name on the page, in one line where its numbers come from
    <!-- ccq report: results -->    all that the page says
    <!-- /ccq report -->            the end of either
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ccq.errors import UserError
from ccq.figures import save
from ccq.names import nearest
from ccq.report.page import MARK, Page, markdown_words, short_rows
from ccq.report.paper import HERE
from ccq.report.table import SMALL, Table

WHOLE = "results"
PLACE = re.compile(r"(<!-- ccq report: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- /ccq report -->)", re.DOTALL)
# tables of the page, which has most only where there are results for them
TABLES = re.findall(r"""tables(?:\.|\[")([\w-]+)""", (HERE / "templates" / "page.j2").read_text(encoding="utf-8"))


def filled(text: str, page: Page) -> str:
    """`text` with each marked place filled from the page; nothing else changes."""

    def fill(place: re.Match) -> str:
        name, known = place["name"], (WHOLE, *dict.fromkeys(TABLES))
        if name == WHOLE:
            content = page.markdown(whole=False)
        elif name in page.tables:
            content = short(name, page)
        elif name in known:
            content = "Not run."
        else:
            raise UserError(f"{name}: no such table.{nearest(name, known)} There are: {', '.join(known)}.")
        return f"{place[1]}{content}\n{place[4]}"

    return PLACE.sub(fill, text)


def short(name: str, page: Page) -> str:
    """A table within a text of its own: its caption at its head, no small print, its sources by name below it."""
    table = page.tables[name]
    table = replace(table, head=[table.head[0] or table.caption.partition(" (")[0], *table.head[1:]])
    below = [markdown_words(note, short=True) for note in table.notes if not note.startswith(SMALL)]
    below.append(origin_of(table, page.tables["sources"]))
    return f"{short_rows(table)}\n\n{' '.join(filter(None, below))}".rstrip()


def origin_of(table: Table, sources: Table) -> str:
    """Files by name, with the commit, hardware and date that they share."""
    numbers: set[int] = set()
    rows = [row for block in table.blocks for row in block.rows]
    texts = [*table.notes, *(block.title for block in table.blocks), *(row.label.text for row in rows),
             *(cell.text for row in rows for cell in row.cells)]  # fmt: skip
    for first, last in MARK.findall(" ".join(texts)):
        numbers.update(range(int(first), int(last or first) + 1))
    shared: dict[tuple[str, ...], list[str]] = {}
    for row in sources.blocks[0].rows:
        if int(row.label.text) in numbers:
            _, file, commit, hardware, date = row.cells
            packages = ", ".join(part for part in commit.small.split(", ") if not part.startswith("ccq "))
            shared.setdefault((hardware.text, packages, f"commit {commit.text}", date.text), []).append(file.text)
    parts = [f"{', '.join(files)} ({'; '.join(filter(None, about))})" for about, files in shared.items()]
    return f"From {'; '.join(parts)}." if parts else ""


def fill(path: Path, page: Page) -> list[Path]:
    """Fill a file in place; what was written: the file, and the figures where it shows the whole page."""
    text = path.read_text(encoding="utf-8")
    if not PLACE.search(text):
        raise UserError(f"{path}: expected a place to fill, <!-- ccq report: NAME --> ... <!-- /ccq report -->")
    path.write_text(filled(text, page), encoding="utf-8")
    shown = page.figures.values() if any(place["name"] == WHOLE for place in PLACE.finditer(text)) else ()
    return [path, *(save(figure, path.parent / "figures" / f"{figure.name}.png") for figure in shown)]
