"""Recall samples as a source of batches, whatever their task; mqar.py and mad.py make the samples."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ccq.data.batches import IGNORE, Batch, Source
from ccq.data.counter import key_of, permute

SPLITS = ("train", "valid", "test")  # disjoint streams of samples: rates are chosen on "valid", reported on "test"


class Slice(NamedTuple):
    """Samples of one kind: tokens, what makes them hard, how many."""

    length: int
    pairs: int  # key-value pairs (MQAR), or the most tokens of a key or a value (MAD)
    samples: int


@dataclass(eq=False)
class Recall(Source):
    """Its kinds are the slices; sample `index` of a slice is a function of (seed, split, slice, index).

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
        self.counts = [s.samples for s in self.slices]
        self.batches = [max(1, round(s.samples / self.batch_size)) for s in self.slices]  # of each slice in an epoch
        self.steps_per_epoch = sum(self.batches)
        # a sample's id over all slices, for window_ids
        self.first_id = np.cumsum([0, *self.counts])
        for slice_ in self.slices:
            self.make(np.zeros(0, np.int64), slice_, 0)  # refuse it now

    def make(self, index: np.ndarray, slice_: Slice, key: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels [len(index), tokens] of the samples with these indices."""
        raise NotImplementedError

    def plan(self, step: int) -> tuple[int, np.ndarray]:
        epoch, at = divmod(step, self.steps_per_epoch)
        if self.shuffle:
            at = int(permute(np.array([at]), self.steps_per_epoch, key_of(self.name, self.seed, epoch))[0])
        ends = np.cumsum(self.batches)
        number = int(np.searchsorted(ends, at, side="right"))
        nth = epoch * self.batches[number] + at - (int(ends[number]) - self.batches[number])
        indices = nth * self.batch_size + np.arange(self.batch_size)
        return number, indices % self.slices[number].samples

    def of(self, kind: int, ids: np.ndarray) -> Batch:
        slice_ = self.slices[kind]
        key = key_of(self.name, self.seed, self.split, slice_.length, slice_.pairs)
        inputs, labels = self.make(np.maximum(ids, 0).astype(np.int64), slice_, key)
        labels[ids < 0] = IGNORE
        ids = np.where(ids < 0, -1, self.first_id[kind] + ids)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), None, torch.from_numpy(ids))
