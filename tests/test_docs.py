"""What the documentation says is run: its code, the examples in docstrings, its numbers, its links."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import ccq
from ccq.demo import regimes as demo

ROOT = Path(__file__).parent.parent
ALL_PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# the tutorials have commands between their blocks: test_tutorials.py runs both
PAGES = [page for page in ALL_PAGES if "\n```python\n" in page.read_text() and page.parent.name != "tutorials"]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "ccq").rglob("*.py"))
    if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)
]


def blocks(page: Path, languages: str = "python") -> list[tuple[int, str, str]]:
    """The blocks of code on a page: the number of the first line, the language, the code."""
    text = page.read_text()
    found = re.finditer(rf"^```({languages})\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: block.start(2)].count("\n"), block[1], block[2]) for block in found]


def execute(page: Path, line: int, source: str, names: dict) -> None:
    exec(compile("\n" * line + source, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_the_page_runs(page, capsys):
    names: dict = {"__name__": "page"}  # blocks of one page continue each other
    found = blocks(page)
    assert found, "a page without code: drop it from PAGES"
    for line, _, source in found:
        execute(page, line, source, names)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "ccq": ccq})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page):
    """But the results, which a command writes."""
    assert len(page.read_text().splitlines()) <= 300 or page.name == "results.md"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tests_that_ecosystem_names_are_there():
    page = (ROOT / "docs" / "ecosystem.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) > 10
    assert [name for name in named if f"def {name}(" not in tests] == []
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", page))
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for tool, package in (("TRL", "trl"), ("PEFT", "peft"), ("accelerate", "accelerate"), ("lm_eval", "lm_eval"),
                          ("torchao", "torchao"), ("pipeline", "transformers"), ("torch.compile", "torch"),
                          ("flash-linear-attention", "flash-linear-attention")):  # fmt: skip
        told = re.search(rf"^\| `?{tool}`? \| ([\d.]+) \|", page, re.M)[1]
        assert f"{pins[package]}.".startswith(f"{told}."), tool


def test_what_ecosystem_says_of_the_load_was_measured():
    page = (ROOT / "docs" / "ecosystem.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "study" / "serve_load.json").read_text())["rows"]
    for row in rows:
        seconds, memory = row["latency_s"], ", ".join(f"{x:.0f}" for x in row["rss_mib"].values())
        answered, speed = f"{row['answered']} of {row['asked']}", f"{row['tokens_per_s']:.0f}"
        cells = (
            f"{row['clients']} | {row['batch']} | {answered} | {speed} | {seconds['median']:.1f} | {seconds['p95']:.1f}"
        )
        assert f"| {cells} | {memory} |" in page
    sentences = re.findall(r"<!-- holds: (.+?) -->", page)
    assert len(sentences) == 3
    assert all(eval(sentence, {"rows": rows}) for sentence in sentences)


def test_the_constructed_table_is_what_the_demo_computes():
    result = demo.clean(demo.make_memory(0))
    page = (ROOT / "docs" / "operator.md").read_text()
    for lam in (0, 0.5, 1):
        at = demo.LAM.index(lam)
        cells = [f"{result.margin[r, at]:+.2f} ({result.rank[r, at]})" for r in range(len(demo.REGIMES))]
        assert f"| {lam:g} | {' | '.join(cells)} |" in page


def test_citation_names_this_version():
    assert f"\nversion: {ccq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
