"""Numbers of README.md and docs/ are those of the result files: `ccq report benchmarks/results --docs FILES`."""

import json
import re
import shutil
from pathlib import Path

import pytest
from made_results import BENCHMARKS

import ccq.report
from ccq import cli
from ccq.evaluate.compare import compare
from ccq.files import read_text
from ccq.report import claims, docs, page
from ccq.report.collect import collect
from ccq.report.numbers import seed_interval

pytestmark = pytest.mark.xdist_group("report docs")  # in one process: the page of all results is made once

ROOT = BENCHMARKS.parents[1]
PAGES = [p for p in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]) if docs.PLACE.search(p.read_text())]


@pytest.fixture(scope="module")
def document():
    return page.build(collect([BENCHMARKS]))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_says_what_the_result_files_say(path, document):
    text = path.read_text()
    same = docs.filled(text, document) == text
    assert same, f"run: ccq report benchmarks/results --docs {path.relative_to(ROOT)}"


def test_what_the_readme_says_in_words_is_in_the_files():
    readme = (ROOT / "README.md").read_text()
    assert "1.10 for GLA, which is met, and 1.05 for Gated DeltaNet, which is\nmissed" in readme
    rows = json.loads((BENCHMARKS / "layer_h200.json").read_text())["rows"]
    times = {(row["backbone"], row["variant"]): row["graph_ms"]["median"] for row in rows
             if (row["pass"], row["T"]) == ("forward and backward", 4096)}  # fmt: skip
    assert times["gla", "ours"] / times["gla", "unit"] <= 1.10
    assert times["gdn", "ours"] / times["gdn", "fla"] > 1.05
    from ccq.demo import TRAINED

    assert len(TRAINED) == 4
    assert "`make run` trains four tiny models" in readme
    assert "0.62 of it at key size 256" in readme
    assert "0.62 of it at key\nsize 256" in (ROOT / "docs" / "kernels.md").read_text()


NANO, CCQ_GDN = BENCHMARKS / "nano" / "needles", "ccq_gated_deltanet"


def last_perplexity(run):
    rows = map(json.loads, read_text(NANO / run / "log.jsonl").splitlines())
    return [row["valid_perplexity"] for row in rows if "valid_perplexity" in row][-1]


def test_what_the_readme_says_of_language_models_is_in_the_files():
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "six rows with three seeds each" in readme
    runs: dict[str, list[float]] = {}  # by seed
    for path in sorted(NANO.glob("*-seed[0-9]")):
        runs.setdefault(path.name.rpartition("-")[0], []).append(last_perplexity(path.name))
    rows = ("gla", "gla_unit", "ccq_gla", "ccq_gla_open", "gated_deltanet", "ccq_gated_deltanet")
    assert {row: len(known) for row, known in runs.items()} == dict.fromkeys(rows, 3)
    assert "about one epoch" in readme
    tokens = json.loads((NANO / "gla-seed2" / "data.json").read_text())["tokens"]
    config = json.loads((NANO / "gla-seed2" / "config.json").read_text())
    read = config["steps"] * config["data"]["batch"] * config["data"]["length"]
    assert read / tokens == pytest.approx(1, abs=0.05)

    def lower(row, *than):
        return [other - own for name in than for own, other in zip(runs[row], runs[name], strict=True)]

    def told(by):
        return f"by {min(by):.1f} to {max(by):.1f}"

    assert f"than GLA and than the control, {told(lower('ccq_gla', 'gla', 'gla_unit'))}" in readme
    assert f"with its gate from 0.5, {told(lower('ccq_gla_open', 'gla', 'gla_unit'))}" in readme
    assert "CCQ-GLA against GLA and for the gate from 0.5 against the control, not for the two other pairs" in readme
    pairs = [("ccq_gla", "gla"), ("ccq_gla_open", "gla_unit"), ("ccq_gla", "gla_unit"), ("ccq_gla_open", "gla")]
    assert [seed_interval(lower(*pair))[0] > 0 for pair in pairs] == [True, True, False, False]

    first, again = runs["ccq_gated_deltanet"], [last_perplexity(f"{CCQ_GDN}-seed{seed}-repeat") for seed in (0, 1)]
    assert "end with perplexities 0.2 and 0.3 apart" in readme
    assert [f"{abs(x - y):.1f}" for x, y in zip(again, first, strict=False)] == ["0.2", "0.3"]
    assert "ends lower with two seeds of three, by 0.3 at most, and one seed run twice differs by as much" in readme
    own = [*((x + y) / 2 for x, y in zip(again, first, strict=False)), first[2]]
    by = [other - x for x, other in zip(own, runs["gated_deltanet"], strict=True)]
    assert (sum(x > 0 for x in by), f"{max(by):.1f}") == (2, "0.3")
    assert "The third seeds of all rows but GLA and its control are of that later batch" in readme
    commits = {run.name: json.loads((run / "provenance.json").read_text())[0]["commit"] for run in NANO.glob("*-seed*")}
    later = {name for name, commit in commits.items() if commit == commits[f"{CCQ_GDN}-seed0-repeat"]}
    assert {name for name in commits if name.endswith("-seed2")} - later == {"gla-seed2", "gla_unit-seed2"}


