"""Sweeps of recall: rates are chosen on validation samples, and claims are judged on paired seeds."""

import math

import numpy as np
import pytest
from made_results import RECALL, recall_run, sweep

from ccq import cli
from ccq.report import claims, page
from ccq.report.claims import FAILS, FEW, HOLDS, NOT_RUN, UNTESTABLE
from ccq.report.collect import collect
from ccq.report.docs import tables_of
from ccq.report.numbers import seed_interval
from ccq.report.recall import Recall, bootstrap, over_samples, spread_notes


def recall_of(folder):
    return Recall(collect([folder]))


def test_the_rate_is_chosen_on_validation_samples_though_another_tests_better(tmp_path):
    runs = [recall_run("gla", lr, 0, 2000) for lr in (1e-3, 3.16e-3)]
    best = recall_run("gla", 1e-2, 0, 2000)
    best["test"] = recall_run("transformer", 3.16e-3, 0, 2000)["test"]
    sweep(tmp_path / "x.json", [*runs, best], "rows")
    [row] = recall_of(tmp_path).rows
    assert row.lr == 3.16e-3
    assert row.estimate().value == pytest.approx(100 * runs[1]["test"]["accuracy"], abs=1e-3)
    assert best["test"]["accuracy"] > runs[1]["test"]["accuracy"]


def test_the_interval_over_samples_is_that_of_the_mean(tmp_path):
    """Against the normal interval of the means of independent samples."""
    rng = np.random.default_rng(0)
    parts, variance, middle = [], 0.0, 0.0
    for pairs, share in ((4, 0.9), (64, 0.4)):
        right = rng.binomial(pairs, share, size=1000)
        values, times = np.unique(right, return_counts=True)
        parts.append({"pairs": pairs, "histogram": np.stack([values, times], 1).tolist()})
        variance += (100 * right / pairs).var(ddof=1) / 1000 / 4
        middle += (100 * right / pairs).mean() / 2
    low, high = over_samples([bootstrap(part) for part in parts])
    half = 1.96 * math.sqrt(variance)
    assert low == pytest.approx(middle - half, abs=0.1 * half)
    assert high == pytest.approx(middle + half, abs=0.1 * half)


def test_rows_are_told_by_their_config(everything):
    labels = {row.system.label for row in recall_of(everything).rows}
    assert labels == {"GLA", "Unit-norm GLA", "Unit-norm GLA, equal state", "CCQ-GLA", "CCQ-GLA, gate from 0.5",
                      "Gated DeltaNet", "CCQ-Gated DeltaNet", "Transformer"}  # fmt: skip


def test_a_run_again_with_its_seed_counts_once_and_its_spread_is_told(everything):
    recall = recall_of(everything)
    row = recall.row("ccq-gla", "128", 2000)
    assert len(row.tried[row.lr]) == 3
    assert len(row.runs) == 1
    [note] = spread_notes(recall)
    values = sorted(100 * recall_run("ccq_gla", 3.16e-3, 0, 2000, n)["test"]["accuracy"] for n in range(3))
    assert f"trained 3 times with seed 0 gave {', '.join(f'{v:.2f}' for v in values)}" in note
    assert f"a spread of {values[-1] - values[0]:.2f} points" in note


def test_a_file_made_again_is_not_a_second_run(tmp_path, everything):
    for name in ("a", "b"):
        sweep(tmp_path / f"{name}.json", [recall_run("gla", 3.16e-3, seed, 2000) for seed in (0, 1)], "rows")
    [row] = recall_of(tmp_path).rows
    assert len(row.runs) == 2


def verdict_of(folder, system, control):
    found = collect([folder])
    document = [c for c in claims.load() if c["kind"] == "recall" and (c["system"], c["control"]) == (system, control)]
    return claims.recalls(document[0], Recall(found))


def test_claims_are_judged_on_differences_of_equal_seeds(everything):
    verdict = verdict_of(everything, "ccq-gla-open", "gla-unit")
    pairs = [
        100 * (recall_run("ccq_gla_open", 3.16e-3, seed, 10_000)["test"]["accuracy"]
               - recall_run("gla_unit", 3.16e-3, seed, 10_000)["test"]["accuracy"])
        for seed in (1, 2, 3)
    ]  # fmt: skip
    low, high = seed_interval(pairs)
    assert f"[{low:+.2f}, {high:+.2f}] over 3 seeds".replace("-", "−") in verdict.ours
    assert "at width 128, 10,000 steps" in verdict.ours
    assert "over samples" in verdict.ours
    assert verdict.verdict == (HOLDS if low > 0 else FAILS if high < 0 else verdict.verdict)
    other = verdict_of(everything, "ccq-gated-deltanet", "gated-deltanet")
    assert other.verdict == FAILS
    assert verdict_of(everything, "ccq-gla", "gla-unit-equal-state").verdict == FEW


def test_what_was_not_run_is_said(tmp_path):
    sweep(tmp_path / "x.json", [recall_run("gla", 3.16e-3, 0, 2000)], "rows", missing=("ccq_gla-mqar-lr1e-3",))
    assert verdict_of(tmp_path, "ccq-gla", "gla").ours == NOT_RUN
    found = collect([tmp_path])
    assert found.unfinished == ["x.json: 1 run is missing."]
    table = tables_of(page.build(found).parts)["mqar"]
    assert any("ccq_gla-mqar-lr1e-3" in note for note in table.notes)


