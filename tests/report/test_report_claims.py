"""Claims are judged on paired differences of seeds; two intervals are never mixed."""

import json
import math

import numpy as np
import pytest
from made_results import evaluation, training_run

from ccq.evaluate.compare import paired
from ccq.report import claims, paper
from ccq.report.collect import collect
from ccq.report.numbers import STUDENT, Results, seed_interval
from ccq.report.recall import Recall

GROUP = "niah_single_1/4096"


def judged(root):
    found = collect([root])
    return {v.claim["says"]: v for v in claims.judge(found, Results(found), paper.load(), Recall(found))}


def needles(root, values):
    """{system: a value a seed} of the pass-key at 4K."""
    for system, scores in values.items():
        for seed, value in enumerate(scores):
            evaluation(
                root / f"{system}-nano-seed{seed}", "niah", {GROUP: (value, "mean")}, f"{system}-nano-seed{seed}"
            )


PASSKEY = "CCQ-GLA finds the pass-key at 4K (S-NIAH-1) where GLA fails"
CONTROL = "... and where unit-norm GLA fails, which the paper does not compare with"


def test_students_quantiles():
    """P(|T| < t) = 95%, by summing the density."""
    x = np.linspace(-60, 60, 2_400_001)
    for freedom, t in enumerate(STUDENT, 2):
        scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
        assert density[np.abs(x) < t].sum() * (x[1] - x[0]) == pytest.approx(0.95, abs=4e-4)


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
    assert found[CONTROL].verdict == claims.FEW
    assert found[CONTROL].ours == "not run"


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
    estimate = results.estimate(results.systems()[0], f"niah:{GROUP}")
    assert len(estimate.values) == 6
    assert estimate.over_seeds is None


def test_a_quick_look_counts_only_where_there_is_no_other(tmp_path):
    evaluation(tmp_path / "a", "niah", {GROUP: (80.0, "mean")}, "gla-nano", quick_look=True, limit=2)
    results = Results(collect([tmp_path]))
    system = results.systems()[0]
    assert results.estimate(system, f"niah:{GROUP}").value == 80
    evaluation(tmp_path / "b", "niah", {GROUP: (20.0, "mean")}, "gla-nano")
    assert Results(collect([tmp_path])).estimate(system, f"niah:{GROUP}").value == 20


def test_lower_is_better_for_perplexity(tmp_path):
    for system, value in (("ccq-gla", 20.0), ("gla", 30.0)):
        for seed in range(3):
            name = f"{system}-nano-seed{seed}"
            evaluation(tmp_path / name, "lm", {"wikitext/4096/word_perplexity": (value, "perplexity")}, name)
    assert judged(tmp_path)["CCQ lowers WikiText perplexity of GLA"].verdict == claims.HOLDS


def test_where_nothing_is_found_the_same_with_a_convolution_is_judged(tmp_path):
    for more, values in (("", {"gla": 0.0, "ccq-gla": 0.0}), (" convolution of 4", {"gla": 40.0, "ccq-gla": 80.0})):
        for system, value in values.items():
            for seed in range(3):
                name = f"{system}{more}-nano-seed{seed}"
                evaluation(tmp_path / name, "niah", {GROUP: (value, "mean")}, name)
        found = judged(tmp_path)[PASSKEY]
        assert found.verdict == (claims.HOLDS if more else claims.UNTESTABLE)
        assert ("at nano with a convolution of 4" in found.ours) == bool(more)


@pytest.mark.parametrize(
    ("changed", "verdict", "told"),
    [
        ({}, claims.HOLDS, "lower on 6 of 6, 3 seeds"),
        ({"qasper": 80.0}, claims.FAILS, "lower on 5 of 6, 3 seeds"),
        ({"qasper": None}, claims.FEW, "lower on 5 of 6, 3 seeds"),  # one was not run
    ],
)
def test_what_holds_for_every_corpus_is_judged_one_by_one(tmp_path, changed, verdict, told):
    """A mean over corpora would let one stand for another."""
    corpora = ("govreport", "qmsum", "narrativeqa", "qasper", "pg19", "code")
    for system, values in (("gla", dict.fromkeys(corpora, 40.0)), ("ccq-gla", dict.fromkeys(corpora, 20.0) | changed)):
        for seed in range(3):
            name = f"{system}-nano-seed{seed}"
            groups = {f"{corpus}/20480": (x, "perplexity") for corpus, x in values.items() if x is not None}
            evaluation(tmp_path / name, "length", groups, name)
    found = judged(tmp_path)["CCQ-GLA has lower perplexity than GLA at 20K on every corpus"]
    assert found.verdict == verdict
    assert told in found.ours


