"""A model comes back as it was saved, bit for bit, or not at all."""

from __future__ import annotations

import json

import pytest
import torch
from model_helpers import SYSTEMS, make_config, make_model, shared_model, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ccq.model import CCQConfig, CCQForCausalLM, CCQModel

each_system = pytest.mark.parametrize("system", SYSTEMS)


@pytest.fixture(autouse=True)
def quiet():
    """Progress bars of a few kilobytes."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def assert_same_weights(ref, got):
    for (name, a), (other, b) in zip(ref.state_dict().items(), got.state_dict().items(), strict=True):
        assert name == other
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


@each_system
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_equal(system, dtype, tmp_path):
    """Nothing is initialised again, and the gate stays fp32 in a bf16 model."""
    model = make_model(system).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # such as no initialisation gives
            parameter.add_(torch.linspace(0.5, 1, parameter.numel()).view_as(parameter).to(parameter.dtype))
    model.save_pretrained(tmp_path)
    assert [file.name for file in sorted(tmp_path.glob("*.safetensors"))] == ["model.safetensors"]
    loaded = CCQForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(model, loaded)
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    assert not loaded.training
    kinds = {name.rpartition(".")[2]: p.dtype for name, p in loaded.named_parameters() if p.dtype != dtype}
    if dtype == torch.bfloat16:
        assert set(kinds.values()) <= {torch.float32}
        assert set(kinds) <= {"gate_weight", "gate_bias", "current_key", "A_log", "dt_bias", "D", "lambda_params"}
        assert ("gate_bias" in kinds) == system.startswith("ccq")
    else:
        assert not kinds
        assert torch.equal(loaded(tokens(1, 20)).logits, model(tokens(1, 20)).logits)


def test_saved_in_shards(tmp_path):
    model = make_model("ccq-gla")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_weights(model, CCQForCausalLM.from_pretrained(tmp_path))


def test_loaded_in_another_dtype_the_gate_stays(tmp_path):
    model = make_model("ccq-gated-deltanet")
    model.save_pretrained(tmp_path)
    loaded = CCQForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cleaner, ref = loaded.model.layers[0].mixer.cleaner, model.model.layers[0].mixer.cleaner
    assert torch.equal(cleaner.gate_weight, ref.gate_weight)
    assert loaded.model.layers[0].mixer.q_proj.weight.dtype == torch.bfloat16
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    assert fresh.model.layers[0].mixer.cleaner.gate_bias.dtype == torch.float32


def test_tied_embeddings(tmp_path):
    model = make_model("ccq-gla", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = CCQForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_weights(model, loaded)


def test_auto_classes(tmp_path):
    model = shared_model("ccq-gla")
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is CCQConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is CCQForCausalLM
    body = AutoModel.from_pretrained(tmp_path)  # without the head, which is no mistake then
    assert type(body) is CCQModel
    assert_same_weights(model.model, body)
    assert type(AutoModelForCausalLM.from_config(model.config)) is CCQForCausalLM


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_and_unknown_tensors_raise(tmp_path):
    shared_model("ccq-gla").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mixer.cleaner.gate_bias"))
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.mixer\.cleaner\.gate_bias"):
        CCQForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    shared_model("ccq-gla").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update(extra=torch.zeros(2)))
    with pytest.raises(ValueError, match="unexpected extra"):
        CCQForCausalLM.from_pretrained(tmp_path)


def test_another_config_raises(tmp_path):
    """A cleaned model without its cleaning, or the other way round, is not what was saved."""
    for saved, loaded, words in (("ccq-gla", False, "unexpected"), ("gla-unit", True, "missing")):
        shared_model(saved).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=rf"{words} .*gate_bias.*gate_weight"):
            CCQForCausalLM.from_pretrained(tmp_path, clean=loaded)


def test_another_shape_raises(tmp_path):
    shared_model("ccq-gla").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight expected \(64,\), got \(63,\)"):
        CCQForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gate_bias expected \(4,\), got \(2,\)"):
        CCQForCausalLM.from_pretrained(tmp_path, num_heads=4)
    CCQForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)  # the one who asks for it gets it


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])  # bytes: nothing, part of the header, all but one
def test_a_file_that_is_cut_off_raises(tmp_path, kept):
    shared_model("ccq-gla").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(OSError, match="damaged or cut off"):
        CCQForCausalLM.from_pretrained(tmp_path)


def test_a_missing_shard_raises(tmp_path):
    shared_model("ccq-gla").save_pretrained(tmp_path, max_shard_size="100KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(OSError, match="model-00002"):
        CCQForCausalLM.from_pretrained(tmp_path)


def test_an_index_that_lost_a_tensor_raises(tmp_path):
    shared_model("gla").save_pretrained(tmp_path, max_shard_size="100KB")
    rewritten = sorted(tmp_path.glob("*.safetensors"))[0]
    tensors = load_file(rewritten)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, rewritten, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        CCQForCausalLM.from_pretrained(tmp_path)


@each_system
def test_initialisation(system):
    """Linears and embeddings as the config says, the rest as its module says, and again on what was meta."""
    torch.manual_seed(0)
    config = make_config(system, initializer_range=0.3)
    model = CCQForCausalLM(config)
    with torch.device("meta"):
        empty = CCQForCausalLM(config)
    empty.to_empty(device="cpu")
    for module in empty.modules():
        module._is_hf_initialized = False
    for parameter in empty.parameters():
        parameter.data.fill_(float("nan"))
    empty.initialize_weights()
    for name, parameter in [*model.named_parameters(), *empty.named_parameters()]:
        assert parameter.isfinite().all(), name
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and name.endswith("weight"):
            assert parameter.std().item() == pytest.approx(0.3, rel=0.2), name
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        if name.endswith("gate_bias"):
            torch.testing.assert_close(parameter.sigmoid(), torch.full_like(parameter, 0.01))
        if name.endswith("gate_weight"):
            assert (parameter == 0).all()


def test_a_head_with_a_bias_that_the_model_lacks_raises(tmp_path):
    shared_model("gla").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.bias": torch.zeros(256)}))
    with pytest.raises(ValueError, match=r"unexpected lm_head\.bias"):
        CCQForCausalLM.from_pretrained(tmp_path)
    CCQModel.from_pretrained(tmp_path)  # which has no head at all


@each_system
def test_made_in_half_precision(system):
    model = CCQForCausalLM._from_config(make_config(system), dtype=torch.bfloat16)
    assert all(p.isfinite().all() for p in model.parameters())
    for module in model.modules():
        if type(module).__name__ == "Hedgehog":  # rows or columns of length 1 at right angles
            w = module.weight.double()
            w = w if w.shape[0] <= w.shape[1] else w.mT
            torch.testing.assert_close(w @ w.mT, torch.eye(len(w), dtype=w.dtype), rtol=0, atol=0.02)
