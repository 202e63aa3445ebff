"""A converted checkpoint is the same function under other names, cleaned or not."""

from __future__ import annotations

import importlib
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from fla_checkpoints import CONFIGS, TYPES, assert_same_tensors, each_type, logits, make_tensors
from model_helpers import relative, tokens
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from ccq.model import CCQConfig, CCQForCausalLM
from ccq.model.convert import convert, main
from ccq.model.convert.families import FAMILIES, fla_config, our_config

# The same function


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def conv(x, weight):
    """Causal, each channel by itself, then SiLU."""
    return F.silu(F.conv1d(F.pad(x.mT, (weight.shape[-1] - 1, 0)), weight, groups=weight.shape[0])).mT


def heads(x, size):
    return x.unflatten(-1, (-1, size))


def gla_layer(x, w):
    from fla.ops.gla.naive import naive_recurrent_gla

    q, k, v, g = (x @ w[f"attn.{name}_proj.weight"].T for name in "qkvg")
    gk = F.logsigmoid(x @ w["attn.gk_proj.0.weight"].T @ w["attn.gk_proj.1.weight"].T + w["attn.gk_proj.1.bias"]) / 16
    o, _ = naive_recurrent_gla(heads(q, 8), heads(k, 8), heads(v, 16), heads(gk, 8))
    return (rms(o, w["attn.g_norm_swish_gate.weight"]) * F.silu(heads(g, 16))).flatten(-2)


def gated_deltanet_layer(x, w):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k, v = (conv(x @ w[f"attn.{name}_proj.weight"].T, w[f"attn.{name}_conv1d.weight"]) for name in "qkv")
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (heads(q, 8), heads(k, 8)))
    g = -w["attn.A_log"].exp() * F.softplus(x @ w["attn.a_proj.weight"].T + w["attn.dt_bias"])
    beta = (x @ w["attn.b_proj.weight"].T).sigmoid()
    o, _ = naive_recurrent_gated_delta_rule(q, k, heads(v, 16), beta, g)
    gate = heads(x @ w["attn.g_proj.weight"].T, 16)
    return (rms(o, w["attn.o_norm.weight"]) * F.silu(gate)).flatten(-2)


def kda_layer(x, w):
    from fla.ops.kda.gate import naive_kda_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k, v = (conv(x @ w[f"attn.{name}_proj.weight"].T, w[f"attn.{name}_conv1d.weight"]) for name in "qkv")
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (heads(q, 8), heads(k, 8)))
    f, gate = (x @ w[f"attn.{name}_proj.0.weight"].T @ w[f"attn.{name}_proj.1.weight"].T for name in "fg")
    g = naive_kda_gate(heads(f, 8), w["attn.A_log"], w["attn.dt_bias"])
    o, _ = naive_recurrent_kda(q, k, heads(v, 16), g, (x @ w["attn.b_proj.weight"].T).sigmoid())
    gate = heads(gate + w["attn.g_proj.1.bias"], 16)
    return (rms(o, w["attn.o_norm.weight"]) * gate.sigmoid()).flatten(-2)


def retnet_layer(x, w):
    from fla.ops.retention.naive import naive_retention

    q, k, v, g = (x @ w[f"attn.{name}_proj.weight"].T for name in "qkvg")
    angle = torch.arange(x.shape[1])[:, None, None] * 10000.0 ** (-torch.arange(8) / 8)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(*heads(y, 16).chunk(2, -1)) * turn for y in (q, k))
    q, k, v = (
        y.transpose(1, 2) for y in (torch.cat([q.real, q.imag], -1), torch.cat([k.real, k.imag], -1), heads(v, 32))
    )
    o = naive_retention(q, k, v).transpose(1, 2)
    return (rms(o, w["attn.g_norm_swish_gate.weight"]) * F.silu(heads(g, 32))).flatten(-2)


