"""Claims are judged on paired differences of seeds; two intervals are never mixed."""

import json
import math
from types import SimpleNamespace

import pytest
from made_results import evaluation, origin, text_run, training_run, trials

from ccq.bench.tables import MEASURES
from ccq.evaluate.compare import paired
from ccq.report import claims, paper
from ccq.report.collect import collect
from ccq.report.results import Results, seed_interval

GROUP = "niah_single_1/4096"


def judged(root):
    found = collect([root])
    return {v.claim["says"]: v for v in claims.judge(found, Results(found), paper.load())}


def needles(root, values, **changes):
    """{system: a value a seed} of the pass-key at 4K."""
    for system, scores in values.items():
        for seed, value in enumerate(scores):
            trials(root, "niah", {system: {GROUP: (value, "mean")}}, (seed,), **changes)


def prefill(root, *rows, **changes):
    """A benchmark of prefill: (system, tokens, ms)."""
    told = [{"system": system, "size": "1.3b", "B": 8, "T": length, "dtype": "bf16",
             "wall_ms": {"median": ms, "low": ms, "high": ms}} | changes for system, length, ms in rows]  # fmt: skip
    (root / "p.json").write_text(json.dumps({**origin(), "bench": "prefill", "rows": told}))


def samples(folder):
    return [json.loads(line) for line in (folder / "niah.jsonl").read_text().splitlines()]


PASSKEY = "CCQ-GLA retrieves the pass-key at 4K (S-NIAH-1) better than GLA"
CONTROL = "... and better than its unit-norm control, which the paper lacks"


def test_no_interval_over_seeds_below_three():
    assert seed_interval([1.0, 2.0]) is None
    low, high = seed_interval([1.0, 2.0, 6.0])
    assert (low + high) / 2 == pytest.approx(3.0)
    assert high - low == pytest.approx(2 * 4.303 * math.sqrt(7 / 3), rel=1e-3)


@pytest.mark.parametrize(
    ("cleaned", "plain", "verdict"),
    [
        ((80, 85, 80), (10, 20, 10), claims.HOLDS),
        ((10, 20, 10), (80, 85, 80), claims.FAILS),
        ((50, 45, 60), (50, 50, 50), claims.FEW),  # seeds disagree: it may be 20 more, or 17 less
        ((90, 55, 60), (50, 50, 50), claims.FEW),  # all above, not told from zero
        ((80, 85), (10, 20), claims.FEW),
        ((0, 0, 0), (0, 0, 0), claims.UNTESTABLE),  # that nothing is found says nothing of cleaning
        ((0, 0, 5), (0, 0, 0), claims.FEW),
        ((100, 100), (100, 100), claims.UNTESTABLE),
    ],
)
def test_verdicts(tmp_path, cleaned, plain, verdict):
    needles(tmp_path, {"ccq-gla": cleaned, "gla": plain})
    found = judged(tmp_path)
    assert found[PASSKEY].verdict == verdict
    assert found[PASSKEY].paper == "+45.40 at 500M, +49.00 at 1.3B (Table 3)"
    assert f"{sum(cleaned) / len(cleaned) - sum(plain) / len(plain):+.2f}".replace("-", "−") in found[PASSKEY].ours
    assert found[CONTROL].verdict == claims.NOT_RUN


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0, 90.0])
@pytest.mark.parametrize(("middle", "better"), [(1.5, "higher"), (-1.5, "lower"), (0.2, "higher"), (-3.0, "higher")])
def test_so_many_seeds_decide_if_they_come_out_as_these_did(spread, middle, better):
    def of(count):
        """`count` differences of this mean and deviation."""
        values = [(-1.0) ** n for n in range(count)]
        values[-1] *= count % 2 == 0
        scale = spread / math.sqrt(sum(x * x for x in values) / (count - 1))
        return [middle + scale * x for x in values]

    needs = claims.needed(of(3), better, 1.0)
    decided = [n for n in range(3, claims.MOST + 1) if claims.decide(of(n), better, 1.0)[0] != claims.FEW]
    assert needs == (decided[0] if decided else 0)
    named = claims.Verdict(claims.FEW, needs=needs).named
    assert named == (f"undecided (needs {needs} seeds)" if needs else "undecided")
    assert claims.Verdict(claims.HOLDS, needs=needs).named == "supported"


