"""`ccq convert SRC DST`: checkpoints of flash-linear-attention into ours, with cleaning if wanted, and back.

Both sides have the same layers, so a checkpoint is renamed, not computed: what can go wrong is a config that means
another function, and a tensor that is not what its name says. Options that our layers do not have are refused by name;
names and shapes are held against our model on the meta device. Tensors pass one at a time.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import pickle
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from ccq.mixers import QueryCleaner
from ccq.model.config import CCQConfig
from ccq.model.decoder import CCQForCausalLM
from ccq.ops.dispatch import nearest

GATE_INIT = 0.01  # where the paper starts its gates
WEIGHTS = "model.safetensors"

# safetensors' names of the dtypes that weights come in
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# files beside the weights that go along
COMPANIONS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


# What fla's configs say, and what of it our layers have


@dataclass(frozen=True)
class Family:
    """One of fla's models: its options, its names, and the mixer that is the same function."""

    mixer: str
    architecture: str
    reads: dict[str, Any]  # the options that our config takes over, with the values that fla assumes
    only: dict[str, tuple[tuple[Any, ...], str]]  # options with the values that our layer has, and why no others
    former: dict[
        str, tuple[tuple[Any, ...], str]
    ]  # likewise, of earlier versions, and what fla's model never passes on
    ignored: tuple[str, ...]  # options that do not change the function: kernels, initialisation, the loss
    names: tuple[tuple[str, str], ...]  # parts of our tensors' names, and fla's for them
    options: Callable[[dict[str, Any]], dict[str, Any]]  # fla's options -> those of CCQConfig
    fla_options: Callable[[CCQConfig], dict[str, Any]]  # and back
    needs: dict[str, Any]  # options of CCQConfig that fla's model has in this form only
    unused: tuple[str, ...] = ()  # ends of tensors of earlier versions that nothing read

    def name(self, ours: str, config: CCQConfig) -> str:
        """fla's name of our tensor."""
        for part, theirs in self.names:
            ours = ours.replace(part, theirs)
        return ours if config.output_gate else ours.replace("g_norm_swish_gate", "g_norm")


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
_FORMER_BLOCK = {"norm_first": ((False,), "our norms stand before the layers, not in them")}
_FORMER_CONV = {"conv_bias": ((False,), "our short convolution of q, k and v has no bias")}
_ATTN_NAMES = (
    ("model.embed_tokens.", "model.embeddings."),
    (".mixer_norm.", ".attn_norm."),
    (".mixer.", ".attn."),
)

