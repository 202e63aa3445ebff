"""Sequences cut into chunks, for what goes along them in plain PyTorch.

N sequences, M chunks of C tokens in all. The chunks stand in the order in which a scan visits them: the first chunks of
all sequences, the sequences with most chunks in front, then their second chunks, and so on. So those still running are
always the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import check_borders


class Layout(NamedTuple):
    size: int  # C
    counts: list[int]  # how many sequences have a first chunk, a second one, ...
    slots: Tensor | None  # [T] where each token lies in the grid of M chunks of C; None where B dense sequences do
    order: Tensor | None  # [N] the sequences, those with most chunks first; None where they stay as they are
    place: Tensor | None  # [N] the inverse of it


def make_layout(batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device, size: int) -> Layout:
    """Cut `batch` sequences of `length` tokens, or the packed ones, into chunks of `size`, a power of two.

    Of fewer tokens where sequences are short, or most packed ones are: a chunk that is not full costs as much as one
    that is.
    """
    if cu_seqlens is None:
        size = min(size, 1 << (length - 1).bit_length())
        return Layout(size, [batch] * -(-length // size), None, None, None)
    borders = cu_seqlens.tolist()
    check_borders(borders, length)  # the values are at hand
    begins = torch.tensor(borders)
    lengths = begins.diff()
    size = min(size, max(4, 1 << (length // len(lengths) - 1).bit_length()))
    chunks = (lengths + size - 1) // size
    order = chunks.argsort(descending=True, stable=True)
    place = order.argsort()
    counts = len(chunks) - torch.bincount(chunks).cumsum(0)[:-1]  # with more chunks than 0, 1, ...
    before = counts.cumsum(0) - counts  # chunks of lower rank
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(length) - begins[owner]
    slots = (before[position // size] + place[owner]) * size + position % size
    return Layout(size, counts.tolist(), slots.to(device), order.to(device), place.to(device))


def spans(g: Tensor) -> Tensor:
    """What the log-decays g [..., C] of the tokens behind j up to i leave of token j, for j <= i, else 0: [..., C, C].

    Added up for each pair, not as the difference of two sums: behind a decay of -1e6 that would have no digits.
    """
    behind = g[..., None, :].expand(*g.shape, g.shape[-1])
    return behind.triu(1).cumsum(-1).exp().triu().mT


def to_chunks(x: Tensor, layout: Layout) -> Tensor:
    """[B, T, H, ...] -> [M, H, C, ...], zero where a chunk is not full: such a token writes and forgets nothing."""
    size = layout.size
    if layout.slots is None:
        if gap := -x.shape[1] % size:
            x = torch.cat([x, x.new_zeros(x.shape[0], gap, *x.shape[2:])], 1)
        x = x.unflatten(1, (-1, size)).transpose(0, 1).flatten(0, 1)
    else:
        grid = x.new_zeros(sum(layout.counts) * size, *x.shape[2:])
        x = grid.index_copy(0, layout.slots, x[0]).unflatten(0, (-1, size))
    return x.transpose(1, 2)


def from_chunks(x: Tensor, layout: Layout, batch: int, length: int) -> Tensor:
    """[M, H, C, ...] -> [B, T, H, ...]"""
    x = x.transpose(1, 2)
    if layout.slots is None:
        return x.unflatten(0, (-1, batch)).transpose(0, 1).flatten(1, 2)[:, :length]
    return x.flatten(0, 1).index_select(0, layout.slots)[None]


def in_order(x: Tensor, index: Tensor | None) -> Tensor:
    """The sequences of x [N, ...] as `order` or `place` says."""
    return x if index is None else x.index_select(0, index)


def per_chunk(x: Tensor, layout: Layout) -> Tensor:
    """[N, ...] -> [M, ...]: of the sequence of each chunk."""
    x = in_order(x, layout.order)
    return torch.cat([x[:n] for n in layout.counts])


def scan(
    layout: Layout, adds: Tensor, start: Tensor, reverse: bool = False, decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sums of `adds` [M, ...] over the chunks before each one (after it, if `reverse`), begun at `start` [N, ...].

    Returns them and, for each sequence, the sum over all its chunks. `decay` [M, Hk]: a chunk first multiplies by it
    what comes from before (after) it.
    """
    start, sums, ended = in_order(start, layout.order), [], []
    running = start[:0] if reverse else start
    parts: Sequence[Tensor | None] = [None] * len(layout.counts)
    if decay is not None:
        parts = decay.view(*decay.shape, *[1] * (adds.ndim - decay.ndim)).split(layout.counts)
    ranks = list(zip(adds.split(layout.counts), parts, strict=True))
    for here, left in reversed(ranks) if reverse else ranks:
        n = here.shape[0]
        if n > running.shape[0]:  # going back, some sequences begin here
            running = torch.cat([running, start[running.shape[0] : n]])
        elif n < running.shape[0]:  # going on, some have ended
            ended.append(running[n:])
            running = running[:n]
        sums.append(running)
        running = (running if left is None else left * running) + here
    total = torch.cat([running, start[running.shape[0] :] if reverse else running[:0], *reversed(ended)])
    return torch.cat(sums[::-1] if reverse else sums), in_order(total, layout.place)
