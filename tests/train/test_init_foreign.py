"""`ccq train --init` trains a model of transformers, with cleaning attached or without, as any of ours."""

import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from test_resume import stop_at
from tiny_models import VOCABULARY, make, tokens
from train_helpers import assert_bit_equal, contents, log_of, write_shards

import ccq
from ccq import cli
from ccq.train import RunError
from ccq.train import export as exporting
from ccq.train.config import read
from ccq.train.world import World

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, the same with gates saved whole, an adapter for it, and text in which tokens follow from those before."""
    out = tmp_path_factory.mktemp("attached")
    model = make("qwen3_5", vocab_size=VOCABULARY)
    model.generation_config.eos_token_id = [7, 2]  # as instruct models have it: turns end by several
    model.save_pretrained(out / "base")
    model = type(model).from_pretrained(out / "base")
    ccq.attach(model, gate_init=0.3, step="projected", covariance_decay="backbone")
    model.save_pretrained(out / "whole")
    ccq.save_adapter(model, out / "adapter")
    text = [[3 + (5 * i + j) % 40 for j in range(60)] for i in range(30)]
    write_shards(out / "text", [text], vocab_size=VOCABULARY)
    return out


def command(folder, run, *more, init="whole", steps=STEPS):
    return [
        "train", "gla_nano", "--init", str(folder / init), "--run-dir", str(run), "--steps", str(steps),
        "--data.path", str(folder / "text"), "--data.valid-path", str(folder / "text"), "--data.length", "32",
        "--data.batch", "4", "--runtime.micro-batch", "2", "--optimizer.lr", "1e-2", "--optimizer.warmup", "2",
        "--dtype", "fp32", "--runtime.log-every", "1", "--runtime.no-tensorboard", "--runtime.device", "cpu",
        "--runtime.checkpoint-every", "5", *more,
    ]  # fmt: skip


def load(name):
    return ccq.pretrained.load_model(str(name))


def last(run):
    return contents(max((run / "checkpoints").glob("step-*[0-9]")))


def test_trained_exported_and_loaded_with_its_gates(folder, tmp_path, capsys, monkeypatch):
    tokenizer = SimpleNamespace(bos_token_id=5, eos_token_id=6, pad_token_id=4, save_pretrained=lambda out: None)
    monkeypatch.setattr(exporting, "tokenizer_of", lambda run: tokenizer)
    assert cli.main(command(folder, tmp_path / "run")) == 0
    assert "Qwen3_5ForCausalLM + CCQ" in capsys.readouterr().out
    rows = [row for row in log_of(tmp_path / "run") if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert rows[0]["lam"] == pytest.approx([0.3] * 3, abs=1e-3) != rows[-1]["lam"]
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    trained, exported = (
        ccq.pretrained.load_model(str(tmp_path / "run")),
        ccq.pretrained.load_model(str(tmp_path / "out")),
    )
    assert exported.generation_config.eos_token_id == trained.generation_config.eos_token_id == [7, 2]
    before = load(folder / "whole")
    ids = tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, exported(ids).logits)
        assert not torch.equal(trained(ids).logits, before(ids).logits)
    gates = {name: x for name, x in exported.named_parameters() if "cleaner" in name}
    saved = last(tmp_path / "run")
    assert gates
    assert all(torch.equal(x, saved[f"model/{name}"]) for name, x in gates.items())
    assert exported.config.ccq_adapter["step"] == "projected"
    identity = exported.config.identity
    assert (identity["system"], identity["tokens"]) == ("whole", STEPS * 4 * 32)
    assert "begun from qwen3_5" in identity["variant"]


def test_the_first_loss_is_that_of_the_model(folder, tmp_path):
    assert cli.main(command(folder, tmp_path, "--optimizer.lr", "0", steps=1)) == 0
    (found,) = [row["valid_loss"] for row in log_of(tmp_path) if "valid_loss" in row]
    model = load(folder / "whole")
    stream = torch.tensor([x for i in range(30) for x in [*(3 + (5 * i + j) % 40 for j in range(60)), 0]])
    windows = [stream[at : at + 33] for at in range(0, len(stream) - 32, 32)]
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(w[None, :-1]).logits[0].double(), w[1:], reduction="none")
            for w in windows
        ]
    assert found == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize("init", ["whole", "adapter"])
def test_gates_alone(folder, tmp_path, init, capsys):
    assert cli.main(command(folder, tmp_path / "run", "--train", "cleaner", init=init)) == 0
    assert "of them trained" in capsys.readouterr().out
    before = dict(load(folder / init).named_parameters())
    after = {name.removeprefix("model/"): x for name, x in last(tmp_path / "run").items() if name.startswith("model/")}
    assert before.keys() == after.keys()
    moved = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert moved == {name for name in before if "cleaner" in name}


def test_the_control_has_no_gates(folder, tmp_path, monkeypatch):
    from tiny_models import in_plain_torch

    in_plain_torch(make("qwen3_5", vocab_size=VOCABULARY), monkeypatch)  # beside an installed fla
    assert cli.main(command(folder, tmp_path, init="base", steps=2)) == 0
    rows = [row for row in log_of(tmp_path) if "loss" in row]
    assert len(rows) == 2
    assert "lam" not in rows[0]


def test_a_recipe_with_cleaning_warns_of_a_model_without(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ccq.train.loop.train", lambda config, run: 0)
    for init, warned in (("base", True), ("whole", False), ("adapter", False)):
        line = command(folder, tmp_path, init=init)
        line[1] = "ccq_gla_nano"
        assert cli.main(line) == 0
        assert ("it trains without. ccq.attach adds it" in capsys.readouterr().err) == warned


def test_an_adapter_names_its_base_model_that_is_gone(folder, tmp_path):
    shutil.copytree(folder / "adapter", tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter" / "ccq_adapter.json").read_text())
    told["base_model"] = str(tmp_path / "moved")
    (tmp_path / "adapter" / "ccq_adapter.json").write_text(json.dumps(told))
    with pytest.raises(ccq.shipped.ModelError, match=r"ccq_adapter.json: its base_model .*moved does not exist"):
        load(tmp_path / "adapter")


def test_stopped_it_resumes_to_the_bit_from_another_folder(folder, tmp_path, monkeypatch):
    assert cli.main(command(folder, tmp_path / "whole")) == 0
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        stop_at(patch, 7)
        assert cli.main(
            [*command(folder, tmp_path / "parts")[:3], "whole", *command(folder, tmp_path / "parts")[4:]]
        ) == (128 + signal.SIGTERM)
    assert read(tmp_path / "parts" / "config.json").init == str((folder / "whole").resolve())
    assert cli.main(command(folder, tmp_path / "parts")) == 0
    assert_bit_equal(last(tmp_path / "whole"), last(tmp_path / "parts"))


def test_what_it_cannot_do_is_refused(folder, tmp_path, capsys):
    from ccq.train.parallelize import parallelize

    assert cli.main(command(folder, tmp_path / "run", "--data.reset")) == 1
    assert "trains on whole windows of text" in capsys.readouterr().err
    for field in (["--model.clean"], ["--model.hidden-size", "128"]):
        with pytest.raises(SystemExit):
            cli.main(command(folder, tmp_path / "run", *field))
        assert "a model of transformers has options of its own. To add cleaning: ccq.attach" in capsys.readouterr().err
    plan = ["plan", "gla_nano", "--init", str(folder / "whole")]
    assert cli.main(plan) == 1
    assert "memory and speed of a model of transformers are not estimated" in capsys.readouterr().err
    recall = ["train", "gla_tiny", "--init", str(folder / "whole"), "--run-dir", str(tmp_path / "run")]
    assert cli.main(recall) == 1
    assert "trains on whole windows of text" in capsys.readouterr().err
    assert cli.main(command(folder, tmp_path / "run", "--runtime.compile")) == 1
    assert "trains in one process and is not compiled" in capsys.readouterr().err
    assert cli.main(command(folder, tmp_path / "kept", steps=1)) == 0
    config = read(tmp_path / "kept" / "config.json")
    with pytest.raises(RunError, match="trains in one process"):
        parallelize(make("qwen3_5"), config, World(0, 2, torch.device("cpu"), None))
    assert cli.main(["train", "gla_tiny", "--foreign", "--run-dir", str(tmp_path / "run")]) == 1
    assert "foreign: expected a model in --init" in capsys.readouterr().err
    assert cli.main(command(folder, tmp_path / "run", init="nothing")) == 1
    assert "nothing" in capsys.readouterr().err
