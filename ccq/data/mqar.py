"""Multi-query associative recall, the synthetic task of zoology (Arora, Eyuboglu et al.), made on the fly.

A sample holds P pairs: k_1 v_1 ... k_P v_P, then each key once more, at places that follow a power law; there, and only
there, the label is the key's value.

    input   k1 v1 k2 v2 .  .  k2 .  .  .  k1 .
    label   -  -  -  -  -  -  v2 -  -  -  v1 -

Keys are drawn from 1 .. V/2 - 1 and values from V/2 .. V - 1, each without replacement. Pair i is asked for at
2 P + 2 g_i, where the gaps g are drawn from range((L - 2 P) / 2) without replacement, in proportion to
(g + 1)^(power_a - 1). What is left (.) is random over the whole vocabulary.

Sample `index` of a slice is a function of (seed, split, slice, index).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ccq.data.batches import IGNORE, Batch, part
from ccq.data.counter import bits, key_of, permute, uniform


class Slice(NamedTuple):
    """Samples of one kind: tokens, key-value pairs, how many."""

    length: int
    pairs: int
    samples: int


# zoology's settings
TRAIN = (
    Slice(64, 4, 100_000),
    Slice(128, 8, 20_000),
    Slice(256, 16, 20_000),
    Slice(256, 32, 20_000),
    Slice(256, 64, 20_000),
)
TEST = (
    Slice(64, 4, 1000),
    Slice(64, 8, 1000),
    Slice(64, 16, 1000),
    Slice(128, 32, 1000),
    Slice(256, 64, 1000),
    Slice(512, 128, 1000),
    Slice(1024, 256, 1000),
)
SPLITS = ("train", "valid", "test")  # disjoint streams of samples: rates are chosen on "valid", reported on "test"


def distinct(key: int, index: np.ndarray, size: int, count: int) -> np.ndarray:
    """[*index.shape, count]: for each index the first `count` of a shuffled range(size) (Fisher-Yates)."""
    draws = bits(key, index, count)
    rows = np.arange(len(index))
    deck = np.tile(np.arange(size, dtype=np.int32), (len(index), 1))
    for at in range(count):
        other = at + (draws[:, at] % np.uint64(size - at)).astype(np.int64)
        taken = deck[rows, other]
        deck[rows, other] = deck[:, at]
        deck[:, at] = taken
    return deck[:, :count].astype(np.int64)


def make_samples(
    index: np.ndarray,
    length: int,
    pairs: int,
    *,
    key: int,
    vocab_size: int = 8192,
    power_a: float = 0.01,
    random_non_queries: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels [len(index), length] of the samples with these indices; see the top of the file."""
    if length % 2 or 4 * pairs > length or pairs < 1:
        raise ValueError(
            f"length must be even and at least 4 * pairs, pairs at least 1; got length={length}, pairs={pairs}"
        )
    if vocab_size <= length:
        raise ValueError(f"vocab_size must exceed length={length}, got {vocab_size}")
    index = np.asarray(index, dtype=np.int64)
    half, context = vocab_size // 2, 2 * pairs
    keys = 1 + distinct(key_of("keys", key), index, half - 1, pairs)
    values = half + distinct(key_of("values", key), index, vocab_size - half, pairs)

    # drawing without replacement in proportion to p is taking the smallest of E / p, with E exponential, in their order
    space = (length - context) // 2
    p = np.arange(1, space + 1) ** (power_a - 1.0)
    arrival = -np.log(uniform(key_of("gaps", key), index, space)) / p
    gaps = np.argsort(arrival, axis=1, kind="stable")[:, :pairs]

    inputs = np.zeros((len(index), length), np.int64)
    labels = np.full((len(index), length), IGNORE, np.int64)
    inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
    np.put_along_axis(inputs, context + 2 * gaps, keys, axis=1)
    np.put_along_axis(labels, context + 2 * gaps, values, axis=1)
    if random_non_queries:
        noise = (bits(key_of("noise", key), index, length) % np.uint64(vocab_size)).astype(np.int64)
        inputs = np.where(inputs == 0, noise, inputs)
    return inputs, labels


class MQAR:
    """The task as a source of batches; a batch comes from one slice, so all its samples have one length.

    An epoch is samples / batch_size batches of each slice, rounded; batches go on where the last epoch stopped, so that
    over time each sample is seen equally often. `shuffle` mixes the slices, another way each epoch; without it they
    follow each other from the first to the last, as in zoology, and a run that stops within an epoch has seen less of
    the last ones.
    """

    def __init__(
        self,
        batch_size: int = 256,
        slices: Sequence[tuple[int, int, int]] = TRAIN,
        *,
        seed: int = 0,
        split: str = "train",
        vocab_size: int = 8192,
        power_a: float = 0.01,
        random_non_queries: bool = True,
        shuffle: bool = True,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.slices = tuple(Slice(*slice_) for slice_ in slices)
        self.batch_size, self.seed, self.split, self.vocab_size = batch_size, seed, split, vocab_size
        self.power_a, self.random_non_queries, self.shuffle = power_a, random_non_queries, shuffle
        self.length = max(s.length for s in self.slices)
        self.batches = [max(1, round(s.samples / batch_size)) for s in self.slices]  # of each slice in an epoch
        self.steps_per_epoch = sum(self.batches)
        # a sample's id over all slices, for window_ids
        self.first_id = np.cumsum([0] + [s.samples for s in self.slices])
        for slice_ in self.slices:
            make_samples(np.zeros(0), slice_.length, slice_.pairs, key=0, vocab_size=vocab_size)  # refuse it now

    def plan(self, step: int) -> tuple[int, np.ndarray]:
        """(number of the slice, indices [batch_size] of its samples) at a step."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        epoch, at = divmod(step, self.steps_per_epoch)
        if self.shuffle:
            at = int(permute(np.array([at]), self.steps_per_epoch, key_of("mqar", self.seed, epoch))[0])
        ends = np.cumsum(self.batches)
        number = int(np.searchsorted(ends, at, side="right"))
        nth = epoch * self.batches[number] + at - (int(ends[number]) - self.batches[number])
        indices = nth * self.batch_size + np.arange(self.batch_size)
        return number, indices % self.slices[number].samples

    def epoch(self, step: int) -> float:
        """Epochs seen before this step."""
        return step / self.steps_per_epoch

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
        inputs, labels = make_samples(
            np.maximum(indices, 0),
            slice_.length,
            slice_.pairs,
            key=key_of("mqar", self.seed, self.split, slice_.length, slice_.pairs),
            vocab_size=self.vocab_size,
            power_a=self.power_a,
            random_non_queries=self.random_non_queries,
        )
        labels[indices < 0] = IGNORE
        ids = np.where(indices < 0, -1, self.first_id[number] + indices)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), None, torch.from_numpy(ids))
