"""docs/analysis.md: its sentences are what the result files give, and its code runs (its tables: tests/report)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ccq.bench.results import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"
TEXT = PAGE.read_text()
RUNS = ("smollm2_135m", "gemma_3_270m", "smollm2_135m_untrained")


def result(name):
    return json.loads((RESULTS / f"alignment_{name}.json").read_text())


def test_what_the_page_concludes_is_in_the_files():
    """Counts and signs that its sentences state."""
    found = {name: result(name)["points"] for name in RUNS}

    def gap(name, point, group="unique"):
        return found[name][point]["top"]["16"][group]

    def pico(kind, model="ccq-gla"):
        """Of a model that ships."""
        [file] = (RESULTS / "pico" / f"{model}-conv-pico" / "analysis").glob(f"{kind}*.json")
        return json.loads(file.read_text())

    def lam(place):
        rows = pico("gate")["lam"][place]
        return sum(map(sum, rows)) / sum(map(len, rows))

    def log(model):
        lines = (RESULTS / "pico" / f"{model}-conv-pico" / "log.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row.get("lam_of_decay_alone")]

    for sentence in re.findall(r"<!-- holds: (.+?) -->", TEXT):
        assert eval(sentence, {"gap": gap, "pico": pico, "lam": lam, "log": log}), sentence
    assert TEXT.count("<!-- holds:") >= 10


@pytest.mark.parametrize("name", RUNS)
def test_results_are_complete_and_from_a_clean_commit(name):
    content = result(name)
    assert content["provenance"]["commit"]
    assert content["provenance"]["dirty"] is False
    assert len(content["prompts"]) == 15
    for kind in ("depth", "histogram", "heads", "spectrum"):
        for ending in ("png", "svg"):
            assert (PAGE.parent / "figures" / f"alignment_{name}_{kind}.{ending}").exists()


def test_code_on_the_page_runs():
    names: dict = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