def test_pairs_are_seed_by_seed(tmp_path):
    """Seeds that vary together cancel: unpaired, these could not be told apart."""
    needles(tmp_path, {"ccq-gla": (30, 55, 80, 90), "gla": (20, 45, 70)})
    verdict = judged(tmp_path)[PASSKEY]
    assert verdict.verdict == claims.HOLDS
    assert "+10.00 at nano, [+10.00, +10.00] over 3 seeds" in verdict.ours


def test_a_run_evaluated_thrice_is_one_seed(tmp_path):
    for system, value in (("ccq-gla", 80.0), ("gla", 10.0)):
        for number, name in enumerate([f"{system}-nano-seed0"] * 3 + [f"{system}-nano"] * 3):
            evaluation(tmp_path / f"{system} {number}", "niah", {GROUP: (value, "mean")}, name)
    assert judged(tmp_path)[PASSKEY].verdict == claims.FEW
    results = Results(collect([tmp_path]))
    estimate = results.estimate(results.rows("niah")[0], f"niah:{GROUP}")
    assert len(estimate.values) == 6
    assert estimate.over_seeds is None


def test_a_quick_look_counts_only_where_there_is_no_other(tmp_path):
    evaluation(tmp_path / "a", "niah", {GROUP: (80.0, "mean")}, "gla-nano", quick_look=True, limit=2)
    results = Results(collect([tmp_path]))
    system = results.rows("niah")[0]
    assert results.estimate(system, f"niah:{GROUP}").value == 80
    evaluation(tmp_path / "b", "niah", {GROUP: (20.0, "mean")}, "gla-nano")
    assert Results(collect([tmp_path])).estimate(system, f"niah:{GROUP}").value == 20
    for seed in (0, 1):
        trials(tmp_path, "niah", {"ccq-gla": {GROUP: (80.0, "mean")}}, (seed,), quick_look=bool(seed))
    results = Results(collect([tmp_path]))
    estimate = results.estimate(results.rows("niah")[-1], f"niah:{GROUP}")
    assert list(estimate.by_seed) == [0]
    assert "quick looks left out, of seed 1" in estimate.notes


def test_lower_is_better_for_perplexity(tmp_path):
    group = "wikitext/4096/word_perplexity"
    trials(tmp_path, "lm", {"ccq-gla": {group: (20.0, "perplexity")}, "gla": {group: (30.0, "perplexity")}})
    assert judged(tmp_path)["CCQ lowers WikiText perplexity of GLA"].verdict == claims.HOLDS


def test_where_nothing_is_found_the_same_with_a_convolution_is_judged(tmp_path):
    for more, values in (("", {"gla": (0,) * 3, "ccq-gla": (0,) * 3}),
                         ("convolution of 4", {"gla": (40,) * 3, "ccq-gla": (80,) * 3})):  # fmt: skip
        needles(tmp_path, values, variant=more)
        found = judged(tmp_path)[PASSKEY]
        assert found.verdict == (claims.HOLDS if more else claims.UNTESTABLE)
        assert ("at nano, convolution of 4" in found.ours) == bool(more)


@pytest.mark.parametrize(("changed", "verdict", "lower"), [
    ({}, claims.HOLDS, 6), ({"qasper": 80.0}, claims.FAILS, 5), ({"qasper": None}, claims.FEW, 5),  # one was not run
])  # fmt: skip
def test_what_holds_for_every_corpus_is_judged_one_by_one(tmp_path, changed, verdict, lower):
    """A mean over corpora would let one stand for another."""
    corpora = ("govreport", "qmsum", "narrativeqa", "qasper", "pg19", "code")
    for system, values in (("gla", dict.fromkeys(corpora, 40.0)), ("ccq-gla", dict.fromkeys(corpora, 20.0) | changed)):
        groups = {f"{corpus}/20480": (x, "perplexity") for corpus, x in values.items() if x is not None}
        trials(tmp_path, "length", {system: groups})
    found = judged(tmp_path)["CCQ-GLA has lower perplexity than GLA at 20K on every corpus"]
    assert found.verdict == verdict
    assert f"lower on {lower} of 6, 3 seeds" in found.ours


