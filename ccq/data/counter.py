"""Randomness without a state: every number is a function of a key and a position, on every machine and for good.

numpy's and torch's generators may change between versions and have to be wound forward; these do not. So a batch can be
a pure function of (seed, step).
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: object) -> int:
    """A 64-bit key from anything that prints: `key_of("windows", seed, epoch)`."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64: a bijection in which each bit in moves half of the bits out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bits(key: int, index: np.ndarray, count: int) -> np.ndarray:
    """uint64 [*index.shape, count]: for each index the first outputs of a SplitMix64 started from (key, index)."""
    start = mix(mix(np.asarray(index, dtype=np.uint64) + np.uint64(key)) ^ np.uint64(key_of("start", key)))
    return mix(start[..., None] + GAMMA * np.arange(1, count + 1, dtype=np.uint64))


def uniform(key: int, index: np.ndarray, count: int) -> np.ndarray:
    """float64 [*index.shape, count] in the open interval (0, 1)."""
    return ((bits(key, index, count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a permutation of range(size), chosen by `key`, sends each index; int64, no memory beyond the indices.

    A Feistel network permutes the next power of four; what falls outside the range is sent through again until it
    falls inside, which is a permutation of the range (cycle walking, at most 4 times on average from 16 indices on).
    """
    index = np.asarray(index, dtype=np.int64)
    if index.size and (index.min() < 0 or index.max() >= size):
        raise IndexError(f"permute: indices must lie in [0, {size}), got {index.min()} to {index.max()}")
    # at least 3 bits a half: of the permutations of 16 a network reaches too few
    half = np.uint64(max(3, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = bits(key, np.zeros(1), ROUNDS)[0]
    result = index.astype(np.uint64).reshape(-1)
    outside = np.arange(result.size)
    while outside.size:
        x = result[outside]
        left, right = x >> half, x & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right + round_key) & mask)
        result[outside] = (left << half) | right
        outside = outside[result[outside] >= size]
    return result.astype(np.int64).reshape(index.shape)
