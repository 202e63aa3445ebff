"""What a recall run found, as `ccq sweep` writes it: its numbers, its curves, and its answers to test samples."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ccq.data.batches import IGNORE
from ccq.model.info import info
from ccq.provenance import provenance
from ccq.train.config import Config, model_config
from ccq.train.optimizer import pure_decay
from ccq.train.recall import RecallRun, Samples

POINTS = 40  # of a curve


def result(run: RecallRun, looks: list[tuple[int, list[int]]], tests: list[Samples]) -> dict[str, Any]:
    """What a run found: its validation at each of `looks` (step, right answers by slice), and `tests` at the end."""
    config = run.config
    slices = config.data.valid_slices
    with run.on_stream():
        right = [run.right(x).cpu().numpy() for x in tests]
    numbers = info(model_config(config.model), 256)
    layers = [layer.mixer for layer in run.model.model.blocks()]
    losses, lams = run.losses.cpu().numpy(), run.lams.cpu().numpy()
    ends = np.unique(np.linspace(0, config.steps, min(POINTS, config.steps) + 1).astype(int))
    where = provenance()
    second = "motif" if config.data.source == "mad" else "pairs"
    train = [(x.inputs.shape[1], int((x.answers != IGNORE).sum()) / len(x.inputs)) for x in run.data.train]
    used = [train[number] for number in run.data.slices]  # tokens of a sample, and how many of them are scored
    asked = [int((x.answers != IGNORE).sum()) for x in run.data.valid]
    curve = [np.array(counts) / np.array(asked) for _, counts in looks]
    return {
        "identity": dataclasses.asdict(config.identity),
        "lr": config.optimizer.lr,
        "seed": config.seed,
        "repeat": config.identity.repeat,
        "steps": config.steps,
        "epochs": round(config.steps * config.data.batch / sum(s[2] for s in config.data.slices), 2),
        "tokens": config.data.batch * sum(s[0] for s in used),
        "scored": round(config.data.batch * sum(s[1] for s in used)),
        "skipped": int(run.skipped),
        "parameters": {"body": numbers.body, "embeddings": numbers.embedding},
        "state_bytes": sum(state_bytes(mixer) for mixer in layers),
        "covariance_bytes": sum(state_bytes(mixer, "covariance") for mixer in layers),
        "model": {name: x for name, x in dataclasses.asdict(config.model).items() if not name.endswith("token_id")},
        "valid": {
            "accuracy": round(float(np.mean(curve[-1])), 6),
            "slices": [
                {"length": s[0], second: s[1], "right": n, "asked": of, "accuracy": round(n / of, 6)}
                for s, n, of in zip(slices, looks[-1][1], asked, strict=True)
            ],
        },
        "test": scores_of(slices, right, [int((x.answers != IGNORE).sum()) for x in tests], second),
        "curve": {
            "step": ends[1:].tolist(),
            "loss": [rounded(losses[a:b].mean()) for a, b in itertools.pairwise(ends)],
            "valid_step": [step for step, _ in looks],
            "valid_accuracy": [round(float(np.mean(x)), 4) for x in curve],
            "valid_by_slice": [[round(float(y), 4) for y in x] for x in curve],
        },
        "gate": gate_path(config, lams, ends[1:]) if lams.shape[1] else None,
        "commit": where["commit"],
        "dirty": where["dirty"],
        "date": where["date"],
    }


def scores_of(
    slices: Sequence[tuple], right: list[np.ndarray], asked: Sequence[int] | None = None, second: str = "pairs"
) -> dict[str, Any]:
    """By slice, with how many samples had so many right answers: all that a bootstrap over samples needs."""
    if asked is None:
        asked = [pairs * len(counts) for (_, pairs, _), counts in zip(slices, right, strict=True)]
    rows = []
    for (length, pairs, _), counts, of in zip(slices, right, asked, strict=True):
        values, times = np.unique(counts, return_counts=True)
        rows.append({
            "length": length, second: pairs, "samples": len(counts), "right": int(counts.sum()), "asked": of,
            "accuracy": round(float(counts.sum() / of), 6),
            "histogram": [[int(v), int(n)] for v, n in zip(values, times, strict=True)],
        })  # fmt: skip
    return {"accuracy": round(float(np.mean([row["accuracy"] for row in rows])), 6), "slices": rows}


def gate_path(config: Config, lams: np.ndarray, at: np.ndarray) -> dict[str, Any]:
    """Mean lam of each layer at the steps `at`, beside where weight decay alone would have taken the bias."""
    alone = None if config.model.fixed_lam is not None else [rounded(x) for x in pure_decay(config)[at]]
    return {"step": at.tolist(), "lam": [[rounded(x) for x in row] for row in lams[at - 1]], "of_decay_alone": alone}


def state_bytes(mixer: Any, part: str | None = None) -> int:
    """Of one sequence of 256 tokens in fp32, all of it or one part."""
    state = mixer.new_state(1, "meta", torch.float32, 256)
    if part is None and "length" in state:  # attention: keys and values
        return 2 * 256 * mixer.key_heads * mixer.size * 4
    return sum(x.nbytes for x in pytree.tree_leaves(state if part is None else state.get(part, {})))


def rounded(x: float) -> float | None:
    return float(f"{x:.5g}") if np.isfinite(x) else None