def test_the_table_shows_how_rows_were_treated(everything):
    table = tables_of(page.build(collect([everything])).parts)["mqar"]
    titles = ["Width 128, 2,000 steps", "Width 128, 10,000 steps", "Width 64", "Width 256"]
    assert [block.title for block in table.blocks] == titles
    rows = {row.label.text.split(" [")[0]: row.cells for row in table.blocks[0].rows if len(row.cells) > 1}
    missing = {row.label.text for row in table.blocks[0].rows if row.cells[0].text == "not run"}
    assert missing == {"Mamba2", "DeltaNet", "GLA, current-key read", "CCQ-GLA, bias not decayed", "CCQ-GLA, stats",
                       "CCQ-GLA, uncentred", "CCQ-GLA, lam 0.1", "CCQ-Gated DeltaNet, gate from 0.5"}  # fmt: skip
    assert [row.cells[0].text for block in table.blocks[2:] for row in block.rows] == ["not run", "not run"]
    assert set(rows) == {"GLA", "Unit-norm GLA", "Unit-norm GLA, equal state", "CCQ-GLA", "CCQ-GLA, gate from 0.5",
                         "Gated DeltaNet", "CCQ-Gated DeltaNet", "Transformer"}  # fmt: skip
    accuracy, seeds, rate, tokens, body, embeddings, state, covariance, lam = rows["CCQ-GLA"]
    assert (rate.text, rate.small) == ("0.00316", "best of 3")
    assert [c.text for c in (tokens, body, embeddings)] == ["65.54M", "0.10M", "1.05M"]
    assert [c.text for c in (state, covariance, lam, seeds)] == ["12.0", "4.0", "0.060", "1"]
    assert accuracy.text == f"{100 * recall_run('ccq_gla', 3.16e-3, 0, 2000)['test']['accuracy']:.1f}"
    assert accuracy.named.startswith("samples ")
    late = {row.label.text.split(" [")[0]: row.cells for row in table.blocks[1].rows}
    assert late["CCQ-GLA"][0].named.startswith("seeds ")
    assert len(RECALL) == len(rows)


def test_what_the_command_writes_is_read(tmp_path, capsys):
    """`ccq sweep` itself, a few steps of two rows."""
    toy = ["--tier", "rows", "--rows", "gla,ccq_gla_open", "--rates", "1e-3", "3e-3", "--steps", "2", "--workers", "0",
           "--test-samples", "3", "--device", "cpu", "--set", "data.batch=4", "--set", "data.slices=[[32,4,16]]",
           "--set", "data.valid_slices=[[32,4,4],[64,8,4]]", "--set", "dtype=fp32"]  # fmt: skip
    assert cli.main(["sweep", "mqar", *toy, "--out", str(tmp_path)]) == 0
    recall = recall_of(tmp_path)
    labels = ["GLA, other recall samples", "CCQ-GLA, gate from 0.5, other recall samples"]  # than the recipe's
    assert [row.system.label for row in recall.rows] == labels
    for row in recall.rows:
        written = {run.content["lr"]: run.content for runs in row.tried.values() for run in runs}
        best = max(written.values(), key=lambda run: (run["valid"]["accuracy"], -run["lr"]))
        assert row.lr == best["lr"]
        assert row.estimate().value == pytest.approx(100 * best["test"]["accuracy"], abs=1e-3)
        assert row.slices == [(32, 4), (64, 8)]


def test_where_both_answer_all_nothing_is_tested(tmp_path):
    runs = [
        recall_run(row, 3.16e-3, seed, 2000) for row in ("gated_deltanet", "ccq_gated_deltanet") for seed in (1, 2, 3)
    ]
    for run in runs:
        for part in run["test"]["slices"]:
            part["accuracy"] = (0.999 if run["row"] == "gated_deltanet" else 0.9995) + 1e-5 * run["seed"]
    sweep(tmp_path / "x.json", runs, "seeds")
    verdict = verdict_of(tmp_path, "ccq-gated-deltanet", "gated-deltanet")
    assert (verdict.verdict, verdict.detail) == (UNTESTABLE, "every run of both gets all right")


def test_slices_are_drawn_apart():
    """Of equal histograms too: else the interval of their mean would be that of one."""
    histogram = [[0, 50], [4, 50]]
    one, two = (bootstrap({"length": length, "pairs": 4, "histogram": histogram}) for length in (64, 128))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.2


def test_an_interval_over_seeds_ends_at_what_is_possible(tmp_path):
    runs = [recall_run("gla", 3.16e-3, seed, 2000) for seed in (1, 2, 3)]
    for run, accuracy in zip(runs, (1.0, 0.9, 1.0), strict=True):
        for part in run["test"]["slices"]:
            part["accuracy"] = accuracy
    sweep(tmp_path / "x.json", runs, "seeds")
    [row] = recall_of(tmp_path).rows
    low, high = row.estimate().over_seeds
    assert high == 100.0
    assert low == pytest.approx(seed_interval([100.0, 90.0, 100.0])[0])
