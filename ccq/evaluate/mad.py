"""MAD's in-context recall, noisy, plain or fuzzy: the share of value tokens given, of keys that were there before."""

from __future__ import annotations

import functools
from typing import Any

from ccq.evaluate.mqar import SIZE, SLICES, as_trained, asked_of, metrics
from ccq.evaluate.requests import RequestSet
from ccq.evaluate.suite import SEED, Option, Suite, lengths_option


def build(options: Any, tokenizer: Any) -> RequestSet:
    from ccq.data.mad import MAD, TEST_SAMPLES
    from ccq.data.recall import Slice

    noise = 0.2 if options.noise is None else options.noise
    return asked_of(options, MAD, [Slice(128, 1, TEST_SAMPLES)], 32, {"noise": noise})


SUITE = Suite(
    name="mad",
    help="MAD's in-context recall: noisy (--slices 128x1x1280), or fuzzy (--slices 128x3x1280 --noise 0)",
    build=build,
    metrics=metrics,
    options=(
        lengths_option("all"),
        SLICES,
        SIZE,
        Option("noise", "the share of pairs that are noise (default: the model's own, else 0.2)", float),
        SEED,
    ),
    text=False,
    as_trained=functools.partial(as_trained, source="mad"),
)
