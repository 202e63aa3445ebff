"""What a trainer takes from any source of data: `source.batch(step, rank, world)`, and a loader that prefetches it.

B  windows a rank     L  tokens a window     N  sequences packed into one row
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

IGNORE = -100  # a label that is not scored


class Batch(NamedTuple):
    """One rank's part of a step. `labels[b, t]` is the token that follows `input_ids[b, :t + 1]`: already shifted.

    With `cu_seqlens` the windows lie in one row ([1, B * L]) and the state starts afresh at each border.
    """

    input_ids: Int[Tensor, "B L"]
    labels: Int[Tensor, "B L"]  # IGNORE where nothing is scored
    cu_seqlens: Int[Tensor, " N1"] | None
    window_ids: Int[Tensor, " windows"]  # which windows (samples) of the source these are
    positions: Int[Tensor, "B P"] | None = None  # with it the labels, [B, P] too, are of these tokens of each row alone


def part(size: int, rank: int, world: int) -> slice:
    """The rows of a global batch that belong to `rank`."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, world={world}), got {rank}")
    if size % world:
        raise ValueError(f"batch_size={size} must be a multiple of the parts (ranks times accumulation), {world}")
    return slice(rank * size // world, (rank + 1) * size // world)


class Source:
    """Sequences of some kinds, each of one length. A batch is of one kind and a pure function of (seed, step); rank and
    world only say which rows of it come back."""

    batch_size: int  # sequences of all ranks in a step
    vocab_size: int
    counts: list[int]  # sequences of each kind

    def plan(self, step: int) -> tuple[int, np.ndarray]:
        """The kind that is trained on at a step, and the numbers [batch_size] of its sequences."""
        raise NotImplementedError

    def of(self, kind: int, ids: np.ndarray) -> Batch:
        """The sequences of a kind with these numbers; -1 is one that scores nothing."""
        raise NotImplementedError

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        kind, ids = self.plan(step)
        return self.of(kind, ids[part(self.batch_size, rank, world)])

    def in_order(
        self, batch_size: int, rank: int = 0, world: int = 1, most: int | None = None
    ) -> Iterator[tuple[int, Batch]]:
        """Every sequence (or the first `most` of a kind) once, for evaluation: `batch_size` a rank at a time, ranks in
        turn, with its kind.

        All ranks get equally many batches of one shape, since they meet in collectives: what is missing in the last is
        filled up.
        """
        for kind, count in enumerate(self.counts):
            count = count if most is None else min(most, count)
            for first in range(0, count, batch_size * world):
                ids = first + np.arange(batch_size * world)
                yield kind, self.of(kind, np.where(ids < count, ids, -1)[part(batch_size * world, rank, world)])


class Steps(IterableDataset):
    """The steps of a source from `step` on, without end: of each, this rank's `accumulate` micro-batches in order.

    Micro-batch m of rank r is part `r * accumulate + m` of `world * accumulate`, so ranks and accumulation cut the
    global batch into the same rows in the same order, and a run goes on with another number of them.
    """

    def __init__(self, source: Source, rank: int = 0, world: int = 1, accumulate: int = 1, step: int = 0) -> None:
        part(source.batch_size, rank * accumulate, world * accumulate)  # refuse now rather than in a worker
        self.source, self.rank, self.world, self.accumulate, self.step = source, rank, world, accumulate, step

    def __iter__(self) -> Iterator[list[Batch]]:
        first, parts = self.rank * self.accumulate, self.world * self.accumulate
        while True:
            batches = [self.source.batch(self.step, first + m, parts) for m in range(self.accumulate)]
            self.step += 1
            yield batches


def loader(steps: Steps, workers: int = 0, pin_memory: bool = False, begin: Callable | None = None) -> DataLoader:
    """Iterate over `steps`, made ahead of time in `workers` (0 or 1) processes, which call `begin` first.

    To resume, build it on `Steps(..., step=n)`.
    """
    if workers not in (0, 1):
        raise ValueError(f"workers must be 0 or 1 (one worker keeps the order), got {workers}")
    return DataLoader(
        steps,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or it would draw from the global generator, and a resumed run would differ
        worker_init_fn=begin,
    )


@contextlib.contextmanager
def iterating(steps: Steps, workers: int = 0, pin_memory: bool = False) -> Iterator[Iterator[list[Batch]]]:
    """Iterate over a `loader` whose worker no signal ends but the block's end: one that is sent to all processes of a
    run (by `timeout`, torchrun, a scheduler) is for the one that trains, and it saves first."""
    batches = iter(loader(steps, workers, pin_memory, ignore_signals))
    try:
        yield batches
    finally:  # now: an exception may hold the last reference until Python waits for a process that hears nothing
        getattr(batches, "_shutdown_workers", lambda: None)()
        for process in getattr(batches, "_workers", ()):  # in the middle of a batch, which may take for ever
            process.kill()


def ignore_signals(worker: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
