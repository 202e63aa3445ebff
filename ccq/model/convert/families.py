"""What the configs of flash-linear-attention say, and what of it our layers have."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ccq.files import read_toml
from ccq.model.config import CCQConfig
from ccq.names import nearest


def lines(items: Sequence[str]) -> str:
    return "".join(f"\n  {item}" for item in items)


@dataclass(frozen=True)
class Family:
    """One of fla's models: its options, its names, and the mixer that is the same function. families.toml has them."""

    mixer: str
    architecture: str
    sizes: str
    reads: dict[str, Any]
    only: dict[str, tuple[list[Any], str]]
    same: dict[str, str]
    needs: dict[str, Any]
    names: list[tuple[str, str]]
    ignored: list[str]
    former: dict[str, tuple[list[Any], str]]
    fixed: dict[str, Any] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def name(self, ours: str, config: CCQConfig) -> str:
        """fla's name of our tensor."""
        for part, theirs in self.names:
            ours = ours.replace(part, theirs)
        return ours if config.output_gate else ours.replace("g_norm_swish_gate", "g_norm")


_MAY_BE_NONE = ("hidden_ratio", "bos_token_id", "eos_token_id", "pad_token_id")  # though fla assumes a number


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


def _by_heads(o: dict[str, Any]) -> dict[str, Any]:
    _own_heads(o, "num_v_heads")
    value_size = _whole("expand_v", round(o["head_dim"] * o["expand_v"], 6), "channels in a head")
    return _mlp_and_conv(o) | {"value_size": value_size}


def _by_heads_back(config: CCQConfig) -> dict[str, Any]:
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
    return {}


# fla's options -> those of CCQConfig, and back
SIZES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[CCQConfig], dict[str, Any]]]] = {
    "expanded": (_expanded, _expanded_back),
    "heads": (_by_heads, _by_heads_back),
    "mamba2": (_mamba2, lambda config: {"num_heads": config.expand * config.hidden_size // config.head_size}),
    "mlp": (lambda o: {"intermediate_size": _mlp_size(o)}, _mlp_and_conv_back),
}


def _family(parts: list[str], **own: Any) -> Family:
    """What the parts say and its own fields, tables and lists put together."""
    fields: dict[str, Any] = {}
    for part in (*(_PARTS[name] for name in parts), own):
        for name, value in part.items():
            if isinstance(value, dict):
                fields[name] = fields.get(name, {}) | value
            else:
                fields[name] = [*fields.get(name, []), *value] if isinstance(value, list) else value
    return Family(**fields)


_TOLD = read_toml(Path(__file__).with_suffix(".toml"))
_PARTS, _RENAMED = _TOLD.pop("parts"), _TOLD.pop("renamed")
RENAMED_TENSORS: list[tuple[str, str]] = _RENAMED["tensors"]
FAMILIES = {model_type: _family(**told) for model_type, told in _TOLD.items()}  # by model_type in fla's config.json
_DECODER = tuple(_PARTS["decoder"]["reads"])  # options of all of them

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
        name = _RENAMED["options"].get(key, key)
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
    taken = {name: options[name] for name in _DECODER} | {ours: options[name] for ours, name in family.same.items()}
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    taken |= SIZES[family.sizes][0](options) | family.fixed
    config = CCQConfig(**taken, mixer=family.mixer, dtype=dtype)
    return config, sorted(name for name in given if name in family.ignored)


def _expects(name: str, value: Any, default: Any) -> str | None:
    """What an option should have been, where it is not."""
    if name == "feature_map":
        maps = FAMILIES["linear_attn"].needs[name]
        return None if value in maps else " or ".join(map(repr, maps))
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
        if getattr(config, name) not in (values := value if isinstance(value, list) else [value])
    ]
    if "intermediate_size" in family.reads and config.intermediate_size is None:
        refused.append("intermediate_size: expected a size, got None (fla's layers have an MLP)")
    if refused:
        raise ValueError(f"{family.architecture} of fla cannot represent this model:" + lines(refused))
    return model_type, {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{name: values[0] for name, (values, _) in family.only.items()},
        **{name: getattr(config, name) for name in _DECODER},
        **{name: getattr(config, ours) for ours, name in family.same.items()},
        **{name: value for name, value in SIZES[family.sizes][1](config).items() if name in family.reads},
    }


def cleaned(config: CCQConfig, gate_init: float, options: dict[str, Any]) -> CCQConfig:
    """The config with cleaning; weights that were trained without unit q and k keep them as they are."""
    if config.clean:
        raise ValueError("clean: the model already has cleaning")
    config = copy.deepcopy(config)
    config.clean, config.gate_init = True, gate_init
    config.normalize = "unit" if config.unit_qk else "stats"
    for name, value in options.items():
        setattr(config, name, value)
    config.check()
    return config
