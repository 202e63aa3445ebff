"""What the configs of flash-linear-attention say, and what of it our layers have."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from ccq.model.config import CCQConfig
from ccq.names import nearest


def lines(items: Sequence[str]) -> str:
    return "".join(f"\n  {item}" for item in items)


_SHARED = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "norm_eps": 1e-6, "initializer_range": 0.02,
    "tie_word_embeddings": False, "max_position_embeddings": 2048, "use_cache": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_MLP = {"intermediate_size": None, "hidden_ratio": 4}
_MAY_BE_NONE = ("hidden_ratio", "bos_token_id", "eos_token_id", "pad_token_id")  # though fla assumes a number
_TRAINING = ("fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
_BLOCK = {
    "hidden_act": (("swish", "silu"), "our MLP is a SwiGLU, our output gate a swish"),
    "attnres_block_size": ((None,), "our decoder adds its layers up, without attention over them"),
}
_AFFINE = {"elementwise_affine": ((True,), "our norms have weights")}
_HYBRID = {"attn": ((None,), "all layers of our decoder have the same mixer")}
_BETA = {"allow_neg_eigval": ((False,), "our beta ends at 1, not at 2")}
_NO_MAP = {"feature_map": ((None,), "none of fla's maps of q and k is ours")}
_MAPS = ("elementwise_product", "identity")  # of fla's for its linear attention, those that are ours
_FORMER_BLOCK = {"norm_first": ((False,), "our norms stand before the layers, not in them")}
_FORMER_CONV = {"conv_bias": ((False,), "our short convolution of q, k and v has no bias")}
_ATTN_NAMES = (
    ("model.embed_tokens.", "model.embeddings."),
    (".mixer_norm.", ".attn_norm."),
    (".mixer.", ".attn."),
)


@dataclass(frozen=True)
class Family:
    """One of fla's models: its options, its names, and the mixer that is the same function."""

    mixer: str
    architecture: str
    reads: dict[str, Any]  # the options that our config takes over, with the values that fla assumes
    only: dict[str, tuple[tuple[Any, ...], str]]  # options with the values that our layer has, and why no others
    same: dict[str, str]  # options of CCQConfig, and fla's for them
    options: Callable[[dict[str, Any]], dict[str, Any]]  # fla's options -> the other ones of CCQConfig
    fla_options: Callable[[CCQConfig], dict[str, Any]]  # and back
    needs: dict[str, Any]  # options of CCQConfig that fla's model has in this form, or one of these, only
    # likewise `only`, of earlier versions, and what fla's model never passes on
    former: dict[str, tuple[tuple[Any, ...], str]] = field(default_factory=lambda: {**_FORMER_BLOCK, **_FORMER_CONV})
    ignored: tuple[str, ...] = ("attn_mode", *_TRAINING)  # what does not change the function: kernels, the loss
    names: tuple[tuple[str, str], ...] = _ATTN_NAMES  # parts of our tensors' names, and fla's for them
    unused: tuple[str, ...] = ()  # ends of tensors of earlier versions that nothing read

    def name(self, ours: str, config: CCQConfig) -> str:
        """fla's name of our tensor."""
        for part, theirs in self.names:
            ours = ours.replace(part, theirs)
        return ours if config.output_gate else ours.replace("g_norm_swish_gate", "g_norm")


# names of options and tensors that fla has given up, and those it has now
_RENAMED_OPTIONS = {
    "rms_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps",
    "rms_norm": "rmsnorm",
    "time_step_limit": "dt_limit",
}
RENAMED_TENSORS = (
    ("model.embed_tokens.", "model.embeddings."),
    ("backbone.embedding.", "backbone.embeddings."),
    (".attn.g_norm.", ".attn.g_norm_swish_gate."),  # today's name too, where fuse_norm is off
)