# names of options and tensors that fla has given up, and those it has now
_RENAMED_OPTIONS = {
    "rms_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps",
    "rms_norm": "rmsnorm",
    "time_step_limit": "dt_limit",
}
_RENAMED_TENSORS = (
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
    if o[name] not in (None, o["num_heads"]):
        heads = o["num_heads"]
        raise ValueError(f"{name}: expected num_heads = {heads}, got {o[name]} (our heads share no keys or values)")


def _gla(o: dict[str, Any]) -> dict[str, Any]:
    _own_heads(o, "num_kv_heads")
    if o["use_short_conv"] and o["share_conv_kernel"]:
        raise ValueError("share_conv_kernel: expected a convolution each of q, k and v, got one for all of them")
    sizes = {}
    for name, size in (("expand_k", "key_size"), ("expand_v", "value_size")):
        width = int(o["hidden_size"] * o[name])
        sizes[size] = _whole(name, width / o["num_heads"], f"channels in each of {o['num_heads']} heads")
    return sizes | {
        "intermediate_size": _mlp_size(o),
        "num_heads": o["num_heads"],
        "conv_size": o["conv_size"] if o["use_short_conv"] else None,
        "output_gate": o["use_output_gate"],
    }


def _gla_back(config: CCQConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "expand_k": _expansion(config.num_heads * config.key_size, config.hidden_size),
        "expand_v": _expansion(config.num_heads * config.value_size, config.hidden_size),
        "use_short_conv": config.conv_size is not None,
        "conv_size": config.conv_size or 4,
        "use_output_gate": config.output_gate,
    }


def _gated_deltanet(o: dict[str, Any]) -> dict[str, Any]:
    _own_heads(o, "num_v_heads")
    return {
        "intermediate_size": _mlp_size(o),
        "num_heads": o["num_heads"],
        "key_size": o["head_dim"],
        "value_size": _whole("expand_v", round(o["head_dim"] * o["expand_v"], 6), "channels in a head"),
        "conv_size": o["conv_size"] if o["use_short_conv"] else None,
        "output_gate": o["use_gate"],
        "unit_qk": True,
    }


def _gated_deltanet_back(config: CCQConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "head_dim": config.key_size,
        "expand_v": _expansion(config.value_size, config.key_size),
        "use_short_conv": config.conv_size is not None,
        "conv_size": config.conv_size or 4,
        "use_gate": config.output_gate,
    }


def _mamba2(o: dict[str, Any]) -> dict[str, Any]:
    heads = o["expand"] * o["hidden_size"] / o["head_dim"]
    if o["num_heads"] not in (None, heads):
        raise ValueError(f"num_heads: expected expand * hidden_size / head_dim = {heads:g}, got {o['num_heads']}")
    return {
        "intermediate_size": None,
        "expand": o["expand"],
        "state_size": o["state_size"],
        "head_size": o["head_dim"],
        "num_groups": o["n_groups"],
        "conv_size": o["conv_kernel"],
    }


def _mamba2_back(config: CCQConfig) -> dict[str, Any]:
    return {
        "expand": config.expand,
        "state_size": config.state_size,
        "head_dim": config.head_size,
        "num_heads": config.expand * config.hidden_size // config.head_size,
        "n_groups": config.num_groups,
        "conv_kernel": config.conv_size,
    }


def _transformer(o: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: o[name] for name in ("num_heads", "num_kv_heads", "rope_theta")}
    return {"intermediate_size": _mlp_size(o), **sizes}


def _transformer_back(config: CCQConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "rope_theta": config.rope_theta,
    }


_PLAIN = {"clean": False, "current_key_read": False}

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
            "feature_map": ((None,), "none of fla's maps of q and k is ours"),
            "clamp_min": ((None,), "our log-decays have no lower bound"),
            "use_gk": ((True,), "our keys decay"),
            "use_gv": ((False,), "our values do not decay"),
        },
        former={
            **_FORMER_BLOCK, **_FORMER_CONV,
            "gate_logit_normalizer": ((16,), "fla's model passes no other on to its layers"),
            "gate_low_rank_dim": ((16,), "fla's model passes no other on to its layers"),
        },
        ignored=("attn_mode", *_TRAINING),
        names=((".mixer.o_norm.", ".mixer.g_norm_swish_gate."), *_ATTN_NAMES),
        options=_gla,
        fla_options=_gla_back,
        needs={**_PLAIN, "feature_map": "identity", "unit_qk": False, "gate_low_rank": 16, "gate_normalizer": 16.0},
    ),
    "gated_deltanet": Family(
        mixer="gated_deltanet",
        architecture="GatedDeltaNetForCausalLM",
        reads={
            **_SHARED, **_MLP, "num_hidden_layers": 21, "head_dim": 256, "num_heads": 6, "num_v_heads": None,
            "expand_v": 2.0, "use_gate": True, "use_short_conv": True, "conv_size": 4,
        },
        only={**_BLOCK, **_HYBRID, "allow_neg_eigval": ((False,), "our beta ends at 1, not at 2")},
        former={**_FORMER_BLOCK, **_FORMER_CONV},
        ignored=("attn_mode", *_TRAINING),
        names=_ATTN_NAMES,
        options=_gated_deltanet,
        fla_options=_gated_deltanet_back,
        needs={**_PLAIN, "feature_map": "identity", "unit_qk": True},
        unused=(".attn.D",),
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
        names=_ATTN_NAMES,
        options=_transformer,
        fla_options=_transformer_back,
        needs={},
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
        raise ValueError("our layers cannot be this model:" + _lines(refused))
    shared = {name: options[name] for name in _SHARED}
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    config = CCQConfig(**{**shared, **family.options(options)}, mixer=family.mixer, dtype=dtype)
    return config, sorted(name for name in given if name in family.ignored)


def _expects(name: str, value: Any, default: Any) -> str | None:
    """What an option should have been, where it is not."""
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
        f"{name}: expected {value!r}, got {getattr(config, name)!r}"
        for name, value in family.needs.items()
        if getattr(config, name) != value
    ]
    if "intermediate_size" in family.reads and config.intermediate_size is None:
        refused.append("intermediate_size: expected a size, got None (fla's layers have an MLP)")
    if refused:
        raise ValueError(f"{family.architecture} of fla cannot be this model:" + _lines(refused))
    return model_type, {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{name: values[0] for name, (values, _) in family.only.items()},
        **{name: getattr(config, name) for name in _SHARED},
        **family.fla_options(config),
    }


