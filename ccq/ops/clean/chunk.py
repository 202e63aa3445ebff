"""The operator chunkwise, in plain PyTorch on any device: the paper's chunkwise algorithm and its derived backward.

M chunks of C tokens, Hk key heads, G query heads to a key head, K key size. Within a chunk the keys meet the queries in
one masked product; between chunks a running sum of k k^T (forward) and of its adjoint (backward) is carried:

    y_t = [ sum_{chunk, j<=t} k_j (k_j . q_t) + C_before q_t ] / t  -  s_t (s_t . q_t) / t^2

    backward, with w_t = Sigma_t g_t and c_t = -lam_t / t:
    dq_t = g_t - lam_t w_t,    dlam_t = -q_t . w_t        (g . Sigma q = q . Sigma g: one read gives both)
    dk_j = sum_{chunk, t>=j} c_t [ (k_j.q_t) g_t + (k_j.g_t) q_t ]  +  D_after k_j  +  e_j
    D_after = dC_T + dC_T^T + sum_{later chunks} c_t [ q_t g_t^T + g_t q_t^T ]
    e_j     = ds_T - sum_{t>=j} c_t [ m_t(q) g_t + m_t(g) q_t ],    m_t(x) = s_t . x_t / t

The gradient of y itself is that of q_clean with lam = -1, without the query: dq_t = Sigma_t dy_t.

Nothing of size T x T or T x K x K exists: time and memory are linear in T. The backward recomputes what it needs
from q, k_bar, 1/|k|, lam and m_t(q), which is as small as lam; no state is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccq.ops.chunks import Layout, from_chunks, in_order, make_layout, per_chunk, to_chunks
from ccq.ops.clean.reference import prepare
from ccq.ops.precision import exact_matmul, inv_norm, stats_dtype, unit_backward

CHUNK = 128  # C; 32 to 256 measured, see benchmarks/operator_cpu.py
PIECE = 2**18  # elements of q in a piece, on a CPU


class Past(NamedTuple):
    """What the tokens of a call follow."""

    second_moment: Tensor | None = None  # C [N, Hk, K, K] of the initial state, None with all of it
    key_sum: Tensor | None = None  # s [N, Hk, K]
    seen: Tensor | None = None  # [N] how many tokens
    cu_seqlens: Tensor | None = None  # [N + 1], where sequences are packed


class Saved(NamedTuple):
    """What the backward needs of a call."""

    q: Tensor
    k: Tensor  # k_bar where normalize is "unit", else k as it came
    k_rnorm: Tensor  # [B, T, Hk] 1/|k|, not read where normalize is "none"
    means: Tensor  # [B, T, Hq] m_t, not read where not centred
    lam: Tensor | None  # None: the call gave y


class Gradients(NamedTuple):
    """Of what a call gave: q_clean (or y), k_bar, and the final C and s."""

    g: Tensor
    k_bar: Tensor | None = None
    second_moment: Tensor | None = None
    key_sum: Tensor | None = None


def scan(layout: Layout, adds: Tensor, start: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Sums of `adds` [M, ...] over the chunks before each one (after it, if `reverse`), begun at `start` [N, ...].

    Returns them and, for each sequence, the sum over all its chunks.
    """
    start, sums, ended = in_order(start, layout.order), [], []
    running = start[:0] if reverse else start
    ranks = adds.split(layout.counts)
    for here in reversed(ranks) if reverse else ranks:
        n = here.shape[0]
        if n > running.shape[0]:  # going back, some sequences begin here
            running = torch.cat([running, start[running.shape[0] : n]])
        elif n < running.shape[0]:  # going on, some have ended
            ended.append(running[n:])
            running = running[:n]
        sums.append(running)
        running = running + here
    total = torch.cat([running, start[running.shape[0] :] if reverse else running[:0], *reversed(ended)])
    return torch.cat(sums[::-1] if reverse else sums), in_order(total, layout.place)


class Chunked(NamedTuple):
    """What forward and backward both need of the keys, chunk by chunk."""

    layout: Layout
    k: Tensor  # [M, Hk, C, K] the keys of the statistics
    t: Tensor  # [M, 1, 1, C, 1] the count, this token included
    before: Tensor  # [M, Hk, K, K] C of all earlier chunks
    key_sum: Tensor  # [M, Hk, 1, C, K] s_t
    second_moment: Tensor  # [N, Hk, K, K] the final state
    final_key_sum: Tensor  # [N, Hk, K]