def _mlp_size(o: dict[str, Any]) -> int:
    """fla's: two thirds of hidden_ratio * hidden_size, up to a multiple of 256."""
    if o["intermediate_size"] is not None:
        return o["intermediate_size"]
    ratio = 4 if o["hidden_ratio"] is None else o["hidden_ratio"]
    return 256 * -(-int(o["hidden_size"] * ratio * 2 / 3) // 256)


def _whole(name: str, value: float, what: str) -> int:
    if value != int(value):
        raise ValueError(f"{name}: expected a whole number of {what}, got {value:g}")
    return int(value)


def _expansion(width: int, base: int) -> float:
    """A number x with int(base * x) == width, which is how fla computes the width."""
    ratio = width / base
    return ratio if int(base * ratio) == width else math.nextafter(ratio, math.inf)


def _own_heads(o: dict[str, Any], name: str) -> None:
    if o.get(name) not in (None, o["num_heads"]):
        heads = o["num_heads"]
        raise ValueError(f"{name}: expected num_heads = {heads}, got {o[name]} (our heads share no keys or values)")


def _expanded(o: dict[str, Any]) -> dict[str, Any]:
    """Of GLA, RetNet, DeltaNet and linear attention, whose keys and values are so many times as wide as the model."""
    _own_heads(o, "num_kv_heads")
    if o.get("use_short_conv") and o.get("share_conv_kernel"):
        raise ValueError("share_conv_kernel: expected a convolution each of q, k and v, got one for all of them")
    sizes = {}
    for name, size in (("expand_k", "key_size"), ("expand_v", "value_size")):
        width = o["hidden_size"] * o[name]
        width = round(width) if math.isclose(width, round(width)) else int(width)
        sizes[size] = _whole(name, width / o["num_heads"], f"channels in each of {o['num_heads']} heads")
    return sizes | _mlp_and_conv(o)


def _expanded_back(config: CCQConfig) -> dict[str, Any]:
    return _mlp_and_conv_back(config) | {
        "expand_k": _expansion(config.num_heads * config.key_size, config.hidden_size),
        "expand_v": _expansion(config.num_heads * config.value_size, config.hidden_size),
    }


def _gated_deltanet(o: dict[str, Any]) -> dict[str, Any]:
    _own_heads(o, "num_v_heads")
    value_size = _whole("expand_v", round(o["head_dim"] * o["expand_v"], 6), "channels in a head")
    return _mlp_and_conv(o) | {"value_size": value_size, "unit_qk": True}


def _gated_deltanet_back(config: CCQConfig) -> dict[str, Any]:
    return _mlp_and_conv_back(config) | {"expand_v": _expansion(config.value_size, config.key_size)}


def _mlp_and_conv(o: dict[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": _mlp_size(o), "conv_size": o["conv_size"] if o.get("use_short_conv") else None}


def _mlp_and_conv_back(config: CCQConfig) -> dict[str, Any]:
    conv = {"use_short_conv": config.conv_size is not None, "conv_size": config.conv_size or 4}
    return {"intermediate_size": config.intermediate_size, **conv}


def _mamba2(o: dict[str, Any]) -> dict[str, Any]:
    heads = o["expand"] * o["hidden_size"] / o["head_dim"]
    if o["num_heads"] not in (None, heads):
        raise ValueError(f"num_heads: expected expand * hidden_size / head_dim = {heads:g}, got {o['num_heads']}")
    return {"intermediate_size": None}


def _mamba2_back(config: CCQConfig) -> dict[str, Any]:
    return {"num_heads": config.expand * config.hidden_size // config.head_size}


_PLAIN = {"clean": False, "current_key_read": False, "base_conv_size": None}

# by model_type in fla's config.json
FAMILIES = {
    "gla": Family(
        mixer="gla",
        architecture="GLAForCausalLM",
        reads={
            **_SHARED, **_MLP, "expand_k": 0.5, "expand_v": 1.0, "num_heads": 4, "num_kv_heads": None,
            "use_output_gate": True, "use_short_conv": False, "conv_size": 4, "share_conv_kernel": False,
        },
        only={
            **_BLOCK, **_AFFINE, **_HYBRID,
            **_NO_MAP,
            "clamp_min": ((None,), "our log-decays have no lower bound"),
            "use_gk": ((True,), "our keys decay"),
            "use_gv": ((False,), "our values do not decay"),
        },
        former={
            **_FORMER_BLOCK, **_FORMER_CONV,
            "gate_logit_normalizer": ((16,), "fla's model passes no other on to its layers"),
            "gate_low_rank_dim": ((16,), "fla's model passes no other on to its layers"),
        },
        names=((".mixer.o_norm.", ".mixer.g_norm_swish_gate."), *_ATTN_NAMES),
        same={"num_heads": "num_heads", "output_gate": "use_output_gate"},
        options=_expanded,
        fla_options=_expanded_back,
        needs={**_PLAIN, "feature_map": "identity", "unit_qk": False, "gate_low_rank": 16, "gate_normalizer": 16.0},
    ),
    "retnet": Family(
        mixer="retnet",
        architecture="RetNetForCausalLM",
        reads={
            **_SHARED, **_MLP, "hidden_ratio": 2, "expand_k": 1.0, "expand_v": 2.0, "num_heads": 8,
            "num_kv_heads": None, "use_output_gate": True, "use_short_conv": False, "conv_size": 4,
        },
        only={**_BLOCK, **_AFFINE, **_HYBRID, **_NO_MAP},
        names=((".mixer.o_norm.", ".mixer.g_norm_swish_gate."), *_ATTN_NAMES),
        same={"num_heads": "num_heads", "output_gate": "use_output_gate"},
        options=lambda o: _expanded(o) | {"rotary": True},
        fla_options=_expanded_back,
        needs={**_PLAIN, "feature_map": "identity", "unit_qk": False, "rotary": True, "rope_theta": 10000.0},
        unused=(".attn.rotary.inv_freq",),
    ),
    "linear_attn": Family(
        mixer="linear_attention",
        architecture="LinearAttentionForCausalLM",
        reads={
            **_SHARED, **_MLP, "expand_k": 1.0, "expand_v": 1.0, "num_heads": 4, "num_kv_heads": None,
            "feature_map": "elementwise_product",
        },
        only={
            **_BLOCK, **_AFFINE, **_HYBRID,
            "tie_feature_map_qk": ((False,), "our q and k have maps of their own"),
            "norm_q": ((False,), "our features do not sum to 1"),
            "norm_k": ((False,), "our features do not sum to 1"),
            "norm_feature_map": ((False,), "our output is not divided by the sum of the weights"),
        },
        former=_FORMER_BLOCK,
        names=((".mixer.o_norm.", ".mixer.norm."), *_ATTN_NAMES),
        same={"num_heads": "num_heads", "feature_map": "feature_map"},
        options=lambda o: _expanded(o) | {"output_gate": False},
        fla_options=lambda config: {k: v for k, v in _expanded_back(config).items() if "conv" not in k},
        needs={**_PLAIN, "feature_map": _MAPS, "unit_qk": False, "output_gate": False, "conv_size": None},
    ),
    "delta_net": Family(
        mixer="deltanet",
        architecture="DeltaNetForCausalLM",
        reads={
            **_SHARED, **_MLP, "expand_k": 1.0, "expand_v": 1.0, "num_heads": 16, "use_gate": False,
            "use_short_conv": True, "conv_size": 4,
        },
        only={
            **_BLOCK, **_HYBRID, **_BETA,
            "use_beta": ((True,), "our DeltaNet learns how strongly it writes"),
            "qk_norm": (("l2",), "our queries and keys have unit length"),
            "qk_activation": (("silu",), "our queries and keys pass a SiLU"),
        },
        ignored=("attn_mode", "use_output_norm", *_TRAINING),  # fla's layer has the norm whatever this says
        same={"num_heads": "num_heads", "output_gate": "use_gate"},
        options=lambda o: _expanded(o) | {"unit_qk": True},
        fla_options=_expanded_back,
        needs={**_PLAIN, "feature_map": "identity", "unit_qk": True},
    ),
    "gated_deltanet": Family(
        mixer="gated_deltanet",
        architecture="GatedDeltaNetForCausalLM",
        reads={
            **_SHARED, **_MLP, "num_hidden_layers": 21, "head_dim": 256, "num_heads": 6, "num_v_heads": None,
            "expand_v": 2.0, "use_gate": True, "use_short_conv": True, "conv_size": 4,
        },
        only={
            **_BLOCK, **_HYBRID, **_BETA,
            "output_gate_activation": (("swish", "silu"), "our output gate is a swish"),
        },
        same={"num_heads": "num_heads", "key_size": "head_dim", "output_gate": "use_gate"},
        options=_gated_deltanet,
        fla_options=_gated_deltanet_back,
        needs={**_PLAIN, "feature_map": "identity", "unit_qk": True},
        unused=(".attn.D",),
    ),
    "kda": Family(
        mixer="kda",
        architecture="KDAForCausalLM",
        reads={
            **_SHARED, **_MLP, "head_dim": 128, "num_heads": 16, "num_v_heads": None, "expand_v": 1.0,
            "use_short_conv": True, "conv_size": 4,
        },
        only={
            **_BLOCK, **_HYBRID, **_BETA,
            "safe_gate": ((False,), "our log-decays have no lower bound"),
            "lower_bound": ((None,), "our log-decays have no lower bound"),
        },
        same={"num_heads": "num_heads", "key_size": "head_dim"},
        options=_gated_deltanet,
        fla_options=_gated_deltanet_back,
        needs={**_PLAIN, "feature_map": "identity", "unit_qk": True, "output_gate": True},
    ),
    "mamba2": Family(
        mixer="mamba2",
        architecture="Mamba2ForCausalLM",
        reads={
            **_SHARED, "num_hidden_layers": 48, "norm_eps": 1e-5, "pad_token_id": 0, "head_dim": 64,
            "state_size": 128, "expand": 2, "conv_kernel": 4, "n_groups": 1, "num_heads": None,
        },
        only={
            "hidden_act": (("silu", "swish"), "the activation behind our convolution"),
            "use_bias": ((False,), "our projections have no bias"),
            "use_conv_bias": ((True,), "our convolution has a bias"),
            "D_has_hdim": ((False,), "our D is one number a head"),
            "rmsnorm": ((True,), "our output has a norm"),
            "norm_before_gate": ((False,), "our norm comes after the gate"),
        },
        former={"dt_limit": (([0, math.inf],), "our time steps have no bounds")},  # of today, but no plain JSON
        ignored=(
            "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "rescale_prenorm_residual",
            "time_step_rank", "time_step_min", "time_step_max", "time_step_floor",
            "chunk_size", "residual_in_fp32", *_TRAINING,
        ),
        names=(
            ("model.embed_tokens.", "backbone.embeddings."),
            ("model.norm.", "backbone.norm_f."),
            ("model.layers.", "backbone.layers."),
            (".mixer_norm.", ".norm."),
        ),
        same={
            "expand": "expand", "state_size": "state_size", "head_size": "head_dim", "num_groups": "n_groups",
            "conv_size": "conv_kernel",
        },
        options=_mamba2,
        fla_options=_mamba2_back,
        needs={**_PLAIN, "unit_qk": False, "intermediate_size": None},
    ),
    "transformer": Family(
        mixer="attention",
        architecture="TransformerForCausalLM",
        reads={**_SHARED, **_MLP, "num_heads": 32, "num_kv_heads": None, "rope_theta": 10000.0},
        only={
            **_BLOCK, **_AFFINE,
            "qkv_bias": ((False,), "our projections have no bias"),
            "qk_norm": ((False,), "our queries and keys are not normalised"),
            "window_size": ((None,), "our attention looks at all tokens so far"),
        },
        former={
            **_FORMER_BLOCK,
            "attention_bias": ((False,), "our projections have no bias"),
            "attention_dropout": ((0,), "our attention drops nothing"),
            "rope_scaling": ((None,), "our rotations are not scaled"),
        },
        ignored=_TRAINING,
        same={"num_heads": "num_heads", "num_kv_heads": "num_kv_heads", "rope_theta": "rope_theta"},
        options=lambda o: {"intermediate_size": _mlp_size(o)},
        fla_options=lambda config: {"intermediate_size": config.intermediate_size},
        needs={"base_conv_size": None},
        unused=(".attn.rotary.inv_freq",),
    ),
}  # fmt: skip

# what transformers itself stores; nothing of it changes the function
_BOOKKEEPING = (
    *PretrainedConfig().to_dict(),
    *("torch_dtype", "auto_map", "_attn_implementation_autoset", "_attn_implementation", "_commit_hash"),
)


def our_config(raw: dict[str, Any]) -> tuple[CCQConfig, list[str]]:
    """The config of ours that means what fla's means, and the options that were ignored; raises for any other."""
    family = FAMILIES[raw["model_type"]]
    given: dict[str, Any] = {}
    refused = []
    for key, value in raw.items():
        name = _RENAMED_OPTIONS.get(key, key)
        if given.setdefault(name, value) != value:
            refused.append(f"{key}: {value!r} contradicts {name}, {given[name]!r}")
    options = {name: given.pop(name, default) for name, default in family.reads.items()}
    for name, default in family.reads.items():
        expected = _expects(name, options[name], default)
        if expected is not None:
            refused.append(f"{name}: expected {expected}, got {options[name]!r}")
    for name, (values, why) in (family.only | family.former).items():
        value = given.pop(name, values[0])
        if value not in values:
            refused.append(f"{name}: expected {' or '.join(map(repr, values))}, got {value!r} ({why})")
    for name, value in given.items():
        if name not in (*family.ignored, *_BOOKKEEPING):
            near = nearest(name, (*family.reads, *family.only))
            refused.append(f"{name}: {family.architecture} of fla has no such option, got {value!r}.{near}")
    if refused:
        raise ValueError("our layers cannot represent this model:" + lines(refused))
    taken = {name: options[name] for name in _SHARED} | {ours: options[name] for ours, name in family.same.items()}
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    config = CCQConfig(**{**taken, **family.options(options)}, mixer=family.mixer, dtype=dtype)
    return config, sorted(name for name in given if name in family.ignored)


def _expects(name: str, value: Any, default: Any) -> str | None:
    """What an option should have been, where it is not."""
    if name == "feature_map":
        return None if value in _MAPS else " or ".join(map(repr, _MAPS))
    if value is None:
        return None if default is None or name in _MAY_BE_NONE else "a value"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "True or False"
    if name == "eos_token_id" and isinstance(value, list):
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "a number"
    if not isinstance(default, float) and value != int(value):
        return "a whole number"
    if value <= 0 and not name.endswith("_token_id") and name != "initializer_range":
        return "a positive number"
    return None


def fla_config(config: CCQConfig) -> tuple[str, dict[str, Any]]:
    """fla's model_type and config for one of ours; raises where fla's model has not what it asks for."""
    known = {family.mixer: model_type for model_type, family in FAMILIES.items()}
    if config.mixer not in known:
        raise ValueError(f"mixer: expected one of {', '.join(known)} to write fla's layout, got {config.mixer!r}")
    model_type = known[config.mixer]
    family = FAMILIES[model_type]
    refused = [
        f"{name}: expected {' or '.join(map(repr, values))}, got {getattr(config, name)!r}"
        for name, value in family.needs.items()
        if getattr(config, name) not in (values := value if isinstance(value, tuple) else (value,))
    ]
    if "intermediate_size" in family.reads and config.intermediate_size is None:
        refused.append("intermediate_size: expected a size, got None (fla's layers have an MLP)")
    if refused:
        raise ValueError(f"{family.architecture} of fla cannot represent this model:" + lines(refused))
    return model_type, {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{name: values[0] for name, (values, _) in family.only.items()},
        **{name: getattr(config, name) for name in _SHARED},
        **{name: getattr(config, ours) for ours, name in family.same.items()},
        **family.fla_options(config),
    }


def cleaned(config: CCQConfig, gate_init: float) -> CCQConfig:
    """The config with cleaning; weights that were trained without unit q and k keep them as they are."""
    if config.clean:
        raise ValueError("clean: the model already has cleaning")
    config = copy.deepcopy(config)
    config.clean, config.gate_init = True, gate_init
    config.normalize = "unit" if config.unit_qk else "stats"
    config.check()
    return config
