"""Claims about analyses: alignment over prompts, the gate and switching off over seeds, model by model; and tables."""

import json

import pytest
from made_results import alignment, evaluation, margin, named, origin, text_run

from ccq.report import claims, paper
from ccq.report.collect import collect
from ccq.report.page import build
from ccq.report.results import Results

GROUP = "niah_single_1/4096"


def judged(root):
    found = collect([root])
    return {v.claim["says"]: v for v in claims.judge(found, Results(found), paper.load())}


RARITY = "... and further off than equally rare tokens that no question asks for"


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"mean": -0.05, "error_of_mean": 0.005}, claims.HOLDS),
        ({"mean": -0.006, "error_of_mean": 0.0045}, claims.FEW),  # neither told from zero nor from a gap that counts
        ({"mean": -0.001, "error_of_mean": 0.002}, claims.FAILS),
        ({"mean": -0.05, "error_of_mean": None}, claims.FEW),
        ({"mean": None, "error_of_mean": None}, claims.FEW),  # no prompt has such tokens
    ],
)
def test_alignment_is_judged_on_its_interval_over_prompts(tmp_path, change, verdict):
    content = alignment(tmp_path / "a.json", "SmolLM2-135M")
    content["prompts"] = [{}] * 15
    part = content["points"]["projection"]["top"]["16"]
    part["novel minus planted"] |= change
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert judged(tmp_path)[RARITY].verdict == verdict
    part["of_isotropic_keys"] = [1.0, 1.0]  # of heads no larger than the directions that are counted
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert judged(tmp_path)[RARITY].verdict == claims.UNTESTABLE


def test_few_prompts_have_students_interval(tmp_path):
    """Three errors of the mean are enough with fifteen prompts, not with three."""
    content = alignment(tmp_path / "a.json", "SmolLM2-135M")
    content["points"]["projection"]["top"]["16"]["novel minus planted"] |= {"mean": -0.03, "error_of_mean": 0.01}
    for prompts, verdict in ((15, claims.HOLDS), (3, claims.FEW)):
        content["prompts"] = [{}] * prompts
        (tmp_path / "a.json").write_text(json.dumps(content))
        assert judged(tmp_path)[RARITY].verdict == verdict


GATE = "The gate opens further where a needle is retrieved than on ordinary text"