def test_every_score_must_be_told_from_zero_and_one_that_is_not_is_enough():
    lower, open_, higher = (dict(enumerate(x)) for x in ((-3.0, -3.1, -2.9), (5.0, -5.0, 0.0), (3.0, 3.1, 2.9)))
    for *parts, verdict in ((lower, lower, claims.HOLDS), (lower, open_, claims.FEW), (open_, higher, claims.FAILS)):
        known = dict(zip("ab", parts, strict=True))
        pairing = SimpleNamespace(known=known, where=list(known), where_trained="nano", quick="", sources=[])
        assert claims.every(pairing, "lower").verdict == verdict


def test_the_interval_over_samples_is_that_of_ccq_compare(tmp_path):
    needles(tmp_path, {"ccq-gla": (70,), "gla": (40,)})
    low, high = paired(*(samples(tmp_path / f"{name}-nano-seed0") for name in ("gla", "ccq-gla")), "mean")["interval"]
    told = judged(tmp_path)[PASSKEY]
    assert f"[{low:+.2f}, {high:+.2f}] over samples".replace("-", "−") in told.ours
    assert "1 seed, so no interval over seeds" in told.ours
    (tmp_path / "gla-nano-seed0" / "niah.jsonl").unlink()  # results are committed without their samples
    assert "over samples" not in judged(tmp_path)[PASSKEY].ours


def test_longbench_is_not_testable_below_the_papers_scale(tmp_path):
    says = "CCQ raises the LongBench average of GLA"
    assert judged(tmp_path)[says].verdict == claims.NOT_RUN
    scores = {"ccq-gla": {"trec/8192": (80.0, "mean")}, "gla": {"trec/8192": (20.0, "mean")}}
    for size, verdict in (("nano", claims.UNTESTABLE), ("1.3b", claims.HOLDS)):
        trials(tmp_path, "longbench", scores, size=size)
        assert judged(tmp_path)[says].verdict == verdict


def test_costs_are_ratios_to_the_control(everything):
    found = collect([everything])
    cleaned, control, source = MEASURES["prefill"].measured(found, "ccq-gla")
    rows = {row["system"]: row for row in source.content["rows"]}
    assert (cleaned, control) == (rows["ccq-gla"], rows["gla-unit"])
    verdicts = judged(everything)
    training = verdicts["CCQ takes no more training throughput from a 1.3B model than the paper reports"]
    assert training.ours == "−4.2% on Unit-norm GLA, +0.0% on Gated DeltaNet (NVIDIA H200, one GPU)"
    assert "−16.3% on GLA" in training.paper
    assert "8 GPUs" in training.paper
    assert training.verdict == claims.HOLDS


def test_alignment_gate_and_intervention_are_read(everything):
    found = judged(everything)
    off = found["Needle keys lie off the top 16 directions at every layer"]
    assert off.ours.startswith("SmolLM2-135M: 4 of 4, mean −")
    rarity = found["... and further off than equally rare tokens that no question asks for"]
    assert rarity.verdict == claims.FAILS  # made of the same tokens
    assert "mean +0.000" in rarity.ours
    gate = found["The gate opens further where a needle is retrieved than on ordinary text"]
    assert gate.ours == "CCQ-GLA, nano, seed 0: 0.300 against 0.200 on text"
    off = found["A model trained with CCQ retrieves the pass-key with CCQ switched off"]
    assert (
        off.ours == "CCQ-Gated DeltaNet, nano: at most 3.0 over 2 lengths at which it retrieves any, up to 8,192 tokens"
    )
    assert off.verdict == claims.FEW  # one model of no known seed


def test_a_training_run_alone_tests_no_claim(tmp_path):
    training_run(tmp_path / "run", "ccq_gla_tiny", 0, 600)
    assert {v.ours for v in judged(tmp_path).values()} == {"not run"}


def test_evaluations_of_one_seed_with_other_lengths_are_told_apart(tmp_path):
    """The file that lacks the score is not the one whose samples are compared."""
    for number, group in enumerate((GROUP, "niah_single_1/8192")):
        scores = {"ccq-gla": {group: (70.0, "mean")}, "gla": {group: (40.0, "mean")}}
        trials(tmp_path / str(number), "niah", scores, seeds=(0,))
    told = judged(tmp_path)[PASSKEY]
    assert "+30.00 at nano" in told.ours
    assert "over samples" in told.ours
    assert {source.path.parent.parent.name for source in told.sources} == {"0"}