def linear_attn_layer(x, w):
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    def mapped(y, name):
        one, two = (
            F.linear(y, *(w[f"attn.feature_map_{name}.layer{i}.{p}"] for p in ("weight", "bias"))) for i in (1, 2)
        )
        return one * two

    q, k, v = (x @ w[f"attn.{name}_proj.weight"].T for name in "qkv")
    o, _ = naive_recurrent_linear_attn(mapped(heads(q, 8), "q"), mapped(heads(k, 8), "k"), heads(v, 16))
    return rms(o, w["attn.norm.weight"]).flatten(-2)


def delta_net_layer(x, w):
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    q, k, v = (conv(x @ w[f"attn.{name}_proj.weight"].T, w[f"attn.{name}_conv1d.weight"]) for name in "qkv")
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (heads(q, 8), heads(k, 8)))
    beta = (x @ w["attn.b_proj.weight"].T).sigmoid()
    o, _ = delta_rule_recurrence(*(y.transpose(1, 2) for y in (q, k, heads(v, 16), beta)))
    return rms(o.transpose(1, 2), w["attn.o_norm.weight"]).flatten(-2)


LAYERS = {
    "gla": gla_layer, "retnet": retnet_layer, "linear_attn": linear_attn_layer, "delta_net": delta_net_layer,
    "gated_deltanet": gated_deltanet_layer, "kda": kda_layer,
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "mix"), LAYERS.items())
def test_logits_are_those_of_flas_equations(model_type, mix, source, tmp_path):
    """fla's block and layer written out around its naive recurrence, on the tensors as fla names them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla's, where there is no GPU
        for name in ("gla", "retention", "linear_attn", "delta_rule", "gated_delta_rule", "kda"):
            importlib.import_module(f"fla.ops.{name}.naive")
        importlib.import_module("fla.ops.kda.gate")
    tensors = make_tensors(model_type)
    convert(source(model_type, tensors), tmp_path / "ours")
    ids = tokens(2, 70, vocabulary=64)
    x = tensors["model.embeddings.weight"][ids]
    for i in range(2):
        prefix = f"model.layers.{i}."
        w = {name.removeprefix(prefix): y for name, y in tensors.items() if name.startswith(prefix)}
        x = x + mix(rms(x, w["attn_norm.weight"]), w) @ w["attn.o_proj.weight"].T
        y = rms(x, w["mlp_norm.weight"])
        x = (
            x
            + (F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        )
    ref = rms(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T
    assert ref.std() > 0.3
    assert relative(ref, logits(tmp_path / "ours", ids)) < 1e-5


def test_logits_are_those_of_mamba2_of_transformers(source, tmp_path):
    """It has the names of fla's, so that the tensors go in as they are."""
    tensors = make_tensors("mamba2")
    convert(source("mamba2", tensors), tmp_path / "ours")
    sizes = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    theirs = Mamba2ForCausalLM(
        Mamba2Config(
            **sizes, state_size=8, n_groups=1, layer_norm_epsilon=1e-5, chunk_size=32, tie_word_embeddings=False
        )
    ).eval()
    theirs.load_state_dict(tensors)
    ids = tokens(2, 70, vocabulary=64)
    with torch.no_grad():
        ref = theirs(ids, use_cache=False).logits
    assert ref.std() > 0.3
    assert relative(ref, logits(tmp_path / "ours", ids)) < 1e-5


def test_logits_are_those_of_llama(source, tmp_path):
    tensors = make_tensors("transformer")
    convert(source("transformer", tensors), tmp_path / "ours")
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    ).eval()  # fmt: skip

    def llama(name):
        name = name.replace("embeddings", "embed_tokens").replace("attn_norm", "input_layernorm")
        return name.replace("mlp_norm", "post_attention_layernorm").replace(".attn.", ".self_attn.")

    theirs.load_state_dict({llama(name): x for name, x in tensors.items()})
    ids = tokens(2, 70, vocabulary=64)
    with torch.no_grad():
        ref = theirs(ids, use_cache=False).logits
    assert ref.std() > 0.3
    assert relative(ref, logits(tmp_path / "ours", ids)) < 1e-5


