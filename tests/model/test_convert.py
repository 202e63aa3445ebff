"""A converted checkpoint is the same function under other names, or it is refused by name and nothing is written."""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from model_helpers import make_model, relative, tokens
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from ccq import cli
from ccq.model import CCQConfig, CCQForCausalLM
from ccq.model.convert import convert, grouped, main
from ccq.model.convert.families import FAMILIES

TYPES = ("gla", "gated_deltanet", "mamba2", "transformer")
each_type = pytest.mark.parametrize("model_type", TYPES)

# What fla's config classes write beside the sizes, version 0.5.
_COMMON = {
    "bos_token_id": 1, "eos_token_id": 2, "fuse_cross_entropy": True, "fuse_linear_cross_entropy": False,
    "fuse_norm": True, "hidden_size": 32, "initializer_range": 0.02, "num_hidden_layers": 2,
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.53.0", "use_cache": True,
    "use_l2warp": False, "vocab_size": 64,
}  # fmt: skip
_BLOCK = {"attnres_block_size": None, "fuse_swiglu": True, "hidden_act": "swish", "hidden_ratio": 4,
          "intermediate_size": 48, "max_position_embeddings": 2048, "norm_eps": 1e-6}  # fmt: skip
CONFIGS = {
    "gla": {
        **_COMMON, **_BLOCK, "attn": None, "attn_mode": "chunk", "clamp_min": None, "conv_size": 4,
        "elementwise_affine": True, "expand_k": 0.5, "expand_v": 1.0, "feature_map": None, "num_heads": 2,
        "num_kv_heads": None, "use_gk": True, "use_gv": False, "use_output_gate": True, "use_short_conv": False,
    },
    "gated_deltanet": {
        **_COMMON, **_BLOCK, "allow_neg_eigval": False, "attn": None, "attn_mode": "chunk", "conv_size": 4,
        "expand_v": 2.0, "head_dim": 8, "num_heads": 3, "num_v_heads": None, "use_gate": True, "use_short_conv": True,
    },
    "mamba2": {
        **_COMMON, "A_init_range": [1, 16], "D_has_hdim": False, "chunk_size": 256, "conv_init": None,
        "conv_kernel": 4, "dt_init_floor": 1e-4, "dt_limit": [0.0, math.inf], "dt_max": 0.1, "dt_min": 0.001,
        "expand": 2, "head_dim": 16, "hidden_act": "silu", "n_groups": 1, "norm_before_gate": False, "norm_eps": 1e-5,
        "num_heads": 4, "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": True,
        "rmsnorm": True, "state_size": 8, "use_bias": False, "use_conv_bias": True,
    },
    "transformer": {
        **_COMMON, **_BLOCK, "elementwise_affine": True, "num_heads": 4, "num_kv_heads": 2, "qk_norm": False,
        "qkv_bias": False, "rope_theta": 500.0, "window_size": None,
    },
}  # fmt: skip

