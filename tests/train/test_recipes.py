"""Recipes are the paper's, the command line can change any field, and a plan adds up."""

import argparse
import dataclasses
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from train_helpers import small

from ccq import cli
from ccq.model import CCQConfig, CCQForCausalLM
from ccq.recipes import RECIPES, recipe
from ccq.report import paper
from ccq.systems import SIZES, SYSTEMS, Identity, recipe_name
from ccq.train import RunError, command, plan
from ccq.train import config as configs
from ccq.train.config import ModelOptions, model_config
from ccq.train.loop import train

PAPER = sorted({system for table in paper.load().tables.values() for _, system in table.rows})


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_recipe_trains_the_preset_of_its_name(system):
    for size in SIZES:
        config = recipe(recipe_name(system, size))
        assert model_config(config.model).to_dict() == CCQConfig.preset(f"{system}-{size}").to_dict()
        assert config.identity == Identity(system, size=size, recipe=recipe_name(system, size))


@pytest.mark.parametrize(("size", "tokens", "budget"), [("500m", 262_144, 15e9), ("1.3b", 524_288, 40e9)])
@pytest.mark.parametrize("system", PAPER)
def test_hyperparameters_are_the_papers(system, size, tokens, budget):
    config = recipe(recipe_name(system, size))
    assert (config.optimizer.lr, config.optimizer.warmup, config.optimizer.schedule) == (1e-3, 1024, "cosine")
    assert (config.optimizer.betas, config.optimizer.weight_decay) == ((0.9, 0.95), 0.1)
    assert (config.dtype, config.data.length, config.model.vocab_size) == ("bf16", 4096, 32_000)
    assert config.data.batch * config.data.length == tokens
    assert config.steps * tokens == pytest.approx(budget, rel=1e-4)
    assert config.model.gate_init == 0.01
    assert config.model.decay_gate_bias


def test_seven_systems_and_their_controls():
    assert len(PAPER) == 7 + 2  # and its two ablations
    assert len(RECIPES) == len(SYSTEMS) * len(SIZES)
    ccq, control = recipe("ccq_gla_500m"), recipe("gla_unit_500m")
    control.model.clean, control.model.unit_qk = True, False
    assert configs.differences(ccq, control) == []  # they differ in nothing but their names


def test_every_recipe_can_be_made_and_saved(tmp_path):
    for name in RECIPES:
        config = recipe(name)
        (tmp_path / "config.json").write_text(configs.to_json(config))
        assert configs.read(tmp_path / "config.json") == config
        assert configs.differences(configs.read(tmp_path / "config.json"), config) == []