@each_type
def test_there_and_back(model_type, source, tmp_path):
    """Names, numbers and options of fla's return, and ours again from them."""
    tensors = make_tensors(model_type)
    report = convert(source(model_type, tensors), tmp_path / "ours")
    assert report.parameters == sum(x.numel() for x in tensors.values())
    assert set(report.ignored) <= set(FAMILIES[model_type].ignored)
    convert(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tensors, load_file(tmp_path / "back" / "model.safetensors"))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    known = {**CONFIGS[model_type], "model_type": model_type}
    for name in set(known) & set(written):
        assert written[name] == known[name], name
    for name, default in FAMILIES[model_type].reads.items():
        assert written.get(name, default) == known.get(name, default), name
    convert(tmp_path / "back", tmp_path / "again")
    ours, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "again"))
    assert_same_tensors(ours, again)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("ours", "again")]
    assert [config.pop("identity")["system"] for config in configs] == ["ours", "again"]  # no run of ours made them
    assert configs[0] == configs[1]
    assert configs[0]["architectures"] == ["CCQForCausalLM"]


@pytest.mark.parametrize("system", ["gla", "gated-deltanet", "kda", "mamba2", "transformer"])
def test_our_presets_go_to_fla_and_return(system, tmp_path):
    """In bf16, whose A_log, dt_bias and D stay fp32."""
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny")).bfloat16()
    model.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "fla")
    assert json.loads((tmp_path / "fla" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    convert(tmp_path / "fla", tmp_path / "again")
    loaded = CCQForCausalLM.from_pretrained(tmp_path / "again")
    assert_same_tensors(model.state_dict(), loaded.state_dict())
    for name, value in model.config.to_dict().items():
        if name not in (
            "feature_map_size",
            "key_size",
            "value_size",
            "num_heads",
            "state_size",
            "head_size",
            "_name_or_path",
            "identity",  # which fla's config has no place for
        ):
            assert loaded.config.to_dict()[name] == value, name  # of sizes, those of other mixers have no meaning


@pytest.mark.parametrize(("hidden", "heads", "key", "value"), [(22, 3, 5, 9), (2048, 6, 256, 512), (72, 5, 11, 15)])
def test_expansions_give_the_sizes_back(hidden, heads, key, value):
    """fla multiplies and cuts, and 22 * (15 / 22) is below 15 in floating point."""
    sizes = {"hidden_size": hidden, "num_heads": heads, "key_size": key, "value_size": value}
    for model_type in ("gla", "delta_net", "gated_deltanet", "kda"):
        family = FAMILIES[model_type]
        config = CCQConfig(mixer=family.mixer, unit_qk=family.needs["unit_qk"], **sizes)
        back, _ = our_config(fla_config(config)[1])
        assert {name: getattr(back, name) for name in sizes} == sizes


# Cleaning


@pytest.mark.parametrize("model_type", [name for name in TYPES if name != "transformer"])
def test_cleaning_changes_little_and_nothing_at_zero(model_type, source, tmp_path):
    folder = source(model_type)
    convert(folder, tmp_path / "plain")
    report = convert(folder, tmp_path / "clean", clean=True)
    assert report.config.normalize == ("unit" if FAMILIES[model_type].needs["unit_qk"] else "stats")
    ids = tokens(2, 130, vocabulary=64)
    ref = logits(tmp_path / "plain", ids)
    model = CCQForCausalLM.from_pretrained(tmp_path / "clean").eval()
    cleaners = [layer.mixer.cleaner for layer in model.model.layers]
    for cleaner in cleaners:
        assert not cleaner.gate_weight.any()
        torch.testing.assert_close(cleaner.gate_bias.sigmoid(), torch.full_like(cleaner.gate_bias, 0.01))
        assert cleaner.gate_bias.dtype == torch.float32
    with torch.no_grad():
        change = relative(ref, model(ids).logits)
        assert 1e-6 < change < 0.02
        for cleaner in cleaners:
            cleaner.intervention = lambda lam: lam * 0
        assert relative(ref, model(ids).logits) < 1e-6
        for cleaner in cleaners:
            cleaner.intervention = torch.ones_like
        assert relative(ref, model(ids).logits) > 10 * change


def test_cleaning_a_checkpoint_of_ours(source, tmp_path):
    convert(source("gla"), tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "clean", clean=True, gate_init=0.1)
    convert(tmp_path / "fla", tmp_path / "direct", clean=True, gate_init=0.1)
    assert_same_tensors(*(load_file(tmp_path / name / "model.safetensors") for name in ("direct", "clean")))
    assert CCQConfig.from_pretrained(tmp_path / "clean").gate_init == 0.1
    with pytest.raises(ValueError, match="clean: the model already has cleaning"):
        convert(tmp_path / "clean", tmp_path / "x", clean=True)
    for clean, options in ((True, {"stepp": "projected"}), (True, {"hidden_size": 64}), (False, {"step": "projected"})):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected an option of cleaning, with clean=True"):
            convert(tmp_path / "plain", tmp_path / "x", clean=clean, **options)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="clean: expected False, got True"):
        convert(tmp_path / "clean", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("model_type", ["gla", "gated_deltanet"])
def test_cleaning_by_another_read(model_type, source, tmp_path, capsys):
    read = {"step": "projected", "steps": 2, "covariance_decay": "learned"}
    convert(source(model_type), tmp_path / "plain")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in read.items()]
    assert main([str(tmp_path / "plain"), str(tmp_path / "clean"), "--clean", "--gate-init", "0.3", *options]) == 0
    assert "step='projected', steps=2, covariance_decay='learned'" in capsys.readouterr().out
    config = CCQConfig.from_pretrained(tmp_path / "clean")
    assert {name: getattr(config, name) for name in read} == read
    ids = tokens(2, 130, vocabulary=64)
    ref = logits(tmp_path / "plain", ids)
    model = CCQForCausalLM.from_pretrained(tmp_path / "clean").eval()
    with torch.no_grad():
        assert relative(ref, model(ids).logits) > 1e-3
        for layer in model.model.layers:
            layer.mixer.cleaner.intervention = lambda lam: lam * 0
        assert relative(ref, model(ids).logits) < 1e-6
    assert main([str(tmp_path / "plain"), str(tmp_path / "x"), "--clean", "--step", "projectd"]) == 1
    assert "step: expected" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "plain"), str(tmp_path / "x"), "--step", "projected"])
    assert "--step: expected --clean beside it" in capsys.readouterr().err


