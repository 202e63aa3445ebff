"""The recurrence in plain PyTorch, on any device: chunks of C tokens, G = Hv / H; the rest as in __init__.py.

With G_t the sum of g from the chunk's first token to t and S the state before the chunk:

    o_t = scale * [ exp(G_t) q_t S + sum_{j<=t} (q_t . k_j exp(G_t - G_j)) u_j ]
    S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T

where u_j = v_j for an additive write. For the delta rule u solves a triangular system, the WY form of a product of
Householder-like factors:

    u_t + beta_t sum_{j<t} (k_t . k_j exp(G_t - G_j)) u_j = beta_t (v_t - exp(G_t) S^T k_t)

Every exponent is a sum of log-decays over the tokens it spans, added up directly and never as the difference of two
longer sums: it is at most 0, so that nothing overflows, and it keeps its digits beside a neighbour of -50.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ccq.ops.checks import check_borders
from ccq.ops.precision import exact_matmul, no_autocast, stats_dtype

CHUNK = 64  # C, a power of two


class Layout(NamedTuple):
    """How tokens are put into chunks.

    The chunks stand in the order in which a scan visits them: the first chunks of all sequences, the sequences with
    most chunks in front, then their second chunks, and so on. So those still running are always the first ones.
    """

    size: int  # C
    counts: list[int]  # how many sequences have a first chunk, a second one, ...
    slots: Tensor | None  # [T] where each token lies in the grid of M chunks of C; None where B dense sequences do
    order: Tensor | None  # [N] the sequences, those with most chunks first; None where they stay as they are
    place: Tensor | None  # [N] the inverse of it


def make_layout(batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Layout:
    if cu_seqlens is None:
        size = min(CHUNK, 1 << (length - 1).bit_length())
        return Layout(size, [batch] * -(-length // size), None, None, None)
    borders = cu_seqlens.tolist()
    check_borders(borders, length)
    begins = torch.tensor(borders)
    lengths = begins.diff()
    size = min(CHUNK, 1 << (int(lengths.max()) - 1).bit_length())
    chunks = (lengths + size - 1) // size
    order = chunks.argsort(descending=True, stable=True)
    place = order.argsort()
    counts = torch.tensor([int((chunks > r).sum()) for r in range(int(chunks.max()))])
    before = counts.cumsum(0) - counts  # chunks of lower rank
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(length) - begins[owner]
    slots = (before[position // size] + place[owner]) * size + position % size
    return Layout(size, counts.tolist(), slots.to(device), order.to(device), place.to(device))


def to_chunks(x: Tensor, layout: Layout) -> Tensor:
    """[B, T, H, ...] -> [M, H, C, ...], zero where a chunk is not full: such a token writes and forgets nothing."""
    size = layout.size
    if layout.slots is None:
        gap = -x.shape[1] % size
        if gap:
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


def after(g: Tensor) -> Tensor:
    """Sum of g over the tokens behind each one, [..., C, *]."""
    shifted = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return shifted.flip(-2).cumsum(-2).flip(-2)


def spans(g: Tensor) -> Tensor:
    """exp of the sum of g over the tokens behind j up to i, for j <= i, else 0: [..., C, 1] -> [..., C, C]."""
    size = g.shape[-2]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    behind = g.expand(*g.shape[:-1], size).masked_fill(~lower.tril(-1), 0)
    return behind.cumsum(-2).masked_fill(~lower, -torch.inf).exp()


def channel_scores(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_c q_ic k_jc exp(sum of g_c behind j up to i) for j <= i, else 0: [..., C, K] -> [..., C, C].

    Every pair of tokens is parted once by the border between the halves of a block of 2, 4, ..., or C tokens. The decay
    from j to i is that from j to the border, which goes to k, times that from the border to i, which goes to q: the
    later half's scores with the earlier one are then one product.

    Returns also the sums of g up to each token and behind it, which come with the blocks.
    """
    scores = (q * k).sum(-1)[..., None, None]  # of blocks, [..., C, 1, 1]: each token with itself
    up_to = g.unsqueeze(-2)  # in a block, [..., C, 1, K]
    behind = torch.zeros_like(up_to)
    half = 1
    while half < q.shape[-2]:
        (first, second), (up_to_1, up_to_2), (behind_1, behind_2) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (scores, up_to, behind)
        )
        (k_1, _), (_, q_2) = (x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (k, q))
        cross = (q_2 * up_to_2.exp()) @ (k_1 * behind_1.exp()).mT
        scores = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)
        up_to, behind = (
            torch.cat([up_to_1, up_to_2 + up_to_1[..., -1:, :]], -2),
            torch.cat([behind_1 + up_to_2[..., -1:, :], behind_2], -2),
        )
        half *= 2
    return scores.squeeze(-3), up_to.squeeze(-3), behind.squeeze(-3)


