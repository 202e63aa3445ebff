"""Recall runs whose steps never leave the device, so that many small models keep one GPU busy.

A model of a million parameters takes a GPU a millisecond a step, and Python several to launch it. So all samples of a
seed lie on the device, and a step takes its batch, its learning rate and its place in the records from there: on a GPU
it is captured once for each kind of sample, and replayed. `Trainer.step` is the truth that this equals; here too the
batch is that of (seed, step), and a step that is not finite changes nothing and is counted.

S kinds of samples (slices), B sequences of a batch, L tokens, P queries of a sequence, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ccq.data.batches import IGNORE
from ccq.data.recall import Recall
from ccq.model.loss import linear_cross_entropy, outer
from ccq.ops.precision import stats_dtype
from ccq.train.captured import WARM_UP, DeviceUpdate
from ccq.train.config import Config
from ccq.train.data import recall_source
from ccq.train.loop import Trainer
from ccq.train.optimizer import learning_rate, squared_norms
from ccq.train.world import World

EVALUATED = 65_536  # tokens that are evaluated at once


@dataclass(frozen=True)
class Samples:
    """All samples of a slice."""

    inputs: Int[Tensor, "n L"]
    positions: Int[Tensor, "n P"]  # of the queries, rising
    answers: Int[Tensor, "n P"]  # IGNORE where there is no further query

    def to(self, device: torch.device) -> Samples:
        return Samples(*(x.to(device) for x in (self.inputs, self.positions, self.answers)))

    def rows(self, index: Int[Tensor, " B"]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, L], and of the queries where they are among the B * L tokens [B * P] and their answers [B * P]."""
        length = self.inputs.shape[1]
        first = torch.arange(index.shape[0], device=index.device)[:, None] * length
        at = self.positions.index_select(0, index) + first
        inputs, answers = (x.index_select(0, index).long() for x in (self.inputs, self.answers))
        return inputs, at.flatten(), answers.flatten()


def samples_of(source: Recall) -> list[Samples]:
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
        made.append(Samples(inputs, positions.int(), labels.gather(1, positions)))
    return made


@dataclass(frozen=True)
class RecallData:
    """What runs of one seed are trained and validated on, whatever their model."""

    train: list[Samples]
    valid: list[Samples]
    slices: list[int]  # that of each step
    order: list[Int[Tensor, "steps B"]]  # of each slice: the samples of its batches

    @staticmethod
    def of(config: Config, device: torch.device) -> RecallData:
        source = recall_source(config, config.data.slices, "train")
        plans = [source.plan(step) for step in range(config.steps)]
        order = [
            torch.from_numpy(
                np.array([ids for n, ids in plans if n == number], np.int64).reshape(-1, source.batch_size)
            )
            for number in range(len(source.slices))
        ]
        held_out = config.data.valid_slices
        valid = samples_of(recall_source(config, held_out, "valid")) if held_out else []
        return RecallData(
            [x.to(device) for x in samples_of(source)],
            [x.to(device) for x in valid],
            [number for number, _ in plans],
            [x.to(device) for x in order],
        )


