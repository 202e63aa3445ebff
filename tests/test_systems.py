"""The registry is whole, and what a run is of comes with it from training to every result."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from ccq import cli
from ccq.model import CCQConfig, CCQForCausalLM
from ccq.model.config import recognise
from ccq.systems import OFF, SIZES, SYSTEMS, UNCHANGED, Identity, recipe_name

TINY = [
    "--steps", "4", "--seed", "3", "--data.batch", "4", "--runtime.micro-batch", "4", "--runtime.no-tensorboard",
    "--runtime.device", "cpu", "--model.conv-size", "4", "--identity.repeat", "1",
]  # fmt: skip
TRAINED = Identity("ccq-gla", "convolution of 4", "tiny", seed=3, repeat=1, tokens=16, recipe="ccq_gla_tiny")


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_preset_can_be_built(system):
    for size in SIZES:
        config = CCQConfig.preset(f"{system}-{size}")
        config.num_hidden_layers = min(config.num_hidden_layers, 2)  # the others are like them
        with torch.device("meta"):
            CCQForCausalLM(config)


def test_what_a_system_names_is_there():
    from ccq.report.paper import load

    rows = {system for table in load().tables.values() for _, system in table.rows}
    for system in SYSTEMS.values():
        assert system.control is None or system.control in SYSTEMS
        assert system.family in SYSTEMS
    assert rows <= SYSTEMS.keys()
    for of in (lambda s: s.label, lambda s: (s.family, s.line), lambda s: (*sorted(s.options.items()), s.equal_state)):
        assert len({str(of(system)) for system in SYSTEMS.values()}) == len(SYSTEMS)  # each once


@pytest.mark.parametrize("system", SYSTEMS)
def test_options_tell_system_and_size(system):
    twins = {"mqar-overwrite": "mqar", "mad-fuzzy": "mad-noisy"}  # the same model, trained on something else
    for size in SIZES:
        options = CCQConfig.preset(f"{system}-{size}").to_dict()
        assert recognise(options) == (system, twins.get(size, size), "")
        assert recognise(options, system, size) == (system, size, "")


@pytest.mark.parametrize(
    ("preset", "changes", "expected"),
    [
        ("gla-nano", {"conv_size": 4}, ("gla", "nano", "convolution of 4")),
        ("gated-deltanet-pico", {"conv_size": None}, ("gated-deltanet", "pico", "no convolution")),
        ("gla-pico", {"clean": True}, ("ccq-gla", "pico", "")),
        ("ccq-gla-pico", {"gate_init": 0.5}, ("ccq-gla-open", "pico", "")),
        ("ccq-gla-pico", {"gate_init": 0.3}, ("ccq-gla", "pico", "gate from 0.3")),
        ("ccq-gla-tiny", {"hidden_size": 96, "num_hidden_layers": 7}, ("ccq-gla", "width 96", "")),
        ("gla-tiny", {"num_hidden_layers": 1, "vocab_size": 99}, ("gla", "tiny", "1 layer")),
        ("ccq-mamba2-500m", {"expand": 1}, ("ccq-mamba2", "500m", "expand 1")),
    ],
)
def test_what_differs_is_said_in_words(preset, changes, expected):
    assert recognise(CCQConfig.preset(preset, **changes).to_dict()) == expected


def test_the_order_is_that_of_sizes_then_of_the_registry():
    made = [Identity("gla", "", "tiny"), Identity("Qwen", "", "nano"), Identity("ccq-gla", "", "nano"),
            Identity("gla", "x", "nano"), Identity("gla", "", "nano"), Identity("gla", "", "width 96")]  # fmt: skip
    assert [f"{i.key} {i.size}" for i in sorted(made, key=lambda i: i.order)] == [
        "gla nano", "gla, x nano", "ccq-gla nano", "Qwen nano", "gla tiny", "gla width 96",
    ]  # fmt: skip


def test_an_identity_of_something_else_is_refused():
    for wrong in ({"system": 3}, {"seed": "0"}, {"repeat": None}):
        with pytest.raises(TypeError, match=f"identity: {next(iter(wrong))}: expected"):
            Identity(**wrong)


def test_the_registry_is_light():
    code = "import sys, ccq.systems; assert not {'transformers', 'triton', 'fla'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity") / "any name"
    assert cli.main(["train", "ccq_gla_tiny", "--run-dir", str(folder), *TINY]) == 0
    assert cli.main(["export", str(folder), str(folder / "model")]) == 0
    return folder


def said(path) -> Identity:
    return Identity(**json.loads(path.read_text())["identity"])


def test_identity_goes_from_training_to_every_result(run, monkeypatch):
    assert said(run / "config.json") == said(run / "model" / "config.json") == TRAINED
    assert CCQConfig.from_pretrained(run / "model").identity == dataclasses.asdict(TRAINED)
    model, ask = str(run / "model"), ["--suite", "mqar", "--limit", "2", "--device", "cpu"]
    assert cli.main(["eval", model, *ask, "--out", str(run / "eval")]) == 0
    assert said(run / "eval" / "mqar.json") == TRAINED
    for stage in ("requests", "score", "metrics"):
        assert cli.main(["eval", model, *ask, "--stage", stage, "--out", str(run / "stages")]) == 0
    assert said(run / "stages" / "mqar.json") == TRAINED
    assert cli.main(["analyze", "intervene", model, *ask, "--off", "--fixed", "0.5", "--out", str(run / "lam")]) == 0
    assert said(run / "lam" / "intervene.json") == TRAINED
    variants = {"none": UNCHANGED, "off": OFF, "fixed-0.5": "lam fixed-0.5 in 0 1 at inference"}
    for name, words in variants.items():
        assert said(run / "lam" / name / "mqar.json") == TRAINED.varied(words)


def test_a_recall_model_is_asked_what_it_was_trained_on(run):
    """48 tokens of its 256, 4 pairs in 32 tokens, as its recipe validates."""
    assert cli.main(["eval", str(run / "model"), "--suite", "mqar", "--limit", "2", "--device", "cpu",
                     "--out", str(run / "own")]) == 0  # fmt: skip
    settings = json.loads((run / "own" / "mqar.json").read_text())["settings"]
    assert settings["vocabulary"] == 48
    assert settings["slices"] == [{"length": 32, "pairs": 4, "samples": 2}]
    asked = ["--slices", "16x2x3", "--recall-vocab-size", "64", "--suite", "mqar", "--device", "cpu"]
    assert cli.main(["eval", str(run / "model"), *asked, "--out", str(run / "other")]) == 0
    settings = json.loads((run / "other" / "mqar.json").read_text())["settings"]
    assert (settings["vocabulary"], settings["slices"]) == (64, [{"length": 16, "pairs": 2, "samples": 3}])


def test_a_run_of_an_older_version_is_read_and_resumed(run, tmp_path, capsys):
    """It has no identity, and calls its runtime system."""
    import shutil

    from ccq.train import config as configs

    old = tmp_path / "old"
    shutil.copytree(run, old, ignore=shutil.ignore_patterns("model", "eval", "lam", "own", "other", "stages"))
    content = json.loads((old / "config.json").read_text())
    del content["identity"]
    content["system"] = content.pop("runtime")
    (old / "config.json").write_text(json.dumps(content))
    read = configs.read(old / "config.json")
    assert read.identity == dataclasses.replace(TRAINED, recipe=None, repeat=0)
    assert configs.differences(read, configs.read(run / "config.json")) == []
    assert cli.main(["export", str(old), str(tmp_path / "model")]) == 0
    assert said(tmp_path / "model" / "config.json") == read.identity
    assert cli.main(["train", "ccq_gla_tiny", "--run-dir", str(old), *TINY]) == 0
    assert "is finished: 4 steps" in capsys.readouterr().out
    assert said(old / "config.json") == TRAINED


def test_an_export_of_an_older_version_has_the_hash_it_had(run, tmp_path):
    """What says where a model is from is no part of what it is: results of before are still found finished."""
    import shutil

    from ccq.evaluate.results import identity_of, model_hash
    from ccq.pretrained import load_model

    shutil.copytree(run / "model", tmp_path / "old")
    content = json.loads((tmp_path / "old" / "config.json").read_text())
    del content["identity"], content["recall"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(content))
    new, old = (load_model(str(path)) for path in (run / "model", tmp_path / "old"))
    assert model_hash(new) == model_hash(old)
    new.config.logits_with_loss = False
    assert model_hash(new) == model_hash(old)
    new.config.step = "projected"  # an option that came later counts where it is used
    assert model_hash(new) != model_hash(old)
    assert Identity(**identity_of(old, "old")) == Identity("ccq-gla", "convolution of 4", "tiny")


def test_a_model_that_shipped_has_the_hash_that_its_results_name():
    """Of every version since: else what was evaluated would count as another model's."""
    from ccq import shipped
    from ccq.evaluate.results import model_hash
    from ccq.pretrained import load_model

    told = (shipped.root() / "ccq-gla-pico" / "results.json").read_text()
    assert f'"hash": "{model_hash(load_model("ccq-gla-pico", dtype="bfloat16"))}"' in told


