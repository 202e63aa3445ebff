"""Where the sequences of a call are: padded, packed as we say it, or packed as other libraries do.

B batch, N sequences (B of them, or packed ones), T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ccq.mixers import Sequences
from ccq.model.cache import CCQCache
from ccq.ops.checks import check_borders, check_cu_seqlens


@dataclass(frozen=True)
class Layout:
    """The tokens of a call: [B, T] as they came, and as the layers see them, packed if there is padding."""

    seqs: Sequences
    shape: tuple[int, int]  # B, T
    lengths: Int[Tensor, " N"]  # of the sequences, padding not counted
    columns: int  # by how many the call makes the longest sequence longer, padding counted
    real: Int[Tensor, " R"] | None  # of the B * T tokens, those that are no padding; None: all
    # where nobody may look at the values: the tokens of each row, real ones first
    order: Int[Tensor, "B T"] | None = None

    def pack(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "1 R D"]:
        if self.order is not None:
            return x.gather(1, self.order[..., None].expand_as(x))
        return x if self.real is None else x.flatten(0, 1)[self.real][None]

    def unpack(self, x: Float[Tensor, "1 R D"]) -> Float[Tensor, "B T D"]:
        if self.order is not None:
            real = torch.arange(self.shape[1], device=x.device) < self.lengths[:, None]
            x = x.masked_fill(~real[..., None], 0)
            return torch.zeros_like(x).scatter(1, self.order[..., None].expand_as(x), x)
        if self.real is None:
            return x
        flat = x.new_zeros(self.shape[0] * self.shape[1], x.shape[2])
        return flat.index_copy(0, self.real, x[0]).view(*self.shape, x.shape[2])


def columns_of(mask: Tensor, batch: int, tokens: int, seen: int) -> Bool[Tensor, "B T"]:
    """The part of an attention mask that is about the tokens of a call."""
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in (tokens, seen + tokens):
        lengths = " or ".join(str(n) for n in sorted({tokens, seen + tokens}))
        raise ValueError(f"attention_mask: expected shape [{batch}, {lengths}], got {list(mask.shape)}")
    return mask[:, mask.shape[1] - tokens :] != 0


def decodes(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: CCQCache) -> bool:
    """Whether a call is a decode step: one real token of each sequence that the cache holds, and no gradient."""
    return (
        bool(cache.states)
        and x.shape[:2] == (cache.batch_size, 1)
        and cu_seqlens is None
        and not torch.is_grad_enabled()
        and (mask is None or bool(columns_of(mask, cache.batch_size, 1, cache.seen).all()))
    )


def arrange(
    x: Float[Tensor, "B T D"], mask: Tensor | None, cu_seqlens: Tensor | None, cache: CCQCache | None
) -> Layout:
    """Where the sequences of a call are. Padding goes once for all layers; a mask of ones is none."""
    batch, tokens = x.shape[:2]
    past, seen = (None, 0) if cache is None else (cache.lengths, cache.seen)
    if mask is not None:
        mask = columns_of(mask, batch, tokens, seen)
        if cache is None and torch.compiler.is_compiling():
            # a graph cannot depend on how much is padding; behind the real tokens it does not reach them
            order = mask.int().argsort(dim=1, descending=True, stable=True)
            return Layout(Sequences(batch, longest=tokens), (batch, tokens), mask.sum(1), tokens, None, order)
        mask = None if bool(mask.all()) else mask

    count, longest, columns, real, borders = batch, tokens, tokens, None, None
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError("attention_mask: expected none beside cu_seqlens: packed sequences have no padding")
        count = check_cu_seqlens(cu_seqlens, x, anywhere=True)
        values = cu_seqlens.tolist()  # looks at them: once a batch, and for all layers
        check_borders(values, tokens)
        longest = columns = max(end - begin for begin, end in pairwise(values))
        borders = cu_seqlens.to(x.device, torch.int64)
    elif mask is not None:
        real = mask.flatten().nonzero()[:, 0]
        borders = F.pad(mask.sum(1).cumsum(0), (1, 0))
        longest = int(mask.sum(1).max())
    if past is not None and past.shape[0] != count:
        raise ValueError(f"past_key_values: expected a cache of {count} sequences, got one of {past.shape[0]}")

    lengths = torch.full((batch,), tokens, device=x.device) if borders is None else borders.diff()
    positions = None
    if borders is not None or past is not None:
        row, index = Sequences(count, borders).locate(tokens if real is None else real.shape[0], x.device)
        positions = index if past is None else past[row] + index
    return Layout(Sequences(count, borders, positions, longest), (batch, tokens), lengths, columns, real)


def borders_of(
    tokens: Tensor | None,
    cache: CCQCache | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Int[Tensor, "B T"] | None = None,
    seq_idx: Int[Tensor, "1 T"] | None = None,
    cu_seq_lens_q: Int[Tensor, " N1"] | None = None,
    cu_seq_lens_k: Int[Tensor, " N1"] | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **unknown: Any,
) -> Tensor | None:
    """cu_seqlens, as given or from what other libraries call them; the longest lengths follow from them.

    Raises where two of them contradict each other, or positions are not those that the model counts itself.
    """
    if unknown:
        raise TypeError(f"forward: there is no argument {next(iter(unknown))!r}")
    found = {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    if tokens is None or all(x is None for x in (position_ids, seq_idx, cu_seq_lens_q, cu_seq_lens_k)):
        return cu_seqlens
    shape, seen = tokens.shape[:2], 0 if cache is None else cache.get_seq_length()
    given = {name: borders.tolist() for name, borders in found.items() if borders is not None}
    if seq_idx is not None:
        if shape[0] != 1 or seq_idx.shape != shape:
            raise ValueError(f"seq_idx: expected shape [1, T], of one packed row, got {list(seq_idx.shape)}")
        given["seq_idx"] = borders_at(seq_idx[0].diff() != 0)
    if position_ids is not None:
        restarts = _restarts(position_ids, shape, seen, mask)
        if restarts is not None:
            given["position_ids"] = borders_at(restarts)
    for name, borders in given.items():
        first = next(iter(given))
        if borders != given[first]:
            raise ValueError(f"{name}: expected the sequences of {first}, {given[first]}, got {borders}")
    borders = next(iter(given.values()), [])
    if cu_seqlens is not None or len(borders) < 3:  # a single one is what a call without borders is
        return cu_seqlens
    return torch.tensor(borders)


def borders_at(changes: Bool[Tensor, " T1"]) -> list[int]:
    """A sequence ends before each change."""
    return [0, *(changes.nonzero()[:, 0] + 1).tolist(), changes.shape[0] + 1]


def _restarts(positions: Tensor, shape: torch.Size, seen: int, mask: Tensor | None) -> Bool[Tensor, " T1"] | None:
    """Where the positions of one packed row begin anew; None where they say no more than batch and mask do.

    Only distances matter, so that a sequence may begin at any position, except behind a cache.
    """
    batch, tokens = shape
    positions = positions[None] if positions.ndim == 1 else positions
    if positions.ndim != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != tokens:
        raise ValueError(f"position_ids: expected shape {list(shape)}, got {list(positions.shape)}")
    real = torch.ones(batch, seen + tokens, dtype=torch.bool, device=positions.device) if mask is None else mask != 0
    offset = positions - (real.cumsum(1) - 1)[:, -tokens:]
    real = real[:, -tokens:]
    first = 0 if seen else offset.gather(1, real.int().argmax(1, keepdim=True))
    if bool(((offset == first) | ~real).all()):
        return None
    restarts = positions[0, 1:] == 0
    follows = (positions[0].diff() == 1) | restarts
    if batch != 1 or seen or not bool(real.all()) or not bool(follows.all()):
        raise ValueError(
            "position_ids: expected 0, 1, 2, ... in each sequence, restarting only in a batch of 1 without padding or "
            "cache: the model counts positions itself and supports no others"
        )
    return restarts