def run(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    batch, length, heads, key_size = q.shape
    high = stats_dtype(q.dtype)
    layout = make_layout(batch, length, cu_seqlens, q.device)
    state = start(initial_state, batch if cu_seqlens is None else cu_seqlens.shape[0] - 1, q, v)
    if layout.order is not None:
        state = state.index_select(0, layout.order)
    state = state.unflatten(1, (heads, -1))  # [N, H, G, K, V]

    def grid(x: Tensor) -> Tensor:
        """[B, T, H or Hv, *] -> [M, H, 1 or G, C, *]"""
        return to_chunks(x.to(high), layout).unflatten(1, (heads, -1)).contiguous()

    with exact_matmul(q) if q.is_cuda else no_autocast(q):
        q, k, u = grid(q) * scale, grid(k), grid(v)
        read, write, decays = q, k, None  # what meets the state before the chunk, and what adds to it
        if g is None:
            scores = (q @ k.mT).tril()
        elif g.ndim == 4:
            scores, up_to, behind = channel_scores(q, k, grid(g))
        else:
            g = grid(g[..., None])
            pairs, up_to, behind = spans(g), g.cumsum(-2), after(g)
            scores = (q @ k.mT) * pairs
        if g is not None:
            read, write = q * up_to.exp(), k * behind.exp()
            decays = up_to[..., -1, :].exp()[..., None].split(layout.counts)  # [n, H, G, 1 or K, 1]
        seen = None
        if beta is not None:
            strength = grid(beta[..., None])
            # u = u_0 - w S, linear in the state before the chunk: both are solved for at once
            known = torch.cat([strength * u, strength * (k if g is None else k * up_to.exp())], -1)
            system = strength * (k @ k.mT if g is None else k @ k.mT * pairs)
            u, w = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split(
                [v.shape[-1], key_size], -1
            )
            seen = w.split(layout.counts)

        outputs, finished = [], []
        parts = zip(*(x.split(layout.counts) for x in (read, write, u, scores)), strict=True)
        for i, (read_i, write_i, u_i, scores_i) in enumerate(parts):
            running = layout.counts[i]
            if running < state.shape[0]:
                state, done = state.split([running, state.shape[0] - running])
                finished.append(done)
            if seen is not None:
                u_i = u_i - seen[i] @ state
            outputs.append(read_i @ state + scores_i @ u_i)
            if decays is not None:
                state = state * decays[i]
            state = state + write_i.mT @ u_i
        o = from_chunks(torch.cat(outputs).flatten(1, 2), layout, batch, length).to(v.dtype)
        if not output_final_state:
            return o, None
        state = torch.cat([state, *reversed(finished)]).flatten(1, 2)
        return o, state if layout.place is None else state.index_select(0, layout.place)


def start(initial_state: Tensor | None, sequences: int, q: Tensor, v: Tensor) -> Tensor:
    """A state to begin with, not the caller's own tensor."""
    if initial_state is not None:
        return initial_state.clone()
    return q.new_zeros(sequences, v.shape[2], q.shape[3], v.shape[3], dtype=stats_dtype(q.dtype))
