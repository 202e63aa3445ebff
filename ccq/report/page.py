"""What the report says: its tables, figures and sentences, which templates/page.j2 puts in order."""

from __future__ import annotations

import functools
import importlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import jinja2

import ccq
from ccq.figures import Figure, sample, save, svg
from ccq.files import write_atomically
from ccq.names import plural
from ccq.report import MADE_BY, claims, figures, tables
from ccq.report import paper as papers
from ccq.report.claims import FAILS, FEW, HOLDS, NOT_RUN, Verdict
from ccq.report.collect import DAMAGE, Collection
from ccq.report.results import Results
from ccq.report.table import WORDS, Table, trimmed
from ccq.train import sweep_tables

# what has `tables` of its own, beside the code whose results they show
OWNERS = (*(f"analysis.{name}" for name in ("alignment", "margin", "intervene")),
          *(f"bench.{name}" for name in ("train", "inference")))  # fmt: skip
Tables = Callable[[Collection], list[Table]]
SIGNS = {HOLDS: "✓", FAILS: "✗", FEW: "…", claims.UNTESTABLE: "–", NOT_RUN: "·"}  # beside the colour of a verdict


@dataclass
class Page:
    """All that the templates show."""

    tables: dict[str, Table]
    figures: dict[str, Figure]
    context: dict[str, Any]

    @functools.cached_property
    def html(self) -> str:
        return self._render("html.j2")

    def markdown(self) -> str:
        return re.sub(r"\n{3,}", "\n\n", self._render("markdown.j2")).strip() + "\n"

    def write(self, out: Path) -> list[Path]:
        """Write OUT/index.html, OUT/report.md and OUT/figures/; what was written."""
        written = [out / "index.html", out / "report.md"]
        for path, text in zip(written, (self.html, self.markdown()), strict=True):
            write_atomically(path, text.encode())
        return [*written, *(save(figure, out / "figures" / f"{name}.png") for name, figure in self.figures.items())]

    def _render(self, form: str) -> str:
        shown = self.context | {"tables": self.tables, "figures": self.figures}
        return environment().get_template("page.j2").render(**shown, form=form)


@functools.cache
def environment() -> jinja2.Environment:
    made = jinja2.Environment(loader=jinja2.PackageLoader("ccq.report"), trim_blocks=True, lstrip_blocks=True,
                              undefined=jinja2.StrictUndefined)  # fmt: skip
    made.filters |= {"inline": html_words, "line": markdown_words, "sample": sample, "svg": svg,
                     "contents": re.compile(r'<h2 id="([\w-]+)">(.*?)</h2>').findall}  # fmt: skip
    made.globals |= {"signs": SIGNS, "made_by": f"{MADE_BY}, ccq {ccq.__version__}",
                     "style": Path(__file__).with_name("style.css").read_text("utf-8")}  # fmt: skip
    return made