def chunk_keys(k: Tensor, past: Past) -> Chunked:
    """Cut the keys of the statistics, k [B, T, Hk, K] in fp32 or fp64, and sum them up to every chunk."""
    batch, length = k.shape[:2]
    layout = make_layout(batch, length, past.cu_seqlens, k.device, CHUNK)
    second_moment, key_sum = start_state(k, past)
    local = torch.arange(1, CHUNK + 1, device=k.device)
    t = torch.cat([(rank * CHUNK + local).expand(n, -1) for rank, n in enumerate(layout.counts)])
    if past.seen is not None:
        t = t + per_chunk(past.seen, layout)[:, None]
    kc = to_chunks(k, layout).contiguous()
    before, second_moment = scan(layout, kc.mT @ kc, second_moment)
    sum_before, final_key_sum = scan(layout, kc.sum(2), key_sum)
    sums = sum_before[:, :, None] + kc.cumsum(2)
    return Chunked(
        layout, kc, t.to(k.dtype)[:, None, None, :, None], before, sums.unsqueeze(2), second_moment, final_key_sum
    )


def scores(keys: Chunked, x: Tensor) -> Tensor:
    """k_j . x_t for j <= t in the chunk, [M, Hk, G, C, C], for x [M, Hk, G, C, K]."""
    return (x.flatten(2, 3) @ keys.k.mT).unflatten(2, x.shape[2:4]).tril_()


