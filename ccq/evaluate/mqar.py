"""Recall, the share of answers that the model gives: multi-query associative recall (zoology's test slices or others),
and MAD's in-context recall, noisy, plain or fuzzy, of keys that were there before."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ccq.data.mad import MAD, TEST_SAMPLES
from ccq.data.mqar import MQAR, OVERWRITTEN_TEST, TEST
from ccq.data.recall import Recall, Slice
from ccq.evaluate.requests import Builder, EvaluationError, RequestSet
from ccq.evaluate.statistics import average, by_group, summary
from ccq.evaluate.suite import SEED, Option, Suite, lengths_option
from ccq.names import positive

SAMPLES = 1000  # zoology's


def as_trained(options: Any, config: Any, source: str = "mqar") -> Any:
    """The options with the settings of what the model was trained on, where they name none."""
    told = getattr(config, "recall", None)
    theirs = told.get("source", "mqar") if told else source
    if theirs != source and options.slices is None:
        raise EvaluationError(f"the model was trained on {theirs}: ask --suite {theirs}, or name --slices")
    if told is None or theirs != source:
        return options
    given = {"slices": tuple((*kind, SAMPLES) for kind in told["slices"]), "recall_vocab_size": told["vocab_size"]}
    given |= {name: told[name] for name in ("updates", "noise") if name in told}
    return options.but(**{name: value for name, value in given.items() if getattr(options, name) is None})


def recall_slices(text: str) -> tuple[tuple[int, ...], ...]:
    """
    >>> recall_slices("64x4x1000,128x8x500")
    ((64, 4, 1000), (128, 8, 500))
    """
    try:
        slices = tuple(tuple(int(number) for number in part.split("x")) for part in text.split(","))
    except ValueError:
        slices = ()
    if not slices or any(len(part) != 3 or min(part) < 1 for part in slices):
        raise argparse.ArgumentTypeError(f"expected LENGTHxPAIRSxSAMPLES separated by commas, got {text!r}")
    if len({part[:2] for part in slices}) < len(slices):
        raise argparse.ArgumentTypeError(f"expected each LENGTHxPAIRS once, got {text!r}")
    return slices


def build(options: Any, tokenizer: Any) -> RequestSet:
    updates = options.updates or 0
    return asked_of(options, MQAR, OVERWRITTEN_TEST if updates else TEST, {"updates": updates} if updates else {})


def build_mad(options: Any, tokenizer: Any) -> RequestSet:
    noise = MAD.noise if options.noise is None else options.noise
    return asked_of(options, MAD, [Slice(128, 1, TEST_SAMPLES)], {"noise": noise})


def asked_of(options: Any, kind: type[Recall], usual: Sequence[Slice], more: dict[str, Any]) -> RequestSet:
    """The test samples of a recall task, the slices `usual` unless others are named; `more` are its own settings."""
    all_slices = usual if options.slices is None else [Slice(*part) for part in options.slices]
    slices = [part for part in all_slices if options.lengths is None or part.length in options.lengths]
    name = kind.name
    if not slices:
        known = sorted({part.length for part in all_slices})
        raise EvaluationError(f"--lengths: {name} has test slices of {known} tokens, got {list(options.lengths)}")
    size = options.recall_vocab_size or kind.vocab_size
    try:
        task = kind(slices=tuple(slices), split="test", seed=options.seed, vocab_size=size, **more)
    except ValueError as error:
        raise EvaluationError(f"--slices, --recall-vocab-size: {error}") from error
    builder, names = Builder(), []
    for number, part in enumerate(task.slices):
        samples = np.arange(part.samples)[: options.limit]
        batch = task.of(number, samples)
        names.append({"length": part.length, kind.second: part.pairs, "samples": len(samples)})
        for index, (inputs, labels) in enumerate(zip(batch.input_ids.numpy(), batch.labels.numpy(), strict=True)):
            asked = np.flatnonzero(labels >= 0)
            where = {"positions": tuple(asked.tolist()), "meta": {"answers": labels[asked].tolist()}}
            builder.add(f"{part.length}-{part.pairs}/{index}", "argmax", inputs, **where)
    return builder.done(name, {"slices": names, "seed": options.seed, "vocabulary": task.vocab_size, **more})


def metrics(asked: RequestSet, answers: list[dict], options, tokenizer) -> tuple[list[dict], dict]:
    """Accuracy over the keys of a slice, with samples resampled; zoology reports the mean over slices."""
    rows = []
    for request, answer in zip(asked.requests, answers, strict=True):
        right = [int(a == b) for a, b in zip(answer["tokens"], request.meta["answers"], strict=True)]
        row = {"id": request.id, "group": request.id.split("/")[0], "output": answer["tokens"]}
        rows.append(row | {"score": sum(right), "weight": len(right)})
    groups = by_group(rows)
    scores = {name: summary(mine) for name, mine in groups.items()}
    if len(groups) > 1:
        scores["average"] = average(groups)
    return rows, scores


UPDATES = Option("updates", "number of overwritten keys (default: the model's own, else 0)", int)
NOISE = Option("noise", "share of noise pairs (default: the model's own, else 0.2)", float)
SLICES = Option("slices", "samples to ask: 32x4x256 is tokens x pairs (mad: motif) x samples", recall_slices)
SIZE = Option("recall_vocab_size", "vocabulary of the samples (default: the model's own, else as published)", positive)

SUITE = Suite(
    name="mqar",
    help="multi-query associative recall, zoology's test slices",
    build=build,
    metrics=metrics,
    options=(lengths_option("all"), SLICES, SIZE, UPDATES, SEED),
    text=False,
    as_trained=as_trained,
)
MAD_SUITE = replace(
    SUITE,
    name="mad",
    help="MAD's in-context recall: noisy (--slices 128x1x1280), or fuzzy (--slices 128x3x1280 --noise 0)",
    build=build_mad,
    options=(lengths_option("all"), SLICES, SIZE, NOISE, SEED),
    as_trained=functools.partial(as_trained, source="mad"),
)