# The tensors of a layer in fla's models, hidden size 32 and the sizes above: as fla's own classes make them.
_MLP = {"mlp_norm.weight": (32,), "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48)}  # fmt: skip
LAYERS = {
    "gla": {
        "attn_norm.weight": (32,), "attn.q_proj.weight": (16, 32), "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (32, 32), "attn.g_proj.weight": (32, 32), "attn.gk_proj.0.weight": (16, 32),
        "attn.gk_proj.1.weight": (16, 16), "attn.gk_proj.1.bias": (16,), "attn.o_proj.weight": (32, 32),
        "attn.g_norm_swish_gate.weight": (16,), **_MLP,
    },
    "gated_deltanet": {
        "attn_norm.weight": (32,), "attn.A_log": (3,), "attn.dt_bias": (3,), "attn.q_proj.weight": (24, 32),
        "attn.k_proj.weight": (24, 32), "attn.v_proj.weight": (48, 32), "attn.a_proj.weight": (3, 32),
        "attn.b_proj.weight": (3, 32), "attn.q_conv1d.weight": (24, 1, 4), "attn.k_conv1d.weight": (24, 1, 4),
        "attn.v_conv1d.weight": (48, 1, 4), "attn.g_proj.weight": (48, 32), "attn.o_norm.weight": (16,),
        "attn.o_proj.weight": (32, 48), **_MLP,
    },
    "mamba2": {
        "norm.weight": (32,), "mixer.dt_bias": (4,), "mixer.A_log": (4,), "mixer.D": (4,),
        "mixer.conv1d.weight": (80, 1, 4), "mixer.conv1d.bias": (80,), "mixer.in_proj.weight": (148, 32),
        "mixer.norm.weight": (64,), "mixer.out_proj.weight": (32, 64),
    },
    "transformer": {
        "attn_norm.weight": (32,), "attn.q_proj.weight": (32, 32), "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (16, 32), "attn.o_proj.weight": (32, 32), **_MLP,
    },
}  # fmt: skip


def make_tensors(model_type: str, layer: dict | None = None) -> dict[str, torch.Tensor]:
    """Weights of size 0.2 and norms between 0.5 and 2, so that every one of them matters."""
    base, last = ("backbone", "norm_f") if model_type == "mamba2" else ("model", "norm")
    shapes = {f"{base}.embeddings.weight": (64, 32)}
    for i in range(2):
        shapes |= {f"{base}.layers.{i}.{name}": shape for name, shape in (layer or LAYERS[model_type]).items()}
    shapes |= {f"{base}.{last}.weight": (32,), "lm_head.weight": (64, 32)}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, x in tensors.items():
        if "norm" in name or name.endswith((".D", "A_log")):
            x.uniform_(0.5, 2, generator=generator)
    return tensors


def make_folder(folder, model_type, tensors=None, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type], **changes}))
    save_file(make_tensors(model_type) if tensors is None else tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def source(tmp_path):
    """A function that makes the folder of a checkpoint of fla's."""
    return lambda model_type, tensors=None, **changes: make_folder(tmp_path / "fla", model_type, tensors, **changes)


def logits(folder, ids) -> torch.Tensor:
    with torch.no_grad():
        return CCQForCausalLM.from_pretrained(folder).eval()(ids).logits


def assert_same_tensors(ref, got):
    assert set(ref) == set(got)
    for name, x in ref.items():
        assert x.dtype == got[name].dtype, name
        assert torch.equal(x, got[name]), name


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


@pytest.mark.parametrize(("model_type", "mix"), [("gla", gla_layer), ("gated_deltanet", gated_deltanet_layer)])
def test_logits_are_those_of_flas_equations(model_type, mix, source, tmp_path):
    """fla's block and layer written out around its naive recurrence, on the tensors as fla names them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla's, where there is no GPU
        __import__("fla.ops.gla.naive")
        __import__("fla.ops.gated_delta_rule.naive")
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


@pytest.mark.parametrize("system", ["gla", "gated-deltanet", "mamba2", "transformer"])
def test_our_presets_go_to_fla_and_return(system, tmp_path):
    """In bf16, whose A_log, dt_bias and D stay fp32."""
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny")).bfloat16()
    model.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "fla")
    assert json.loads((tmp_path / "fla" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    convert(tmp_path / "fla", tmp_path / "again", to="ccq")
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
    for model_type in ("gla", "gated_deltanet"):
        family = FAMILIES[model_type]
        config = CCQConfig(mixer=family.mixer, unit_qk=model_type == "gated_deltanet", **sizes)
        options = {**family.reads, "hidden_size": hidden, **family.fla_options(config)}
        back = family.options(options)
        assert {name: back[name] for name in ("num_heads", "key_size", "value_size")} == {
            name: sizes[name] for name in ("num_heads", "key_size", "value_size")
        }


# Cleaning


@pytest.mark.parametrize("model_type", ["gla", "gated_deltanet", "mamba2"])
def test_cleaning_changes_little_and_nothing_at_zero(model_type, source, tmp_path):
    folder = source(model_type)
    convert(folder, tmp_path / "plain")
    report = convert(folder, tmp_path / "clean", clean=True)
    assert report.config.normalize == ("unit" if model_type == "gated_deltanet" else "stats")
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
    with pytest.raises(ValueError, match="clean: the model has cleaning already"):
        convert(tmp_path / "clean", tmp_path / "x", clean=True)
    with pytest.raises(ValueError, match="clean: expected False, got True"):
        convert(tmp_path / "clean", tmp_path / "x")
    with pytest.raises(ValueError, match="to: expected fla, got 'ccq'"):
        convert(tmp_path / "plain", tmp_path / "x", to="ccq")
    assert not (tmp_path / "x").exists()


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
        ({"mixer": "retnet"}, "mixer: expected one of gla, .* got 'retnet'"),
        ({"mixer": "gated_deltanet"}, "unit_qk: expected True, got False"),
    ],
)
def test_what_fla_does_not_have(changes, message, tmp_path):
    CCQForCausalLM(CCQConfig.preset("gla-tiny", **changes)).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "ours", tmp_path / "x")
    assert not (tmp_path / "x").exists()


# Options


REFUSED = [
    ("gla", {"feature_map": "relu"}, "feature_map: expected None, got 'relu'"),
    ("gla", {"clamp_min": -1.0}, "clamp_min: expected None"),
    ("gla", {"num_kv_heads": 1}, "num_kv_heads: expected num_heads = 2, got 1"),
    ("gla", {"attn": {"layers": [1], "num_heads": 2}}, "attn: expected None"),
    ("gla", {"use_gv": True}, "use_gv: expected False"),
    ("gla", {"elementwise_affine": False}, "elementwise_affine: expected True"),
    ("gla", {"gate_logit_normalizer": 8}, "gate_logit_normalizer: expected 16, got 8"),
    ("gla", {"use_short_conv": True, "share_conv_kernel": True}, "share_conv_kernel: expected a convolution each"),
    ("gla", {"expand_k": 0.6}, "expand_k: expected a whole number of channels in each of 2 heads"),
    ("gla", {"hidden_act": "powlu"}, "hidden_act: expected 'swish' or 'silu'"),
    ("gla", {"attnres_block_size": 2}, "attnres_block_size: expected None"),
    ("gla", {"quantization_config": {"bits": 4}}, "quantization_config: GLAForCausalLM of fla has no such option"),
    ("gla", {"use_shortconv": True}, "use_shortconv: .*Did you mean 'use_short_conv'"),
    ("gla", {"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05 contradicts norm_eps"),
    ("gla", {"hidden_size": "32"}, "hidden_size: expected a number, got '32'"),
    ("gla", {"num_heads": 0}, "num_heads: expected a positive number"),
    ("gla", {"num_heads": 2.5}, "num_heads: expected a whole number, got 2.5"),
    ("gla", {"use_short_conv": 1}, "use_short_conv: expected True or False"),
    ("gla", {"vocab_size": None}, "vocab_size: expected a value"),
    ("gated_deltanet", {"num_v_heads": 6}, "num_v_heads: expected num_heads = 3, got 6"),
    ("gated_deltanet", {"allow_neg_eigval": True}, "allow_neg_eigval: expected False"),
    ("gated_deltanet", {"expand_v": 1.3}, "expand_v: expected a whole number of channels"),
    ("gated_deltanet", {"norm_first": True}, "norm_first: expected False"),
    ("mamba2", {"use_bias": True}, "use_bias: expected False"),
    ("mamba2", {"use_conv_bias": False}, "use_conv_bias: expected True"),
    ("mamba2", {"norm_before_gate": True}, "norm_before_gate: expected False"),
    ("mamba2", {"D_has_hdim": True}, "D_has_hdim: expected False"),
    ("mamba2", {"dt_limit": [0.0, 1.0]}, r"dt_limit: expected \[0, inf\], got \[0.0, 1.0\]"),
    ("mamba2", {"expand": 1.5}, "expand: expected a whole number"),
    ("mamba2", {"num_heads": 8}, "num_heads: expected expand .* = 4, got 8"),
    ("mamba2", {"n_groups": 3}, "num_groups: expected a divisor of 4 heads"),
    ("transformer", {"window_size": 512}, "window_size: expected None, got 512"),
    ("transformer", {"qk_norm": True}, "qk_norm: expected False"),
    ("transformer", {"qkv_bias": True}, "qkv_bias: expected False"),
    ("transformer", {"rope_theta": None}, "rope_theta: expected a value"),
    ("transformer", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: expected None"),
    ("transformer", {"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_options_that_our_layers_do_not_have(model_type, changes, message, source, tmp_path):
    folder = source(model_type, {}, **changes)
    with pytest.raises(ValueError, match=message) as error:
        convert(folder, tmp_path / "x")
    assert str(folder / "config.json") in str(error.value)
    assert sorted(tmp_path.iterdir()) == [folder]


def test_all_refused_options_are_named_at_once(source, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)hidden_size.*clamp_min.*use_gv.*novelty"):
        convert(source("gla", {}, use_gv=True, clamp_min=0, novelty=1, hidden_size=-1), tmp_path / "x")


@pytest.mark.parametrize("system", ["gla", "transformer"])
def test_layers_that_fla_has_not_are_refused(system, tmp_path):
    make_model(f"{system}+base-conv").save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="base_conv_size: expected None, got 3"):
        convert(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gated_delta_net", "Did you mean 'gated_deltanet'"),
        ("glaa", "Did you mean 'gla'"),
        ("llama", "expected one of gla, gated_deltanet, mamba2, transformer, ccq, got 'llama'"),
        (None, "got None"),
        (["gla"], r"got \['gla'\]"),
    ],
)
def test_unknown_model_type(kind, message, source, tmp_path):
    folder = source("gla")
    (folder / "config.json").write_text(json.dumps({**CONFIGS["gla"], "model_type": kind}))
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "x")


def test_sizes_that_follow_from_ratios(source, tmp_path):
    """Without intermediate_size: two thirds of hidden_ratio * hidden_size, up to a multiple of 256."""
    layer = LAYERS["gla"] | {"mlp.gate_proj.weight": (256, 32), "mlp.up_proj.weight": (256, 32)}
    layer |= {"mlp.down_proj.weight": (32, 256)}
    folder = source("gla", make_tensors("gla", layer), intermediate_size=None, hidden_ratio=None)
    assert convert(folder, tmp_path / "x").config.intermediate_size == 256
    assert FAMILIES["gla"].options(FAMILIES["gla"].reads)["intermediate_size"] == 5632  # of fla's 1.3B models


def test_infinity_as_transformers_5_writes_it(source, tmp_path):
    convert(source("mamba2", dt_limit=[0.0, {"__float__": "Infinity"}]), tmp_path / "x")


def test_options_that_are_missing_are_flas_defaults(source, tmp_path):
    folder = source("gated_deltanet")
    config = json.loads((folder / "config.json").read_text())
    for name in ("conv_size", "use_gate", "use_short_conv", "expand_v", "norm_eps", "attn", "torch_dtype"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    report = convert(folder, tmp_path / "x")
    assert (report.config.conv_size, report.config.value_size, report.config.norm_eps) == (4, 16, 1e-6)
    assert report.config.dtype == torch.float32  # of the tensors


# Variants of names and shapes


def rename(tensors, old, new):
    return {name.replace(old, new): x for name, x in tensors.items()}


def test_gla_with_short_convolutions_and_an_unfused_norm(source, tmp_path):
    convs = {"attn.q_conv1d.weight": (16, 1, 3), "attn.k_conv1d.weight": (16, 1, 3), "attn.v_conv1d.weight": (32, 1, 3)}
    tensors = rename(make_tensors("gla", LAYERS["gla"] | convs), "g_norm_swish_gate", "g_norm")
    convert(source("gla", tensors, use_short_conv=True, conv_size=3, fuse_norm=False), tmp_path / "ours")
    loaded = CCQForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        assert torch.equal(loaded[f"model.layers.1.mixer.{name}.weight"], tensors[f"model.layers.1.attn.{name}.weight"])
    assert torch.equal(loaded["model.layers.0.mixer.o_norm.weight"], tensors["model.layers.0.attn.g_norm.weight"])


def test_without_an_output_gate(source, tmp_path):
    layer = {name: shape for name, shape in LAYERS["gla"].items() if "g_proj" not in name}
    tensors = rename(make_tensors("gla", layer), "g_norm_swish_gate", "g_norm")
    convert(source("gla", tensors, use_output_gate=False), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert_same_tensors(tensors, load_file(tmp_path / "back" / "model.safetensors"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["use_output_gate"] is False


def test_checkpoints_of_earlier_versions(source, tmp_path):
    """gate and up in one tensor, the embedding's first name, a D that nothing read, names of options."""
    tensors = make_tensors("gated_deltanet")
    convert(source("gated_deltanet", tensors), tmp_path / "new")
    old = rename(tensors, "model.embeddings.", "model.embed_tokens.")
    for i in range(2):
        up = old.pop(f"model.layers.{i}.mlp.up_proj.weight")
        gate = f"model.layers.{i}.mlp.gate_proj.weight"
        old[gate] = torch.cat([old[gate], up])
        old[f"model.layers.{i}.attn.D"] = torch.ones(3)
    folder = make_folder(tmp_path / "old", "gated_deltanet", old, norm_first=False, rms_norm_eps=1e-6)
    convert(folder, tmp_path / "from_old")
    assert_same_tensors(*(load_file(tmp_path / name / "model.safetensors") for name in ("new", "from_old")))


def test_earlier_mamba2(source, tmp_path):
    tensors = rename(make_tensors("mamba2"), "backbone.embeddings.", "backbone.embedding.")
    folder = source("mamba2", tensors, time_step_min=0.001, time_step_rank="auto")
    config = json.loads((folder / "config.json").read_text())
    for new, old in (("norm_eps", "layer_norm_epsilon"), ("rmsnorm", "rms_norm"), ("dt_limit", "time_step_limit")):
        config[old] = config.pop(new)
    config["layer_norm_epsilon"] = 3e-5
    (folder / "config.json").write_text(json.dumps(config))
    assert convert(folder, tmp_path / "ours").config.norm_eps == 3e-5


@pytest.mark.parametrize("stored", [False, True])
def test_tied_embeddings(stored, source, tmp_path):
    tensors = make_tensors("transformer")
    if stored:
        tensors["lm_head.weight"] = tensors["model.embeddings.weight"].clone()
    else:
        del tensors["lm_head.weight"]
    convert(source("transformer", tensors, tie_word_embeddings=True), tmp_path / "ours")
    model = CCQForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embeddings.weight"])
    convert(tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is True
    tensors.pop("lm_head.weight", None)
    assert_same_tensors(tensors, load_file(tmp_path / "back" / "model.safetensors"))


def test_a_tied_head_that_differs(source, tmp_path):
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embeddings.weight"):
        convert(source("transformer", tie_word_embeddings=True), tmp_path / "x")


def test_all_missing_and_unknown_tensors_are_named(source, tmp_path):
    tensors = make_tensors("gla")
    del tensors["lm_head.weight"], tensors["model.layers.0.attn.q_proj.weight"]
    del tensors["model.layers.1.attn.q_proj.weight"], tensors["model.layers.1.mlp_norm.weight"]
    tensors |= {f"model.layers.{i}.attn.lora.weight": torch.ones(1) for i in range(3)} | {"extra": torch.ones(1)}
    with pytest.raises(ValueError) as error:
        convert(source("gla", tensors), tmp_path / "x")
    assert str(error.value).splitlines()[1:] == [
        "  missing: model.layers.{0-1}.attn.q_proj.weight",
        "  missing: model.layers.1.mlp_norm.weight",
        "  missing: lm_head.weight",
        "  not understood: extra",
        "  not understood: model.layers.{0-2}.attn.lora.weight",
    ]
    assert not (tmp_path / "x").exists()


def test_names_are_grouped_by_layer():
    names = [f"model.layers.{i}.a" for i in (0, 1, 2, 4, 7, 8)] + ["b", "model.layers.11.c"]
    assert grouped(names) == ["model.layers.{0-2,4,7-8}.a", "b", "model.layers.11.c"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65}, r"model.embeddings.weight: expected shape \[65, 32\], got \[64, 32\]"),
        ({"head_dim": 4}, r"model.layers.0.attn.q_proj.weight: expected shape \[12, 32\], got \[24, 32\]"),
        ({"conv_size": 3}, r"model.layers.0.attn.k_conv1d.weight: expected shape \[24, 1, 3\], got \[24, 1, 4\]"),
        ({"num_hidden_layers": 1}, r"not understood: model.layers.1.attn.A_log"),
        ({"use_short_conv": False}, r"not understood: model.layers.{0-1}.attn.q_conv1d.weight"),
        ({"intermediate_size": 24}, r"mlp.gate_proj.weight: expected shape \[24, 32\], got \[48, 32\]"),
    ],
)
def test_tensors_of_another_shape(changes, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(source("gated_deltanet", **changes), tmp_path / "x")


# Files


def shard(folder, suffix="safetensors"):
    """The weights of a folder, in three files with an index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    places = {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        name = f"{stem}-{i + 1:05d}-of-00003.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index, places


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(suffix, source, tmp_path):
    folder = source("gla")
    convert(folder, tmp_path / "whole")
    index, places = shard(folder, suffix)
    convert(folder, tmp_path / "ours")
    assert_same_tensors(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "ours")))
    victim = folder / sorted(set(places.values()))[1]
    data = victim.read_bytes()
    victim.write_bytes(data[:-100])
    with pytest.raises(OSError, match=rf"{victim.name}: damaged"):
        convert(folder, tmp_path / "x")
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=f"names {victim.name}: there is no such file"):
        convert(folder, tmp_path / "x")
    index.write_text("{}")
    with pytest.raises(ValueError, match="expected a weight_map"):
        convert(folder, tmp_path / "x")
    index.write_text(json.dumps({"weight_map": {"a": "../whole/model.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="no such file beside it"):
        convert(folder, tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"fla", "whole", "ours"}


def test_a_tensor_in_two_shards(source, tmp_path):
    folder = source("gla")
    _, places = shard(folder)
    first, second = sorted(set(places.values()))[:2]
    save_file({**load_file(folder / first), **load_file(folder / second)}, folder / first)
    with pytest.raises(ValueError, match="is in another file too"):
        convert(folder, tmp_path / "x")


def test_a_pickle_that_runs_something_does_not(source, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = source("gla")
    (folder / "model.safetensors").unlink()
    torch.save({"model.embeddings.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="more than tensors is in it"):
        convert(folder, tmp_path / "x")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(keep, source, tmp_path):
    folder = source("gla")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(OSError, match=r"model\.safetensors: damaged or cut off"):
        convert(folder, tmp_path / "x")
    assert list(tmp_path.iterdir()) == [folder]


def test_tensors_that_are_no_weights(source, tmp_path):
    tensors = make_tensors("gla")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    with pytest.raises(ValueError, match=r"lm_head.weight is of I8; expected one of F64, F32, BF16, F16"):
        convert(source("gla", tensors), tmp_path / "x")


def test_no_weights_no_config(source, tmp_path):
    folder = source("gla")
    (folder / "model.safetensors").rename(folder / "consolidated.pth")
    with pytest.raises(FileNotFoundError, match=r"expected model.safetensors .* got config.json, consolidated.pth"):
        convert(folder, tmp_path / "x")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: expected JSON"):
        convert(folder, tmp_path / "x")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        convert(folder, tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        convert(tmp_path / "nowhere", tmp_path / "x")


def test_target_that_is_there(source, tmp_path):
    folder = source("gla")
    target = tmp_path / "a" / "b"
    convert(folder, target)  # makes its parents
    before = (target / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="does not exist yet, or an empty one"):
        convert(folder, target)
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError):
        convert(folder, folder)
    with pytest.raises(FileExistsError):
        convert(folder, folder / "config.json")
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


@pytest.mark.parametrize("when", ["write_safetensors", "_copy_companions"])
def test_nothing_is_left_of_a_conversion_that_stops(when, source, tmp_path, monkeypatch):
    folder = source("gla")

    def stop(*_):
        assert any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        assert not (tmp_path / "x").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ccq.model.convert.{when}", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "x")
    assert list(tmp_path.iterdir()) == [folder]


def test_the_file_is_as_safetensors_wants_it(source, tmp_path):
    """Aligned, without gaps, and each tensor in its own dtype."""
    tensors = make_tensors("gated_deltanet")
    tensors = {name: x if name.endswith(("A_log", "dt_bias")) else x.bfloat16() for name, x in tensors.items()}
    convert(source("gated_deltanet", tensors), tmp_path / "ours")
    data = (tmp_path / "ours" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    ends = sorted(x["data_offsets"] for x in header.values())
    assert ends[0][0] == 0
    assert ends[-1][1] == len(data) - 8 - length
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    loaded = load_file(tmp_path / "ours" / "model.safetensors")
    assert loaded["model.layers.0.mixer.A_log"].dtype == torch.float32
    assert loaded["model.layers.0.mixer.q_proj.weight"].dtype == torch.bfloat16


def test_one_tensor_at_a_time(source, tmp_path, monkeypatch):
    """While the next one is read, the last may still be alive, and no other."""
    from ccq.model.convert import tensors as module

    alive, most = weakref.WeakSet(), 0
    original = module.Kept

    def watched(shape, dtype, read):
        def counting(rows):
            nonlocal most
            x = read(rows)
            alive.add(x)
            most = max(most, len(alive))
            return x

        return original(shape, dtype, counting)

    monkeypatch.setattr(module, "Kept", watched)
    convert(source("gla"), tmp_path / "ours")
    assert most == 2


# The command


def test_command(source, tmp_path, capsys):
    folder = source("gla")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md", "modeling.py"):
        (folder / name).write_text(json.dumps({"name": name}))
    assert cli.main(["convert", str(folder), str(tmp_path / "ours"), "--clean", "--gate-init", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "ccq layout, gla, 2 layers" in out
    assert "lam starts at 0.05, normalize='stats'" in out
    assert "ignored, for it does not change the function: attn_mode, fuse_cross_entropy" in out
    assert "copied: generation_config.json, tokenizer.json, tokenizer_config.json" in out
    assert "left behind: README.md, modeling.py" in out
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]


def test_command_that_fails(source, tmp_path, capsys):
    folder = source("gla", clamp_min=0.1)
    assert main([str(folder), str(tmp_path / "x")]) == 1
    assert "clamp_min: expected None, got 0.1 (our log-decays have no lower bound)" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "none" / "here"), str(tmp_path / "x")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    for arguments, message in (
        (["--gate-init", "0.1"], "--gate-init: expected --clean beside it"),
        (["--to", "flax"], "invalid choice: 'flax'"),
    ):
        with pytest.raises(SystemExit):
            main([str(folder), str(tmp_path / "x"), *arguments])
        assert message in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "x"), "--clean", "--gate-init", "1.5"]) == 1
    assert "gate_init: expected a number between 0 and 1, got 1.5" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "x"), "--clean", "--to", "fla"]) == 1
    assert "clean: fla has no cleaned layers" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "x"), "--to", "fla"]) == 1
    assert "is in that layout already" in capsys.readouterr().err


def test_a_name_on_the_hub(source, tmp_path, monkeypatch):
    import huggingface_hub

    folder = source("gla")
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns: asked.append(name) or str(folder)
    )
    assert main(["fla-hub/gla-1.3B-100B", str(tmp_path / "ours")]) == 0
    assert asked == ["fla-hub/gla-1.3B-100B"]

    def fail(*_, **__):
        raise FileNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OSError, match="there is no such folder, and the Hub gives none: offline"):
        main(["fla-hub/gla", str(tmp_path / "x")])