def read(keys: Chunked, x: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sigma_t x_t for x [M, Hk, G, C, K], and behind it the scores and m_t = s_t . x_t / t."""
    p = scores(keys, x)
    y = (p.flatten(2, 3) @ keys.k).add_(x.flatten(2, 3) @ keys.before).view_as(x).div_(keys.t)
    m = None
    if centred:
        m = (x * keys.key_sum).sum(-1, keepdim=True) / keys.t
        y.addcmul_(m / keys.t, keys.key_sum, value=-1)
    return y, p, m


def pieces(q: Tensor, cu_seqlens: Tensor | None) -> list[slice]:
    """The tokens cut so that what one piece needs stays in a CPU's cache; states carry over from one to the next.

    In one piece time grows faster than T, since what lies between two operations goes through memory. A GPU has no use
    for it, and packed sequences are cut by their borders.
    """
    length = q.shape[1]
    if cu_seqlens is not None or q.device.type != "cpu":
        return [slice(0, length)]
    size = max(4, PIECE // (q[:, 0].numel() * CHUNK)) * CHUNK
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def following(past: Past, piece: slice, moment: Tensor, total: Tensor) -> Past:
    """What a piece follows, where C and s before it are these."""
    count = torch.full(moment.shape[:1], piece.start, device=moment.device)
    return Past(moment, total, count if past.seen is None else count + past.seen)


def forward(
    q: Tensor, k: Tensor, lam: Tensor | None, past: Past, centred: bool, normalize: str, output_final_state: bool = True
) -> tuple[Tensor, ...]:
    """q_clean (without lam: y, in fp32), k_bar, 1/|k|, m_t, and the final C and s."""
    cut = pieces(q, past.cu_seqlens)
    if len(cut) > 1:
        outputs = []
        moment, total = start_state(k, past)
        for piece in cut:
            before = following(past, piece, moment, total)
            q_i, k_i, lam_i = of((q, k, lam), piece)
            *output, moment, total = forward(q_i, k_i, lam_i, before, centred, normalize, output_final_state)
            outputs.append(output)
        return *join(outputs), moment, total
    with exact_matmul(q):
        q_read, k_stat, k_bar = prepare(q, k, normalize)
        keys = chunk_keys(k_stat, past)
        y, _, m = read(keys, to_grouped_chunks(q_read, keys), centred)
        y = from_grouped_chunks(y, keys, q)
        out = y if lam is None else (q_read - lam.to(y.dtype)[..., None] * y).to(q.dtype)
        means = y.new_empty(0) if m is None else from_grouped_chunks(m, keys, q).squeeze(-1)
        return contiguous(out, k_bar, inv_norm(k).squeeze(-1), means, keys.second_moment, keys.final_key_sum)


def contiguous(*outputs: Tensor | None) -> tuple:
    """Whatever the layout of what came: so compilers are told."""
    return tuple(None if x is None else x.contiguous() for x in outputs)


def join(outputs: list[list]) -> list:
    """Pieces of [B, T, ...] tensors put together; what was not asked for is empty, or None, in each."""
    columns = zip(*outputs, strict=True)
    return [parts[0] if parts[0] is None or parts[0].ndim < 2 else torch.cat(parts, 1) for parts in columns]


def backward(grads: Gradients, saved: Saved, past: Past, centred: bool, normalize: str) -> tuple:
    """dq, dk, dlam (None without lam), and the gradients of the initial C and s."""
    q, k, k_rnorm, means, lam = saved
    g, dk_bar, d_second_moment, d_key_sum = grads
    cut = pieces(q, past.cu_seqlens)
    if len(cut) > 1:
        # forward once more, for the states at which the pieces begin; then the pieces from the last to the first
        starts = [start_state(k, past)]
        with exact_matmul(q):
            for piece in cut[:-1]:
                k_i, rnorm_i = of((k, k_rnorm), piece)
                keys_t = statistics_keys(k_i, rnorm_i, normalize).transpose(1, 2)
                starts.append((starts[-1][0] + keys_t.mT @ keys_t, starts[-1][1] + keys_t.sum(2)))
        outputs = []
        for piece, start in zip(reversed(cut), reversed(starts), strict=True):
            g_i, bar_i = of((g, dk_bar), piece)
            grads = Gradients(g_i, bar_i, d_second_moment, d_key_sum)
            before = following(past, piece, *start)
            *output, d_second_moment, d_key_sum = backward(grads, Saved(*of(saved, piece)), before, centred, normalize)
            outputs.append(output)
        return *join(outputs[::-1]), d_second_moment, d_key_sum
    high = stats_dtype(q.dtype)
    with exact_matmul(q):
        q_rnorm = inv_norm(q) if normalize == "unit" else None
        q_read = q.to(high) if q_rnorm is None else q.to(high) * q_rnorm
        k_stat = statistics_keys(k, k_rnorm, normalize)
        g = g.to(high)
        gate = torch.full_like(g[..., :1], -1) if lam is None else lam.to(high)[..., None]  # dy: as if lam were -1

        keys = chunk_keys(k_stat, past)
        qc, gc = to_grouped_chunks(q_read, keys), to_grouped_chunks(g, keys)
        w, scores_g, mean_g = read(keys, gc, centred)
        w = from_grouped_chunks(w, keys, q)
        dlam = None if lam is None else -(q_read * w).sum(-1).to(lam.dtype)
        dq = w if lam is None else g - gate * w  # of y: without the query that y is taken off

        weight = -to_grouped_chunks(gate, keys) / keys.t
        cg, cq = (weight * gc).flatten(2, 3), (weight * qc).flatten(2, 3)
        dk = scores(keys, qc).flatten(2, 3).mT @ cg
        dk += scores_g.flatten(2, 3).mT @ cq
        cross = qc.flatten(2, 3).mT @ cg
        if d_second_moment is None:
            d_second_moment = torch.zeros_like(keys.second_moment)
        if d_key_sum is None:
            d_key_sum = torch.zeros_like(keys.final_key_sum)
        after, d_first = scan(keys.layout, cross + cross.mT, d_second_moment + d_second_moment.mT, reverse=True)
        dk += keys.k @ after
        if mean_g is not None:
            mean_q = to_grouped_chunks(means[..., None], keys)
            pull = -(weight * (mean_q * gc + mean_g * qc)).sum(2)  # [M, Hk, C, K]
            sum_after, d_key_sum = scan(keys.layout, pull.sum(2), d_key_sum, reverse=True)
            dk += sum_after[:, :, None] + pull.flip(2).cumsum(2).flip(2)
        else:
            dk += per_chunk(d_key_sum, keys.layout)[:, :, None]
            d_key_sum = d_key_sum.clone()  # an operator must not return its input
        dk = from_chunks(dk, keys.layout, *k.shape[:2])
        if dk_bar is not None:
            dk += dk_bar.to(high)

        if q_rnorm is not None:
            dq = unit_backward(dq, q_read, q_rnorm)
        if normalize != "none":
            dk = unit_backward(dk, k_stat, k_rnorm[..., None])
        return contiguous(dq.to(q.dtype), dk.to(k.dtype), dlam, d_first / 2, d_key_sum)


def of(tensors: Iterable[Tensor | None], piece: slice) -> Any:
    """The piece of each [B, T, ...] tensor; what is not there stays empty, or None."""
    return [x if x is None or x.ndim < 2 else x[:, piece] for x in tensors]


def start_state(k: Tensor, past: Past) -> tuple[Tensor, Tensor]:
    """The initial C and s of k [B, T, Hk, K]: zeros if there are none."""
    if past.second_moment is not None and past.key_sum is not None:
        return past.second_moment, past.key_sum
    batch, _, heads, size = k.shape
    sequences = batch if past.cu_seqlens is None else len(past.cu_seqlens) - 1
    zeros = k.new_zeros(sequences, heads, size, size, dtype=stats_dtype(k.dtype))
    return zeros, zeros[..., 0].clone()


def statistics_keys(k: Tensor, k_rnorm: Tensor, normalize: str) -> Tensor:
    """The keys of the statistics from what the backward is given."""
    k = k.to(stats_dtype(k.dtype))
    return k * k_rnorm[..., None] if normalize == "stats" else k


def to_grouped_chunks(x: Tensor, keys: Chunked) -> Tensor:
    """[B, T, Hq, ...] -> [M, Hk, G, C, ...]"""
    return to_chunks(x.unflatten(2, (keys.k.shape[1], -1)), keys.layout).transpose(2, 3).contiguous()


def from_grouped_chunks(x: Tensor, keys: Chunked, q: Tensor) -> Tensor:
    """[M, Hk, G, C, ...] -> [B, T, Hq, ...], as q has them."""
    return from_chunks(x.transpose(2, 3), keys.layout, *q.shape[:2]).flatten(2, 3)
