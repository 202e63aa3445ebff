"""Options and tensors of a checkpoint: converted as fla means them, or refused by name with nothing written."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from fla_checkpoints import CONFIGS, LAYERS, TYPES, assert_same_tensors, make_folder, make_tensors
from model_helpers import make_model
from safetensors.torch import load_file

from ccq.model import CCQForCausalLM
from ccq.model.convert import convert, grouped, model_shapes, read_json
from ccq.model.convert.families import FAMILIES, SIZES, our_config

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
    ("gated_deltanet", {"output_gate_activation": "sigmoid"}, "output_gate_activation: expected 'swish' or 'silu'"),
    ("delta_net", {"qk_norm": "sum"}, "qk_norm: expected 'l2', got 'sum'"),
    ("delta_net", {"qk_activation": "elu", "use_beta": False}, "(?s)use_beta: expected True.*qk_activation"),
    ("retnet", {"feature_map": "relu", "num_kv_heads": 1}, "feature_map: expected None"),
    ("retnet", {"num_kv_heads": 1}, "num_kv_heads: expected num_heads = 2, got 1"),
    ("retnet", {"expand_k": 0.5, "num_heads": 16}, "rotary: .*keys of even size"),
    ("linear_attn", {"feature_map": "dpfp"}, "feature_map: expected 'elementwise_product' or 'identity', got 'dpfp'"),
    ("linear_attn", {"norm_feature_map": True}, "norm_feature_map: expected False"),
    ("linear_attn", {"use_short_conv": False}, "use_short_conv: LinearAttentionForCausalLM of fla has no such option"),
    ("kda", {"safe_gate": True, "lower_bound": -5.0}, "(?s)safe_gate: expected False.*lower_bound: expected None"),
    ("kda", {"num_v_heads": 6}, "num_v_heads: expected num_heads = 3, got 6"),
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


@pytest.mark.parametrize(("model_type", "name"), TYPES.items())
def test_every_option_of_the_installed_fla(model_type, name, tmp_path):
    """Its own classes write the config and name the tensors: an option or a tensor that a new version has, shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        models = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    make_config = getattr(models, f"{name}Config")
    assert make_config.model_type == model_type
    plain, _ = our_config(json.loads(make_config().to_json_string(use_diff=False), object_hook=number))
    assert plain.mixer == FAMILIES[model_type].mixer
    own = {
        key: value for key, value in CONFIGS[model_type].items() if key not in ("torch_dtype", "transformers_version")
    }
    config = make_config(**own)
    config.save_pretrained(tmp_path)
    written = read_json(tmp_path / "config.json")
    assert {key: written[key] for key in own if key in written} == {key: own[key] for key in own if key in written}
    ours, ignored = our_config(written)
    assert set(ignored) <= set(FAMILIES[model_type].ignored)
    if model_type == "transformer":
        pytest.importorskip("flash_attn", reason="fla's attention needs flash_attn")
    with torch.device("meta"):
        theirs = getattr(models, f"{name}ForCausalLM")(config).state_dict()
    expected = {FAMILIES[model_type].name(key, ours): shape for key, shape in model_shapes(ours)[1].items()}
    assert {key: tuple(x.shape) for key, x in theirs.items()} == expected
    assert set(make_tensors(model_type)) == set(expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("model_type", "name"), [pair for pair in TYPES.items() if pair[0] != "transformer"])
def test_logits_are_those_of_flas_own_model(model_type, name, tmp_path):
    """On a GPU its models run: the same weights, in its kernels and in ours."""
    from fla import models

    left_out = ("torch_dtype", "transformers_version", "hidden_size", "intermediate_size", "head_dim")
    own = {key: value for key, value in CONFIGS[model_type].items() if key not in left_out}
    own |= {"hidden_size": 128, "fuse_cross_entropy": False, "initializer_range": 0.1}
    own |= {"num_heads": 4, "head_dim": 64} if model_type == "mamba2" else {"num_heads": 2, "intermediate_size": 128}
    own |= {"head_dim": 64} if model_type in ("gated_deltanet", "kda") else {}
    torch.manual_seed(0)
    theirs = getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**own)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    ids = torch.randint(64, (2, 150), generator=torch.Generator().manual_seed(0)).cuda()
    ours = CCQForCausalLM.from_pretrained(tmp_path / "ours").eval()
    for dtype, least in ((torch.float32, 5e-3), (torch.bfloat16, 5e-2)):
        if model_type == "delta_net" and dtype == torch.float32:
            continue  # fla's kernel of the delta rule refuses it
        with torch.no_grad():
            ref, got = (m.to("cuda", dtype)(ids, use_cache=False).logits.float() for m in (theirs, ours))
        assert ref.std() > 0.1
        assert (got - ref).norm() < least * ref.norm()


def number(x):
    """Infinity is an object in what transformers 5 writes."""
    return float(x["__float__"]) if "__float__" in x else x


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
        ("llama", f"expected one of {', '.join(TYPES)}, ccq, got 'llama'"),
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
    assert SIZES[FAMILIES["gla"].sizes][0](FAMILIES["gla"].reads)["intermediate_size"] == 5632  # of fla's 1.3B models


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
        "  missing: model.layers.*.attn.q_proj.weight in 2 layers",
        "  missing: model.layers.1.mlp_norm.weight",
        "  missing: lm_head.weight",
        "  not understood: extra",
        "  not understood: model.layers.*.attn.lora.weight in 3 layers",
    ]
    assert not (tmp_path / "x").exists()


def test_names_are_grouped_by_layer():
    names = [f"model.layers.{i}.a" for i in (0, 1, 2, 4, 7, 8)] + ["b", "model.layers.11.c"]
    assert grouped(names) == ["model.layers.*.a in 6 layers", "b", "model.layers.11.c"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65}, r"model.embeddings.weight: expected shape \[65, 32\], got \[64, 32\]"),
        ({"head_dim": 4}, r"model.layers.0.attn.q_proj.weight: expected shape \[12, 32\], got \[24, 32\]"),
        ({"conv_size": 3}, r"model.layers.0.attn.k_conv1d.weight: expected shape \[24, 1, 3\], got \[24, 1, 4\]"),
        ({"num_hidden_layers": 1}, r"not understood: model.layers.1.attn.A_log"),
        ({"use_short_conv": False}, r"not understood: model.layers.\*.attn.q_conv1d.weight in 2 layers"),
        ({"intermediate_size": 24}, r"mlp.gate_proj.weight: expected shape \[24, 32\], got \[48, 32\]"),
    ],
)
def test_tensors_of_another_shape(changes, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(source("gated_deltanet", **changes), tmp_path / "x")
