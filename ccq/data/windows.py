"""The training order: which tokens a step trains on, as a pure function of (seed, step).

The stream of N tokens is cut into windows of L: window w has the inputs [w L, w L + L) and the targets one further on.
Each token but the first of the stream is a target of exactly one window. The last window may be short: it is filled up
with end-of-text inputs whose label is -100, so its tokens are scored and the filling is not.

Epoch e goes through the windows in the order of a permutation chosen by (seed, e); the epochs follow each other without
a gap, so what is left of one that does not fill a global batch shares it with the first windows of the next.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ccq.data.batches import IGNORE, Batch, Source
from ccq.data.counter import key_of, permute
from ccq.data.shards import ShardError, TokenShards


class TokenWindows(Source):
    """Windows of `length` tokens out of prepared shards, `batch_size` of them a step over all ranks.

    reset   documents do not see each other: `cu_seqlens` has a border before the end-of-text that ends a document,
            which so begins the next one: the sequence of a document is its tokens after one end-of-text, and its
            targets are its tokens and the end-of-text that ends it. No token goes unscored.
    """

    def __init__(
        self, shards: TokenShards | str | Path, length: int, batch_size: int, seed: int = 0, reset: bool = False
    ) -> None:
        self.shards = shards if isinstance(shards, TokenShards) else TokenShards(shards)
        for name, value in (("length", length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.shards.tokens < 2:
            raise ShardError(f"{self.shards.folder} holds {self.shards.tokens} tokens: at least 2 are needed")
        self.length, self.batch_size, self.seed, self.reset = length, batch_size, seed, reset
        self.vocab_size = self.shards.vocab_size
        self.windows = -(-(self.shards.tokens - 1) // length)
        self.counts = [self.windows]

    def plan(self, step: int) -> tuple[int, np.ndarray]:
        at = step * self.batch_size + np.arange(self.batch_size)
        ids = np.empty(self.batch_size, np.int64)
        for epoch in np.unique(at // self.windows):
            here = at // self.windows == epoch
            ids[here] = permute(at[here] % self.windows, self.windows, key_of("windows", self.seed, epoch))
        return 0, ids

    def of(self, kind: int, ids: np.ndarray) -> Batch:
        L = self.length
        inputs = np.full((len(ids), L), self.shards.eos_id, np.int64)
        labels = np.full((len(ids), L), IGNORE, np.int64)
        borders = [np.zeros(1, np.int64)]
        for row, window in enumerate(ids):
            if window >= 0:
                start = int(window) * L
                tokens, ends = self.shards.read(start, min(start + L + 1, self.shards.tokens))
                inputs[row, : len(tokens) - 1], labels[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
                cuts = ends - 1
                borders.append(row * L + cuts[(cuts > 0) & (cuts < len(tokens) - 1)])
            borders.append(np.array([(row + 1) * L]))
        shape = (1, -1) if self.reset else (len(ids), L)
        return Batch(
            torch.from_numpy(inputs.reshape(shape)),
            torch.from_numpy(labels.reshape(shape)),
            torch.from_numpy(np.concatenate(borders)) if self.reset else None,
            torch.from_numpy(np.array(ids, np.int64)),
        )
