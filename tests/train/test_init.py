"""A run can begin with the weights of another model, train a part of it, and go on as any other."""

import dataclasses
import json
import shutil
import signal

import pytest
import torch
from test_resume import stop_at
from train_helpers import assert_bit_equal, contents, log_of, small

from ccq import cli
from ccq.train import RunError
from ccq.train.config import fixed, read
from ccq.train.export import export
from ccq.train.loop import Trainer, train
from ccq.train.world import join

SHAPE = {"dtype": "fp32", "checkpoint_every": 5}


def begun(name, system="gla", train=None, **changes):
    return dataclasses.replace(small(system, **{**SHAPE, **changes}), init=str(name), train=train)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of GLA, and its export."""
    out = tmp_path_factory.mktemp("trained")
    assert train(small("gla", steps=5, **SHAPE), out / "run") == 0
    export(out / "run", out / "model")
    return out


def weights(run, step):
    found = contents(run / "checkpoints" / f"step-{step:08d}")
    return {name.removeprefix("model/"): x for name, x in found.items() if name.startswith("model/")}


@pytest.mark.parametrize("kind", ["model", "run"])
def test_it_begins_with_those_weights(trained, tmp_path, kind, capsys):
    """At a rate of 0 nothing moves: the first checkpoint is what was read."""
    assert train(begun(trained / kind, steps=1, lr=0.0, seed=1), tmp_path) == 0
    before, now = weights(trained / "run", 5), weights(tmp_path, 1)
    assert before.keys() == now.keys()
    assert all(torch.equal(before[name], x) for name, x in now.items())
    assert f"weights of {trained / kind}" in capsys.readouterr().out
    [origin] = json.loads((tmp_path / "provenance.json").read_text())
    assert origin["init"] == str(trained / kind)


def test_a_gate_that_is_new_starts_as_configured_and_is_said(trained, tmp_path, capsys):
    config = begun(trained / "model", "ccq-gla", steps=1, lr=0.0, gate_init=0.2)
    assert train(config, tmp_path) == 0
    assert "new, as configured: model.layers.0.mixer.cleaner.gate_weight" in capsys.readouterr().out
    before, now = weights(trained / "run", 5), weights(tmp_path, 1)
    new = [name for name in now if name not in before]
    assert {name.rsplit(".", 1)[1] for name in new} == {"gate_weight", "gate_bias"}
    assert all(torch.equal(now[name], x) for name, x in before.items())
    assert torch.sigmoid(now["model.layers.0.mixer.cleaner.gate_bias"]).tolist() == pytest.approx([0.2] * 2, rel=1e-5)


def test_a_head_that_is_now_the_embedding_is_said(trained, tmp_path, capsys):
    assert train(begun(trained / "model", tie_word_embeddings=True, steps=1), tmp_path / "tied") == 0
    assert f"the lm_head.weight of {trained / 'model'} is left out" in capsys.readouterr().out
    assert train(begun(trained / "model", steps=1), tmp_path / "untied") == 0
    assert "left out" not in capsys.readouterr().out


def test_what_does_not_fit_is_named(trained, tmp_path):
    with pytest.raises(RunError, match=r"does not fit: .*embed_tokens.weight is \[64, 32\] there, \[96, 32\] here"):
        train(begun(trained / "model", vocab_size=96), tmp_path / "a")
    with pytest.raises(RunError, match=r"model.layers.1.*weight has no place here"):
        train(begun(trained / "run", num_hidden_layers=1), tmp_path / "b")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    shutil.copy(trained / "run" / "config.json", tmp_path / "empty")
    with pytest.raises(RunError, match="holds no complete checkpoint"):
        train(begun(tmp_path / "empty"), tmp_path / "c")
    damaged = tmp_path / "damaged"
    shutil.copytree(trained / "model", damaged)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(RunError, match=r"init: the weights of .*damaged could not be read"):
        train(begun(damaged), tmp_path / "d")


def test_on_the_command_line_the_options_come_from_the_model(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "gla_tiny", "--init", str(trained / "model"), "--run-dir", "run", "--steps", "2"]
    command += [
        "--data.recall-vocab-size",
        "64",
        "--model.clean",
        "--runtime.no-tensorboard",
        "--runtime.device",
        "cpu",
    ]
    assert cli.main(command) == 0
    config = read(tmp_path / "run" / "config.json")
    assert (config.model.hidden_size, config.model.clean, config.init) == (32, True, str(trained / "model"))
    assert config.identity.system == "ccq-gla"
    assert "begun from gla after 40 tokens" in config.identity.variant
    shutil.move(trained / "model", trained / "away")
    try:
        capsys.readouterr()
        assert cli.main(command) == 0  # and is finished: the model is not needed any more
        assert "is finished" in capsys.readouterr().out
    finally:
        shutil.move(trained / "away", trained / "model")
    assert cli.main([*command[:3], str(tmp_path / "nowhere"), *command[4:]]) == 1
    assert "nowhere" in capsys.readouterr().err
    assert cli.main(["train", "gla_tiny", *command[4:]]) == 1
    assert "init: the run has" in capsys.readouterr().err


def test_a_recipe_with_cleaning_warns_of_a_model_without(trained, tmp_path, capsys):
    """Its options are those of the model. A warm-up that the run does not live to see the end of is told, too."""
    for system, more, told in (("ccq_gla", [], True), ("ccq_gla", ["--model.clean"], False), ("gla", [], False)):
        run = tmp_path / f"{system}{len(more)}"
        command = ["train", f"{system}_tiny", "--init", str(trained / "model"), "--run-dir", str(run), *more]
        command += ["--steps", "1", "--data.recall-vocab-size", "64", "--runtime.device", "cpu"]
        assert cli.main([*command, "--runtime.no-tensorboard"]) == 0
        said = capsys.readouterr()
        assert ("the model to begin with has none: it trains without. --model.clean adds it" in said.err) == told
        assert "warning: the warm-up (20 steps) is longer than the run" in said.out


def test_it_resumes_exactly_without_the_model(trained, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    shutil.copytree(trained / "model", model)
    config = begun(model, "ccq-gla", train="cleaner|q_proj", steps=8, rates=("gate=1e-2",))
    assert train(config, tmp_path / "undisturbed") == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert train(config, tmp_path / "run") == 128 + signal.SIGTERM
    shutil.rmtree(model)
    capsys.readouterr()
    assert train(config, tmp_path / "run") == 0
    assert "resumed at step 4" in capsys.readouterr().out
    ends = [contents(tmp_path / run / "checkpoints" / "step-00000008") for run in ("undisturbed", "run")]
    assert_bit_equal(*ends)
    assert "lam_of_decay_alone" not in log_of(tmp_path / "run")[-1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_frozen_does_not_move_and_has_no_moments(dtype):
    config = dataclasses.replace(small("ccq-gla", dtype=dtype), train="cleaner|q_proj")
    with join("cpu") as world:
        trainer = Trainer(config, world)
        before = {name: x.detach().clone() for name, x in trainer.prepared.masters.items()}
        take(trainer, 3)
    moved = {name for name, x in trainer.prepared.masters.items() if not torch.equal(before[name], x)}
    assert (
        moved == {name for name in before if "cleaner" in name or "q_proj" in name} == set(trainer.state()["optimizer"])
    )
    assert moved < set(trainer.state()["model"])


def take(trainer, steps):
    from ccq.train.data import train_source

    source = train_source(trainer.config)
    for step in range(steps):
        trainer.step([source.batch(step)])


def test_no_match_is_an_error_that_lists_the_names(tmp_path):
    with pytest.raises(
        RunError, match=r"train: no name of a parameter matches 'claener'.*layers\.N\.mixer\.cleaner\.gate_b"
    ):
        train(dataclasses.replace(small("ccq-gla"), train="claener"), tmp_path)
    with pytest.raises(RunError, match=r"optimizer\.rates: no name of a parameter matches 'foo'"):
        train(small("ccq-gla", rates=("q_proj=1e-3", "foo=1e-2")), tmp_path)
    assert not (tmp_path / "config.json").exists()  # the folder is nobody's: the corrected command may take it


def test_parameters_have_their_own_rate():
    """AdamW's first step moves a weight by the rate, whatever the gradient."""
    config = small("ccq-gla", lr=1e-3, rates=("q_proj=1e-2", "_proj=3e-3"), weight_decay=0.0, clip=None, eps=1e-12)
    with join("cpu") as world:
        trainer = Trainer(config, world)
        before = {name: x.detach().clone() for name, x in trainer.prepared.masters.items()}
        take(trainer, 1)
    for name, x in trainer.prepared.masters.items():
        rate = 1e-2 if "q_proj" in name else 3e-3 if "_proj" in name else 1e-3
        assert (x.detach() - before[name]).abs().max().item() == pytest.approx(rate, rel=1e-3), name