def cleaned(config: CCQConfig, gate_init: float) -> CCQConfig:
    """The config with cleaning; weights that were trained without unit q and k keep them as they are."""
    if config.clean:
        raise ValueError("clean: the model has cleaning already")
    config = copy.deepcopy(config)
    config.clean, config.gate_init = True, gate_init
    config.normalize = "unit" if config.unit_qk else "stats"
    config.check()
    return config


# Files of tensors


@dataclass(frozen=True)
class Kept:
    """Where a tensor lies and what it is, without its numbers."""

    shape: tuple[int, ...]
    dtype: Any  # a torch.dtype, or the name of one that is none of DTYPES
    read: Callable[[slice], Tensor]  # some of its rows


ALL = slice(None)


def read(folder: Path) -> dict[str, Kept]:
    """The tensors of a checkpoint by name; their numbers are read when asked for."""
    tensors: dict[str, Kept] = {}
    for file in weight_files(folder):
        for name, tensor in _safetensors(file) if file.suffix == ".safetensors" else _pickled(file):
            if name in tensors:
                raise ValueError(f"{file.name}: {name} is in another file too")
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"{file.name}: {name} is of {tensor.dtype}; expected one of {', '.join(DTYPES)}")
            tensors[name] = tensor
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's tensors, in the order in which transformers looks for them."""
    for single in (WEIGHTS, "pytorch_model.bin"):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            places = _json(index).get("weight_map")
            if not isinstance(places, dict) or not places or not all(isinstance(x, str) for x in places.values()):
                raise ValueError(f"{index}: expected a weight_map from tensors to files")
            files = [folder / name for name in sorted(set(places.values()))]
            for file in files:
                if file.parent != folder or not file.is_file():
                    raise FileNotFoundError(f"{index} names {file.name}: there is no such file beside it")
            return files
    raise FileNotFoundError(
        f"{folder}: expected {WEIGHTS} or pytorch_model.bin, or their index.json, got "
        + (", ".join(sorted(file.name for file in folder.iterdir())) or "an empty folder")
    )


def _safetensors(file: Path) -> Iterator[tuple[str, Kept]]:
    try:
        handle = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise OSError(f"{file}: damaged or cut off ({error})") from error
    for name in list(handle.keys()):
        part = handle.get_slice(name)
        dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
        yield name, Kept(tuple(part.get_shape()), dtype, part.__getitem__)


