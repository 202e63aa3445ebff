"""A document as one HTML file: style and figures inside, no script, nothing fetched."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from ccq.report import document as d
from ccq.report import figures

STYLE = Path(__file__).with_name("style.css")
WORDS = {"holds": "✓", "does not": "✗", "not enough runs": "…", "not testable": "–"}  # beside the colour


def inline(text: str) -> str:
    """**bold**, `code`, [words](address); all else is escaped."""
    text = escape(text, quote=True)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\[([\d–]+)\]\((#[^)]+)\)", r'<sup><a href="\2">\1</a></sup>', text)
    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)


def cell(part: d.Cell, tag: str = "td", label: str = "", span: int = 1) -> str:
    classes = [*part.kind.split(), *(["bold"] if part.bold else [])]
    attributes = f' class="{" ".join(classes)}"' if classes else ""
    attributes += f' title="{escape(part.hover, quote=True)}"' if part.hover else ""
    attributes += f' data-label="{escape(label, quote=True)}"' if label else ""
    attributes += f' colspan="{span}"' if span > 1 else ""
    attributes += ' scope="row"' if tag == "th" else ""
    body = inline(part.text)
    if part.kind.startswith("verdict"):
        body = f'<span class="word"><span class="mark">{WORDS[part.text]}</span>{body}</span>'
    small = f'<span class="small">{inline(part.small)}</span>' if part.small else ""
    return f"<{tag}{attributes}>{body}{small}</{tag}>"


def table(part: d.Table) -> str:
    width = len(part.head)
    head = "".join(f'<th scope="col">{inline(text)}</th>' for text in part.head)
    bodies = []
    for block in part.blocks:
        rows = []
        if block.title:
            rows.append(f'<tr><th class="title" colspan="{width}" scope="rowgroup">{inline(block.title)}</th></tr>')
        for row in block.rows:
            anchor = f' id="source-{row.label.text}"' if part.name == "sources" else ""
            cells = "".join(
                cell(c, label=part.head[at + 1] if part.stack else "",
                     span=width - 1 if len(row.cells) == 1 and width > 2 else 1)
                for at, c in enumerate(row.cells)
            )  # fmt: skip
            kind = f' class="{row.kind}"' if row.kind else ""
            rows.append(f"<tr{kind}{anchor}>{cell(row.label, 'th')}{cells}</tr>")
        bodies.append(f'<tbody class="block">{"".join(rows)}</tbody>')
    kind = ' class="stack words"' if part.stack else ' class="wide"' if width > 12 else ""
    notes = "".join(f"<li>{inline(note)}</li>" for note in part.notes)
    return (
        f'<p class="caption" id="caption-{part.name}">{inline(part.caption)}</p><div class="scroll" tabindex="0">'
        f'<table{kind} id="table-{part.name}" aria-labelledby="caption-{part.name}">'
        f"<thead><tr>{head}</tr></thead>{''.join(bodies)}</table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def figure(part: d.Figure) -> str:
    panels = "".join(
        figures.inline(figures.svg(panel.draw, part.size, panel.title), f"{part.name}{at}",
                       escape(f"{part.alt}: {panel.title}".strip(": "), quote=True))
        for at, panel in enumerate(part.panels)
    )  # fmt: skip
    files = f'<a href="figures/{part.name}.svg">SVG</a>, <a href="figures/{part.name}.png">PNG</a>'
    one = " one" if len(part.panels) == 1 else ""
    columns = min(part.columns, len(part.panels))
    return (
        f'<figure id="figure-{part.name}"><div class="title">{inline(part.title)}</div>'
        f'{legend(part)}<div class="panels{one}" style="--columns: {columns}">{panels}</div>'
        f"<figcaption>{inline(part.caption)} {files}</figcaption></figure>"
    )


SHAPES = {  # markers in a box of 10 around 0
    "o": '<circle r="3.4"/>',
    "s": '<rect x="-3" y="-3" width="6" height="6"/>',
    "D": '<rect x="-3" y="-3" width="6" height="6" transform="rotate(45)"/>',
    "^": '<path d="M0 -4 L4 3 L-4 3 Z"/>',
    "v": '<path d="M0 4 L4 -3 L-4 -3 Z"/>',
    "x": '<path d="M-3 -3 L3 3 M-3 3 L3 -3"/>',
    "X": '<path d="M-3 -3 L3 3 M-3 3 L3 -3" stroke-width="2.5"/>',
    "P": '<path d="M0 -4 L0 4 M-4 0 L4 0" stroke-width="3"/>',
    "*": '<path d="M0 -5 L1.2 -1.6 L4.8 -1.5 L1.9 0.6 L2.9 4 L0 2 L-2.9 4 L-1.9 0.6 L-4.8 -1.5 L-1.2 -1.6 Z"/>',
    "d": '<path d="M0 -4.5 L2.8 0 L0 4.5 L-2.8 0 Z"/>',
    "h": '<path d="M0 -4 L3.5 -2 L3.5 2 L0 4 L-3.5 2 L-3.5 -2 Z"/>',
    "<": '<path d="M-4 0 L3 -4 L3 4 Z"/>',
    ">": '<path d="M4 0 L-3 -4 L-3 4 Z"/>',
}
DASHES = {"--": "6 3", ":": "2 3", "-.": "7 3 2 3"}


def legend(part: d.Figure) -> str:
    """What the lines are, above the panels, where it hides none of them."""
    entries = []
    for text, colour, line, marker in part.legend:
        colour = figures.page_colour(colour)
        dash = f' stroke-dasharray="{DASHES[line]}"' if line in DASHES else ""
        shape = SHAPES.get(marker, SHAPES["o"]) if marker else ""
        entries.append(
            f'<span><svg viewBox="0 0 34 12" width="34" height="12" aria-hidden="true" style="color: {colour}" '
            f'stroke="currentColor" fill="currentColor"><line x1="1" y1="6" x2="33" y2="6" stroke-width="2"{dash}/>'
            f'<g transform="translate(17 6)">{shape}</g></svg> {inline(text)}</span>'
        )
    return f'<div class="legend">{"".join(entries)}</div>' if entries else ""


def render(part: Any) -> str:
    if isinstance(part, d.Heading):
        anchor = f' id="{part.anchor}"' if part.anchor else ""
        return f"<h{part.level}{anchor}>{inline(part.text)}</h{part.level}>"
    if isinstance(part, d.Text):
        return f'<p class="{part.kind}">{inline(part.text)}</p>' if part.kind else f"<p>{inline(part.text)}</p>"
    if isinstance(part, d.Equation):
        return f'<div class="equation">{part.html}</div>'
    if isinstance(part, d.Items):
        items = "".join(f"<li>{inline(item)}</li>" for item in part.items)
        if part.kind == "notice":
            return f'<div class="notice" role="note"><strong>{inline(part.title)}</strong><ul>{items}</ul></div>'
        return (f"<p><strong>{inline(part.title)}</strong></p>" if part.title else "") + f"<ul>{items}</ul>"
    if isinstance(part, d.Table):
        return table(part)
    if isinstance(part, d.Figure):
        return figure(part)
    if isinstance(part, d.Details):
        return f"<details><summary>{inline(part.summary)}</summary>{''.join(map(render, part.parts))}</details>"
    if isinstance(part, d.Columns):
        columns = "".join(f"<div>{''.join(map(render, column))}</div>" for column in part.columns)
        return f'<div class="columns {part.kind}">{columns}</div>'
    raise TypeError(f"no such part: {part!r}")


def page(document: d.Document) -> str:
    links = " ".join(
        f'<a href="#{part.anchor}">{inline(part.text)}</a>'
        for part in document.parts
        if isinstance(part, d.Heading) and part.anchor
    )
    parts = [render(part) for part in document.parts]
    first = next((at for at, part in enumerate(document.parts) if isinstance(part, d.Heading)), len(parts))
    parts.insert(first, f'<nav aria-label="contents">{links}</nav>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{STYLE.read_text()}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{inline(document.title)}</h1>\n"
        + "\n".join(parts)
        + f"\n<footer>{inline(document.foot)}</footer>\n</main>\n</body>\n</html>\n"
    )
