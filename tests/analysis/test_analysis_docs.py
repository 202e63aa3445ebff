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

    nano = RESULTS / "nano" / "needles"

    def nano_gap(run):
        content = json.loads((nano / run / "analysis" / "alignment_model.json").read_text())
        return content["points"]["projection"]["top"]["16"]["unique"]

    def nano_lam(row):
        """Where a needle is retrieved and on text: a mean over seeds, a seed that was run twice counted once."""
        seeds: dict[str, list[list[float]]] = {}
        for file in nano.glob(f"{row}-seed*/analysis/gate_model.json"):
            content = json.loads(file.read_text())["lam"]
            means = [sum(map(sum, content[p])) / sum(map(len, content[p])) for p in ("retrieval", "text")]
            seeds.setdefault(file.parts[-3].removesuffix("-repeat"), []).append(means)
        assert len(seeds) == 3
        of_seeds = [[sum(column) / len(column) for column in zip(*runs, strict=True)] for runs in seeds.values()]
        return [sum(column) / 3 for column in zip(*of_seeds, strict=True)]

    def nano_moved():
        """The most that switching off changes a score, of three seeds."""
        files = list(nano.glob("ccq_gated_deltanet-seed*/intervene/*/intervene.json"))
        assert len(files) == 6
        both = [[row["suites"]["niah"] for row in json.loads(file.read_text())["rows"]] for file in files]
        return max(abs(off[name] - on[name]) for on, off in both for name in on)

    known = {f.__name__: f for f in (gap, pico, lam, log, nano_gap, nano_lam, nano_moved)}
    for sentence in re.findall(r"<!-- holds: (.+?) -->", TEXT):
        assert eval(sentence, known), sentence
    assert TEXT.count("<!-- holds:") >= 10


@pytest.mark.parametrize("name", RUNS)
def test_results_are_complete_and_from_a_clean_commit(name):
    content = result(name)
    assert content["provenance"]["commit"]
    assert content["provenance"]["dirty"] is False
    assert len(content["prompts"]) == 15
    for kind in ("depth", "histogram", "heads", "spectrum"):
        assert (PAGE.parent / "figures" / f"alignment_{name}_{kind}.png").exists()


def test_code_on_the_page_runs():
    names: dict = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