def test_what_the_readme_says_of_needles_is_in_the_files():
    readme = " ".join((ROOT / "README.md").read_text().split())
    asked = {path.parent.parent.name: json.loads(path.read_text())["scores"] for path in NANO.glob("*/eval/niah.json")}
    assert "GLA finds none at this size, with CCQ or without" in readme
    assert {score["value"] for run, scores in asked.items() if "gla" in run for score in scores.values()} == {0.0}
    assert "Gated DeltaNet finds them" in readme
    assert asked["gated_deltanet-seed0"]["niah_single_1/4096"]["value"] == 100
    assert "With the third seed CCQ finds more in all twelve settings" in readme
    assert "which settings differ by more than the samples can tell changes when the same seed is run again" in readme
    more = {}
    for run in ("seed0", "seed0-repeat", "seed1", "seed1-repeat", "seed2"):
        names = f"gated_deltanet-{run.removesuffix('-repeat')}", f"{CCQ_GDN}-{run}"
        settings = compare([NANO / name / "eval" for name in names], ["niah"])["suites"]["niah"]
        assert len(settings) == 12
        differences = {name: row["differences"][0] for name, row in settings.items()}
        more[run] = {name: d["difference"] > 0 for name, d in differences.items() if d["significant"]}
    assert list(more["seed2"].values()) == [True] * 12
    assert all(more[seed] != more[f"{seed}-repeat"] for seed in ("seed0", "seed1"))
    assert "learned it worst: 37% of the pass-keys at 8K against 98%" in readme
    at_8k = [asked[f"{row}gated_deltanet-seed2"]["niah_single_1/8192"]["value"] for row in ("", "ccq_")]
    assert at_8k == [37, 98]
    assert "up to 21 points between scores of needles" in readme
    pairs = [(f"{CCQ_GDN}-seed{seed}", f"{CCQ_GDN}-seed{seed}-repeat") for seed in (0, 1)]
    assert max(abs(asked[a][name]["value"] - asked[b][name]["value"]) for a, b in pairs for name in asked[a]) == 21
    assert "no score of needles moves by more than 2 points, at up to 102,400 tokens (the paper: 2.2 and 1.6)" in readme
    assert [claim["at_most"] for claim in claims.load() if claim["kind"] == "intervention"] == [2.2, 1.6]
    files = sorted(NANO.glob(f"{CCQ_GDN}-seed*/intervene/*/intervene.json"))
    assert len(files) == 6
    moved = {}
    for path in files:
        none, off = (row["suites"]["niah"] for row in json.loads(path.read_text())["rows"])
        moved |= {(path, name): abs(off[name] - value) for name, value in none.items()}
    assert max(moved.values()) == 2
    assert {name for _, name in moved} >= {"niah_single_1/102400", "niah_single_3/16384"}
    assert "Without needle documents in its text Gated DeltaNet finds none" in readme
    assert "without RULER's own form among them next to none (one seed each)" in readme
    for text, most in (("plain", 0), ("no-ruler", 2)):
        [path] = (NANO.parent / text).glob("*/eval/niah.json")
        assert max(score["value"] for score in json.loads(path.read_text())["scores"].values()) == most


