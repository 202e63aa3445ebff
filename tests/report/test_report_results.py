"""The long table: rates are chosen on validation, repeats counted once, and differences judged on paired seeds."""

import math

import numpy as np
import pytest
from made_results import evaluation, origin, recall_run, sweep, text_run

from ccq import cli
from ccq.files import write_json
from ccq.report import claims, page, paper
from ccq.report.claims import FAILS, FEW, HOLDS, NOT_RUN, UNTESTABLE
from ccq.report.collect import collect
from ccq.report.results import RECALL, Record, Results, drawn, seed_interval
from ccq.systems import Identity
from ccq.train.sweep_tables import tables


def judged(folder, system, control, where=RECALL):
    found = collect([folder])
    [verdict] = [v for v in claims.judge(found, Results(found), paper.load()) if v.claim.get("where") == [where]
                 and (v.claim["system"], v.claim["control"]) == (system, control)]  # fmt: skip
    return verdict


def only(folder):
    """The one row of a sweep, and its results."""
    results = Results(collect([folder]))
    [row] = results.rows("recall")
    return results.estimate(row, RECALL)


# -- runs on text ------------------------------------------------------------------------------------------------------


def test_the_last_validation_of_the_longest_runs_counts(everything):
    results = Results(collect([everything]))
    estimate = results.estimate(Identity("ccq-gla", "", "pico"), "valid:perplexity")
    assert estimate.by_seed == {0: pytest.approx(29.1), 1: pytest.approx(30.1), 2: pytest.approx(31.2)}  # not seed 9
    low, high = seed_interval([29.1, 30.1, 31.2])
    assert estimate.over_seeds == (pytest.approx(low), pytest.approx(high))
    verdict = judged(everything, "ccq-gla", "gla-unit", "valid:perplexity")
    low, high = seed_interval([29.1 - 30, 30.1 - 31, 31.2 - 32])
    assert f"[{low:+.2f}, {high:+.2f}] over 3 seeds".replace("-", "−") in verdict.ours
    assert verdict.verdict == HOLDS


def test_the_table_shows_how_rows_were_treated(everything):
    tables = page.assemble(collect([everything])).tables
    [block] = [block for block in tables["models"].blocks if block.title == "Here, pico"]
    rows = {row.label.text.split(" [")[0]: row.cells for row in block.rows}
    assert {label: [cell.text for cell in cells[2:7]] for label, cells in rows.items()} == {
        "Unit-norm GLA": ["19.7M", "31.00", "0, 1, 2", "0.002", "600"],
        "CCQ-GLA": ["19.7M", "30.13", "0, 1, 2", "0.002", "600"],
    }
    assert rows["CCQ-GLA"][5].small == "0.004: 99.0 after 1.97M"  # of the shorter run
    assert float(rows["CCQ-GLA"][9].text) > float(rows["Unit-norm GLA"][9].text)  # the covariance is counted
    blocks = {block.title.split(" [")[0]: block for block in tables["repeats"].blocks}
    cells = blocks["CCQ-GLA, pico, seed 0, 2 runs: valid"].rows[0].cells
    assert [cell.text for cell in cells] == ["29.00, 29.20", "0.2"]


@pytest.mark.parametrize(
    ("second", "spread", "says"), [(29.0, "0", "do not differ"), (29.003, "0.003", "may be chance")]
)
def test_a_run_that_came_out_the_same_says_so(tmp_path, second, spread, says):
    for repeat, perplexity in enumerate((29.0, second)):
        text_run(tmp_path / str(repeat), "ccq_gla_pico", 0, perplexity, repeat=repeat)
    table = page.build(collect([tmp_path])).tables["repeats"]
    assert [cell.text for cell in table.blocks[0].rows[0].cells] == ["29.00, 29.00", spread]
    assert says in table.notes[0]


