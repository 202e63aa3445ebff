from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_helpers import SYSTEMS, make_config, make_model, tokens
from torch.utils.flop_counter import FlopCounterMode

from ccq import cli
from ccq.model import CCQConfig
from ccq.model.info import info

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_numbers_of_the_largest_model():
    x = info(CCQConfig.preset("ccq-gla-1.3b"))
    layer = 2 * 2048 * 1536 + 3 * 2048 * 3072 + 2048 * 16 + 16 * 1536 + 1536 + 512  # q k, v g o, decays, their norm
    layer += 6 * 1536 + 6 + 3 * 2048 * 5632 + 2 * 2048  # the gate of the cleaning, the MLP, norms
    assert x.body == 21 * layer + 2048
    assert x.embedding == 2 * 32000 * 2048
    assert x.state_bytes / 2**20 == pytest.approx(94.6, abs=0.05)
    plain = info(CCQConfig.preset("gla-1.3b"))
    assert 1.01 < x.train_flops / plain.train_flops < 1.03  # the cleaning: about 2%


def test_tied_embeddings_count_once():
    assert info(CCQConfig.preset("gla-tiny", tie_word_embeddings=True)).embedding == 256 * 64


@pytest.mark.parametrize("system", ["transformer", "linear-attention"])
def test_flops_are_those_of_the_products(system):
    """Counted by PyTorch where it sees every product; a linear layer's share is the larger at this width."""
    model = make_model(system)
    length = 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, length), use_cache=False)
    counted = counter.get_total_flops() / length
    estimated = info(model.config, length).forward_flops
    assert estimated == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_numbers(system):
    x = info(make_config(system, "nano"))
    assert x.forward_flops > 2 * x.body * 0.9
    assert x.training_bytes(1) > 16 * x.body


def test_the_command_shows_one_table(capsys):
    assert cli.main(["info", "gla-1.3b", "ccq-gla-1.3b"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "-1.3b" in line] == ["gla-1.3b", "ccq-gla-1.3b"]
    assert "94.6 MiB" in out


def test_the_command_reads_a_folder(tmp_path, capsys):
    CCQConfig.preset("ccq-gla-tiny").save_pretrained(tmp_path)
    assert cli.main(["info", str(tmp_path), "--length", "100", "--batch", "1"]) == 0
    assert "100 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gla-13b"], "Did you mean 'gla-1.3b'?"),
        (["gla-1.3b", "--length", "0"], "--length: expected one whole number above 0"),
        (["empty"], "empty has no config.json: expected the folder of a checkpoint"),
        (["run"], "the config of run could not be loaded"),
    ],
)
def test_the_command_names_mistakes(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "run"):
        Path(name).mkdir()
    Path("run/config.json").write_text('{"model": {}, "data": {}}')
    with pytest.raises(SystemExit) as stop:
        cli.main(["info", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_mixer_without_linears(monkeypatch):
    from ccq.mixers.base import MIXERS, Mixer

    class Nothing(Mixer):
        def state_bytes(self, length=0):
            return 0

        def flops(self, length):
            return 0.0

    monkeypatch.setitem(MIXERS, "nothing", Nothing)
    assert info(CCQConfig.preset("gla-tiny", mixer="nothing")).activation_bytes > 0


def test_memory_to_train_is_near_what_was_measured():
    """And as `ccq plan` has it; what CCQ adds is what it was measured to add."""
    from ccq.recipes import recipe
    from ccq.systems import recipe_name
    from ccq.train.plan import plan

    rows = json.loads((RESULTS / "train_h200.json").read_text())["rows"]
    peak = {row["system"]: row["peak_gib"] for row in rows if (row["size"], row["length"]) == ("1.3b", 4096)}
    told = {}
    for system in ("gla", "ccq-gla", "gated-deltanet", "ccq-gated-deltanet", "transformer"):
        name = recipe_name(system, "1.3b")
        told[system] = info(CCQConfig.preset(f"{system}-1.3b")).training_bytes(32768) / 2**30
        assert told[system] == pytest.approx(plan(name, recipe(name), 1).memory / 2**30, abs=1)
        assert 7 / 8 - 0.005 < told[system] / peak[system] < 1.1
    for system in ("gla", "gated-deltanet"):
        assert told[f"ccq-{system}"] - told[system] == pytest.approx(peak[f"ccq-{system}"] - peak[system], abs=0.1)