def test_what_the_readme_says_of_lengths_and_of_runs_made_twice_is_in_the_files():
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        "the last 2,048 tokens of a window of 20K have the perplexity that they have in one of 4K, within 3%" in readme
    )
    for path in NANO.parent.glob("*/*/eval/length.json"):
        scores = json.loads(path.read_text())["scores"]
        for corpus in {name.split("/")[0] for name in scores}:
            same = [scores[f"{corpus}/same/{length}"]["value"] for length in range(4096, 20_481, 2048)]
            assert same == pytest.approx([same[0]] * 9, rel=0.03)
    assert "of three rows of GLA, each interrupted at other steps, the losses are the same to the last digit" in readme
    for run in ("gla_unit-seed0", "ccq_gla-seed0", "ccq_gla_open-seed0"):
        both = [[json.loads(line) for line in read_text(NANO / name / "log.jsonl").splitlines()]
                for name in (run, f"{run}-repeat")]  # fmt: skip
        losses = [[(row["step"], row["loss"]) for row in rows if "loss" in row] for rows in both]
        assert losses[0] == losses[1]
        begun = [[part["step"] for part in json.loads((NANO / name / "provenance.json").read_text())]
                 for name in (run, f"{run}-repeat")]  # fmt: skip
        assert all(len(steps) > 1 for steps in begun)
        assert begun[0] != begun[1]
    assert "part within the first ten steps" in readme
    for name in (f"{CCQ_GDN}-seed0", f"{CCQ_GDN}-seed1"):
        first = [json.loads(read_text(NANO / run / "log.jsonl").splitlines()[0]) for run in (name, f"{name}-repeat")]
        assert [row["step"] for row in first] == [10, 10]
        assert first[0]["loss"] != first[1]["loss"]


def test_a_bullet_points_at_nothing_above_it():
    """What the paper says of a claim stands by itself: the page shows some claims without those before them."""
    assert not [claim["paper"] for claim in claims.load() if "above" in claim.get("paper", "")]


def test_there_are_pages_with_tables():
    names = {place["name"] for path in PAGES for place in docs.PLACE.finditer(path.read_text())}
    assert {"layer", "op", "decode-op", "inference", "gap", "control", "results"} <= names


def test_a_result_that_changes_is_noticed(tmp_path):
    """Each number of a table is the file's: another file gives another README."""
    text = (ROOT / "README.md").read_text()
    files = ("layer_h200", "op_h200", "decode_op_h200", "prefill_h200", "decode_h200")
    for name in files:
        shutil.copy(BENCHMARKS / f"{name}.json", tmp_path)
    before = docs.filled(text, page.assemble(collect([tmp_path])))
    for name, change in zip(files, ("graph_ms", "ms", "ms", "wall_ms", "step_ms"), strict=True):
        path = tmp_path / f"{name}.json"
        content = json.loads(path.read_text())
        content["rows"][-1][change]["median"] *= 2
        path.write_text(json.dumps(content))
        after = docs.filled(text, page.assemble(collect([tmp_path])))
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
    ccq.report.fill([BENCHMARKS / "op_h200.json"], [file])
    assert file.read_text() == text


def test_a_table_without_results_is_said_to_be_missing(tmp_path):
    text = "<!-- ccq report: margin -->\n<!-- /ccq report -->"
    assert "Not run yet." in docs.filled(text, page.build(collect([])))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- ccq report: layr -->\n<!-- /ccq report -->\n", "no such table. Did you mean 'layer'?"),
        ("nothing\n", "expected a place to fill"),
    ],
)
def test_what_cannot_be_filled_is_refused_by_name(tmp_path, capsys, text, message):
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(SystemExit):
        cli.main(["report", "--docs", str(file)])
    assert message in capsys.readouterr().err
    assert file.read_text() == text