@pytest.mark.parametrize("rates", [("cleaner",), ("cleaner=fast",), ("cleaner=-1",), ("(=1",), ("cleaner=nan",)])
def test_a_rate_that_is_none_is_refused(rates):
    with pytest.raises(RunError, match=r"optimizer\.rates"):
        small(rates=rates)


def test_gla_is_trained_then_cleaned_then_trained_on(trained, tmp_path):
    """From the same place: at lam = 0.01 cleaning changes little, and from there its gates are learned."""
    assert cli.main(["convert", str(trained / "model"), str(tmp_path / "cleaned"), "--clean"]) == 0
    found = {}
    for name, init in (("gla", trained / "model"), ("ccq-gla", tmp_path / "cleaned")):
        options = [
            "--steps",
            "6",
            "--optimizer.warmup",
            "0",
            "--optimizer.schedule",
            "constant",
            "--runtime.log-every",
            "1",
        ]
        options += ["--data.recall-vocab-size", "64", "--runtime.no-tensorboard", "--runtime.device", "cpu"]
        assert cli.main(["train", "gla_tiny", "--init", str(init), "--run-dir", str(tmp_path / name), *options]) == 0
        found[name] = [row for row in log_of(tmp_path / name) if "loss" in row]
    assert found["ccq-gla"][0]["loss"] == pytest.approx(found["gla"][0]["loss"], rel=1e-3)
    assert found["ccq-gla"][0]["loss"] != found["gla"][0]["loss"]
    assert found["ccq-gla"][-1]["loss"] < found["ccq-gla"][0]["loss"]
    lam = [row["lam"][0] for row in found["ccq-gla"]]
    assert lam[0] == pytest.approx(0.01, rel=1e-5)
    assert lam[-1] != pytest.approx(0.01, rel=1e-3)


def test_older_runs_keep_their_mark():
    """It tells whether an export is of a run: options that came later, unset, are no part of it."""
    assert not {"init", "train", "optimizer.rates"} & fixed(small()).keys()
    assert {"init", "train"} <= fixed(dataclasses.replace(small(), init="model", train="q")).keys()
