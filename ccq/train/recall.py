"""Recall runs that lie on the device with all their samples, so that many small models keep one GPU busy.

A model of a million parameters takes a GPU a millisecond a step, and Python several to make a batch and to launch its
kernels. So all samples of a seed lie on the device, a step is replayed as a CUDA graph, and nothing waits for what it
found. `Trainer.step` is the truth that this equals; here too the batch is that of (seed, step), and a step that is not
finite changes nothing and is counted.

B sequences of a batch, L tokens, P queries of a sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils import _pytree as pytree

from ccq.data.batches import IGNORE, Batch
from ccq.data.recall import Recall
from ccq.model.info import info
from ccq.model.loss import exact_logits
from ccq.provenance import provenance
from ccq.train.config import Config, model_config
from ccq.train.data import recall_source
from ccq.train.monitor import at_positions
from ccq.train.optimizer import learning_rate, pure_decay
from ccq.train.trainer import WARM_UP, Trainer
from ccq.train.world import World

EVALUATED = 65_536  # tokens that are evaluated at once
POINTS = 40  # of a curve


@dataclass(frozen=True)
class Samples:
    """All samples of a slice."""

    inputs: Int[Tensor, "n L"]
    positions: Int[Tensor, "n P"]  # of the queries, rising
    answers: Int[Tensor, "n P"]  # IGNORE where there is no further query

    def batch(self, index: Int[Tensor, " B"]) -> Batch:
        inputs, answers = (x.index_select(0, index).long() for x in (self.inputs, self.answers))
        return Batch(inputs, answers, None, index, self.positions.index_select(0, index))

    @property
    def asked(self) -> int:
        """Queries of all samples."""
        return int((self.answers != IGNORE).sum())


def samples_of(source: Recall, device: torch.device) -> list[Samples]:
    """Every sample of a source, slice by slice; one that is asked less often than others gets answers IGNORE."""
    made = []
    for number, slice_ in enumerate(source.slices):
        parts = []
        for ids in np.array_split(np.arange(slice_.samples), max(1, slice_.samples // 1024)):
            batch = source.of(number, ids)
            parts.append([x.int() for x in (batch.input_ids, batch.labels)])
        inputs, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        asked = labels != IGNORE
        # the places that are asked come first, in their order
        positions = (~asked).int().sort(dim=1, stable=True)[1][:, : int(asked.sum(1).max())]
        made.append(Samples(*(x.to(device) for x in (inputs, positions.int(), labels.gather(1, positions)))))
    return made


@dataclass(frozen=True)
class RecallData:
    """What runs of one seed are trained and validated on, whatever their model."""

    train: list[Samples]
    valid: list[Samples]
    slices: list[int]  # that of each step
    order: Int[Tensor, "steps B"]  # the samples of its batch

    @staticmethod
    def of(config: Config, device: torch.device) -> RecallData:
        source, held_out = recall_source(config, config.data.slices, "train"), config.data.valid_slices
        slices, order = zip(*(source.plan(step) for step in range(config.steps)), strict=True)
        valid = samples_of(recall_source(config, held_out, "valid"), device) if held_out else []
        return RecallData(samples_of(source, device), valid, list(slices), torch.from_numpy(np.stack(order)).to(device))


class RecallRun:
    """One model in training; `advance` takes it through a step, `valid_right` has what it knew when last asked."""

    def __init__(self, config: Config, device: torch.device, data: RecallData) -> None:
        self.config, self.device, self.data = config, device, data
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self.on_stream():  # of the weights too: a gradient is added up on the stream where its weight was made
            self.trainer = Trainer(config, World(0, 1, device))
            self.model, gates = self.trainer.model, self.trainer.gates
            gates.record(True, angle=False)
            self.numbers = torch.zeros(2, config.steps, dtype=torch.float64, device=device)
            self.losses, self.norms = self.numbers
            self.lams = torch.zeros(config.steps, len(gates.cleaners), dtype=torch.float64, device=device)
            self.valid_right = torch.zeros(len(data.valid), dtype=torch.int64, device=device)
        self.at = 0  # steps taken
        self.looks: list[tuple[int, Int[Tensor, " slices"]]] = []  # after which step, and `valid_right` there

    @property
    def captured(self) -> bool:
        return bool(self.trainer.graphs)

    @property
    def skipped(self) -> int:
        """Steps that were not finite."""
        return int((~self.numbers.isfinite().all(0)).sum())

    def on_stream(self) -> Any:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def start(self, capture: bool = True) -> RecallRun:
        """On a GPU, take a step of each kind until it is captured, at rate 0: no weight moves."""
        self.trainer.captures &= capture
        if self.stream is not None:
            for number in set(self.data.slices):
                for _ in range(WARM_UP + 1):
                    self.advance(self.data.slices.index(number), lr=0.0)
            self.look()
            self.at, self.looks = 0, []
            with self.on_stream():
                for state in self.trainer.optimizer.state.values():
                    for value in state.values():
                        value.zero_()
            self.wait()
        return self

    def advance(self, step: int, lr: float | None = None) -> None:
        """Take the step, at the rate of the config's schedule where none is given; nothing here waits for a GPU."""
        trainer, samples = self.trainer, self.data.train[self.data.slices[step]]
        with self.on_stream():
            batch = samples.batch(self.data.order[step])
            trainer.scored.copy_((batch.labels != IGNORE).sum())
            trainer.lr.fill_(learning_rate(step, self.config) if lr is None else lr)
            self.numbers[:, step], gates = trainer.found([batch])
            if gates is not None:
                self.lams[step] = gates[0]
        self.at = step + 1

    @torch.no_grad()
    def look(self, step: int = 0) -> None:
        """Validate after `step`: `valid_right` is filled when the device gets there."""
        with self.on_stream():
            if self.data.valid:
                self.valid_right.copy_(torch.stack([self.right(samples).sum() for samples in self.data.valid]))
            self.looks.append((step, self.valid_right.clone()))

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    @torch.no_grad()
    def right(self, samples: Samples) -> Int[Tensor, " n"]:
        """Answers that are right, of each sample."""
        count, length = samples.inputs.shape
        found = []
        for index in torch.arange(count, device=self.device).split(max(1, EVALUATED // length)):
            batch = samples.batch(index)
            logits = exact_logits(self.model.lm_head, at_positions(self.model, batch))
            found.append((logits.argmax(-1).view_as(batch.labels) == batch.labels).sum(1))
        self.trainer.gates.collect()
        return torch.cat(found)


def result(run: RecallRun, tests: list[Samples]) -> dict[str, Any]:
    """What a run found: its validation whenever it was looked at, and `tests` at the end."""
    config, looks = run.config, [(step, right.tolist()) for step, right in run.looks]
    slices = config.data.valid_slices
    with run.on_stream():
        right = [run.right(x).cpu().numpy() for x in tests]
    numbers = info(model_config(config.model), 256)
    layers = [layer.mixer for layer in run.model.model.blocks()]
    losses, lams = run.losses.cpu().numpy(), run.lams.cpu().numpy()
    ends = np.unique(np.linspace(0, config.steps, min(POINTS, config.steps) + 1).astype(int))
    where = provenance()
    second = "motif" if config.data.source == "mad" else "pairs"
    train = [(x.inputs.shape[1], x.asked / len(x.inputs)) for x in run.data.train]
    used = [train[number] for number in run.data.slices]  # tokens of a sample, and how many of them are scored
    asked = [x.asked for x in run.data.valid]
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
        "skipped": run.skipped,
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
        "test": scores_of(slices, right, [x.asked for x in tests], second),
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
    slices: Sequence[tuple], right: list[np.ndarray], asked: Sequence[int], second: str = "pairs"
) -> dict[str, Any]:
    """By slice, with how many samples had so many right answers: all that a bootstrap over samples needs."""
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
    """Of one sequence of 256 tokens in fp32, all of it but its length, or one part."""
    state = mixer.new_state(1, "meta", torch.float32, 256)
    counted = {name: x for name, x in state.items() if name != "length" and part in (None, name)}
    return sum(x.nbytes for x in pytree.tree_leaves(counted))


def rounded(x: float) -> float | None:
    return float(f"{x:.5g}") if np.isfinite(x) else None
