"""In-context recall of MAD (Poli et al., 2024), plain, noisy and fuzzy, with several queries a sample.

A sample is a row of keys, each followed by its value, which stays the same within the sample; the last pair is one that
was there before. Trained on is every next token. Asked for, in validation and test, are the values of keys that were
there before, and nothing else.

    tokens       k1 v1 k2 v2 k1 v1 .  .  k2 v2
    asked for                   v1          v2

plain  (motif 1)         one token a key and a value, L - 1 inputs
noisy  (motif 1, noise)  a pair is two noise tokens (.) with that probability, from NOISE tokens of their own
fuzzy  (motif 3)         1 to 3 different tokens a key and a value; asked for are keys of 3 only; filled up to L inputs
                         from the left

Two things are not as in its code (athms/mad-lab), where a sample can be one without an answer: there the pair that is
spared from noise can be the last one, which is none anyway, and the place of the pair that is asked for at the end can
lie behind the last place that is filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ccq.data.batches import IGNORE
from ccq.data.counter import bits, key_of, uniform
from ccq.data.recall import Recall, Slice

NOISE = 16  # tokens that noise is made of, where there is any
SAMPLES, TEST_SAMPLES = 12_800, 1_280  # of all its baselines


def vocabularies(vocab_size: int, motif: int, noise: float) -> tuple[range, range, range]:
    """Keys, values and noise; fuzzy samples are filled up with the last token of all."""
    plain = vocab_size - (NOISE if noise else 0) - (motif > 1)
    return range(plain // 2), range(plain // 2, plain), range(plain, plain + (NOISE if noise else 0))


def pair_samples(
    index: np.ndarray, length: int, *, key: int, vocab_size: int, noise: float, asked_only: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Plain and noisy samples: inputs and labels [len(index), length - 1]."""
    keys, values, noises = vocabularies(vocab_size, 1, noise)
    count, pairs = len(index), length // 2 - 1  # before the last
    rows = np.arange(count)[:, None]

    def draw(name: str, size: int, low: range) -> np.ndarray:
        return low.start + (bits(key_of(name, key), index, size) % np.uint64(len(low))).astype(np.int64)

    value_of = draw("values", len(keys), values)
    chosen = draw("keys", pairs, keys)
    noisy = uniform(key_of("noisy", key), index, pairs) < noise
    noisy[rows, draw("spared", 1, range(pairs))] = False
    there = np.zeros((count, len(keys)), bool)
    before = np.zeros((count, pairs + 1), bool)  # whether the key of a pair was there before
    for at in range(pairs):
        mine = (rows[:, 0], chosen[:, at])
        before[:, at] = there[mine] & ~noisy[:, at]
        there[mine] |= ~noisy[:, at]
    before[:, -1] = True
    probe = np.where(there, uniform(key_of("probe", key), index, len(keys)), -1).argmax(1)
    chosen = np.concatenate([chosen, probe[:, None]], axis=1)
    tokens = np.stack([chosen, value_of[rows, chosen]], axis=2)
    if noise:
        tokens[:, :-1][noisy] = draw("noise", 2 * pairs, noises).reshape(count, pairs, 2)[noisy]
    asked = np.stack([np.zeros_like(before), before], axis=2)
    tokens, asked = tokens.reshape(count, length), asked.reshape(count, length)
    return tokens[:, :-1].copy(), np.where(asked | (not asked_only), tokens, IGNORE)[:, 1:]


def fuzzy_samples(
    index: np.ndarray, length: int, motif: int, *, key: int, vocab_size: int, asked_only: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Fuzzy samples: inputs and labels [len(index), length]."""
    keys, values, _ = vocabularies(vocab_size, motif, 0.0)
    tokens = np.full((len(index), length + 1), vocab_size - 1, np.int64)
    labels = np.full((len(index), length + 1), IGNORE, np.int64)
    draws = bits(key_of("motifs", key), index, 2 * length + 5).tolist()  # four a pair of two tokens at least
    for row, numbers in enumerate(draws):
        made, asked = fuzzy_sample(iter(numbers), length, motif, keys, values, asked_only)
        tokens[row, length + 1 - len(made) :], labels[row, length + 1 - len(made) :] = made, asked
    return tokens[:, :-1].copy(), (labels if asked_only else tokens)[:, 1:].copy()


def fuzzy_sample(
    draws: Iterator[int], length: int, motif: int, keys: range, values: range, full: bool
) -> tuple[list, list]:
    """The tokens of one sample, and the labels where it is asked; with `full` all keys have `motif` tokens."""

    def word(vocabulary: range, size: int) -> tuple[int, ...]:
        """`size` different tokens, each such row of them equally likely."""
        left, number, found = list(vocabulary), next(draws), []
        for _ in range(size):
            number, at = divmod(number, len(left))
            found.append(left.pop(at))
        return tuple(found)

    def pair() -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes = [1 + next(draws) % motif for _ in range(2)]
        return word(keys, motif if full else sizes[0]), word(values, sizes[1])

    probe = pair()
    value_of = dict([probe])
    size = len(probe[0]) + len(probe[1])
    end = length - size - 2 * motif  # no pair begins behind it
    place = next(draws) % (end - 2 * motif + 1)  # so that some pair begins at or behind it
    tokens: list[int] = []
    labels: list[int] = []
    seen: set[tuple[int, ...]] = set()
    while len(tokens) < end:
        new, value = probe if len(tokens) >= place and probe[0] not in seen else pair()
        value = value_of.setdefault(new, value)
        tokens += [*new, *value]
        labels += [IGNORE] * len(new) + [x if new in seen else IGNORE for x in value]
        seen.add(new)
    return [*tokens, *probe[0], *probe[1]], [*labels, *[IGNORE] * len(probe[0]), *probe[1]]


@dataclass(eq=False)
class MAD(Recall):
    """The tasks as a source of batches; a slice is (length, motif, samples)."""

    batch_size: int = 128
    slices: tuple[Slice, ...] = (Slice(128, 1, SAMPLES),)
    _: KW_ONLY
    vocab_size: int = 32
    noise: float = 0.2
    name, second = "mad", "motif"

    def make(self, index: np.ndarray, slice_: Slice, key: int) -> tuple[np.ndarray, np.ndarray]:
        length, motif = slice_.length, slice_.pairs
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise must lie in [0, 1), got {self.noise}")
        if motif > 1 and self.noise:
            raise ValueError(f"noise must be 0 with motifs of {motif} tokens, got {self.noise}")
        if motif == 1 and (length % 2 or length < 4):
            raise ValueError(f"length must be even and at least 4, got {length}")
        if motif > 1 and length < 6 * motif:
            raise ValueError(f"length must be at least 6 * motif = {6 * motif}, got {length}")
        if len(vocabularies(self.vocab_size, motif, self.noise)[0]) < motif:
            raise ValueError(f"vocab_size={self.vocab_size} leaves no keys of {motif} tokens")
        how: dict[str, Any] = {"key": key, "vocab_size": self.vocab_size, "asked_only": self.split != "train"}
        if motif == 1:
            return pair_samples(index, length, noise=self.noise, **how)
        return fuzzy_samples(index, length, motif, **how)
