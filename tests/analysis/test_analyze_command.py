"""`ccq analyze` from a folder to files, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ccq import cli
from ccq.analysis import KINDS, AnalysisError, capture
from ccq.model import CCQConfig, CCQForCausalLM


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A model of ours with its tokenizer, as training exports it."""

    def save(system="ccq-gla"):
        torch.manual_seed(0)
        model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", vocab_size=len(tokenizer)))
        model.save_pretrained(tmp_path / system)
        tokenizer.save_pretrained(tmp_path / system)
        return tmp_path / system

    return save


def strict(path):
    """JSON without NaN, which is none."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{path} has {name}"))


def test_alignment_writes_a_result_and_the_figures(folder, tmp_path, capsys):
    out = tmp_path / "out"
    model = folder()
    assert cli.main(["analyze", "alignment", str(model), "--variants", "3", "--sentences", "6", "--out", str(out)]) == 0
    result = strict(out / "alignment_ccq_gla.json")
    assert set(result["points"]) == {"projection", "read", "operator"}
    assert len(result["prompts"]) == 15
    assert result["provenance"]["commit"]
    assert str(tmp_path) not in (out / "alignment_ccq_gla.json").read_text()
    for name in ("depth", "histogram", "heads", "spectrum"):
        assert (out / f"alignment_ccq_gla_{name}.png").stat().st_size > 2000
    assert "novel minus planted" in capsys.readouterr().out


def test_gate_writes_a_result_and_the_figure(folder, tmp_path):
    out = tmp_path / "out"
    assert cli.main(["analyze", "gate", str(folder()), "--variants", "3", "--sentences", "6", "--out", str(out)]) == 0
    assert strict(out / "gate_ccq_gla.json")["of_bias"][0] == pytest.approx([0.01, 0.01])
    assert (out / "gate_ccq_gla_layers.png").exists()


@pytest.mark.parametrize("kind", ["alignment", "gate", "margin"])
def test_a_result_replaces_an_older_one_of_its_model_and_nothing_else(kind, folder, tmp_path, capsys, monkeypatch):
    """Exports of many runs are called `model`; that of another is refused before any prompt is read."""
    arguments = ["--variants", "3", "--sentences", "6", "--name", "model", "--out", str(tmp_path / "out")]
    assert cli.main(["analyze", kind, str(folder()), *arguments]) == 0
    before = (tmp_path / "out" / f"{kind}_model.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(f"ccq.analysis.{kind}{'s' if kind == 'gate' else ''}.measure", lambda *_: pytest.fail("begun"))
        assert cli.main(["analyze", kind, str(folder("ccq-gated-deltanet")), *arguments]) == 1
    assert f"{kind}_model.json holds something else, which stays" in capsys.readouterr().err
    assert (tmp_path / "out" / f"{kind}_model.json").read_bytes() == before
    assert cli.main(["analyze", kind, str(tmp_path / "ccq-gla"), *arguments]) == 0


@pytest.mark.parametrize(("kind", "numbers"), [("alignment", "points"), ("gate", "lam"), ("margin", "cells")])
def test_without_matplotlib_there_are_numbers(kind, numbers, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ccq.figures", None)
    monkeypatch.delattr("ccq.figures", raising=False)  # where another test has imported it
    model = folder()
    assert cli.main(["analyze", kind, str(model), "--variants", "3", "--sentences", "6", "--out", str(tmp_path)]) == 0
    assert strict(tmp_path / f"{kind}_ccq_gla.json")[numbers]
    assert "no figure is drawn" in capsys.readouterr().out


def test_a_text_of_another_encoding_is_read(folder, tmp_path):
    (tmp_path / "text").write_bytes("Más texto. ".encode("latin-1") * 40)
    arguments = ["--variants", "3", "--sentences", "6", "--text", str(tmp_path / "text"), "--out", str(tmp_path)]
    assert cli.main(["analyze", "gate", str(folder()), *arguments]) == 0


def test_margin_of_ours_and_of_a_model_without_cleaning(folder, tmp_path, capsys):
    out = tmp_path / "out"
    ours, plain = folder(), folder("transformer")
    small = ["--variants", "3", "--sentences", "6", "--out", str(out)]
    assert cli.main(["analyze", "margin", str(ours), *small]) == 0
    assert strict(out / "margin_ccq_gla.json")["own_lam"] is True
    assert (out / "margin_ccq_gla.png").exists()
    assert cli.main(["analyze", "margin", str(plain), *small]) == 1
    assert "expected a lam to measure it with (--lam)" in capsys.readouterr().err
    own = ["--prompt", "The cat saw a dog. Who saw a dog?", "--needle", "cat", "--lam", "0.5"]
    assert cli.main(["analyze", "margin", str(plain), *own, *small]) == 0
    assert strict(out / "margin_transformer.json")["prompts"] == 1


def test_a_model_with_no_key_projection_is_refused_by_name(tmp_path, tokenizer, capsys, monkeypatch):
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=512)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.delitem(capture.FUSED, "gpt2")
    small = ["--variants", "3", "--sentences", "6", "--out", str(tmp_path)]
    assert cli.main(["analyze", "alignment", str(tmp_path / "model"), *small]) == 1
    error = capsys.readouterr().err
    assert "GPT2LMHeadModel has no key projection" in error
    assert "transformer.h.*.attn.c_attn" in error


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_help(kind, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["analyze", kind, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: ccq analyze {kind}")


def test_an_unknown_kind_names_the_nearest(capsys):
    with pytest.raises(SystemExit):
        cli.main(["analyze", "margins"])
    assert "unknown kind 'margins'. Did you mean 'margin'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["alignment", "./nowhere"], "does not exist"),
        (["alignment", "./nowhere.gguf"], "a .gguf file"),
        (["alignment", "./nowhere", "--variants", "1"], "variants: expected 3 to 8"),
    ],
)
def test_what_is_not_there_is_said_without_a_traceback(arguments, text, capsys):
    assert cli.main(["analyze", *arguments]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["alignment", "gate", "margin"])
def test_a_model_without_a_tokenizer_is_told_of_the_option(folder, capsys, kind):
    model = folder()
    for path in model.glob("*token*"):
        path.unlink()
    assert cli.main(["analyze", kind, str(model)]) == 1
    assert "ccq-gla has no tokenizer: give one with --tokenizer" in capsys.readouterr().err


def test_a_name_that_is_no_folder_is_said_to_be_none_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its variable was read when it was imported
    assert cli.main(["analyze", "alignment", "no-such-model-at-all"]) == 1
    assert capsys.readouterr().err.startswith(
        "ccq analyze: there is no model 'no-such-model-at-all': it is not a folder here"
    )


def test_a_prompt_past_learned_positions_is_refused_in_a_sentence(tmp_path, tokenizer, capsys):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=96)
    for name, model_type in (("known", "gpt2"), ("unknown", "not in any list")):
        model = GPT2LMHeadModel(config).eval()
        model.config.model_type = model_type
        with pytest.raises(AnalysisError, match=r"has 100 tokens, the model takes 96"):
            capture.run(model, [1] * 100)
        capture.run(model, [1] * 96)
        with pytest.raises(IndexError):  # something else is wrong with it
            capture.run(model, [10**6])
        model.config.model_type = "gpt2"
        model.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "known")
    arguments = ["analyze", "alignment", str(tmp_path / "known"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert cli.main([*arguments, "--variants", "3", "--sentences", "20"]) == 1
    assert "the model takes 96: give fewer --sentences" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