def _pickled(file: Path) -> Iterator[tuple[str, Kept]]:
    """Of a file of torch.save: tensors and nothing that runs; mapped, not read."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise OSError(f"{file}: damaged, or more than tensors is in it ({str(error).splitlines()[0]})") from error
    if not isinstance(loaded, dict) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise ValueError(f"{file}: expected tensors by name")
    for name, tensor in loaded.items():
        yield name, Kept(tuple(tensor.shape), tensor.dtype, tensor.__getitem__)


def write_safetensors(path: Path, tensors: dict[str, Kept]) -> None:
    """One file, tensor by tensor: its header says what will come, so that no two need to be in memory."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            x = tensor.read(ALL).contiguous()
            assert (tuple(x.shape), x.dtype) == (tensor.shape, tensor.dtype), name
            file.write(x.detach().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


# One into the other


def model_shapes(config: CCQConfig) -> tuple[CCQForCausalLM, dict[str, tuple[int, ...]]]:
    """Our model without memory, and its tensors' names and shapes as a checkpoint has them."""
    with torch.device("meta"):
        model = CCQForCausalLM(config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return model, shapes


def find(source: dict[str, Kept], wanted: dict[str, tuple[int, ...]], unused: tuple[str, ...]) -> dict[str, Kept]:
    """The tensors called `wanted`, also where an earlier version of fla named or joined them in another way.

    Raises with every tensor that is missing, of another shape, or not understood.
    """
    found: dict[str, Kept] = {}
    used, missing, wrong = set(), [], []
    for name, shape in wanted.items():
        spellings = [name, *(name.replace(new, old) for old, new in _RENAMED_TENSORS if new in name)]
        place = next((spelling for spelling in spellings if spelling in source), name)
        kept = source.get(place)
        joined = _joined_gate(source, name, shape)
        if joined is not None:
            place, kept = joined
        if kept is None:
            missing.append(name)
            continue
        used.add(place)
        if kept.shape != shape:
            wrong.append(f"{place}: expected shape {list(shape)}, got {list(kept.shape)}")
        found[name] = kept
    extra = [name for name in source if name not in used and not name.endswith(unused)]
    problems = [
        *(f"missing: {name}" for name in grouped(missing)),
        *(f"not understood: {name}" for name in grouped(extra)),
        *wrong,
    ]
    if problems:
        raise ValueError("the tensors are not those that config.json asks for:" + _lines(problems))
    return found


def _joined_gate(source: dict[str, Kept], name: str, shape: tuple[int, ...]) -> tuple[str, Kept] | None:
    """gate_proj and up_proj of a SwiGLU as halves of one tensor, called gate_proj: fla before February 2025."""
    match = re.fullmatch(r"(.*\.mlp)\.(gate|up)_proj\.weight", name)
    if match is None or f"{match[1]}.up_proj.weight" in source:
        return None
    place = f"{match[1]}.gate_proj.weight"
    joined = source.get(place)
    rows = shape[0]
    if joined is None or joined.shape != (2 * rows, *shape[1:]):
        return None
    half = slice(0, rows) if match[2] == "gate" else slice(rows, 2 * rows)
    return place, Kept(shape, joined.dtype, lambda _: joined.read(half))


def grouped(names: Sequence[str]) -> list[str]:
    """Names with the layers that share one joined: model.layers.{0-3,5}.attn.D."""
    layers: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"\.layers\.(\d+)\.", name)
        if match is None:
            layers.setdefault(name, [])
        else:
            layers.setdefault(f"{name[: match.start(1)]}{{}}{name[match.end(1) :]}", []).append(int(match[1]))
    result = []
    for pattern, numbers in layers.items():
        spans: list[list[int]] = []
        for number in sorted(numbers):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
        one = len(spans) == 1 and spans[0][0] == spans[0][1]
        result.append(pattern.replace("{}", text if one else f"{{{text}}}") if numbers else pattern)
    return result


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    target: Path
    layout: str  # "ccq" or "fla"
    config: CCQConfig  # of ours, on whichever side it is
    parameters: int
    ignored: list[str]  # options of the source that do not change the function
    copied: list[str]  # files that went along
    left: list[str]  # files that did not


def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    clean: bool = False,
    gate_init: float = GATE_INIT,
) -> Report:
    """Write the checkpoint in folder `source` in the other layout to folder `target`.

    Args:
        to: "ccq" or "fla"; None: the one that it is not in.
        clean: add cleaning, with lam = gate_init everywhere; a checkpoint of ours can get it too (to="ccq").

    `target` must not exist, or be empty. It appears when all of it is written, or not at all.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    if to not in (None, "ccq", "fla"):
        raise ValueError(f"to: expected one of ccq, fla, got {to!r}.{nearest(to, ('ccq', 'fla'))}")
    if not 0 < gate_init < 1:
        raise ValueError(f"gate_init: expected a number between 0 and 1, got {gate_init}")
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: there is no such folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: expected a folder that does not exist yet, or an empty one")
    raw = _json(source / "config.json")
    kind = raw.get("model_type")
    types = (*FAMILIES, CCQConfig.model_type)
    if kind not in types:
        near = nearest(kind, types) if isinstance(kind, str) else ""
        raise ValueError(
            f"{source / 'config.json'}: model_type: expected one of {', '.join(types)}, got {kind!r}.{near}"
        )
    ours = kind == CCQConfig.model_type
    to = to or ("fla" if ours and not clean else "ccq")
    if to == "fla" and clean:
        raise ValueError("clean: fla has no cleaned layers; expected to='ccq'")
    if (to == "fla") != ours and not (ours and clean):
        raise ValueError(f"to: expected {'fla' if ours else 'ccq'}, got {to!r}: {source} is in that layout already")

    ignored: list[str] = []
    with _naming(source / "config.json"):
        if ours:
            config = CCQConfig.from_pretrained(source)
        else:
            config, ignored = our_config(raw)
        result = cleaned(config, gate_init) if clean else config
        model_type, settings = fla_config(config) if to == "fla" else (None if ours else kind, {})
    with _naming(source):
        tensors = arrange(read(source), config, FAMILIES[model_type] if model_type else None, to)
        if clean:
            tensors = with_gates(tensors, result)
    if result.dtype is None:
        result.dtype = next(iter(tensors.values())).dtype  # of the embedding

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        if to == "ccq":
            result.architectures = [CCQForCausalLM.__name__]
            result.save_pretrained(partial)
        else:
            settings["torch_dtype"] = str(result.dtype).removeprefix("torch.")
            (partial / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        write_safetensors(partial / WEIGHTS, tensors)
        copied, left = _copy_companions(source, partial)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    parameters = sum(math.prod(x.shape) for x in tensors.values())
    return Report(target, to, result, parameters, ignored, copied, left)


def arrange(source: dict[str, Kept], config: CCQConfig, family: Family | None, to: str) -> dict[str, Kept]:
    """The tensors under their new names, in our model's order; without a family they keep ours."""
    shapes = model_shapes(config)[1]
    fla = {name: family.name(name, config) if family else name for name in shapes}
    old, new = (shapes, fla.values()) if to == "fla" else (fla.values(), shapes)
    wanted = dict(zip(old, shapes.values(), strict=True))
    unused = family.unused if family and to != "fla" else ()
    if config.tie_word_embeddings and "lm_head.weight" in source:
        unused = (*unused, "lm_head.weight")  # it may be stored, and is the embedding
    found = find(source, wanted, unused)
    if config.tie_word_embeddings and "lm_head.weight" in source:
        name = next(iter(found))
        if not torch.equal(found[name].read(ALL), source["lm_head.weight"].read(ALL)):
            raise ValueError(f"tie_word_embeddings is True, but lm_head.weight differs from {name}")
    return dict(zip(new, found.values(), strict=True))