def test_damaged_or_foreign_configs_are_refused(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(RunError, match="is missing"):
        configs.read(path)
    path.write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        configs.read(path)
    fields = json.loads(configs.to_json(small()))
    fields["optimizer"]["momentum"] = 0.9
    path.write_text(json.dumps(fields))
    with pytest.raises(RunError, match=r"not a config of this version.*momentum"):
        configs.read(path)


def test_any_field_can_be_set_on_the_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr("ccq.train.loop.train", lambda config, run: seen.append((config, run)) or 0)
    line = (
        "train ccq-gla-1.3b --run-dir there --steps 7 --seed 3 --optimizer.lr 3e-4 --optimizer.clip None "
        "--model.no-clean --model.fixed-lam 0.2 --data.path here --data.reset --runtime.micro-batch 2 --dtype fp32 "
        "--optimizer.betas 0.8 0.9"
    )
    assert cli.main(line.split()) == 0
    ((config, run),) = seen
    expected = recipe("ccq_gla_1.3b")
    expected.steps, expected.seed, expected.dtype = 7, 3, "fp32"
    expected.optimizer.lr, expected.optimizer.clip, expected.optimizer.betas = 3e-4, None, (0.8, 0.9)
    expected.model.clean, expected.model.fixed_lam = False, 0.2
    expected.data.path, expected.data.reset, expected.runtime.micro_batch = "here", True, 2
    assert config == expected
    assert str(run) == "there"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("ccq_gla_tinny", 2, "there is no recipe 'ccq_gla_tinny'. Did you mean 'ccq_gla_tiny'?"),
        ("ccq_gla_tiny --optimizer.lrr 3", 2, "--optimizer.lr FLOAT"),
        ("ccq_gla_tiny --steps many", 2, "many"),
        ("ccq_gla_tiny --steps 0", 1, "steps: expected at least 1, got 0"),
        ("ccq_gla_tiny --optimizer.lr nan", 1, "optimizer.lr: expected a finite number, got nan"),
        ("ccq_gla_tiny --optimizer.weight-decay inf", 1, "optimizer.weight_decay: expected a finite number, got inf"),
        (
            "ccq_gla_tiny --data.valid-slices 32 4 0",
            1,
            "data.valid_slices: expected length, pairs and samples, each",
        ),
        ("ccq_gla_tiny --runtime.sample-every -1", 1, "runtime.sample_every: expected at least 0, got -1"),
        ("ccq_gla_tiny --runtime.validate-windows 0", 1, "runtime.validate_windows: expected at least 1, got 0"),
        ("ccq_gla_tiny --optimizer.clip 0", 1, "optimizer.clip: expected more than 0, or None for no clipping, got 0"),
        ("ccq_gla_tiny --optimizer.eps 0", 1, "optimizer.eps: expected more than 0, got 0"),
        ("ccq_gla_tiny --optimizer.betas 0.9 1", 1, "optimizer.betas: expected at least 0 and below 1, got (0.9, 1"),
        ("ccq_gla_tiny --optimizer.rates cleaner", 1, "optimizer.rates: expected PATTERN=RATE, got cleaner"),
        ("ccq_gla_tiny --seed 99999999999999999999", 1, "seed: expected a whole number of 64 bits, got 99999999999999"),
        ("ccq_gla_tiny --data.noise 0.5", 1, "data.noise: this is for --data.source mad, here it is mqar"),
        (
            "ccq_gla_tiny --data.reset",
            1,
            "data.reset: this is for --data.source tokens, here it is mqar: set it to Fals",
        ),
        ("gla_mad_noisy --data.updates 3", 1, "data.updates: this is for --data.source mqar, here it is mad"),
        ("ccq_gla_tiny --data.recall-vocab-size 0", 1, "data.recall_vocab_size: expected at least 1, got 0"),
        ("ccq_gla_tiny --runtime.timeout -5", 1, "runtime.timeout: expected at least 1, got -5"),
        ("ccq_gla_tiny --runtime.device gpu", 1, "runtime.device: expected cpu, cuda or cuda:N, got 'gpu'"),
        (
            "ccq_gla_tiny --system.device cpu",
            2,
            "this option is now --runtime.device",
        ),
        ("ccq_gla_tiny --model.key-size 0", 1, "model.key_size: expected at least 1, got 0"),
        ("ccq_gla_tiny --model.mixer glaa", 1, "Did you mean 'gla'?"),
    ],
)
def test_mistakes_on_the_command_line_are_named(line, code, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        got = cli.main(["train", *line.split()])
    except SystemExit as stop:
        got = stop.code
    output = capsys.readouterr()
    assert got == code
    assert said in output.err + output.out
    assert not os.listdir(tmp_path)


def test_help_of_a_recipe_lists_its_fields(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["ccq_gla_tiny", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--optimizer.weight-decay FLOAT" in text
    options = re.findall(r"(--model\.\S+) .*\n\W*(.*)", text)
    assert len(options) == len(dataclasses.fields(ModelOptions))
    assert [name for name, told in options if told.startswith("(default")] == []  # each says what it is


def test_a_run_of_an_older_version_with_an_option_that_nothing_read_goes_on(tmp_path, monkeypatch):
    config = small("gla", steps=2)
    config.data.noise = 0.5
    assert train(config, tmp_path) == 0
    monkeypatch.setattr("ccq.train.loop.train", lambda config, run: 0)
    assert configs.read(tmp_path / "config.json").data.noise == 0.5
    assert cli.main(["train", "gla_tiny", "--run-dir", str(tmp_path), "--data.noise", "0.5"]) == 0
    assert cli.main(["train", "gla_tiny", "--run-dir", str(tmp_path / "new"), "--data.noise", "0.5"]) == 1


def test_options_that_a_recipe_does_not_read_are_no_variant_of_it():
    config = recipe("ccq_gla_tiny")
    config.data.length = 9
    assert configs.identified(config).identity.variant == ""
    config = recipe("gla_nano")
    config.data.recall_vocab_size = 9
    assert configs.identified(config).identity.variant == ""
    config.data.length = 9
    assert configs.identified(config).identity.variant == "windows of 9"


# ccq plan


def test_plan_of_a_model_to_begin_with(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CCQForCausalLM(CCQConfig.preset("gla-tiny", num_hidden_layers=3)).save_pretrained("three")
    told = []
    for line in ("gla_tiny", "gla_tiny --init three", "gla_tiny --model.num-hidden-layers 3"):
        assert cli.main(["plan", *line.split(), "--gpus", "1"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] != told[1] == told[2]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Where measurements ship; the user's own are in ./bench."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "SHIPPED", tmp_path / "ships")
    (tmp_path / "ships").mkdir()
    return tmp_path / "ships"


def test_plan_of_the_papers_runs(results):
    config = recipe("gla_1.3b")
    found = plan.plan("gla_1.3b", config, 8)
    assert "paper" in found.speed.source
    assert found.bound == "computation"
    assert 40e9 / found.rate == pytest.approx(40e9 / (8 * 41_600))  # 1.4 days
    assert found.speed.rate == 41_600


def test_plan_takes_what_was_measured(results):
    rows = [{"system": "ccq_gla", "size": "1.3b", "length": 4096, "tokens_per_second": 50_000.0}]
    (results / "train_h200.json").write_text(json.dumps({"gpu": "NVIDIA H200", "rows": rows}))
    assert plan.plan("ccq_gla_1.3b", recipe("ccq_gla_1.3b"), 8).rate == pytest.approx(400_000)
    assert "measured on one NVIDIA H200" in plan.plan("ccq-gla-1.3b", recipe("ccq_gla_1.3b"), 8).speed.source
    changed = recipe("ccq_gla_1.3b")
    changed.model.num_hidden_layers = 42  # what was measured is another model
    other = plan.plan("ccq_gla_1.3b", changed, 8)
    assert "a guess" in other.speed.source
    assert other.speed.rate < 25_000


def test_plan_prefers_what_the_user_measured(results):
    row = {"system": "ccq_gla", "size": "1.3b", "length": 4096, "tokens_per_second": 50_000.0}
    (results / "train_h200.json").write_text(json.dumps({"gpu": "NVIDIA H200", "rows": [row]}))
    own = results.parent / "bench" / "train_a100.json"
    own.parent.mkdir()
    own.write_text(json.dumps({"gpu": "NVIDIA A100", "rows": [row | {"tokens_per_second": 20_000.0}]}))
    found = plan.plan("ccq_gla_1.3b", recipe("ccq_gla_1.3b"), 8).speed
    assert (found.rate, found.source) == (20_000, "measured on one NVIDIA A100 (train_a100.json)")
    own.write_text("{")
    with pytest.raises(RunError, match=r"train_a100.json is damaged .*expected a result of `ccq bench train`"):
        plan.plan("ccq_gla_1.3b", recipe("ccq_gla_1.3b"), 8)


def test_plan_finds_what_ships():
    assert "measured on one NVIDIA H200" in plan.plan("ccq_gla_1.3b", recipe("ccq_gla_1.3b"), 8).speed.source


def test_memory_of_a_plan_counts_every_byte_of_the_weights(results):
    """On one GPU: fp32 masters, gradients, two moments, bf16 copies: 18 bytes a parameter, 16 with bf16 gradients."""
    config = recipe("gla_500m")
    from ccq.model import CCQForCausalLM

    with torch.device("meta"):
        parameters = sum(p.numel() for p in CCQForCausalLM(model_config(config.model)).parameters())
    one = plan.plan("gla_500m", config, 1)
    assert one.weights == 18 * parameters
    config.runtime.micro_batch = config.data.batch
    assert plan.plan("gla_500m", config, 1).weights == 16 * parameters
    config.runtime.micro_batch = recipe("gla_500m").runtime.micro_batch
    eight = plan.plan("gla_500m", config, 8)
    assert 2 * parameters < eight.weights < 5 * parameters
    config.runtime.activation_checkpointing = True
    assert plan.plan("gla_500m", config, 8).activations < 0.2 * eight.activations


def test_many_nodes_wait_for_the_network_when_a_gpu_has_little_to_do(results):
    config = recipe("gla_1.3b")
    few, many = (plan.plan("gla_1.3b", config, gpus) for gpus in (16, 128))
    assert few.bound == "computation"
    assert many.bound == "communication between nodes"
    assert many.rate < 128 * many.speed.rate
    with pytest.raises(RunError, match="cannot be shared by 7 ranks"):
        plan.plan("gla_1.3b", config, 7)


def test_plan_on_the_command_line(results, capsys):
    assert cli.main(["plan", "ccq_gla_500m", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"15B tokens.*[5-9]\.\d hours, \d\d GPU-hours", out)
    assert "40B tokens" in out
    assert "a guess" in out
    assert cli.main(["plan", "ccq_gla_500m", "--gpus", "3"]) == 1
    assert cli.main(["plan", "ccq_gla_tiny", "--gpus", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"tokens \(this recipe\): [1-9][\d.]* seconds, 0.\d+ GPU-hours\n$", out), out
    assert "15B" not in out


def test_plan_of_another_gpu_is_marked_as_an_estimate(results, capsys):
    """In proportion to the data sheets, until the user has measured."""
    config = recipe("ccq_gla_1.3b")
    ours, theirs = (plan.plan("ccq_gla_1.3b", config, 8, gpu).speed for gpu in ("H200", "A100"))
    assert "measured" in ours.source or "paper" in ours.source
    reference = plan.plan("gla_1.3b", recipe("gla_1.3b"), 8, "H200").speed.rate
    flops = [plan.info(model_config(recipe(name).model), 4096).train_flops for name in ("gla_1.3b", "ccq_gla_1.3b")]
    assert theirs.rate == pytest.approx(reference * flops[0] / flops[1] * 312 / 989)
    assert theirs.source.startswith("an estimate, nothing is measured on A100")
    assert cli.main(["plan", "ccq_gla_1.3b", "--gpu", "a100"]) == 0
    assert "8 x A100" in capsys.readouterr().out
    rows = [{"system": "ccq_gla", "size": "1.3b", "length": 4096, "tokens_per_second": 9_000.0}]
    (results / "train_a100.json").write_text(json.dumps({"gpu": "NVIDIA A100-SXM4-80GB", "rows": rows}))
    assert plan.plan("ccq_gla_1.3b", config, 8, "A100").speed.rate == 9_000
    with pytest.raises(SystemExit):
        cli.main(["plan", "ccq_gla_1.3b", "--gpu", "abacus"])
    assert "--gpu: invalid choice: 'ABACUS' (choose from " in capsys.readouterr().err


def test_bench_shows_a_row_beside_its_control(capsys, monkeypatch):
    from ccq.bench import results

    written = {}
    monkeypatch.setattr(results, "write", lambda args, content: written.update(content))
    control = {"system": "gla_unit", "tokens_per_second": 100.0, "peak_gib": 10.0, "mfu": None}
    row = {"system": "ccq_gla", "tokens_per_second": 96.0, "peak_gib": 10.2, "mfu": 0.5}
    results.run(argparse.Namespace(), "training", [control, row], lambda row: {"system": "gla_unit"})
    title, head, first, second = capsys.readouterr().out.splitlines()
    assert title == "training"
    assert head.split() == list(row)
    assert first.split() == ["gla_unit", "100.000", "10.000", "-"]
    assert second.split() == ["ccq_gla", "96.000", "(0.960×)", "10.200", "(1.020×)", "0.500"]
    assert written == {"rows": [control, row]}


def test_bench_measures_the_trainers_own_step(monkeypatch):
    """The arithmetic, on a CPU: tokens over the median step."""
    from ccq.bench import train as bench
    from ccq.train.loop import Trainer
    from ccq.train.world import join

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    clock = iter(range(100))
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with join("cpu") as world:
        trainer = Trainer(small("ccq-gla"), world)
        row = bench.measure(trainer, tokens=64, length=16, steps=3, warmup=1)
    assert row["tokens_per_second"] == 64
    assert row["peak_gib"] == 1
    assert trainer.progress["step"] == 4
