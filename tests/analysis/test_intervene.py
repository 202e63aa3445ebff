"""A model with lam changed is the model that has such a lam; afterwards it is what it was."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from ccq.analysis import AnalysisError
from ccq.analysis.intervene import Intervention, cleaners, intervene, main
from ccq.evaluate import Options, evaluate, niah
from ccq.evaluate.requests import EvaluationError
from ccq.model import CCQConfig, CCQForCausalLM

SYSTEMS = ["ccq-gla", "ccq-gated-deltanet", "ccq-mamba2"]


def make(system="ccq-gla", **changes):
    torch.manual_seed(0)
    settings = {"initializer_range": 0.2, "gate_init": 0.5, **changes}
    model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", **settings)).eval()
    for module in model.modules():
        if hasattr(module, "gate_weight"):
            torch.nn.init.normal_(module.gate_weight, std=0.5)
    return model


def with_fixed_lam(model, lam):
    """Another model with the same weights, in which lam is a constant of the config."""
    other = CCQForCausalLM(CCQConfig.from_dict(model.config.to_dict() | {"fixed_lam": lam}))
    missing, left = other.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert all("gate" in name for name in left)
    return other.eval()


IDS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("change", "lam"), [(Intervention("off"), 0.0), (Intervention("fixed", 0.7), 0.7)])
def test_off_and_fixed_are_models_with_that_lam(system, change, lam):
    model = make(system)
    before = logits(model)
    with intervene(model, change):
        assert torch.allclose(logits(model), logits(with_fixed_lam(model, lam)), atol=1e-6)
    assert (logits(model) - before).abs().max() == 0
    assert not torch.allclose(before, logits(with_fixed_lam(model, lam)), atol=1e-4)


def test_scaling_by_nothing_is_off_and_by_one_is_none():
    model = make()
    before = logits(model)
    with intervene(model, Intervention("off")):
        off = logits(model)
    with intervene(model, Intervention("scale", 0.0)):
        assert torch.equal(logits(model), off)
    with intervene(model, Intervention("scale", 1.0)):
        assert torch.equal(logits(model), before)


def test_scaling_multiplies_lam_and_stops_at_one():
    lam = torch.tensor([0.1, 0.4, 0.9])
    assert torch.allclose(Intervention("scale", 2.0)(lam), torch.tensor([0.2, 0.8, 1.0]))


def test_one_layer_alone_is_changed():
    model = make()
    seen = []
    every = cleaners(model)
    with intervene(model, Intervention("fixed", 0.25, layers=(1,))):
        for cleaner in every:
            cleaner.record = True
        logits(model)
        seen = [cleaner.lam for cleaner in every]
    assert torch.equal(seen[1], torch.full_like(seen[1], 0.25))
    assert seen[0].std() > 0.01


def test_decoding_follows_the_intervention():
    model = make("ccq-gated-deltanet")
    with torch.no_grad(), intervene(model, Intervention("off")):
        whole = model(IDS).logits[:, -1]
        cache = model(IDS[:, :-3]).past_key_values
        for t in range(IDS.shape[1] - 3, IDS.shape[1]):
            last = model(IDS[:, t : t + 1], past_key_values=cache).logits[:, -1]
    assert torch.allclose(whole, last, atol=1e-4)
    with torch.no_grad():
        cache = model(IDS[:, :-1]).past_key_values
        assert not torch.allclose(model(IDS[:, -1:], past_key_values=cache).logits[:, -1], last, atol=1e-4)


def test_the_model_is_as_it_was_after_an_error_and_interventions_nest():
    model = make()
    outer, inner = Intervention("fixed", 0.5), Intervention("off", layers=(0,))
    with intervene(model, outer):
        with contextlib.suppress(KeyError), intervene(model, inner):
            assert [c.intervention for c in cleaners(model)] == [inner, outer]
            raise KeyError
        assert {c.intervention for c in cleaners(model)} == {outer}
    assert {c.intervention for c in cleaners(model)} == {None}


def test_what_cannot_be_is_refused():
    with pytest.raises(AnalysisError, match=r"layers: expected layers from 0 to 1 .* got 2"):
        intervene(make(), Intervention("off", layers=(2,))).__enter__()
    with pytest.raises(AnalysisError, match="CCQForCausalLM has no cleaning"):
        intervene(make("gla"), Intervention("off")).__enter__()
    for kind, value, text in (("fixed", 1.5, "from 0 to 1"), ("scale", -1, "not negative"), ("of", 0, "none, off")):
        with pytest.raises(AnalysisError, match=text):
            Intervention(kind, value)


def test_a_suite_is_evaluated_under_each_intervention(tmp_path, capsys):
    """Results differ from folder to folder though the weights are the same, and lam 0 in all layers is lam off."""
    make(vocab_size=8192).save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    arguments = [str(tmp_path / "model"), "--suite", "mqar", "--lengths", "64", "--limit", "6", "--out", str(out)]
    assert main([*arguments, "--off", "--fixed", "0", "1", "--scale", "0.5", "--each-layer"]) == 0
    result = json.loads((out / "intervene.json").read_text())
    names = [row["intervention"] for row in result["rows"]]
    alone = ["off", "fixed-0", "fixed-1", "scale-0.5"]
    assert names == ["none", *alone, *(f"{name}-layers-{i}" for name in alone for i in range(2))]
    answers = {
        name: [
            row["tokens"]
            for row in map(json.loads, (out / name / "responses" / "mqar.jsonl").read_text().splitlines()[1:])
        ]
        for name in names
    }
    assert answers["off"] == answers["fixed-0"]
    assert answers["off"] != answers["fixed-1"]
    assert len({json.dumps(x) for x in answers.values()}) > 3
    shown = capsys.readouterr().out
    assert "scale-0.5-layers-1" in shown


def test_a_result_keeps_what_calls_before_found_and_that_of_another_model_stays(tmp_path, capsys):
    arguments = ["--suite", "mqar", "--lengths", "64", "--limit", "6", "--out", str(tmp_path / "out")]
    for name, system in (("one", "ccq-gla"), ("two", "ccq-gated-deltanet")):
        CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", vocab_size=8192)).save_pretrained(tmp_path / name)
    assert main([str(tmp_path / "one"), *arguments, "--off"]) == 0
    first = json.loads((tmp_path / "out" / "intervene.json").read_text())["rows"]
    with pytest.raises(FileExistsError, match=r"intervene.json holds something else"):
        main([str(tmp_path / "two"), *arguments, "--off"])
    assert main([str(tmp_path / "one"), *arguments, "--fixed", "1"]) == 0
    assert main([str(tmp_path / "one"), *arguments, "--off", "--limit", "3"]) == 1  # refused: fewer were asked
    rows = json.loads((tmp_path / "out" / "intervene.json").read_text())["rows"]
    assert rows[:2] == first
    assert [row["intervention"] for row in rows] == ["none", "off", "fixed-1"]
    assert all(row["suites"]["mqar"] for row in rows)
    assert main([str(tmp_path / "one"), *arguments, "--off", "--limit", "9"]) == 0  # more: those of six are left out
    rows = json.loads((tmp_path / "out" / "intervene.json").read_text())["rows"]
    assert [bool(row["suites"]) for row in rows] == [True, True, False]


def test_answers_of_a_changed_model_are_not_taken_for_its_own(tmp_path):
    """Its weights are the same: what was finished, or half asked, without the change is neither returned nor mixed."""
    model = make(vocab_size=8192)

    def ask(out, **more):
        return evaluate(model, None, "mqar", Options(out=tmp_path / out, lengths=(64,), limit=6, **more))

    plain = ask("a")
    with (
        intervene(model, Intervention("fixed", 1.0)),
        pytest.raises(EvaluationError, match="lam was None, now it is fix"),
    ):
        ask("a")
    with intervene(model, Intervention("fixed", 1.0, layers=(1,))):
        ask("b")
    every = intervene(model, Intervention("fixed", 1.0))
    with every, pytest.raises(EvaluationError, match="lam was fixed-1-layers-1 in 1, now it is fixed-1 in 0, 1"):
        ask("b")
    with pytest.raises(EvaluationError, match="lam was fixed-1-layers-1 in 1, now it is None"):
        ask("b")
    assert ask("a")["scores"] == json.loads(json.dumps(plain["scores"]))


def test_samples_are_drawn_once_and_what_is_finished_is_not_run_again(tmp_path, capsys, monkeypatch):
    arguments = ["ccq-gla-pico", "--suite", "niah", "--tasks", "niah_single_1", "--lengths", "256", "--limit", "1"]
    arguments += ["--sizing", "full", "--answer-tokens", "2", "--device", "cpu", "--out", str(tmp_path), "--off"]
    draw, drawn = niah.draw, []
    monkeypatch.setattr(niah, "draw", lambda *given, **options: drawn.append(given) or draw(*given, **options))
    niah.samples.cache_clear()
    assert main(arguments) == 0
    assert len(drawn) == 1
    capsys.readouterr()
    assert main([*arguments, "--fixed", "0.5"]) == 0
    assert capsys.readouterr().out.count("already finished") == 2


def test_a_suite_that_fails_as_trained_is_said_once(tmp_path, capsys):
    arguments = ["ccq-gla-pico", "--suite", "niah", "--lengths", "512", "--device", "cpu", "--off", "--each-layer"]
    assert main([*arguments, "--tasks", "niah_book", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("512 is too short for niah_book") == 1
    assert not (tmp_path / "out" / "intervene.json").exists()


def test_a_command_without_an_intervention_or_with_an_unknown_suite_is_refused(tmp_path, capsys):
    for arguments, text in (
        ([], "at least one intervention"),
        (["--off", "--suite", "nia"], "Did you mean 'niah'?"),
        (["--off", "--suite", "mqar", "--keys", "odd"], "--keys: this option is for niah, and --suite is mqar"),
    ):
        with pytest.raises(SystemExit):
            main(["model", "--out", str(tmp_path), *arguments])
        assert text in capsys.readouterr().err