def html_words(text: str) -> str:
    """**bold**, `code`, [words](#place); all else is escaped."""
    text = escape(text, quote=True)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\[([\d–]+)\]\((#[^)]+)\)", r'<sup><a href="\2">\1</a></sup>', text)
    return re.sub(r"\[([^\]]+)\]\((#[^)]+)\)", r'<a href="\2">\1</a>', text)


MARK = re.compile(r" ?\[(\d+)(?:–(\d+))?\]\(#source-\d+\)")  # a footnote


def markdown_words(text: str, short: bool = False) -> str:
    """One line, no bars; short: without footnotes."""
    text = text.replace("|", "\\|").replace("\n", " ")
    if short:
        return MARK.sub("", text).strip()
    return re.sub(r"\[([\d–]+)\]\((#[^)]+)\)", r"<sup>[\1](\2)</sup>", text)


def build(found: Collection, *more: Tables) -> Page:
    """The page, with `more` tables. Results of which none can be made (other versions, damage that is still JSON) are
    left out by name.

    Some damage shows only in a cell, or in a line drawn: so a page counts once it has been written out.
    """
    try:
        page = assemble(found, *more)
        assert page.html
        return page
    except DAMAGE:
        return assemble(without_unusable(found, *more), *more)


def without_unusable(found: Collection, *more: Tables) -> Collection:
    """Results less those of which no page can be made by themselves; they are named."""
    usable, problems = [], list(found.problems)
    for source in found.sources:
        try:
            if assemble(Collection([source]), *more).html:
                usable.append(source)
        except DAMAGE as error:
            told = (str(error) or "no more is said").splitlines()[0]
            problems.append(f"{source.name} is incomplete and left out: {type(error).__name__} {told}.")
    return replace(found, sources=usable, problems=problems)


def assemble(found: Collection, *more: Tables) -> Page:
    paper, results = papers.load(), Results(found)
    verdicts = claims.judge(found, results, paper)
    made: list[Table | None] = [
        tables.claims_table(verdicts),
        tables.models_table(paper, found, results),
        tables.repeats_table(results),
        *(tables.score_table(name, paper, results) for name in ("lm", "niah", "longbench", "ablations")),
        *sweep_tables.tables(results),
        *(table for name in OWNERS for table in importlib.import_module(f"ccq.{name}").tables(found)),
        *(table for of in more for table in of(found)),
        tables.source_table(found),
    ]
    pictures = figures.figures(found, results, paper)
    told = [f"{fact.what}: {fact} ({fact.where})" for name, fact in paper.facts.items()
            if name.startswith(("gap", "lam", "off"))]  # fmt: skip
    questions = ("perplexity" if "perplexity" in pictures else "extrapolation", "needles", "recall", "overhead")
    shown = Names({table.name: trimmed(table) for table in made if table is not None})
    return Page(shown, Names(pictures), {
        "nothing": not found.sources,
        "first": [pictures[name] for name in questions if name in pictures],
        "help": did_it_help(verdicts),
        "run": what_was_run(found),
        "notices": found.notices(),
        "facts": paper.facts,
        "told": told,
        "ignored": found.ignored,
    })  # fmt: skip


class Names(dict):
    """Of what there is nothing, the page shows nothing."""

    def __missing__(self, name: str) -> None:
        return None


def what_was_run(found: Collection) -> str:
    """In one sentence; the table of sources has each."""
    words = {"run": ("training run", ""), "sweep": ("run of a sweep", "runs of sweeps"), "eval": ("evaluation", ""),
             "analysis": ("analysis", "analyses"), "bench": ("benchmark", "")}  # fmt: skip
    counts = {kind: len(found.of(kind)) for kind in words}
    counts["sweep"] = sum(len(source.content["runs"]) for source in found.of("sweep"))
    parts = [plural(count, *words[kind]) for kind, count in counts.items() if count]
    dates = sorted({source.date for source in found.sources if source.date != "unknown"})
    when = f", {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "") if dates else ""
    return f"This page shows {', '.join(parts)}{when}. [Sources](#sources) lists each of them."


def did_it_help(verdicts: list[Verdict]) -> dict[str, Any]:
    """The answer in one sentence, then the headline claims and those that are decided."""
    tried = [v for v in verdicts if v.claim["kind"] == "score" and v.verdict != NOT_RUN]
    decided = [v for v in tried if v.verdict in (HOLDS, FAILS)]
    shown = [v for v in verdicts if v in decided or (v.claim.get("headline") and v.verdict != NOT_RUN)] or tried[:4]
    items = [f"**{v.named.capitalize()}**: {v.says}. Here: {v.short or v.ours}. The paper: {v.paper}." for v in shown]
    if not tried:
        return {"lead": WORDS["few"] + (" They show:" if items else ""), "listed": items}
    count = Counter(v.verdict for v in tried)
    said = [f"{count[v]} {'is' if count[v] == 1 else 'are'} {v}" for v in SIGNS if count[v]]
    lead = f"**Of {plural(len(tried), 'claim')} about quality that we tested, {', '.join(said)}.** "
    if held := [v for v in tried if v.verdict == HOLDS]:
        survive = sum(v.survives for v in held)
        told = {"survive": survive or "none", "s": "s" if survive < 2 else "", "tests": plural(held[0].tests, "test")}
        lead += WORDS["held"].format(held=plural(len(held), "supported claim"), **told)
    lead += "The decided claims and the main ones:" if decided else "The main claims:"
    return {"lead": lead, "listed": items}
