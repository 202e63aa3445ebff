"""What docs/study.md says of its runs is in their files, and its verdicts follow from its rules."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from scripts import script

from ccq.files import read_text

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "study.md").read_text()


STUDY = script("benchmarks/study.py")


def run(system, seed):
    return STUDY.Run(STUDY.RUNS / f"{system.replace('-', '_')}-seed{seed}")


def old(system):
    """Seed 0 at the older commit."""
    return STUDY.Run(STUDY.RUNS / "earlier" / f"{system.replace('-', '_')}-seed0")


def again(system, seed):
    """The repeat of a seed."""
    return STUDY.Run(STUDY.RUNS / f"{system.replace('-', '_')}-seed{seed}-repeat1")


def behind(one, where):
    """How much higher the perplexity of a run is than that of seed 1 of the control, at these steps of 512 tokens in
    windows of 16K: the geometric mean over the corpora."""

    def losses(x):
        scores = x.read("eval/length.json")["scores"]
        found = {name: s["loss_by_position"][slice(*where)] for name, s in scores.items() if "loss_by_position" in s}
        return {name: statistics.mean(step["loss"] for step in steps) for name, steps in found.items()}

    mine, theirs = losses(one), losses(run("gla-unit", 1))
    assert len(theirs) == 7
    return math.exp(statistics.mean(mine[name] - theirs[name] for name in theirs)) - 1


def spread(*claims):
    """Of the differences of a claim over its seeds: their standard deviation, pooled over claims with as many seeds."""
    found = [x for x in STUDY.judge(STUDY.pairs(STUDY.runs())) if x.name in claims]
    assert len({len(x.differences) for x in found}) == 1
    return math.sqrt(statistics.mean(statistics.variance(x.differences.values()) for x in found))


def pace(system, seed):
    """Millions of tokens a second, the median of what the log says."""
    return statistics.median(x["tokens_per_second"] for x in run(system, seed).log if "tokens_per_second" in x) / 1e6


def before():
    """What the paper's step changed on Gated DeltaNet in the runs before the study, by seed."""
    found = STUDY.ROOT / "benchmarks" / "results" / "nano" / "needles"
    pairs = [[STUDY.Run(found / f"{x}gated_deltanet-seed{seed}") for x in ("ccq_", "")] for seed in range(3)]
    return [ours.perplexity() - control.perplexity() for ours, control in pairs]


def interval(claim):
    (verdict,) = [verdict for verdict in STUDY.judge(STUDY.pairs(STUDY.runs())) if verdict.name == claim]
    return verdict.interval


def last(system, seed):
    return run(system, seed).perplexity()


def gain(system, read, seed):
    """Tier 6: perplexity with a read put in, less that of the model trained on without it."""
    name = system.replace("-", "_")
    with_it, without = (STUDY.Run(STUDY.RUNS / "continued" / f"{name}-{x}-seed{seed}") for x in (read, "none"))
    return with_it.perplexity() - without.perplexity()


def tried(system, rate="2e-3"):
    """Perplexity of a run that chooses the rate."""
    return STUDY.Run(STUDY.RUNS / "sweep" / f"{system.replace('-', '_')}-{rate}").perplexity()


def speed(system):
    """Millions of tokens a second of a training step alone."""
    rows = json.loads((STUDY.RUNS / "cost" / "profile_nano_h200.json").read_text())["rows"]
    (row,) = [row for row in rows if row["system"] == system and row["part"] == "train"]
    return row["B"] * row["T"] / row["wall_ms"] / 1e3


def test_tables_of_the_page_are_made_from_the_files():
    assert STUDY.filled(PAGE) == PAGE
    assert {place["name"] for place in STUDY.PLACE.finditer(PAGE)} == {"runs", "claims", "sweep", "continued"}


def test_five_seeds_are_planned_where_the_page_says_d():
    marked = re.findall(r"^\| (S\d+)\. .* \| D \|", PAGE, re.MULTILINE)
    assert set(marked) == STUDY.DECIDE


def test_sentences_of_the_page_hold():
    sentences = re.findall(r"<!-- holds: (.+?) -->", PAGE)
    assert len(sentences) >= 6
    for sentence in sentences:
        assert eval(sentence, globals()), sentence