class RecallRun:
    """One model in training; `advance` takes it through a step, `valid_right` has what it knew when last asked."""

    def __init__(self, config: Config, device: torch.device, data: RecallData) -> None:
        self.config, self.device, self.data = config, device, data
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self.on_stream():  # of the weights too: a gradient is added up on the stream where its weight was made
            self.trainer = Trainer(config, World(0, 1, device))
            self.model = self.trainer.model
            cleaners = self.trainer.gates.cleaners
            rates = [learning_rate(n, config) for n in range(config.steps)]
            self.rates = torch.tensor(rates, dtype=torch.float64, device=device)
            self.update = DeviceUpdate(self.trainer)
            self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step
            self.taken = [torch.zeros_like(self.at) for _ in data.order]  # batches of each slice
            self.losses = torch.zeros(config.steps, dtype=torch.float64, device=device)
            self.norms = torch.zeros_like(self.losses)
            self.skipped = torch.zeros_like(self.at)
            self.lams = torch.zeros(config.steps, len(cleaners), dtype=torch.float64, device=device)
            self.valid_right = torch.zeros(len(data.valid), dtype=torch.int64, device=device)
            self.trainer.gates.record(True, angle=False)
        self.steps: dict[int, Callable[[], Any]] = {}  # of each slice: what runs a step
        self.validation: Callable[[], Any] = self.validate
        self.captured = False

    def on_stream(self) -> Any:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def start(self, capture: bool = True) -> RecallRun:
        """Make the steps ready: on a GPU, warm up, capture, and put everything back as it was."""
        numbers = sorted(set(self.data.slices))
        self.steps = {n: functools.partial(self.step, n) for n in numbers}
        if self.stream is None:
            return self
        masters = self.trainer.prepared.masters
        with self.on_stream():
            before = {name: x.detach().clone() for name, x in masters.items()}
            for number in numbers:
                for _ in range(WARM_UP):
                    self.rewind()
                    self.step(number)
            self.validate()
            if capture:
                self.capture(numbers)
            self.rewind()
            with torch.no_grad():
                for name, x in masters.items():
                    x.copy_(before[name])
            for state in self.trainer.optimizer.state.values():
                for value in state.values():
                    value.zero_()
            self.trainer.prepared.refresh()
        self.stream.synchronize()
        return self

    def rewind(self) -> None:
        for x in (self.at, self.skipped, *self.taken):
            x.zero_()

    def capture(self, numbers: list[int]) -> None:
        """A graph for each slice and one for the validation. They share memory: nothing in it outlives a replay."""
        assert self.stream is not None
        pool = torch.cuda.graph_pool_handle()

        def graph_of(function: Callable[[], Any]) -> Callable[[], Any]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                function()
            return graph.replay

        self.stream.synchronize()
        steps = {n: graph_of(functools.partial(self.step, n)) for n in numbers}
        self.validation = graph_of(self.validate)
        self.steps, self.captured = steps, True

    def advance(self, step: int) -> None:
        with self.on_stream():
            self.steps[self.data.slices[step]]()

    def look(self) -> None:
        """Validate: `valid_right` is filled when the device gets there."""
        with self.on_stream():
            self.validation()

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    # what a graph holds

    def step(self, number: int) -> None:
        """One step on the next batch of slice `number`; nothing here waits for a GPU."""
        trainer = self.trainer
        index = self.data.order[number].index_select(0, self.taken[number])[0]
        hidden, answers = self.queries(self.data.train[number], index)
        total, scored = linear_cross_entropy(hidden, self.model.lm_head.weight, answers)
        loss = total / scored
        loss.backward()
        with torch.no_grad():
            gradients = trainer.prepared.gradients()
            norm = squared_norms(gradients)[1].sqrt()
            self.update.lr.copy_(self.rates.index_select(0, self.at)[0])
            finite = self.update(gradients, loss, norm)
            self.losses.index_copy_(0, self.at, loss.detach().double().view(1))
            self.norms.index_copy_(0, self.at, norm.view(1))
            gates = trainer.gates.collect()
            if gates is not None:
                self.lams.index_copy_(0, self.at, gates[:1])
            self.skipped += ~finite
            self.at += 1
            self.taken[number] += 1

    def queries(self, samples: Samples, index: Int[Tensor, " B"]) -> tuple[Float[Tensor, "BP D"], Int[Tensor, " BP"]]:
        """What the model knows where it is asked, and the answers: no logits of other positions."""
        inputs, at, answers = samples.rows(index)
        hidden = self.model.model(inputs, use_cache=False, return_dict=True).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, at), answers

    @torch.no_grad()
    def right(self, samples: Samples) -> Int[Tensor, " n"]:
        """Answers that are right, of each sample. The logits are fp32: in bf16 the best ones would often be equal."""
        count, length = samples.inputs.shape
        found = []
        for index in torch.arange(count, device=self.device).split(max(1, EVALUATED // length)):
            hidden, answers = self.queries(samples, index)
            logits = outer(hidden.mT, self.model.lm_head.weight.mT, stats_dtype(hidden.dtype))
            found.append((logits.argmax(-1) == answers).view(len(index), -1).sum(1))
        self.trainer.gates.collect()
        return torch.cat(found)

    def validate(self) -> None:
        if self.data.valid:
            self.valid_right.copy_(torch.stack([self.right(samples).sum() for samples in self.data.valid]))
