"""Multi-query associative recall, zoology's test slices or others: the share of keys whose value the model gives."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ccq.evaluate.errors import EvaluationError
from ccq.evaluate.requests import Builder, RequestSet
from ccq.evaluate.statistics import average, grouped, summary
from ccq.evaluate.suite import SEED, Option, Suite, lengths_option, positive

VOCABULARY, SAMPLES = 8192, 1000  # zoology's


def as_trained(options: Any, config: Any) -> Any:
    """The options with vocabulary and slices of what the model was trained on, where they name none."""
    told = getattr(config, "recall", None)
    if told is None:
        return options
    slices = tuple((length, pairs, SAMPLES) for length, pairs in told["slices"])
    vocabulary = options.recall_vocab_size or told["vocab_size"]
    return options.but(slices=options.slices or slices, recall_vocab_size=vocabulary)


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
        raise argparse.ArgumentTypeError(f"expected LENGTHxPAIRSxSAMPLES with commas between, got {text!r}")
    return slices


def build(options, tokenizer) -> RequestSet:
    from ccq.data.mqar import MQAR, TEST, Slice

    all_slices = TEST if options.slices is None else [Slice(*part) for part in options.slices]
    slices = [part for part in all_slices if options.lengths is None or part.length in options.lengths]
    if not slices:
        known = sorted({part.length for part in all_slices})
        raise EvaluationError(f"--lengths: MQAR has test slices of {known} tokens, got {list(options.lengths)}")
    try:
        task = MQAR(slices=slices, split="test", seed=options.seed, vocab_size=options.recall_vocab_size or VOCABULARY)
        task.of(0, np.arange(1))
    except ValueError as error:
        raise EvaluationError(f"--slices, --recall-vocab-size: {error}") from error
    builder, names = Builder(), []
    for number, part in enumerate(task.slices):
        count = part.samples if options.limit is None else min(part.samples, options.limit)
        batch = task.of(number, np.arange(count))
        names.append({"length": part.length, "pairs": part.pairs, "samples": count})
        for index, (inputs, labels) in enumerate(zip(batch.input_ids.numpy(), batch.labels.numpy(), strict=True)):
            asked = np.flatnonzero(labels >= 0)
            meta = {"answers": labels[asked].tolist()}
            builder.add(
                f"{part.length}-{part.pairs}/{index}", "argmax", inputs, positions=tuple(asked.tolist()), meta=meta
            )
    return builder.done("mqar", {"slices": names, "seed": options.seed, "vocabulary": task.vocab_size})


def metrics(asked: RequestSet, answers: list[dict], options, tokenizer) -> tuple[list[dict], dict]:
    """Accuracy over the keys of a slice, with samples resampled; zoology reports the mean over slices."""
    rows = []
    for request, answer in zip(asked.requests, answers, strict=True):
        right = [int(a == b) for a, b in zip(answer["tokens"], request.meta["answers"], strict=True)]
        group = request.id.split("/")[0]
        rows.append(
            {"id": request.id, "group": group, "output": answer["tokens"], "score": sum(right), "weight": len(right)}
        )
    groups = grouped(rows)
    scores = {name: summary(mine) for name, mine in groups.items()}
    if len(groups) > 1:
        scores["average"] = average(groups)
    return rows, scores


SUITE = Suite(
    name="mqar",
    help="multi-query associative recall, zoology's test slices",
    build=build,
    metrics=metrics,
    options=(
        lengths_option("all"),
        Option("slices", "other than the model's own, such as 32x4x256: tokens, pairs, samples", recall_slices),
        Option("recall_vocab_size", f"of the samples (default: the model's own, else {VOCABULARY})", positive),
        SEED,
    ),
    text=False,
    as_trained=as_trained,
)