def test_the_interval_over_samples_is_that_of_ccq_compare(tmp_path):
    needles(tmp_path, {"ccq-gla": (70,), "gla": (40,)})
    rows = [[json.loads(line) for line in (tmp_path / f"{name}-nano-seed0" / "niah.jsonl").read_text().splitlines()]
            for name in ("gla", "ccq-gla")]  # fmt: skip
    low, high = paired(*rows, "mean")["interval"]
    told = judged(tmp_path)[PASSKEY]
    assert f"[{low:+.2f}, {high:+.2f}] over samples".replace("-", "−") in told.ours
    assert "1 seed, so no interval over seeds" in told.ours
    (tmp_path / "gla-nano-seed0" / "niah.jsonl").unlink()  # results are committed without their samples
    assert "over samples" not in judged(tmp_path)[PASSKEY].ours


def test_longbench_is_not_testable_below_the_papers_scale(tmp_path):
    says = "CCQ raises the LongBench average of GLA"
    assert judged(tmp_path)[says].verdict == claims.UNTESTABLE
    for size, verdict in (("nano", claims.UNTESTABLE), ("1.3b", claims.HOLDS)):
        for system, value in (("ccq-gla", 80.0), ("gla", 20.0)):
            for seed in range(3):
                name = f"{system}-{size}-seed{seed}"
                evaluation(tmp_path / name, "longbench", {"trec/8192": (value, "mean")}, name)
        assert judged(tmp_path)[says].verdict == verdict


def test_costs_are_ratios_to_the_control(everything):
    found = collect([everything])
    ratio, over, source = claims.measured_cost(found, "prefill", "gla")
    rows = {row["system"]: row["wall_ms"]["median"] for row in source.content["rows"]}
    assert ratio == rows["ccq-gla"] / rows["gla-unit"]
    assert over == "Unit-norm GLA"
    verdicts = judged(everything)
    training = verdicts["CCQ takes no more training throughput from a 1.3B model than the paper reports"]
    assert training.ours == "−4.2% on Unit-norm GLA, +0.0% on Gated DeltaNet (NVIDIA H200, one GPU)"
    assert "−16.3% on GLA" in training.paper
    assert "8 GPUs" in training.paper
    assert training.verdict == claims.HOLDS


def test_a_cost_above_the_papers_does_not_hold(tmp_path):
    from made_results import origin

    rows = [{"system": name, "size": "1.3b", "B": 8, "T": 4096, "wall_ms": {"median": ms, "low": ms, "high": ms}}
            for name, ms in (("gla-unit", 100.0), ("ccq-gla", 115.0))]  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps({**origin(), "rows": rows}))
    verdict = judged(tmp_path)["CCQ adds no more to the prefill of 4K tokens than the paper reports"]
    assert verdict.verdict == claims.FAILS
    assert verdict.ours.startswith("+15.0% on Unit-norm GLA")


def test_alignment_gate_and_intervention_are_read(everything):
    found = judged(everything)
    assert found["Needle keys lie off the top 16 directions at every layer"].ours.startswith(
        "SmolLM2-135M: 4 of 4, mean −"
    )
    rarity = found["... and further off than equally rare tokens that no question asks for: more than rarity"]
    assert rarity.verdict == claims.FAILS  # made of the same tokens
    assert "mean +0.000" in rarity.ours
    gate = found["The gate opens further where a needle is retrieved than on ordinary text"]
    assert gate.ours == "CCQ-GLA, nano, seed 0: 0.300 against 0.200"
    off = found["Switched off at inference, CCQ is hardly missed by a model trained with it (pass-key)"]
    assert off.ours == "CCQ-Gated DeltaNet, nano: at most 3.0 over 2 lengths at which it finds any"
    assert off.verdict == claims.FAILS


def test_a_training_run_alone_tests_no_claim(tmp_path):
    training_run(tmp_path / "run", "ccq_gla_tiny", 0, 600)
    assert {v.ours for v in judged(tmp_path).values()} == {"not run"}
