"""A document as Markdown, with the same words and numbers as the page."""

from __future__ import annotations

import re
from typing import Any

from ccq.report import document as d


def words(text: str) -> str:
    """For a cell: one line, no bars."""
    return re.sub(r"\[([\d–]+)\]\((#[^)]+)\)", r"<sup>[\1](\2)</sup>", text.replace("|", "\\|").replace("\n", " "))


def cell(part: d.Cell) -> str:
    text = f"**{words(part.text)}**" if part.bold else words(part.text)
    small = part.named or part.small
    return f"{text} <sub>{words(small)}</sub>" if small else text


def table(part: d.Table) -> str:
    width = len(part.head)
    lines = [f"**{part.caption}**", "", f"| {' | '.join(words(text) for text in part.head)} |"]
    lines.append("|---" * width + "|")
    for block in part.blocks:
        if block.title:
            lines.append(f"| *{words(block.title)}* |" + " |" * (width - 1))
        for row in block.rows:
            anchor = f'<a id="source-{row.label.text}"></a>' if part.name == "sources" else ""
            cells = [cell(c) for c in row.cells]
            cells += [""] * (width - 1 - len(cells))
            lines.append(f"| {anchor}{cell(row.label)} | {' | '.join(cells)} |")
    lines += ["", *(f"- {words(note)}" for note in part.notes)]
    return "\n".join(lines).rstrip()


def render(part: Any) -> str:
    if isinstance(part, d.Heading):
        return f"{'#' * part.level} {part.text}"
    if isinstance(part, d.Text):
        return words(part.text)
    if isinstance(part, d.Equation):
        return "\n".join(f"    {line}" for line in part.plain.splitlines())
    if isinstance(part, d.Items):
        items = "\n".join(f"- {words(item)}" for item in part.items)
        return f"**{part.title}**\n\n{items}" if part.title else items
    if isinstance(part, d.Table):
        return table(part)
    if isinstance(part, d.Figure):
        return f"![{part.title}](figures/{part.name}.png)\n\n*{part.title}.* {words(part.caption)}"
    if isinstance(part, d.Details):
        return "\n\n".join([f"**{part.summary}**", *map(render, part.parts)])
    if isinstance(part, d.Columns):
        return "\n\n".join(render(inner) for column in part.columns for inner in column)
    raise TypeError(f"no such part: {part!r}")


def page(document: d.Document) -> str:
    return "\n\n".join([f"# {document.title}", *map(render, document.parts), words(document.foot)]) + "\n"