def test_the_share_of_needle_documents_is_of_the_text(tmp_path):
    from ccq.recipes import recipe
    from ccq.train.config import identified

    config = recipe(recipe_name("gla-unit", "nano"))
    config.data.length, config.data.reset = 1024, True
    found = identified(config, needles=0.1).identity
    assert (found.needles, found.variant) == (0.1, "windows of 1024, state reset at documents")
    assert identified(identified(config, 0.1)).identity == found  # once more changes nothing


def test_committed_results_and_shipped_models_say_what_they_are_of():
    from pathlib import Path

    from ccq import shipped

    results = Path(__file__).parents[1] / "benchmarks" / "results"
    files = [*results.glob("nano/**/*.json"), *results.glob("pico/**/*.json"), *results.glob("alignment_*.json")]
    files = [file for file in files if file.name not in ("data.json", "provenance.json")]
    identities = [said(file) for file in files]
    for name in ("mqar_rows", "mqar_seeds"):
        runs = json.loads((results / f"{name}.json").read_text())["runs"]
        identities += [Identity(**one["identity"]) for one in runs]
    trained = [identity for identity in identities if identity.size]
    assert len(trained) > 200
    for identity in trained:
        assert identity.recipe == recipe_name(identity.system, identity.size)
        assert identity.tokens
        assert identity.seed is not None
    for name in shipped.names():
        assert (
            said(shipped.root() / name / "config.json").label
            == f"{SYSTEMS[name.removesuffix('-pico')].label}, convolution of 4"
        )