def with_gates(tensors: dict[str, Kept], config: CCQConfig) -> dict[str, Kept]:
    """The tensors of an uncleaned model and those that cleaning adds, as a cleaner fills them."""
    model, shapes = model_shapes(config)
    gates = {}
    for prefix, module in model.named_modules():
        if isinstance(module, QueryCleaner):
            module.to_empty(device="cpu")
            module.reset_parameters()
            for name, x in module.state_dict().items():
                gates[f"{prefix}.{name}"] = Kept(tuple(x.shape), x.dtype, x.__getitem__)
    return {name: gates[name] if name in gates else tensors[name] for name in shapes}


@contextmanager
def _naming(place: Path) -> Iterator[None]:
    """Errors about what is written there say where."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error


def _copy_companions(source: Path, target: Path) -> tuple[list[str], list[str]]:
    copied, left = [], []
    for file in sorted(source.iterdir()):
        if file.name in COMPANIONS and file.is_file():
            shutil.copyfile(file, target / file.name)
            copied.append(file.name)
        elif file.name != "config.json" and not re.search(r"\.(safetensors|bin)(\.index\.json)?$", file.name):
            left.append(file.name)
    return copied, left


def _json(file: Path) -> dict[str, Any]:
    try:
        # infinity is an object in what transformers 5 writes
        loaded = json.loads(file.read_text(), object_hook=lambda x: float(x["__float__"]) if "__float__" in x else x)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return loaded


def _lines(items: Sequence[str]) -> str:
    return "".join(f"\n  {item}" for item in items)


def folder_of(name: str) -> Path:
    """The folder `name`, or the snapshot of that name on the Hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise FileNotFoundError(f"{name}: there is no such folder")
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", *COMPANIONS]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise OSError(f"{name}: there is no such folder, and the Hub gives none: {error}") from error


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq convert", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "source", metavar="SRC", help="folder of a checkpoint, or a name on the Hub such as fla-hub/gla-1.3B-100B"
    )
    parser.add_argument("target", metavar="DST", help="folder to make; it must not exist, or be empty")
    parser.add_argument("--clean", action="store_true", help="add cleaning to every layer")
    parser.add_argument(
        "--gate-init",
        type=float,
        metavar="LAM",
        help=f"with --clean: where lam starts, between 0 and 1 (default: {GATE_INIT})",
    )
    parser.add_argument(
        "--to", choices=("ccq", "fla"), help="the layout to write (default: the one that SRC is not in)"
    )
    arguments = parser.parse_args(argv)
    if arguments.gate_init is not None and not arguments.clean:
        parser.error("--gate-init: expected --clean beside it")
    gate_init = GATE_INIT if arguments.gate_init is None else arguments.gate_init
    try:
        source = folder_of(arguments.source)
        report = convert(source, arguments.target, arguments.to, arguments.clean, gate_init)
    except ValueError as error:
        print(f"ccq convert: {error}", file=sys.stderr)
        return 1
    config = report.config
    print(
        f"{report.target}: {report.layout} layout, {config.mixer}, {config.num_hidden_layers} layers, "
        f"{report.parameters / 1e6:,.1f} million parameters"
    )
    if config.clean:
        print(f"cleaned: lam starts at {config.gate_init:g}, normalize={config.normalize!r}")
    for what, names in (
        ("ignored, for it does not change the function", report.ignored),
        ("copied", report.copied),
        ("left behind", report.left),
    ):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 0