def test_runs_on_other_text_are_other_rows(tmp_path):
    for number, words in enumerate(("", "", "trained on plain text")):
        text_run(tmp_path / str(number), "ccq_gla_pico", number, 30.0, variant=words)
    rows = Results(collect([tmp_path])).rows("valid")
    assert [row.label for row in rows] == ["CCQ-GLA", "CCQ-GLA, trained on plain text"]


# -- sweeps of recall --------------------------------------------------------------------------------------------------


def test_the_rate_is_chosen_on_validation_samples_though_another_tests_better(tmp_path):
    runs = [recall_run("gla", lr, 0, 2000) for lr in (1e-3, 3.16e-3)]
    best = recall_run("gla", 1e-2, 0, 2000)
    best["test"] = recall_run("transformer", 3.16e-3, 0, 2000)["test"]
    sweep(tmp_path / "x.json", [*runs, best], "rows")
    estimate = only(tmp_path)
    assert [source.rate for source in estimate.sources] == [3.16e-3]
    assert estimate.value == pytest.approx(100 * runs[1]["test"]["accuracy"], abs=1e-3)
    assert best["test"]["accuracy"] > runs[1]["test"]["accuracy"]


def test_tasks_are_kept_apart_and_of_mads_grid_the_chosen_decay_counts(tmp_path):
    """A model of one width and number of steps may be of MQAR or of MAD."""
    runs = [recall_run("gla", 1e-3, 0, 2000, size="mad-noisy") | {"decay": decay} for decay in (0.0, 0.1)]
    runs[0]["test"] = recall_run("transformer", 1e-3, 0, 2000)["test"]
    for part in runs[1]["test"]["slices"]:
        part["motif"] = part.pop("pairs")
    content = {"kind": "mad_sweep", "tier": "rows", "size": "mad-noisy", "provenance": origin(), "missing": [],
               "chosen": {"gla": 1e-3}, "chosen_decay": {"gla": 0.1}, "runs": runs}  # fmt: skip
    write_json(tmp_path / "mad.json", content)
    sweep(tmp_path / "x.json", [recall_run("gla", 1e-3, 0, 2000)], "rows")
    results = Results(collect([tmp_path]))
    told = "width 128, 2,000 steps"
    assert [row.size for row in results.rows("recall")] == [told, f"MAD, noisy, {told}"]
    noisy = results.estimate(results.rows("recall")[1], RECALL)
    assert noisy.value == pytest.approx(100 * runs[1]["test"]["accuracy"], abs=1e-3)
    low, high = noisy.over_samples
    assert low < noisy.value < high
    text = "".join(str(table) for table in tables(results))
    assert f"MAD, noisy, {told}" in text
    assert "128 tokens, keys of at most 32" in text


def test_the_interval_over_samples_is_that_of_the_mean():
    """Against the normal interval of the means of independent samples."""
    rng = np.random.default_rng(0)
    parts, variance, middle = [], 0.0, 0.0
    for pairs, share in ((4, 0.9), (64, 0.4)):
        right = rng.binomial(pairs, share, size=1000)
        values, times = np.unique(right, return_counts=True)
        parts.append({"pairs": pairs, "histogram": np.stack([values, times], 1).tolist()})
        variance += (100 * right / pairs).var(ddof=1) / 1000 / 4
        middle += (100 * right / pairs).mean() / 2
    low, high = Record(Identity(), "recall", "average", middle, None, "", slices=tuple(parts)).interval
    half = 1.96 * math.sqrt(variance)
    assert low == pytest.approx(middle - half, abs=0.1 * half)
    assert high == pytest.approx(middle + half, abs=0.1 * half)


def test_slices_are_drawn_apart():
    """Of equal histograms too: else the interval of their mean would be that of one."""
    histogram = [[0, 50], [4, 50]]
    one, two = (drawn({"length": length, "pairs": 4, "histogram": histogram}) for length in (64, 128))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.2


