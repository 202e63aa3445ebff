"""Recipes: a system times a size, each a small function; `recipe("ccq_gla_500m")` is a whole run.

A size says how big the model is and how it is trained. A system is one of the paper's seven, or a control:

>>> recipe("ccq_gla_500m").model.clean, recipe("gla_500m").model.clean
(True, False)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ccq.data.mqar import TEST
from ccq.train.config import Config, Data, Optimizer, System, preset

MILLION, BILLION = 10**6, 10**9

# -- sizes: the model's, the data and how it is trained ---------------------------------------------------------------


def size_500m(system: str) -> Config:
    """the paper's: 15B tokens, 262,144 a step, 4K context; needs --data.path"""
    return paper(f"{system}-500m", batch_tokens=262_144, tokens=15 * BILLION)


def size_1_3b(system: str) -> Config:
    """the paper's: 40B tokens, 524,288 a step, 4K context; needs --data.path"""
    return paper(f"{system}-1.3b", batch_tokens=524_288, tokens=40 * BILLION)


def paper(name: str, batch_tokens: int, tokens: int) -> Config:
    """What the paper's runs share. It does not name a clipping norm: 1, as the settings it inherits have it."""
    length = 4096
    return Config(
        model=preset(name),
        data=Data(source="tokens", length=length, batch=batch_tokens // length),
        optimizer=Optimizer(lr=1e-3, warmup=1024, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        steps=tokens // batch_tokens,
        dtype="bf16",
    )


def size_nano(system: str) -> Config:
    """tens of millions of parameters, one GPU, minutes: 0.1B tokens, 32,768 a step, 4K context; needs --data.path

    The paper's settings but for the batch and the warm-up, 5% of the steps: its own would not fit so few tokens.
    """
    length, batch_tokens, steps = 4096, 32_768, 100 * MILLION // 32_768 + 1
    return Config(
        model=preset(f"{system}-nano"),
        data=Data(source="tokens", length=length, batch=batch_tokens // length),
        optimizer=Optimizer(lr=2e-3, warmup=steps // 20, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        system=System(micro_batch=8, validate_every=500, sample_every=1000),
        steps=steps,
        dtype="bf16",
    )


def size_pico(system: str) -> Config:
    """a few million parameters on text with an 8K vocabulary: 0.23B tokens, 32,768 a step; needs --data.path"""
    steps = 7000
    return Config(
        model=preset(f"{system}-pico"),
        data=Data(source="tokens", length=2048, batch=16),
        optimizer=Optimizer(lr=3e-3, warmup=steps // 20),
        system=System(micro_batch=16, validate_every=500, sample_every=1000),
        steps=steps,
        dtype="bf16",
    )


def size_mqar(system: str) -> Config:
    """recall at zoology's settings, width 128, 2,000 steps; the learning rate decides much: see `ccq sweep`"""
    return zoology(system, 128)


def size_mqar64(system: str) -> Config:
    """the same at width 64"""
    return zoology(system, 64)


def size_mqar256(system: str) -> Config:
    """the same at width 256"""
    return zoology(system, 256)


def zoology(system: str, width: int) -> Config:
    """zoology's recall models, data and optimizer; docs/training.md says what is the same and what is not.

    Two layers of two heads, no MLP, tied embeddings: a gated convolution, then the mixer (Mamba2, which has a
    convolution of its own: twice the mixer). Sizes of keys and values and the output gate are those of its layers.
    """
    head = width // 2
    shapes: dict[str, dict[str, Any]] = {
        "transformer": {},
        "mamba2": {"base_conv_size": None, "state_size": 16, "head_size": 64},
        "deltanet": {"key_size": head, "value_size": head, "output_gate": False},
        "gated-deltanet": {"key_size": head, "value_size": 2 * head, "output_gate": False},
    }
    shape = shapes.get(system, {"key_size": head // 2, "value_size": head, "feature_map_size": head // 4})
    model = preset(f"{system}-tiny", **{
        "vocab_size": 8192, "hidden_size": width, "intermediate_size": None, "num_hidden_layers": 2, "num_heads": 2,
        "base_conv_size": 3, "tie_word_embeddings": True, **shape,
    })  # fmt: skip
    return Config(
        model=model,
        data=Data(source="mqar", batch=256, valid_slices=tuple((s.length, s.pairs, 256) for s in TEST)),
        optimizer=Optimizer(lr=3.16e-3, warmup=0, betas=(0.9, 0.999), weight_decay=0.1, clip=None),
        system=System(micro_batch=256, validate_every=250),
        steps=2000,
        dtype="bf16",
    )


def size_tiny(system: str) -> Config:
    """recall in minutes on a laptop: no data, no GPU"""
    return Config(
        model=preset(f"{system}-tiny"),
        data=Data(
            source="mqar",
            batch=32,
            slices=((16, 2, 20_000), (32, 4, 20_000)),
            valid_slices=((32, 4, 256),),
            recall_vocab_size=48,  # few keys and values, so that they are learned in a minute
        ),
        optimizer=Optimizer(lr=1e-2, warmup=20),
        system=System(micro_batch=32, checkpoint_every=100, validate_every=100),
        steps=1000,
        dtype="fp32",
    )


SIZES: dict[str, Callable[[str], Config]] = {
    "500m": size_500m,
    "1.3b": size_1_3b,
    "nano": size_nano,
    "pico": size_pico,
    "mqar": size_mqar,
    "mqar64": size_mqar64,
    "mqar256": size_mqar256,
    "tiny": size_tiny,
}

# -- systems: what is trained ------------------------------------------------------------------------------------------


def with_model(config: Config, **options: Any) -> Config:
    """The config with other options of its model."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **options))


def transformer(size: str) -> Config:
    """softmax attention, RoPE, SwiGLU"""
    return SIZES[size]("transformer")


def mamba2(size: str) -> Config:
    """Mamba-2, without MLPs"""
    return SIZES[size]("mamba2")


def gla(size: str) -> Config:
    """gated linear attention"""
    return SIZES[size]("gla")


def gla_hedgehog(size: str) -> Config:
    """GLA with Hedgehog's learned features"""
    return SIZES[size]("gla-hedgehog")


def gated_deltanet(size: str) -> Config:
    """Gated DeltaNet; its q and k are unit vectors, so it is CCQ's control too"""
    return SIZES[size]("gated-deltanet")


def deltanet(size: str) -> Config:
    """DeltaNet: the delta rule without forgetting"""
    return SIZES[size]("deltanet")


def ccq_gla(size: str) -> Config:
    """GLA + CCQ"""
    return with_model(gla(size), clean=True)


def ccq_gated_deltanet(size: str) -> Config:
    """Gated DeltaNet + CCQ"""
    return with_model(gated_deltanet(size), clean=True)


def gla_unit(size: str) -> Config:
    """the control of CCQ-GLA: unit q and k, no cleaning"""
    return with_model(gla(size), unit_qk=True)


def gla_unit_equal_state(size: str) -> Config:
    """unit GLA with keys so much longer that its state is as large as CCQ-GLA's with the covariance"""
    config = gla_unit(size)
    config.model.key_size += config.model.key_size**2 // config.model.value_size
    return config


def gla_current_key(size: str) -> Config:
    """unit GLA with Comba's read: q - d k of the same token, d learned"""
    return with_model(gla_unit(size), current_key_read=True)


def ccq_gla_open(size: str) -> Config:
    """CCQ-GLA whose gate starts at 0.5 instead of 0.01"""
    return with_model(ccq_gla(size), gate_init=0.5)


def ccq_gla_uncentred(size: str) -> Config:
    """CCQ-GLA, the mean of the keys not taken away"""
    return with_model(ccq_gla(size), centred=False)


def ccq_gla_fixed_lam(size: str) -> Config:
    """CCQ-GLA with lam = 0.1 without a gate"""
    return with_model(ccq_gla(size), fixed_lam=0.1)


def ccq_gla_stats(size: str) -> Config:
    """cleaning without the norm: q and k as GLA has them, unit keys in the covariance only"""
    return with_model(ccq_gla(size), normalize="stats")


def ccq_gla_no_decay(size: str) -> Config:
    """CCQ-GLA whose gate's bias does not decay: what opens it then is its gradient"""
    return with_model(ccq_gla(size), decay_gate_bias=False)


def ccq_gated_deltanet_no_decay(size: str) -> Config:
    """CCQ-Gated DeltaNet whose gate's bias does not decay"""
    return with_model(ccq_gated_deltanet(size), decay_gate_bias=False)


def ccq_gated_deltanet_open(size: str) -> Config:
    """CCQ-Gated DeltaNet whose gate starts at 0.5"""
    return with_model(ccq_gated_deltanet(size), gate_init=0.5)


def ccq_gated_deltanet_uncentred(size: str) -> Config:
    """the paper's ablation: the mean of the keys is not taken away"""
    return with_model(ccq_gated_deltanet(size), centred=False)


def ccq_gated_deltanet_fixed_lam(size: str) -> Config:
    """the paper's ablation: lam = 0.1 without a gate"""
    return with_model(ccq_gated_deltanet(size), fixed_lam=0.1)


PAPER = (transformer, mamba2, gla, gla_hedgehog, gated_deltanet, ccq_gla, ccq_gated_deltanet)
CONTROLS = (
    gla_unit, gla_unit_equal_state, gla_current_key, deltanet,
    ccq_gla_open, ccq_gla_no_decay, ccq_gla_uncentred, ccq_gla_fixed_lam, ccq_gla_stats,
    ccq_gated_deltanet_open, ccq_gated_deltanet_no_decay, ccq_gated_deltanet_uncentred, ccq_gated_deltanet_fixed_lam,
)  # fmt: skip
SYSTEMS = {make.__name__: make for make in (*PAPER, *CONTROLS)}

RECIPES: dict[str, Callable[[], Config]] = {
    f"{name}_{size}": functools.partial(make, size) for name, make in SYSTEMS.items() for size in SIZES
}


def recipe(name: str) -> Config:
    return RECIPES[name]()