def gate(path, seed, retrieval, repeat=0, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    name = "ccq-gla-nano" + ("" if seed is None else f"-seed{seed}") + (f"-repeat{repeat}" if repeat else "")
    lam = {place: [[0.2, 0.2]] for place in ("text", "filler", "needle", "question")} | {"retrieval": [retrieval]}
    path.write_text(json.dumps({"kind": "gate", **named(name), "layers": [0], "lam": lam,
                                "settings": settings, "provenance": origin()}))  # fmt: skip


def test_copies_of_a_gate_analysis_are_one_seed(tmp_path):
    for number in range(3):
        gate(tmp_path / f"copy{number}" / "gate.json", 0, [0.4, 0.4 + 0.001 * number], text="filler")
        gate(tmp_path / f"unknown{number}" / "gate.json", None, [0.4, 0.4], text="filler")
    told = judged(tmp_path)[GATE]
    assert told.verdict == claims.FEW
    assert "against 0.200 on our filler" in told.ours
    for seed in (1, 2):
        gate(tmp_path / f"seed{seed}" / "gate.json", seed, [0.4, 0.41], text="book.txt")
    told = judged(tmp_path)[GATE]
    assert told.verdict == claims.HOLDS
    assert "on our filler and the text book.txt, [+0.197, +0.210] further over 3 seeds" in told.ours


def test_a_run_made_again_is_no_further_weight_and_no_further_model(tmp_path):
    """What a claim shows is a mean over seeds, and an alignment is one model's."""
    gate(tmp_path / "seed0" / "gate.json", 0, [0.4, 0.4])
    gate(tmp_path / "seed0 again" / "gate.json", 0, [0.8, 0.8], repeat=1)
    gate(tmp_path / "seed1" / "gate.json", 1, [0.2, 0.2])
    assert "0.400 against 0.200" in judged(tmp_path)[GATE].ours  # (0.6 + 0.2) / 2
    for name in ("gla-unit-nano-seed0", "gla-unit-nano-seed0-repeat"):
        alignment(tmp_path / name / "alignment.json", name)
    assert judged(tmp_path)["Needle keys lie off the top 16 directions at every layer"].ours.count("Unit-norm GLA") == 1


def test_a_model_with_few_seeds_does_not_keep_others_from_a_verdict(tmp_path):
    for seed in range(3):
        gate(tmp_path / f"seed{seed}" / "gate.json", seed, [0.4, 0.4 + 0.01 * seed])
    content = json.loads((tmp_path / "seed0" / "gate.json").read_text()) | named("ccq-gla-pico-seed0")
    (tmp_path / "pico.json").write_text(json.dumps(content))
    told = judged(tmp_path)[GATE]
    assert told.verdict == claims.HOLDS
    assert "1 with fewer than 3 seeds not counted" in told.detail


SWITCHED = "A model trained with CCQ retrieves the pass-key with CCQ switched off"


@pytest.mark.parametrize(
    ("none", "off", "seeds", "verdict"),
    [
        ({512: 99.0, 4096: 50.0}, {512: 99.0, 4096: 50.5}, 3, claims.HOLDS),
        ({512: 99.0, 4096: 50.0}, {512: 99.0, 4096: 50.5}, 1, claims.FEW),
        ({512: 99.0, 4096: 50.0}, {512: 99.0, 4096: 30.0}, 3, claims.FAILS),
        ({512: 99.0, 4096: 0.0}, {512: 99.0, 4096: 0.0}, 3, claims.UNTESTABLE),  # none at the paper's lengths
        ({4096: 0.0}, {4096: 0.0}, 3, claims.UNTESTABLE),
    ],
)
def test_switching_off_is_judged_over_seeds_at_the_papers_lengths(tmp_path, none, off, seeds, verdict):
    for seed in range(seeds):
        rows = [{"intervention": name, "suites": {"niah": {f"niah_single_1/{n}": x for n, x in scores.items()}}}
                for name, scores in (("none", none), ("off", off))]  # fmt: skip
        content = {"kind": "intervene", **named(f"ccq-gla-nano-seed{seed}"), "rows": rows}
        (tmp_path / f"{seed}.json").write_text(json.dumps({**content, "provenance": origin()}))
    assert judged(tmp_path)[SWITCHED].verdict == verdict


def test_a_seed_that_finds_nothing_misses_nothing(tmp_path):
    """Three seeds, of which one finds a needle at the greatest length: that is three, each with what it misses."""
    for seed in range(3):
        scores = {"niah_single_1/4096": 90.0, "niah_single_1/102400": 1.0 if seed == 0 else 0.0}
        rows = [{"intervention": name, "suites": {"niah": scores}} for name in ("none", "off")]
        content = {"kind": "intervene", **named(f"ccq-gla-nano-seed{seed}"), "rows": rows}
        (tmp_path / f"{seed}.json").write_text(json.dumps({**content, "provenance": origin()}))
    told = judged(tmp_path)[SWITCHED]
    assert told.verdict == claims.HOLDS
    assert "seed 0: at most 0.0 over 2 lengths" in told.ours
    assert "seed 1: at most 0.0 over 1 length " in told.ours


def test_numbers_and_uuids_are_judged_apart_from_the_pass_key(tmp_path):
    """Each bound by its own needles, also where they lie in two files of one model."""
    for seed in range(3):
        for task, off in (("niah_single_1", 50.0), ("niah_single_2", 50.0), ("niah_single_3", 40.0)):
            rows = [{"intervention": name, "suites": {"niah": {f"{task}/{length}": x for length in (4096, 16384)}}}
                    for name, x in (("none", 50.0), ("off", off))]  # fmt: skip
            content = {"kind": "intervene", **named(f"ccq-gla-nano-seed{seed}"), "rows": rows}
            (tmp_path / f"{seed}-{task}.json").write_text(json.dumps({**content, "provenance": origin()}))
    found = judged(tmp_path)
    assert found[SWITCHED].verdict == claims.HOLDS
    assert "at most 0.0 over 2 lengths" in found[SWITCHED].ours
    others = found["... and numbers and UUIDs (S-NIAH-2 and 3)"]
    assert others.verdict == claims.FAILS
    assert "CCQ-GLA, nano, from 4,096 tokens on: intervals over seeds within [−10.00, +0.00]" in others.ours
    assert "at most 10.0 over 2 lengths at which it retrieves any, up to 16,384 tokens" in others.ours


def test_switching_off_shows_the_interval_over_samples_that_lie_beside_it(tmp_path):
    for name, value in (("none", 50.0), ("off", 45.0)):
        evaluation(tmp_path / name, "niah", {GROUP: (value, "mean")}, f"ccq-gla-nano-seed0, lam {name}")
    rows = [{"intervention": name, "suites": {"niah": {GROUP: x}}} for name, x in (("none", 50.0), ("off", 45.0))]
    content = {"kind": "intervene", **named("ccq-gla-nano-seed0"), "rows": rows, "provenance": origin()}
    (tmp_path / "intervene.json").write_text(json.dumps(content))
    assert "over samples" in judged(tmp_path)[SWITCHED].ours


# -- tables ------------------------------------------------------------------------------------------------------------


def texts(cells):
    return [cell.text for cell in cells]


def test_margins_are_means_over_layers_and_heads(tmp_path):
    margin(tmp_path / "margin.json")
    [row] = build(collect([tmp_path])).tables["margin"].blocks[0].rows
    assert row.label.text.startswith("CCQ-GLA, nano, seed 0")
    assert texts(row.cells) == ["0.500, its own", "0.250 → 0.275", "−0.050 → −0.025", "3.2 → 2.0", "1 of 4", "1 of 4"]


def test_what_the_analysis_leaves_open_is_a_dash(tmp_path):
    """A model whose heads differ in size, and prompts without such tokens."""
    content = alignment(tmp_path / "a.json", "SmolLM2-135M")
    for part in content["points"]["projection"]["top"].values():
        part["of_isotropic_keys"] = [0.25, 0.5]
        for group in ("unique", "novel", "novel minus planted"):
            part[group] |= {"mean": None, "error_of_mean": None, "thirds": [None] * 3, "negative_layers": 0}
            part[group] |= {name: [None] * 4 for name in ("by_layer", "deviation_by_layer")}
            part[group]["by_head"] = [[None, None]] * 4
    (tmp_path / "a.json").write_text(json.dumps(content))
    row = build(collect([tmp_path])).tables["gap"].blocks[1].rows[0]
    assert texts(row.cells[:3]) == ["projection", "0.25, 0.50", "–"]


def test_changed_cleaning_stands_under_its_own_scores(tmp_path):
    for seed, suites in enumerate(({"niah": {"a": 1.0, "b": 2.0}}, {"niah": {"b": 3.0}, "length": {"c": 4.0}})):
        content = {"kind": "intervene", **named(f"ccq-gla-nano-seed{seed}"), "provenance": origin(),
                   "rows": [{"intervention": "none", "suites": suites}]}  # fmt: skip
        (tmp_path / f"{seed}.json").write_text(json.dumps(content))
    table = build(collect([tmp_path])).tables["intervene"]
    assert table.head == ["", "niah: a", "niah: b", "length: c"]
    shown = [texts(row.cells) for row in table.blocks[0].rows]
    assert shown == [["1.00", "2.00", "not run"], ["not run", "3.00", "4.00"]]


def test_what_a_run_was_asked_with_its_cleaning_changed_is_one_row_and_no_model(tmp_path):
    run = tmp_path / "ccq_gla_nano_seed0"
    text_run(run, "ccq_gla_nano", 0, 30.0)
    evaluation(run / "eval", "niah", {"niah_single_1/4096": (50.0, "mean")}, "model")
    told = json.loads((run / "config.json").read_text())["identity"]
    for part, task in (("passkey", "niah_single_1/4096"), ("others", "niah_single_2/4096")):
        rows = [{"intervention": name, "suites": {"niah": {task: x}}} for name, x in (("none", 50), ("off", 99))]
        folder = run / "intervene" / part
        evaluation(folder / "off", "niah", {task: (99.0, "mean")}, "model, lam off")
        content = {"kind": "intervene", "identity": told, "model": {"name": "model"}, "rows": rows}
        (folder / "intervene.json").write_text(json.dumps(content | {"provenance": origin()}))
    tables = build(collect([tmp_path])).tables
    assert [texts(row.cells) for row in tables["intervene"].blocks[0].rows] == [["50.00", "50.00"], ["99.00", "99.00"]]
    assert tables["intervene"].head[1:] == ["S1 4K", "S2 4K"]
    here = [row.label.text for block in tables["niah"].blocks if block.title == "Here, nano" for row in block.rows]
    assert [label.split(" [")[0] for label in here] == ["CCQ-GLA"]