def test_a_run_again_with_its_seed_is_averaged_into_it(everything, tmp_path):
    results = Results(collect([everything]))
    estimate = results.estimate(Identity("ccq-gla", "", "width 128, 2,000 steps"), RECALL)
    values = [100 * recall_run("ccq_gla", 3.16e-3, 0, 2000, n)["test"]["accuracy"] for n in range(3)]
    assert estimate.by_seed == {0: pytest.approx(sum(values) / 3, abs=1e-3)}
    for name in ("a", "b"):  # a file that was made again
        sweep(tmp_path / f"{name}.json", [recall_run("gla", 3.16e-3, seed, 2000) for seed in (0, 1)], "rows")
    assert len(only(tmp_path).values) == 2


def test_claims_are_judged_on_differences_of_equal_seeds(everything):
    verdict = judged(everything, "ccq-gla-open", "gla-unit")
    one, two = ([recall_run(row, 3.16e-3, seed, 10_000)["test"]["accuracy"] for seed in (1, 2, 3)]
                for row in ("ccq_gla_open", "gla_unit"))  # fmt: skip
    low, high = seed_interval([100 * (x - y) for x, y in zip(one, two, strict=True)])
    assert f"at width 128, 10,000 steps, [{low:+.2f}, {high:+.2f}] over 3 seeds".replace("-", "−") in verdict.ours
    assert "over samples" in verdict.ours
    assert verdict.verdict == (HOLDS if low > 0 else FAILS if high < 0 else verdict.verdict)
    assert judged(everything, "ccq-gated-deltanet", "gated-deltanet").verdict == FAILS
    assert judged(everything, "ccq-gla", "gla-unit-equal-state").verdict == FEW


def test_the_table_of_a_sweep_shows_how_rows_were_treated(everything, tmp_path):
    table = page.assemble(collect([everything])).tables["mqar"]
    first, missing, later = table.blocks
    assert [first.title, later.title] == ["Width 128, 2,000 steps", "Width 128, 10,000 steps"]
    labels = ("Mamba2", "DeltaNet", "GLA, current-key read", "CCQ-GLA, bias not decayed", "CCQ-GLA, stats",
              "CCQ-GLA, uncentred", "CCQ-GLA, lam 0.1", "CCQ-Gated DeltaNet, gate from 0.5")  # fmt: skip
    assert missing.folded
    assert {row.label.text for row in missing.rows} == {f"{label}, width 128, 2,000 steps" for label in labels}
    rows = {row.label.text.split(" [")[0]: row.cells for row in first.rows}
    assert set(rows) == {"GLA", "Unit-norm GLA", "Unit-norm GLA, equal state", "CCQ-GLA", "CCQ-GLA, gate from 0.5",
                         "Gated DeltaNet", "CCQ-Gated DeltaNet", "Transformer"}  # fmt: skip
    accuracy, seeds, rate, *facts = rows["CCQ-GLA"]
    assert (rate.text, rate.small, seeds.text) == ("0.00316", "best of 3", "1")
    assert [cell.text for cell in facts] == ["65.54M", "0.10M", "1.05M", "12.0", "4.0", "0.060"]
    assert accuracy.named.startswith("samples ")
    assert later.rows[2].cells[0].named.startswith("seeds ")
    sweep(tmp_path / "x.json", [recall_run("gla", 3.16e-3, 0, 2000)], "rows", missing=("ccq_gla-mqar-lr1e-3",))
    assert judged(tmp_path, "ccq-gla", "gla").verdict == NOT_RUN
    assert collect([tmp_path]).unfinished == ["x.json: 1 run is missing."]
    assert any("ccq_gla-mqar-lr1e-3" in note for note in page.build(collect([tmp_path])).tables["mqar"].notes)


