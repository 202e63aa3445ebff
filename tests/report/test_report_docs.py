"""Tables of README.md and docs/ are those of the result files: `ccq report benchmarks/results --docs FILES`."""

import json
import re
import shutil
from pathlib import Path

import pytest
from made_results import BENCHMARKS

from ccq import cli
from ccq.report import page as docs
from ccq.report.collect import collect
from ccq.report.page import assemble, build

pytestmark = pytest.mark.xdist_group("report docs")  # in one process: the page of all results is made once

ROOT = BENCHMARKS.parents[1]
PAGES = [p for p in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]) if docs.PLACE.search(p.read_text())]


@pytest.fixture(scope="module")
def page():
    return build(collect([BENCHMARKS]))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_says_what_the_result_files_say(path, page):
    text = path.read_text()
    same = docs.filled(text, page) == text
    assert same, f"run: ccq report benchmarks/results --docs {path.relative_to(ROOT)}"


def test_there_are_pages_with_tables():
    names = {place["name"] for path in PAGES for place in docs.PLACE.finditer(path.read_text())}
    assert {"layer", "op", "decode-op", "inference", "gap", "control", "results"} <= names


def test_a_result_that_changes_is_noticed(tmp_path):
    """Each number of a table is the file's: another file gives another page."""
    text = (ROOT / "docs" / "performance.md").read_text()
    files = ("layer_h200", "op_h200", "decode_op_h200", "prefill_h200", "decode_h200")
    for name in files:
        shutil.copy(BENCHMARKS / f"{name}.json", tmp_path)
    before = docs.filled(text, assemble(collect([tmp_path])))
    for name, change in zip(files, ("graph_ms", "ms", "ms", "wall_ms", "step_ms"), strict=True):
        path = tmp_path / f"{name}.json"
        content = json.loads(path.read_text())
        content["rows"][-1][change]["median"] *= 2
        path.write_text(json.dumps(content))
        after = docs.filled(text, assemble(collect([tmp_path])))
        assert after != before, name
        before = after


def test_the_command_fills_what_is_marked_and_leaves_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- ccq report: op -->\nold\n<!-- /ccq report -->\nafter\n")
    assert cli.main(["report", str(BENCHMARKS / "op_h200.json"), "--docs", str(file)]) == 0
    text = file.read_text()
    assert text.startswith("before\n<!-- ccq report: op -->\n| cleaning alone, µs |")
    assert text.endswith("<!-- /ccq report -->\nafter\n")
    assert "old" not in text
    assert re.search(r"From results/op_h200.json \(NVIDIA H200; .*; commit \w{7}.*; 20\d\d-\d\d-\d\d\)", text)
    assert not Path("report").exists()  # the page was not asked for
    assert docs.filled(text, assemble(collect([BENCHMARKS / "op_h200.json"]))) == text


def test_a_table_without_results_is_said_to_be_missing():
    text = "<!-- ccq report: margin -->\n<!-- /ccq report -->"
    assert "Not run." in docs.filled(text, assemble(collect([])))


@pytest.mark.parametrize(("text", "message"), [
    ("<!-- ccq report: layr -->\n<!-- /ccq report -->\n", "no such table. Did you mean 'layer'?"),
    ("nothing\n", "expected a place to fill"),
])  # fmt: skip
def test_what_cannot_be_filled_is_refused_by_name(tmp_path, capsys, text, message):
    file = tmp_path / "page.md"
    file.write_text(text)
    assert cli.main(["report", "--docs", str(file)]) == 1
    assert message in capsys.readouterr().err
    assert file.read_text() == text
