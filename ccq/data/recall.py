"""Recall samples as a source of batches, whatever their task; mqar.py and mad.py make the samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ccq.data.batches import IGNORE, Batch, part
from ccq.data.counter import key_of, permute

SPLITS = ("train", "valid", "test")  # disjoint streams of samples: rates are chosen on "valid", reported on "test"


class Slice(NamedTuple):
    """Samples of one kind: tokens, what makes them hard, how many."""

    length: int
    pairs: int  # key-value pairs (MQAR), or the most tokens of a key or a value (MAD)
    samples: int


@dataclass(eq=False)
class Recall:
    """A batch comes from one slice, so all its samples have one length; sample `index` of a slice is a function of
    (seed, split, slice, index).

    An epoch is samples / batch_size batches of each slice, rounded; batches go on where the last epoch stopped, so that
    over time each sample is seen equally often. `shuffle` mixes the slices, another way each epoch; without it they
    follow each other from the first to the last, and a run that stops within an epoch has seen less of the last ones.
    """

    batch_size: int
    slices: tuple[Slice, ...]
    _: KW_ONLY
    seed: int = 0
    split: str = "train"
    vocab_size: int = 0
    shuffle: bool = True
    name: ClassVar[str]  # of the task
    second: ClassVar[str]  # what results call the second number of a slice

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {self.split!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        self.slices = tuple(Slice(*slice_) for slice_ in self.slices)  # plain tuples do too
        self.batches = [max(1, round(s.samples / self.batch_size)) for s in self.slices]  # of each slice in an epoch
        self.steps_per_epoch = sum(self.batches)
        # a sample's id over all slices, for window_ids
        self.first_id = np.cumsum([0] + [s.samples for s in self.slices])
        for slice_ in self.slices:
            self.make(np.zeros(0, np.int64), slice_, 0)  # refuse it now

    def make(self, index: np.ndarray, slice_: Slice, key: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels [len(index), tokens] of the samples with these indices."""
        raise NotImplementedError

    def plan(self, step: int) -> tuple[int, np.ndarray]:
        """(number of the slice, indices [batch_size] of its samples) at a step."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        epoch, at = divmod(step, self.steps_per_epoch)
        if self.shuffle:
            at = int(permute(np.array([at]), self.steps_per_epoch, key_of(self.name, self.seed, epoch))[0])
        ends = np.cumsum(self.batches)
        number = int(np.searchsorted(ends, at, side="right"))
        nth = epoch * self.batches[number] + at - (int(ends[number]) - self.batches[number])
        indices = nth * self.batch_size + np.arange(self.batch_size)
        return number, indices % self.slices[number].samples

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        number, indices = self.plan(step)
        return self.of(number, indices[part(self.batch_size, rank, world)])

    def in_order(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Slice, Batch]]:
        """Every sample once, slice by slice, for evaluation; filled up with samples -1, which score nothing."""
        for number, slice_ in enumerate(self.slices):
            for first in range(0, slice_.samples, batch_size * world):
                ids = first + np.arange(batch_size * world)
                ids = np.where(ids < slice_.samples, ids, -1)
                yield slice_, self.of(number, ids[part(batch_size * world, rank, world)])

    def of(self, number: int, indices: np.ndarray) -> Batch:
        """Samples of slice `number`; index -1 is one without labels."""
        slice_ = self.slices[number]
        key = key_of(self.name, self.seed, self.split, slice_.length, slice_.pairs)
        inputs, labels = self.make(np.maximum(indices, 0).astype(np.int64), slice_, key)
        labels[indices < 0] = IGNORE
        ids = np.where(indices < 0, -1, self.first_id[number] + indices)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), None, torch.from_numpy(ids))