def test_what_the_command_writes_is_read(tmp_path):
    """`ccq sweep` itself, a few steps of two rows."""
    toy = ["--tier", "rows", "--rows", "gla,ccq_gla_open", "--rates", "1e-3", "3e-3", "--steps", "2", "--workers", "0",
           "--test-samples", "3", "--device", "cpu", "--set", "data.batch=4", "--set", "data.slices=[[32,4,16]]",
           "--set", "data.valid_slices=[[32,4,4],[64,8,4]]", "--set", "dtype=fp32"]  # fmt: skip
    assert cli.main(["sweep", "mqar", *toy, "--out", str(tmp_path)]) == 0
    results = Results(collect([tmp_path]))
    labels = ["GLA, other recall samples", "CCQ-GLA, gate from 0.5, other recall samples"]
    assert [row.label for row in results.rows("recall")] == labels
    assert results.settings("recall") == ["average", "32-4", "64-8"]
    for row in results.rows("recall"):
        written = [r.source.content for r in results.of(row, "recall") if r.setting == "average"]
        best = max(written, key=lambda run: (run["valid"]["accuracy"], -run["lr"]))
        assert results.estimate(row, RECALL).value == pytest.approx(100 * best["test"]["accuracy"], abs=1e-3)


def test_doubts_of_two_sets_of_samples_add_up_in_squares(tmp_path):
    """A sweep does not keep which samples were right: the difference is as of two sets drawn apart."""
    sweep(tmp_path / "x.json", [recall_run(row, 3.16e-3, 1, 2000) for row in ("gla", "ccq_gla")], "seeds")
    results = Results(collect([tmp_path]))
    control, row = sorted(results.rows("recall"), key=lambda row: row.system, reverse=True)
    half = [np.diff(results.estimate(each, RECALL).over_samples)[0] / 2 for each in (row, control)]
    pairing = claims.Pairing(results, row, control, [RECALL])
    low, high = pairing.over_samples()
    assert (low + high) / 2 == pytest.approx(pairing.differences[0])
    assert (high - low) / 2 == pytest.approx(math.sqrt(half[0] ** 2 + half[1] ** 2))
    assert (high - low) / 2 > max(half)


def test_where_both_answer_all_nothing_is_tested(tmp_path):
    both = ("gated_deltanet", "ccq_gated_deltanet")
    runs = [recall_run(row, 3.16e-3, seed, 2000) for row in both for seed in (1, 2, 3)]
    for run in runs:
        for part in run["test"]["slices"]:
            part["accuracy"] = (0.999 if run["row"] == "gated_deltanet" else 0.9995) + 1e-5 * run["seed"]
    sweep(tmp_path / "x.json", runs, "seeds")
    verdict = judged(tmp_path, "ccq-gated-deltanet", "gated-deltanet")
    assert (verdict.verdict, verdict.detail) == (UNTESTABLE, "every run of both sides gets all samples right")


def test_an_interval_over_seeds_ends_at_what_is_possible(tmp_path):
    runs = [recall_run("gla", 3.16e-3, seed, 2000) for seed in (1, 2, 3)]
    for run, accuracy in zip(runs, (1.0, 0.9, 1.0), strict=True):
        for part in run["test"]["slices"]:
            part["accuracy"] = accuracy
    sweep(tmp_path / "x.json", runs, "seeds")
    low, high = only(tmp_path).over_seeds
    assert high == 100.0
    assert low == pytest.approx(seed_interval([100.0, 90.0, 100.0])[0])


# -- many claims -------------------------------------------------------------------------------------------------------


def test_what_holds_says_whether_it_survives_that_many_tests(tmp_path):
    for seed in range(3):
        text_run(tmp_path / f"g{seed}", "gla_pico", seed, 30.0 + seed)
        text_run(tmp_path / f"u{seed}", "gla_unit_pico", seed, 30.0 + seed + 0.1 * (-1) ** seed)
        text_run(tmp_path / f"c{seed}", "ccq_gla_pico", seed, 20.0 + seed + (0.001, 0, -0.001)[seed])
    verdict = judged(tmp_path, "ccq-gla", "gla", "valid:perplexity")
    assert (verdict.verdict, verdict.tests, verdict.survives) == (HOLDS, 2, True)
    assert "survives Holm's correction for 2 tests" in verdict.why


