"""What docs/recall.md says is in the files of its rounds, and every claim compares rows that its round trains."""

import json
import re
import statistics
from pathlib import Path

import pytest
from scripts import script

from ccq import demo
from ccq.systems import SYSTEMS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "recall.md").read_text()
SEEDS, PAGE = script("benchmarks/recall_seeds.py"), script("benchmarks/recall_page.py")


def answered(name, task, row):
    """Per cent, by seed."""
    return list(PAGE.tasks(name)[task][row]["answered"].values())


def mean(name, task, row):
    return round(statistics.mean(answered(name, task, row)), 1)


def ahead(name, claim):
    """In how many seeds the row answers more."""
    return sum(x > 0 for x in PAGE.verdicts(name)[claim].differences.values())


def gain(name, claim):
    """Points and their interval."""
    low, high = PAGE.verdicts(name)[claim].interval
    return [round((low + high) / 2, 1), round(low, 1), round(high, 1)]


def tasks_of(name):
    """None: the round was not run to its end."""
    return list(PAGE.tasks(name))


def supported(name):
    return [claim for claim, x in PAGE.verdicts(name).items() if x.verdict == "supported"]


def rates(name, task):
    return {x["rate"] for x in PAGE.tasks(name)[task].values()}


def test_tables_of_the_page_are_made_from_the_files():
    assert PAGE.filled(TEXT) == TEXT
    assert [place["name"] for place in PAGE.PLACE.finditer(TEXT)] == list(PAGE.ROUNDS) == list(SEEDS.ROUNDS)


def test_sentences_of_the_page_hold():
    for sentence in re.findall(r"<!-- holds: (.+?) -->", TEXT):
        assert eval(sentence, globals()), sentence


@pytest.mark.parametrize("name", PAGE.ROUNDS)
def test_claims_are_those_of_the_rules(name):
    """Every row of a claim is trained; a claim that the page names in a table has its task and rows there."""
    plan = SEEDS.ROUNDS[name]
    for claim, (task, row, other) in PAGE.CLAIMS[name].items():
        assert {row, other} <= set(plan.tasks[task].rows), claim
        assert {row, other} <= SYSTEMS.keys()
        if name == "controls":
            steps = f"{plan.tasks[task].steps:,}"
            assert re.search(rf"^\| {claim}\. .* \| {steps} \| `{row}` \| `{other}` \|$", TEXT, re.MULTILINE), claim


@pytest.mark.parametrize("name", PAGE.ROUNDS)
def test_a_round_is_what_its_plan_says(name):
    """All seeds of all rows, at the rate with the lowest validation loss."""
    for task, rows in PAGE.tasks(name).items():
        plan = SEEDS.ROUNDS[name].tasks[task]
        assert set(rows) == set(plan.rows)
        for row in rows.values():
            assert list(map(int, row["answered"])) == list(SEEDS.ROUNDS[name].seeds)
            assert row["rate"] == (min(row["search"], key=row["search"].get) if row["search"] else plan.rates[0])
            assert set(row["search"]) == (set(plan.rates) if len(plan.rates) > 1 else set())


def test_a_verdict_is_that_of_the_study(monkeypatch):
    """A clear gain with every seed, none at all, and a round that was not run."""
    answers = {
        "gla-unit": (50.0, 60.0, 55.0, 58.0),
        "gla-projected": (50.1, 59.9, 55.1, 57.9),
        "gla-projected-decay": (80.0, 91.0, 84.0, 88.0),
    }
    rows = {row: {"rate": "3e-3", "search": {}, "answered": dict(enumerate(x))} for row, x in answers.items()}
    made = {"own rate": rows}
    monkeypatch.setattr(PAGE, "tasks", lambda name: made if name == "rates" else {})
    verdicts = PAGE.verdicts("rates")
    assert [verdicts[f"T{n}"].verdict for n in (1, 2, 3)] == ["supported", "not supported", "not run"]
    assert {x.verdict for x in PAGE.verdicts("first").values()} == {"not run"}
    assert PAGE.rows_table("first") == "Not run."
    assert "| own rate | `gla-unit` | 3e-3 | 55.8 | 50 to 60 | 3 of 4 | given |" in PAGE.rows_table("rates")


def test_what_the_demo_says_of_this_page():
    """Its task, its rows and its numbers."""
    plan, told = SEEDS.ROUNDS["first"].tasks["overwritten"], demo.WORDS["recall"]
    assert set(demo.TRAINED) <= set(plan.rows)
    assert (demo.UPDATES, demo.Settings.steps) == (plan.updates, plan.steps)
    assert rates("first", "overwritten") == {demo.RATE}
    assert f"After these {plan.steps} steps at this rate" in told
    assert f"{gain('first', 'C6')[0]:.0f} points more than the control" in told
    assert f"ahead in {ahead('first', 'C6')} of 20 seeds" in told
    assert gain("controls", "R1")[0] < 0
    assert PAGE.verdicts("controls")["R1"].verdict == "undecided"
    assert f"After {SEEDS.ROUNDS['long'].tasks['2000 steps'].steps:,} steps" in told
    assert f"it then answers {gain('long', 'L1')[0]} points more, which is significant" in told
    assert "L1" in supported("long")
    assert PAGE.verdicts("long")["L6"].verdict == "not supported"


def test_a_run_trains_and_is_asked(tmp_path):
    """Two steps of the shortest job, and the same again, which only reads."""
    plan = SEEDS.ROUNDS["first"].tasks["overwritten"]
    job = SEEDS.Job(SEEDS.replace(plan, steps=2), "gla-projected-decay", "3e-3", 7)
    found = SEEDS.run(job, tmp_path)
    assert 0 <= found["answered"] <= 100
    assert found["valid_loss"] > 0
    config = json.loads((tmp_path / job.name / "config.json").read_text())
    assert (config["data"]["updates"], config["seed"], config["optimizer"]["lr"]) == (2, 7, 3e-3)
    scores = tmp_path / job.name / "eval" / "mqar.json"
    before = scores.stat().st_mtime_ns
    assert SEEDS.run(job, tmp_path) == found
    assert scores.stat().st_mtime_ns == before