def test_a_claim_that_rests_on_a_quick_look_says_so(tmp_path):
    needles(tmp_path, {"ccq-gla": (80, 85, 90), "gla": (10, 15, 20)}, quick_look=True, limit=4)
    told = judged(tmp_path)[PASSKEY]
    assert told.verdict == claims.HOLDS
    assert told.detail.endswith("; first 4 samples")


def test_a_run_without_a_seed_is_no_further_seed(tmp_path):
    needles(tmp_path, {"ccq-gla": (80, 80), "gla": (10, 10)})
    for system, value in (("ccq-gla", 80.0), ("gla", 10.0)):
        evaluation(tmp_path / f"{system}-nano", "niah", {GROUP: (value, "mean")}, f"{system}-nano")
    told = judged(tmp_path)[PASSKEY]
    assert told.verdict == claims.FEW
    assert "2 seeds" in told.ours


VALID = "CCQ lowers validation perplexity of GLA"


def test_runs_of_unequal_length_are_not_compared(tmp_path):
    for seed in range(3):
        text_run(tmp_path / f"gla_pico_seed{seed}", "gla_pico", seed, 30.0 + seed, steps=600)
        text_run(tmp_path / f"ccq_gla_pico_seed{seed}", "ccq_gla_pico", seed, 20.0 + seed, steps=1200)
    told = judged(tmp_path)[VALID]
    assert told.verdict == claims.UNTESTABLE
    assert told.detail == "trained for 39,321,600 against 19,660,800 tokens"


def test_rates_are_never_averaged(tmp_path):
    """Of two rates the one that validates best counts, as in a sweep of recall."""
    for seed in range(3):
        for lr, more in ((1e-3, 10.0), (2e-3, 0.0)):
            text_run(tmp_path / f"gla_pico_seed{seed}-{lr}", "gla_pico", seed, 30.0 + more, lr=lr)
        text_run(tmp_path / f"ccq_gla_pico_seed{seed}", "ccq_gla_pico", seed, 32.0)
    told = judged(tmp_path)[VALID]
    assert "+2.00 at pico" in told.ours
    assert told.verdict == claims.FAILS


def test_a_cost_takes_both_backbones_and_the_papers_batch_and_may_not_be_above_the_papers(tmp_path):
    def verdict(systems, more=0.0, **changes):
        prefill(tmp_path, *((s, 4096, 100.0 + more * s.startswith("ccq")) for s in systems), **changes)
        return judged(tmp_path)["CCQ adds no more to the prefill of 4K tokens than the paper reports"]

    gla, both = ("gla-unit", "ccq-gla"), ("gla-unit", "ccq-gla", "gated-deltanet", "ccq-gated-deltanet")
    assert verdict(both).verdict == claims.HOLDS
    assert (verdict(gla).verdict, verdict(gla).detail) == (claims.FEW, "takes both backbones")
    assert verdict(both, B=1).ours == "not run"
    assert verdict(both, T=8192).ours == "not run"
    assert verdict(gla, 15.0).verdict == claims.FAILS  # one that costs more is enough
    assert verdict(gla, 15.0).ours.startswith("+15.0% on Unit-norm GLA")


def test_what_ccq_changes_is_taken_at_the_same_length(tmp_path):
    from ccq.report.page import build

    prefill(tmp_path, ("gla-unit", 8192, 400.0), ("gla-unit", 4096, 200.0), ("ccq-gla", 4096, 220.0))
    table = build(collect([tmp_path])).tables["inference"]
    [cell] = [row.cells[1] for row in table.blocks[0].rows if row.label.text == "CCQ-GLA"]
    assert cell.text == "220 (+10.0%)"


def test_the_interval_over_samples_is_that_of_all_runs_of_a_seed(tmp_path):
    needles(tmp_path, {"ccq-gla": [50.0], "gla": [30.0]})
    folder = tmp_path / "ccq-gla-nano-seed0-repeat"
    evaluation(folder, "niah", {GROUP: (30.0, "mean")}, folder.name, model={"name": folder.name, "hash": "other"})
    control, *runs = (samples(tmp_path / name) for name in ("gla-nano-seed0", "ccq-gla-nano-seed0", folder.name))
    bounds = [paired(control, run, "mean")["interval"] for run in runs]
    low, high = ((one + two) / 2 for one, two in zip(*bounds, strict=True))
    told = f"+10.00 at nano, 1 seed, so no interval over seeds, {claims.interval((low, high))}"
    assert told in judged(tmp_path)[PASSKEY].ours