def test_attention_cannot_be_cleaned(source, tmp_path):
    with pytest.raises(ValueError, match="clean: attention has no key-value state"):
        convert(source("transformer"), tmp_path / "x", clean=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit_qk": True}, "unit_qk: expected False, got True"),
        ({"feature_map": "hedgehog"}, "feature_map: expected 'identity', got 'hedgehog'"),
        ({"gate_normalizer": 8.0}, "gate_normalizer: expected 16.0, got 8.0"),
        ({"current_key_read": True}, "current_key_read: expected False"),
        ({"intermediate_size": None}, "intermediate_size: expected a size"),
        ({"mixer": "mesa"}, "mixer: expected one of gla, .* got 'mesa'"),
        ({"mixer": "retnet"}, "rotary: expected True, got False"),
        (
            {"mixer": "linear_attention", "feature_map": "hedgehog", "output_gate": False},
            "feature_map: expected 'elementwise_product' or 'identity', got 'hedgehog'",
        ),
        ({"mixer": "gated_deltanet"}, "unit_qk: expected True, got False"),
        ({"mixer": "kda", "unit_qk": True, "output_gate": False}, "output_gate: expected True, got False"),
    ],
)
def test_what_fla_does_not_have(changes, message, tmp_path):
    CCQForCausalLM(CCQConfig.preset("gla-tiny", **changes)).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "ours", tmp_path / "x")
    assert not (tmp_path / "x").exists()