# -- asked otherwise ---------------------------------------------------------------------------------------------------


def needles(folder, name, value, sizing, **changes):
    return evaluation(folder / f"{name}-{sizing}", "niah", {"niah_single_1/4096": (value, "mean")}, name,
                      settings={"sizing": sizing}, **changes)  # fmt: skip


def test_an_average_is_over_what_all_models_of_a_size_were_asked(tmp_path):
    slices = {"64-4": (80.0, "mean"), "128-8": (40.0, "mean"), "256-16": (0.0, "mean")}
    evaluation(tmp_path / "a", "mqar", slices, "gla-nano")
    evaluation(tmp_path / "b", "mqar", {name: slices[name] for name in ("64-4", "128-8")}, "ccq-gla-nano")
    evaluation(tmp_path / "c", "mqar", {"64-4": (20.0, "mean")}, "gla-pico")  # another size: it stands by itself
    results = Results(collect([tmp_path]))
    found = {row.system + row.size: results.estimate(row, "mqar:average") for row in results.rows("mqar")}
    values = {name: estimate.value for name, estimate in found.items()}
    assert values == {"glanano": 60, "ccq-glanano": 60, "glapico": 20}
    assert found["glanano"].notes == ["mean over the 2 that all were asked of 3: 64-4, 128-8"]
    assert found["glanano"].over_samples is None  # the file's own is of all three
    assert found["ccq-glanano"].notes == []
    assert "mean over the 2 that all were asked of 3" in page.build(collect([tmp_path])).html


def test_an_average_of_a_sweep_is_over_the_slices_that_all_were_tested_on(tmp_path):
    runs = [recall_run(row, 3.16e-3, 1, 2000) for row in ("gla", "ccq_gla")]
    del runs[1]["test"]["slices"][-1]
    sweep(tmp_path / "x.json", runs, "seeds")
    results = Results(collect([tmp_path]))
    for row, run in zip(results.rows("recall"), runs, strict=True):
        parts = run["test"]["slices"][: len(runs[1]["test"]["slices"])]
        estimate = results.estimate(row, RECALL)
        assert estimate.value == pytest.approx(100 * np.mean([part["accuracy"] for part in parts]))
        assert estimate.over_samples == Record(row, "", "", 0, None, "", slices=tuple(parts)).interval


def test_of_a_model_asked_in_two_sizings_rulers_counts(tmp_path):
    needles(tmp_path, "gla-nano-seed0", 80.0, "largest")
    needles(tmp_path, "gla-nano-seed0", 20.0, "ruler")
    results = Results(collect([tmp_path]))
    [row] = results.rows("niah")
    estimate = results.estimate(row, "niah:niah_single_1/4096")
    assert (estimate.value, len(estimate.notes)) == (20, 1)
    assert "sized as RULER does" in estimate.notes[0]


@pytest.mark.parametrize(("sizing", "verdict"), [("ruler", UNTESTABLE), ("largest", HOLDS)])
def test_no_claim_is_judged_on_what_was_asked_otherwise(tmp_path, sizing, verdict):
    """ "full" is what "largest" was called."""
    for seed in range(3):
        needles(tmp_path, f"gla-nano-seed{seed}", 20.0 + 5 * seed, "full")
        needles(tmp_path, f"ccq-gla-nano-seed{seed}", 80.0 + 5 * seed, sizing)
    found = collect([tmp_path])
    row = next(row for row in Results(found).rows("niah") if row.system == "ccq-gla")
    claim = {"system": "ccq-gla", "control": "gla", "where": ["niah:niah_single_1/4096"], "better": "higher"}
    got = claims.score(claim, found, Results(found), paper.load())
    assert got.verdict == verdict
    assert got.detail.startswith("evaluated differently: sizing ruler against full") == (verdict == UNTESTABLE)
    assert row.size == "nano"
