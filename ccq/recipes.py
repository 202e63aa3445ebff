"""Recipes: a system of ccq/systems.py times a size; `recipe("ccq_gla_500m")` is a whole run.

A size says how big the model is (ccq/model/config.py) and how it is trained, which stands here:

>>> recipe("ccq_gla_500m").model.clean, recipe("gla_500m").model.clean
(True, False)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ccq.data.mad import EPOCHS, SAMPLES, TEST_SAMPLES
from ccq.data.mqar import OVERWRITTEN_TEST, OVERWRITTEN_TRAIN, TEST, UPDATES
from ccq.systems import SYSTEMS, Identity, recipe_name
from ccq.train.config import Config, Data, Optimizer, Runtime, preset

MILLION, BILLION = 10**6, 10**9


def paper(system: str, size: str, batch_tokens: int, tokens: int) -> Config:
    """What the paper's runs share. It does not name a clipping norm: 1, as the settings it inherits have it."""
    length = 4096
    return Config(
        model=preset(f"{system}-{size}"),
        data=Data(source="tokens", length=length, batch=batch_tokens // length),
        optimizer=Optimizer(lr=1e-3, warmup=1024, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        steps=tokens // batch_tokens,
        dtype="bf16",
    )


def nano(system: str) -> Config:
    """The paper's settings but for the batch and the warm-up, 5% of the steps: its own would not fit so few tokens."""
    length, batch_tokens, steps = 4096, 32_768, 100 * MILLION // 32_768 + 1
    return Config(
        model=preset(f"{system}-nano"),
        data=Data(source="tokens", length=length, batch=batch_tokens // length),
        optimizer=Optimizer(lr=2e-3, warmup=steps // 20, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        runtime=Runtime(micro_batch=8, validate_every=500, sample_every=1000),
        steps=steps,
        dtype="bf16",
    )


def pico(system: str) -> Config:
    steps = 7000
    return Config(
        model=preset(f"{system}-pico"),
        data=Data(source="tokens", length=2048, batch=16),
        optimizer=Optimizer(lr=3e-3, warmup=steps // 20),
        runtime=Runtime(micro_batch=16, validate_every=500, sample_every=1000),
        steps=steps,
        dtype="bf16",
    )


def zoology(system: str, size: str) -> Config:
    return Config(
        model=preset(f"{system}-{size}"),
        data=Data(source="mqar", batch=256, valid_slices=tuple((s.length, s.pairs, 256) for s in TEST)),
        optimizer=Optimizer(lr=3.16e-3, warmup=0, betas=(0.9, 0.999), weight_decay=0.1, clip=None),
        runtime=Runtime(micro_batch=256, validate_every=250),
        steps=2000,
        dtype="bf16",
    )


def overwritten(system: str) -> Config:
    """zoology's forgetting variant; MQAR otherwise."""
    config = zoology(system, "mqar-overwrite")
    config.data.updates, config.data.slices = UPDATES, tuple((*s,) for s in OVERWRITTEN_TRAIN)
    config.data.valid_slices = tuple((s.length, s.pairs, 256) for s in OVERWRITTEN_TEST)
    return config


def mad(system: str, size: str) -> Config:
    """MAD's baseline of a task; the rate and the decay are its defaults, see `ccq sweep mad`."""
    motif, noise = {"mad-noisy": (1, 0.2), "mad-fuzzy": (3, 0.0)}[size]
    kinds = [((128, motif, samples),) for samples in (SAMPLES, TEST_SAMPLES)]
    batch = 128
    return Config(
        model=preset(f"{system}-{size}"),
        data=Data(source="mad", batch=batch, slices=kinds[0], valid_slices=kinds[1], noise=noise),
        optimizer=Optimizer(lr=5e-4, warmup=0, betas=(0.9, 0.999), weight_decay=0.0, clip=None),
        runtime=Runtime(micro_batch=batch, validate_every=1000),
        steps=EPOCHS * SAMPLES // batch,
        dtype="bf16",
    )


def tiny(system: str) -> Config:
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
        runtime=Runtime(micro_batch=32, checkpoint_every=100, validate_every=100),
        steps=1000,
        dtype="fp32",
    )


# size: what makes the config of a system
TRAINED: dict[str, Callable[[str], Config]] = {
    "500m": lambda system: paper(system, "500m", batch_tokens=262_144, tokens=15 * BILLION),
    "1.3b": lambda system: paper(system, "1.3b", batch_tokens=524_288, tokens=40 * BILLION),
    "nano": nano,
    "pico": pico,
    **{size: functools.partial(zoology, size=size) for size in ("mqar", "mqar64", "mqar256")},
    "mqar-overwrite": overwritten,
    **{size: functools.partial(mad, size=size) for size in ("mad-noisy", "mad-fuzzy")},
    "tiny": tiny,
}


def make(system: str, size: str) -> Config:
    """The recipe of a system of ccq.systems at a size."""
    config = TRAINED[size](system)
    config.identity = Identity(system, size=size, recipe=recipe_name(system, size))
    return config


RECIPES: dict[str, Callable[[], Config]] = {
    recipe_name(system, size): functools.partial(make, system, size) for system in SYSTEMS for size in TRAINED
}


def recipe(name: str) -> Config:
    return RECIPES[name]()
