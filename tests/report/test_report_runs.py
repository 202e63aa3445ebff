"""Runs on text as rows: how each was treated, a sweep's runs kept apart, and the spread of one seed run twice."""

import pytest
from made_results import text_run

from ccq.report import claims, page, paper
from ccq.report.collect import collect
from ccq.report.docs import tables_of
from ccq.report.numbers import Results, seed_interval
from ccq.report.recall import Recall
from ccq.report.systems import System


@pytest.fixture(scope="module")
def found(everything):
    return collect([everything])


def test_the_last_validation_of_the_longest_runs_counts(found):
    results = Results(found)
    estimate = results.estimate(System("ccq-gla", "", "pico"), "valid:perplexity")
    assert estimate.by_seed == {0: pytest.approx(29.1), 1: pytest.approx(30.1), 2: pytest.approx(31.2)}  # not seed 9
    low, high = seed_interval([29.1, 30.1, 31.2])
    assert estimate.over_seeds == (pytest.approx(low), pytest.approx(high))


def test_the_claim_is_judged_on_paired_seeds(found):
    verdicts = claims.judge(found, Results(found), paper.load(), Recall(found))
    [verdict] = [v for v in verdicts if v.claim.get("where") == ["valid:perplexity"] and v.ours != claims.NOT_RUN]
    assert (verdict.claim["system"], verdict.claim["control"]) == ("ccq-gla", "gla-unit")
    low, high = seed_interval([29.1 - 30, 30.1 - 31, 31.2 - 32])
    assert f"[{low:+.2f}, {high:+.2f}] over 3 seeds".replace("-", "−") in verdict.ours
    assert verdict.verdict == claims.HOLDS


def test_the_table_shows_how_rows_were_treated(found):
    tables = tables_of(page.build(found).parts)
    [block] = tables["runs"].blocks
    assert block.title == "Here, pico"
    rows = [(row.label.text.split(" [")[0], [cell.text for cell in row.cells]) for row in block.rows]
    assert [(label, cells[1:5]) for label, cells in rows] == [
        ("Unit-norm GLA", ["0, 1, 2", "0.002", "600", "19.7M"]),
        ("CCQ-GLA", ["0, 1, 2", "0.002", "600", "19.7M"]),
    ]
    assert [cells[0] for _, cells in rows] == ["31.00", "30.13"]
    assert [row.cells[2].small for row in block.rows] == ["", "0.004: 99.0 after 1.97M"]  # of the shorter run
    states = [float(cells[7]) for _, cells in rows]
    assert states[1] > states[0]  # the covariance is counted
    blocks = {block.title.split(" [")[0]: block for block in tables["repeats"].blocks}
    cells = blocks["CCQ-GLA, pico, seed 0, 2 runs: valid"].rows[0].cells
    assert [cell.text for cell in cells] == ["29.00, 29.20", "0.2"]
    assert "not told from chance" in tables["repeats"].notes[0]


@pytest.mark.parametrize(("second", "spread", "says"), [(29.0, "0", "do not differ"), (29.003, "0.003", "not told")])
def test_a_run_that_came_out_the_same_says_so(tmp_path, second, spread, says):
    for repeat, perplexity in enumerate((29.0, second)):
        text_run(tmp_path / str(repeat), "ccq_gla_pico", 0, perplexity, repeat=repeat)
    table = tables_of(page.build(collect([tmp_path])).parts)["repeats"]
    assert [cell.text for cell in table.blocks[0].rows[0].cells] == ["29.00, 29.00", spread]
    assert says in table.notes[0]


def test_runs_on_other_text_are_other_rows(tmp_path):
    for number, words in enumerate(("", "", "trained on plain text")):
        text_run(tmp_path / str(number), "ccq_gla_pico", number, 30.0, variant=words)
    labels = sorted(source.system.label for source in collect([tmp_path]).of("run"))
    assert labels == ["CCQ-GLA", "CCQ-GLA", "CCQ-GLA, trained on plain text"]
