"""Recipes: a system of ccq/systems.toml times a size; `recipe("ccq_gla_500m")` is a whole run.

A size says how big the model is (there too) and how it is trained, which stands here:

>>> recipe("ccq_gla_500m").model.clean, recipe("gla_500m").model.clean
(True, False)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ccq.data.mad import EPOCHS, SAMPLES, TEST_SAMPLES
from ccq.data.mqar import OVERWRITTEN_TEST, OVERWRITTEN_TRAIN, TEST, UPDATES
from ccq.systems import SYSTEMS, Identity, recipe_name
from ccq.train.config import Config, Data, Optimizer, Runtime, preset

MILLION, BILLION = 10**6, 10**9


def text(system: str, size: str, length: int, batch: int, steps: int, lr: float, warmup: int, **runtime: Any) -> Config:
    """The paper's settings. It does not name a clipping norm: 1, as the settings it inherits have it."""
    return Config(
        model=preset(f"{system}-{size}"),
        data=Data(source="tokens", length=length, batch=batch),
        optimizer=Optimizer(lr=lr, warmup=warmup, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        runtime=Runtime(**runtime),
        steps=steps,
        dtype="bf16",
    )


def recall(
    system: str, size: str, data: Data, lr: float, weight_decay: float, steps: int, validate_every: int
) -> Config:
    """What zoology's and MAD's runs share."""
    return Config(
        model=preset(f"{system}-{size}"),
        data=data,
        optimizer=Optimizer(lr=lr, warmup=0, betas=(0.9, 0.999), weight_decay=weight_decay, clip=None),
        runtime=Runtime(micro_batch=data.batch, validate_every=validate_every),
        steps=steps,
        dtype="bf16",
    )


def zoology(system: str, size: str) -> Config:
    """MQAR, or its forgetting variant."""
    overwritten = size == "mqar-overwrite"
    data = Data(source="mqar", batch=256)
    if overwritten:
        data.updates, data.slices = UPDATES, tuple((*s,) for s in OVERWRITTEN_TRAIN)
    data.valid_slices = tuple((s.length, s.pairs, 256) for s in (OVERWRITTEN_TEST if overwritten else TEST))
    return recall(system, size, data, lr=3.16e-3, weight_decay=0.1, steps=2000, validate_every=250)


def mad(system: str, size: str) -> Config:
    """MAD's baseline of a task; the rate and the decay are its defaults, see `ccq sweep mad`."""
    motif, noise = {"mad-noisy": (1, 0.2), "mad-fuzzy": (3, 0.0)}[size]
    train, valid = (((128, motif, samples),) for samples in (SAMPLES, TEST_SAMPLES))
    data = Data(source="mad", batch=128, slices=train, valid_slices=valid, noise=noise)
    steps = EPOCHS * SAMPLES // data.batch
    return recall(system, size, data, lr=5e-4, weight_decay=0.0, steps=steps, validate_every=1000)


def tiny(system: str, size: str) -> Config:
    return Config(
        model=preset(f"{system}-{size}"),
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


PAPER = functools.partial(text, length=4096, lr=1e-3, warmup=1024)
# size: what makes the config of a system at it; where tokens are few, the warm-up is 5% of the steps
TRAINED: dict[str, Callable[[str, str], Config]] = {
    "500m": functools.partial(PAPER, batch=64, steps=15 * BILLION // 262_144),
    "1.3b": functools.partial(PAPER, batch=128, steps=40 * BILLION // 524_288),
    "nano": functools.partial(
        text, length=4096, batch=8, steps=100 * MILLION // 32_768 + 1, lr=2e-3, warmup=152, sample_every=1000
    ),
    "pico": functools.partial(
        text, length=2048, batch=16, steps=7000, lr=3e-3, warmup=350, micro_batch=16, sample_every=1000
    ),
    **dict.fromkeys(("mqar", "mqar64", "mqar256", "mqar-overwrite"), zoology),
    **dict.fromkeys(("mad-noisy", "mad-fuzzy"), mad),
    "tiny": tiny,
}


def make(system: str, size: str) -> Config:
    """The recipe of a system of ccq.systems at a size."""
    config = TRAINED[size](system, size)
    config.identity = Identity(system, size=size, recipe=recipe_name(system, size))
    return config


RECIPES: dict[str, Callable[[], Config]] = {
    recipe_name(system, size): functools.partial(make, system, size) for system in SYSTEMS for size in TRAINED
}


def recipe(name: str) -> Config:
    return RECIPES[name]()