@pytest.mark.parametrize("path", sorted(STUDY.RUNS.glob("*-seed*")), ids=lambda path: path.name)
def test_a_run_is_what_the_plan_says(path):
    """100M tokens, the rate that its row chose, and the twelve needle settings where it was asked; its line has its own
    numbers."""
    config = json.loads((path / "config.json").read_text())
    identity, recipe = config["identity"], path.name.rpartition("-seed")[0]
    assert identity["tokens"] == pytest.approx(100e6, rel=1e-3)
    assert config["model"]["conv_size"] == 4
    rates = {}
    for tried in STUDY.searched(identity["system"]):
        rows = [json.loads(line) for line in read_text(tried / "log.jsonl").splitlines()]
        rates[float(tried.name.rpartition(f"{recipe}-")[2])] = [r["valid_loss"] for r in rows if "valid_loss" in r][-1]
    assert sorted(rates) == [1e-3, 2e-3, 4e-3]
    assert config["optimizer"]["lr"] == min(rates, key=rates.get)
    table = STUDY.runs_table(STUDY.runs())
    rows = [json.loads(line) for line in read_text(path / "log.jsonl").splitlines()]
    perplexity = [row["valid_perplexity"] for row in rows if "valid_perplexity" in row][-1]
    repeat = r" \(repeat\)" if identity["repeat"] else ""
    (line,) = re.findall(rf"^\| `{identity['system']}` \| {identity['seed']}{repeat} \| .*$", table, re.MULTILINE)
    assert f"| {perplexity:.2f} |" in line
    needles = path / "eval" / "niah.json"
    if needles.exists():
        scores = [score["value"] for score in json.loads(needles.read_text())["scores"].values()]
        assert len(scores) == 12
        assert f"| {sum(scores) / 12:.1f} |" in line


def test_verdicts_are_those_of_the_rules(monkeypatch):
    """Against scipy's paired test, on made-up values: a clear gain, a clear loss, none, and too few seeds."""
    stats = pytest.importorskip("scipy.stats")
    made = {
        "gla-unit": [40.0, 41.0, 42.0, 40.5, 41.5],
        "ccq-gla": [40.02, 40.98, 42.01, 40.5, 41.49],
        "gla-projected-decay": [38.0, 39.1, 39.9, 38.4, 39.6],
        "gla-projected": [38.5, 39.4, 40.4],
        "gated-deltanet": [30.0, 31.0],
        "ccq-gated-deltanet": [29.0, 30.0],
    }
    monkeypatch.setattr(STUDY, "by_seed", lambda found, system, measure: dict(enumerate(made.get(system, []))))
    verdicts = {verdict.name: verdict for verdict in STUDY.judge(STUDY.pairs([]))}
    assert verdicts["S1"].verdict == "not supported"  # no gain of 0.1 is left
    assert verdicts["S2"].verdict == verdicts["S3"].verdict == "supported"
    assert verdicts["S7"].verdict == "undecided"
    assert verdicts["S6"].verdict == "not run"
    for name, row, control in (("S1", "ccq-gla", "gla-unit"), ("S4", "gla-projected", "gla-unit")):
        count = min(len(made[row]), len(made[control]))
        truth = stats.ttest_rel(made[row][:count], made[control][:count])
        interval = truth.confidence_interval(0.95)
        assert verdicts[name].p == pytest.approx(truth.pvalue, rel=1e-6)
        assert verdicts[name].interval == pytest.approx((interval.low, interval.high), rel=1e-3)


def test_a_p_that_the_correction_takes_away_supports_nothing(monkeypatch):
    made = {"gla-unit": [40.0, 40.0, 40.0], "gla-projected": [39.0, 39.2, 38.6], "ccq-gla": [40.2, 39.7, 40.3],
            "gla-projected-decay": [40.1, 39.6, 40.2]}  # fmt: skip
    monkeypatch.setattr(STUDY, "by_seed", lambda found, system, measure: dict(enumerate(made.get(system, []))))
    (verdict,) = [verdict for verdict in STUDY.judge(STUDY.pairs([])) if verdict.name == "S4"]
    assert verdict.p < 0.05
    assert verdict.interval[1] < 0
    assert verdict.verdict == "undecided"
