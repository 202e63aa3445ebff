"""Tables of README.md and docs/ are those of the result files: `python benchmarks/fill_docs.py`."""

import json
import re
import shutil

import pytest
from made_results import BENCHMARKS, rows_in
from scripts import script

from ccq.report.collect import collect
from ccq.report.page import build
from ccq.systems import SYSTEMS

pytestmark = pytest.mark.xdist_group("report docs")  # in one process: the page of all results is made once

docs = script("benchmarks/fill_docs.py")
ROOT, PAGES = docs.ROOT, docs.pages()


@pytest.fixture(scope="module")
def page():
    return docs.page_of([BENCHMARKS])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_says_what_the_result_files_say(path, page):
    text = path.read_text()
    same = docs.filled(text, page) == text
    assert same, f"run: python benchmarks/fill_docs.py {path.relative_to(ROOT)}"


def test_there_are_pages_with_tables():
    names = {place["name"] for path in PAGES for place in docs.PLACE.finditer(path.read_text())}
    assert {"layer", "op", "decode-op", "inference", "gap", "control", "results"} <= names


def test_a_result_that_changes_is_noticed(tmp_path):
    """Each number of a table is the file's: another file gives another page."""
    text = (ROOT / "docs" / "performance.md").read_text()
    files = ("layer_h200", "op_h200", "decode_op_h200", "prefill_h200", "decode_h200")
    for name in files:
        shutil.copy(BENCHMARKS / f"{name}.json", tmp_path)
    before = docs.filled(text, docs.page_of([tmp_path]))
    for name, change in zip(files, ("graph_ms", "ms", "ms", "wall_ms", "step_ms"), strict=True):
        path = tmp_path / f"{name}.json"
        content = json.loads(path.read_text())
        content["rows"][-1][change]["median"] *= 2
        path.write_text(json.dumps(content))
        after = docs.filled(text, docs.page_of([tmp_path]))
        assert after != before, name
        before = after


def test_layers_are_set_against_the_backbone_with_unit_queries(page):
    layer = {(r["backbone"], r["variant"]): r["graph_ms"]["median"] for r in rows_in("layer_h200")
             if (r["pass"], r["T"]) == ("forward and backward", 4096)}  # fmt: skip
    (cell,) = [row.cells[1].text for block in page.tables["layer"].blocks for row in block.rows
               if row.label.text == "CCQ-GLA"]  # fmt: skip
    assert cell == f"{layer['gla', 'ours']:.2f} ({layer['gla', 'ours'] / layer['gla', 'unit']:.2f}×)"


def test_layers_of_another_shape_have_no_place_in_the_papers_table(tmp_path):
    content = json.loads((BENCHMARKS / "layer_h200.json").read_text())
    (tmp_path / "layer.json").write_text(json.dumps(content | {"shape": content["shape"] | {"heads": 16}}))
    head = docs.page_of([tmp_path]).tables["layer"].head
    assert "here" not in head
    assert "here" in docs.page_of([BENCHMARKS / "layer_h200.json"]).tables["layer"].head


def test_the_command_fills_what_is_marked_and_leaves_the_rest(tmp_path, monkeypatch, page):
    monkeypatch.setattr(docs, "page_of", lambda paths: page)
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- ccq report: op -->\nold\n<!-- /ccq report -->\nafter\n")
    docs.main([str(file)])
    text = file.read_text()
    assert text.startswith("before\n<!-- ccq report: op -->\n| cleaning alone, µs |")
    assert text.endswith("<!-- /ccq report -->\nafter\n")
    assert "old" not in text
    assert re.search(r"From results/op_h200.json \(NVIDIA H200; .*; commit \w{7}.*; 20\d\d-\d\d-\d\d\)", text)
    assert list(tmp_path.iterdir()) == [file]  # no figure: it does not show the whole page
    assert docs.filled(text, page) == text


def test_a_table_without_results_is_said_to_be_missing():
    text = "<!-- ccq report: margin -->\n<!-- /ccq report -->"
    assert "Not run." in docs.filled(text, docs.page_of([]))


@pytest.mark.parametrize(("text", "message"), [
    ("<!-- ccq report: layr -->\n<!-- /ccq report -->\n", "no such table. Did you mean 'layer'?"),
    ("nothing\n", "expected a place to fill"),
])  # fmt: skip
def test_what_cannot_be_filled_is_refused_by_name(tmp_path, capsys, monkeypatch, page, text, message):
    file = tmp_path / "page.md"
    file.write_text(text)
    monkeypatch.setattr(docs, "page_of", lambda paths: page)
    with pytest.raises(SystemExit):
        docs.main([str(file)])
    assert message in capsys.readouterr().err
    assert file.read_text() == text


def rows_of(table):
    return {row.label.text: row.cells for block in table.blocks for row in block.rows}


def test_numbers_of_kernels_are_those_of_the_files(page):
    op = rows_of(page.tables["op"])
    at = {("ours", "forward"): 0, ("with gate", "forward"): 1, ("ours", "forward and backward"): 2}
    for result in rows_in("op_h200"):
        if (where := at.get((result["name"], result["pass"]))) is not None:
            cells = op[f"batch {result['B']}, {result['T']:,} tokens"]
            assert cells[where].text == f"{1e3 * result['ms']['median']:.0f}"
    decode = rows_of(page.tables["decode-op"])
    for result in rows_in("decode_op_h200"):
        system = {"gla": "gla", "gdn": "gated-deltanet"}[result["backbone"]]
        name = {"fla": f"{SYSTEMS[system].label}, by fla", "ours": SYSTEMS[f"ccq-{system}"].label}.get(
            result["variant"]
        )
        if name is not None:
            cell = decode[name][{1: 0, 8: 1, 32: 2, 128: 3}[result["B"]]]
            assert cell.text.startswith(f"{1e3 * result['ms']['median']:.1f}")


def test_goals_of_benchmarks_are_those_of_the_files(page):
    """Those that only the repository measures are on its page, not on a user's."""
    shown = rows_of(page.tables["goals"])
    for name in ("operator_cpu", "data_prepare"):
        for goal in json.loads((BENCHMARKS / f"{name}.json").read_text())["goals"]:
            assert shown[goal["name"]][0].text == f"{goal['value']:.3g}"
            assert shown[goal["name"]][2].text == ("met" if goal["ok"] else "missed")
    assert build(collect([BENCHMARKS / "operator_cpu.json"])).tables["goals"] is None


def test_damage_in_a_table_of_the_repository_is_named(tmp_path):
    content = json.loads((BENCHMARKS / "operator_cpu.json").read_text())
    content["goals"][0]["name"] = [1]  # it shows only when the cell is written out
    (tmp_path / "x.json").write_text(json.dumps(content))
    shutil.copy(BENCHMARKS / "data_prepare.json", tmp_path)
    page = docs.page_of([tmp_path])
    assert "x.json is incomplete and left out" in page.markdown()
    assert [block.title.partition(" [")[0] for block in page.tables["goals"].blocks] == ["`ccq data prepare`"]
