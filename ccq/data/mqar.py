"""Multi-query associative recall, the synthetic task of zoology (Arora, Eyuboglu et al.), made on the fly.

A sample holds P pairs: k_1 v_1 ... k_P v_P, then each key once more, at places that follow a power law; there, and only
there, the label is the key's value.

    input   k1 v1 k2 v2 .  .  k2 .  .  .  k1 .
    label   -  -  -  -  -  -  v2 -  -  -  v1 -

Keys are drawn from 1 .. V/2 - 1 and values from V/2 .. V - 1, each without replacement. Pair i is asked for at
2 P + 2 g_i, where the gaps g are drawn from range((L - 2 P) / 2) without replacement, in proportion to
(g + 1)^(POWER_A - 1). What is left (.) is random over the whole vocabulary.

With `updates`, zoology's forgetting variant, so many of the keys stand once more behind the pairs, each with another
value: that one is asked for.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np

from ccq.data.batches import IGNORE
from ccq.data.counter import bits, key_of, uniform
from ccq.data.recall import Recall, Slice


def _slices(samples: int, *kinds: tuple[int, int]) -> tuple[Slice, ...]:
    return tuple(Slice(*kind, samples) for kind in kinds)


# zoology's settings
POWER_A = 0.01
TRAIN = (Slice(64, 4, 100_000), *_slices(20_000, (128, 8), (256, 16), (256, 32), (256, 64)))
TEST = _slices(1000, (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
OVERWRITTEN_TEST = _slices(1000, (64, 4), (64, 9), (128, 16), (256, 36), (512, 64), (1024, 144), (2048, 256))


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
    index: np.ndarray, length: int, pairs: int, *, key: int, vocab_size: int = 8192, updates: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels [len(index), length] of the samples with these indices; see the top of the file."""
    if length % 2 or 4 * pairs + 2 * updates > length or pairs < 1:
        raise ValueError(
            f"length must be even and 4 * pairs + 2 * updates or more, got {length=}, {pairs=}, {updates=}"
        )
    if not 0 <= updates <= pairs:
        raise ValueError(f"updates must lie between 0 and pairs={pairs}, got {updates}")
    if vocab_size <= length:
        raise ValueError(f"vocab_size must exceed length={length}, got {vocab_size}")
    index = np.asarray(index, dtype=np.int64)
    half, context = vocab_size // 2, 2 * (pairs + updates)
    keys = 1 + distinct(key_of("keys", key), index, half - 1, pairs)
    values = half + distinct(key_of("values", key), index, vocab_size - half, pairs)
    stored, last = [keys, values], values.copy()
    if updates:
        which = distinct(key_of("updated", key), index, pairs, updates)
        further = bits(key_of("further", key), index, updates) % np.uint64(vocab_size - half - 1)  # never its own again
        old = np.take_along_axis(values, which, axis=1)
        new = half + (old - half + 1 + further.astype(np.int64)) % (vocab_size - half)
        np.put_along_axis(last, which, new, axis=1)
        stored = [np.concatenate(x, axis=1) for x in ((keys, np.take_along_axis(keys, which, 1)), (values, new))]

    # drawing without replacement in proportion to p is taking the smallest of E / p, with E exponential, in their order
    space = (length - context) // 2
    p = np.arange(1, space + 1) ** (POWER_A - 1.0)
    arrival = -np.log(uniform(key_of("gaps", key), index, space)) / p
    gaps = np.argsort(arrival, axis=1, kind="stable")[:, :pairs]

    inputs = np.zeros((len(index), length), np.int64)
    labels = np.full((len(index), length), IGNORE, np.int64)
    inputs[:, 0:context:2], inputs[:, 1:context:2] = stored
    np.put_along_axis(inputs, context + 2 * gaps, keys, axis=1)
    np.put_along_axis(labels, context + 2 * gaps, last, axis=1)
    noise = (bits(key_of("noise", key), index, length) % np.uint64(vocab_size)).astype(np.int64)
    return np.where(inputs == 0, noise, inputs), labels


@dataclass(eq=False)
class MQAR(Recall):
    """The task as a source of batches; zoology has `shuffle=False`."""

    batch_size: int = 256
    slices: tuple[Slice, ...] = TRAIN
    _: KW_ONLY
    vocab_size: int = 8192
    updates: int = 0
    name, second = "mqar", "pairs"

    def make(self, index: np.ndarray, slice_: Slice, key: int) -> tuple[np.ndarray, np.ndarray]:
        how = {"key": key, "vocab_size": self.vocab_size, "updates": self.updates}
        return make_samples(index, slice_.length, slice_.pairs, **how)
