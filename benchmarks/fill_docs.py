"""Fill the tables of the documentation from the result files:

    python benchmarks/fill_docs.py             # README.md and docs/*.md, from benchmarks/results
    python benchmarks/fill_docs.py FILE...     # these Markdown files

What stands between two comments is replaced; a test fails where a page differs from its results.

    <!-- ccq report: layer -->      the table of that name on the page, in one line where its numbers come from
    <!-- ccq report: results -->    all that the page says
    <!-- /ccq report -->            the end of either
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_kernels import decode_op_tables, layer_tables, op_tables

from ccq.bench.tables import timed
from ccq.errors import UserError
from ccq.figures import save
from ccq.names import nearest
from ccq.report.collect import Collection, collect
from ccq.report.page import MARK, Page, build, environment, markdown_words
from ccq.report.table import Block, Cell, Row, Table, marks

ROOT = Path(__file__).parents[1]
WHOLE = "results"
PLACE = re.compile(r"(<!-- ccq report: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- /ccq report -->)", re.DOTALL)
GOALS = {"operator-cpu": "The operator on a CPU", "data-prepare": "`ccq data prepare`"}


def page_of(paths: Sequence[Path]) -> Page:
    """The report with what only the scripts beside this one measure."""
    return build(collect(paths), layer_tables, op_tables, decode_op_tables, goals_tables)


def goals_tables(found: Collection) -> list[Table]:
    """What benchmarks that set themselves a goal found: ratios, since machines differ."""
    blocks, notes = [], []
    for kind, title in GOALS.items():
        for source in found.of("bench", kind)[-1:]:
            rows = []
            for goal in source.content["goals"]:
                bound = f"≥ {goal['at_least']:g}" if goal["at_least"] is not None else f"≤ {goal['at_most']:g}"
                value = timed(f"{goal['value']:.3g}", "", source)
                rows.append(Row(Cell(goal["name"]), [value, Cell(bound), Cell("met" if goal["ok"] else "missed")]))
            blocks.append(Block(f"{title} {marks([source])}", rows))
            load_before, cores = source.content.get("load_before", 0), source.content.get("cores")
            if load_before > 0.5:
                notes.append(f"{source.name}: the machine had other load: {load_before:g} on {cores} cores.")
    if not blocks:
        return []
    return [Table("goals", "On a CPU: ratios and their goals", ["", "here", "goal", ""], blocks, notes)]


def known() -> list[str]:
    """What can be asked for: the page has most of its tables only where there are results for them."""
    template = environment().loader.get_source(environment(), "page.j2")[0]
    return list(dict.fromkeys((WHOLE, *re.findall(r"""tables(?:\.|\[")([\w-]+)""", template))))


def filled(text: str, page: Page) -> str:
    """`text` with each marked place filled from the page; nothing else changes."""

    def fill(place: re.Match) -> str:
        name = place["name"]
        if name == WHOLE:
            content = "\n".join(page.markdown().splitlines()[1:-1]).strip()  # without its title and its foot
        elif name in page.tables:
            content = short(name, page)
        elif name in known():
            content = "Not run."
        else:
            raise UserError(f"{name}: no such table.{nearest(name, tuple(known()))} There are: {', '.join(known())}.")
        return f"{place[1]}{content}\n{place[4]}"

    return PLACE.sub(fill, text)


def short(name: str, page: Page) -> str:
    """A table within a text of its own: its caption at its head, no small print, its sources by name below it."""
    table = page.tables[name]
    table = replace(table, head=[table.head[0] or table.caption.partition(" (")[0], *table.head[1:]])
    macros: Any = environment().get_template("markdown.j2").module
    below = [markdown_words(note, short=True) for note in table.notes if not note.startswith("Small print")]
    below.append(origin_of(table, page.tables["sources"]))
    return f"{macros.rows(table, short=True).strip()}\n\n{' '.join(filter(None, below))}".rstrip()


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


def pages() -> list[Path]:
    """The pages of the repository that have a place to fill."""
    return [p for p in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]) if PLACE.search(p.read_text())]


def fill(path: Path, page: Page) -> list[Path]:
    """Fill a file in place; what was written: the file, and the figures where it shows the whole page."""
    text = path.read_text(encoding="utf-8")
    if not PLACE.search(text):
        raise UserError(f"{path}: expected a place to fill, <!-- ccq report: NAME --> ... <!-- /ccq report -->")
    path.write_text(filled(text, page), encoding="utf-8")
    shown = page.figures.values() if any(place["name"] == WHOLE for place in PLACE.finditer(text)) else ()
    return [path, *(save(figure, path.parent / "figures" / f"{figure.name}.png") for figure in shown)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="Markdown files (default: all of docs/)")
    files = parser.parse_args(argv).files or pages()
    page = page_of([ROOT / "benchmarks" / "results"])
    try:
        done = [path for file in files for path in fill(file, page)]
    except UserError as error:
        parser.error(str(error))
    print(f"Filled {', '.join(map(str, done))}")


if __name__ == "__main__":
    main()
