"""docs/analysis.md: its tables are what the result files give, its sentences too, and its code runs."""

from __future__ import annotations

import re

import pytest

from ccq.analysis import table

TEXT = table.PAGE.read_text()


def test_tables_come_from_the_result_files():
    assert table.filled(TEXT, table.TABLES) == TEXT, "run: python -m ccq.analysis.table"


def test_what_the_page_concludes_is_in_the_files():
    """Counts and signs that its sentences state."""
    found = {name: table.result(name)["points"] for name in table.RUNS}

    def gap(name, point, group="unique"):
        return found[name][point]["top"]["16"][group]

    for sentence in re.findall(r"<!-- holds: (.+?) -->", TEXT):
        assert eval(sentence, {"gap": gap}), sentence
    assert TEXT.count("<!-- holds:") >= 10


@pytest.mark.parametrize("name", table.RUNS)
def test_results_are_complete_and_from_a_clean_commit(name):
    content = table.result(name)
    assert content["provenance"]["commit"]
    assert content["provenance"]["dirty"] is False
    assert len(content["prompts"]) == 15
    for kind in ("depth", "histogram", "heads", "spectrum"):
        for ending in ("png", "svg"):
            assert (table.FIGURES / f"alignment_{name}_{kind}.{ending}").exists()


def test_code_on_the_page_runs():
    names: dict = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(table.PAGE), "exec"), names)
