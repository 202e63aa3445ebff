"""The operator chunkwise, in plain PyTorch on any device: the paper's chunkwise algorithm and its derived backward.

M chunks of C tokens, Hk key heads, G query heads to a key head, K key size. Within a chunk the keys meet the queries in
one masked product; between chunks a running sum of k k^T (forward) and of its adjoint (backward) is carried:

    y_t = [ sum_{chunk, j<=t} k_j (k_j . q_t) + C_before q_t ] / t  -  s_t (s_t . q_t) / t^2

    backward, with w_t = Sigma_t g_t and c_t = -lam_t / t:
    dq_t = g_t - lam_t w_t,    dlam_t = -q_t . w_t        (g . Sigma q = q . Sigma g: one read gives both)
    dk_j = sum_{chunk, t>=j} c_t [ (k_j.q_t) g_t + (k_j.g_t) q_t ]  +  D_after k_j  +  e_j
    D_after = dC_T + dC_T^T + sum_{later chunks} c_t [ q_t g_t^T + g_t q_t^T ]
    e_j     = ds_T - sum_{t>=j} c_t [ m_t(q) g_t + m_t(g) q_t ],    m_t(x) = s_t . x_t / t

The gradient of y itself is that of q_clean with lam = -1, without the query: dq_t = Sigma_t dy_t. The projected step
has the same backward, with its own dy (reference.projected_backward).

With a log-decay a_t, one a token and key head, what key j adds to C_t, s_t and to the weight n_t in the place of t is
multiplied by exp(a_{j+1} + ... + a_t), and so is what flows back. y does not change when C, s and n are scaled
together, so of the gradient of the decays only the keys' side is left (B_t: that of scaling what token t adds):

    da_j = <dC_T, C_T> + ds_T . s_T + dn_T n_T - sum_{t>=j} B_t
    B_t  = k_t . (dk_t through C / 2 + dk_t through s) + dn_t

Nothing of size T x T or T x K x K exists: time and memory are linear in T. The backward recomputes what it needs
from q, k_bar, 1/|k|, lam and m_t(q), which is as small as lam; no state is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccq.ops.chunks import Layout, from_chunks, make_layout, per_chunk, scan, spans, to_chunks
from ccq.ops.clean.reference import STEPS, Read, prepare, projected_backward
from ccq.ops.clean.state import weight_of
from ccq.ops.precision import exact_matmul, high, inv_norm, stats_dtype, unit_backward

CHUNK = 128  # C; 32 to 256 measured, see benchmarks/operator_cpu.py
PIECE = 2**18  # elements of q in a piece, on a CPU


class Past(NamedTuple):
    """What the tokens of a call follow."""

    second_moment: Tensor | None = None  # C [N, Hk, K, K] of the initial state, None with all of it
    key_sum: Tensor | None = None  # s [N, Hk, K]
    seen: Tensor | None = None  # [N] how many tokens; or [N, Hk] their weight
    cu_seqlens: Tensor | None = None  # [N + 1], where sequences are packed


class Saved(NamedTuple):
    """What the backward needs of a call."""

    q: Tensor
    k: Tensor  # k_bar where normalize is "unit", else k as it came
    k_rnorm: Tensor  # [B, T, Hk] 1/|k|, not read where normalize is "none"
    means: Tensor  # [B, T, Hq] m_t, not read where not centred
    lam: Tensor | None  # None: the call gave y
    y: Tensor | None = None  # of the projected step: to keep it costs less than to read it again
    log_decay: Tensor | None = None


class Gradients(NamedTuple):
    """Of what a call gave: q_clean (or y), k_bar, and the final C, s and weight."""

    g: Tensor
    k_bar: Tensor | None = None
    second_moment: Tensor | None = None
    key_sum: Tensor | None = None
    weight: Tensor | None = None


class Decay(NamedTuple):
    """What is left of something in a chunk, by the log-decays between, [M, Hk, ...]."""

    within: Tensor  # [C, C] of token j at token t >= j, else 0
    start: Tensor  # [C] of what the chunk begins with, at token t
    end: Tensor  # [C] of token j at the end of the chunk
    across: Tensor  # [] of what the chunk begins with, at its end


class Chunked(NamedTuple):
    """What forward and backward both need of the keys, chunk by chunk."""

    layout: Layout
    decay: Decay | None
    k: Tensor  # [M, Hk, C, K] the keys of the statistics
    t: Tensor  # [M, 1 or Hk, 1, C, 1] the count or the weight, this token included
    before: Tensor  # [M, Hk, K, K] C of all earlier chunks
    key_sum: Tensor  # [M, Hk, 1, C, K] s_t
    second_moment: Tensor  # [N, Hk, K, K] the final state
    final_key_sum: Tensor  # [N, Hk, K]
    final_weight: Tensor | None  # [N, Hk] with a decay

    @property
    def final(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.second_moment, self.final_key_sum, self.final_weight


def chunk_keys(k: Tensor, log_decay: Tensor | None, past: Past) -> Chunked:
    """Cut the keys of the statistics, k [B, T, Hk, K] in fp32 or fp64, and sum them up to every chunk."""
    batch, length = k.shape[:2]
    layout = make_layout(batch, length, past.cu_seqlens, k.device, CHUNK)
    second_moment, key_sum, seen = start(k, past, log_decay is not None)
    kc = to_chunks(k, layout).contiguous()
    if log_decay is None:
        local = torch.arange(1, layout.size + 1, device=k.device)
        t = torch.cat([(rank * layout.size + local).expand(n, -1) for rank, n in enumerate(layout.counts)])
        if past.seen is not None:
            t = t + per_chunk(past.seen, layout)[:, None]
        t = t.to(k.dtype)[:, None]
        before, second_moment = scan(layout, kc.mT @ kc, second_moment)
        sum_before, final_key_sum = scan(layout, kc.sum(2), key_sum)
        sums = sum_before[:, :, None] + kc.cumsum(2)
        decay = weight = None
    else:
        decays = to_chunks(log_decay.to(k.dtype), layout)  # zero where a chunk is not full: nothing is lost there
        within, left = spans(decays).contiguous(), decays.cumsum(-1).exp()
        decay = Decay(within, left, within[..., -1, :], left[..., -1])
        real = to_chunks(k.new_ones(batch, length, 1), layout)  # [M, 1, C]
        kept = decay.end[..., None] * kc
        before, second_moment = scan(layout, kept.mT @ kc, second_moment, decay=decay.across)
        sum_before, final_key_sum = scan(layout, kept.sum(2), key_sum, decay=decay.across)
        sums = decay.start[..., None] * sum_before[:, :, None] + decay.within @ kc
        assert seen is not None
        weight_before, weight = scan(layout, (decay.end * real).sum(-1), seen, decay=decay.across)
        t = decay.start * weight_before[..., None] + (decay.within @ real[..., None])[..., 0]
        t = t.clamp(min=1)  # it includes this token; less it is only where a chunk is not full
    return Chunked(
        layout, decay, kc, t[:, :, None, :, None], before, sums.unsqueeze(2), second_moment, final_key_sum, weight
    )


def scores(keys: Chunked, x: Tensor) -> Tensor:
    """k_j . x_t for j <= t in the chunk, decayed, [M, Hk, G, C, C], for x [M, Hk, G, C, K]."""
    p = (x.flatten(2, 3) @ keys.k.mT).unflatten(2, x.shape[2:4])
    return p.tril_() if keys.decay is None else p.mul_(keys.decay.within[:, :, None])


def read(keys: Chunked, x: Tensor, centred: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sigma_t x_t for x [M, Hk, G, C, K], and behind it the scores and m_t = s_t . x_t / t."""
    p = scores(keys, x)
    before = (x.flatten(2, 3) @ keys.before).view_as(x)
    if keys.decay is not None:
        before *= keys.decay.start[:, :, None, :, None]
    y = (p.flatten(2, 3) @ keys.k).view_as(x).add_(before).div_(keys.t)
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


def following(past: Past, piece: slice, moment: Tensor, total: Tensor, weight: Tensor | None) -> Past:
    """What a piece follows, where C, s and, with a decay, the weight before it are these."""
    if weight is not None:
        return Past(moment, total, weight)
    count = torch.full(moment.shape[:1], piece.start, device=moment.device)
    return Past(moment, total, count if past.seen is None else count + past.seen)


def forward(
    q: Tensor, k: Tensor, lam: Tensor | None, log_decay: Tensor | None, past: Past, how: Read,
    output_final_state: bool = True, keep_y: bool = True,
) -> tuple:  # fmt: skip
    """q_clean (without lam: y, in fp32), k_bar, 1/|k|, m_t, y for a projected step's backward; the final C, s, weight.

    What there is none of is None or empty. This backend always has the final state at hand, and so y.
    """
    cut = pieces(q, past.cu_seqlens)
    if len(cut) > 1:
        outputs, state = [], start(k, past, log_decay is not None)
        for piece in cut:
            q_i, k_i, lam_i, log_decay_i = of((q, k, lam, log_decay), piece)
            *output, moment, total, weight = forward(q_i, k_i, lam_i, log_decay_i, following(past, piece, *state), how)
            state = moment, total, weight
            outputs.append(output)
        return *join(outputs), *state
    with exact_matmul(q):
        q_read, k_stat, k_bar = prepare(q, k, how.normalize)
        keys = chunk_keys(k_stat, log_decay, past)
        y, _, m = read(keys, to_grouped_chunks(q_read, keys), how.centred)
        y = from_grouped_chunks(y, keys, q)
        out = y if lam is None else STEPS[how.step](q_read, y, lam.to(y.dtype)[..., None]).to(q.dtype)
        kept = y.to(kept_dtype(q.dtype)) if lam is not None and how.step == "projected" else None
        means = y.new_empty(0) if m is None else from_grouped_chunks(m, keys, q).squeeze(-1)
        return contiguous(out, k_bar, inv_norm(k).squeeze(-1), means, kept, *keys.final)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the y that is kept: bf16 has the range for it, fp16 has not."""
    return dtype if dtype == torch.bfloat16 else stats_dtype(dtype)


def contiguous(*outputs: Tensor | None) -> tuple:
    """Whatever the layout of what came: so compilers are told."""
    return tuple(None if x is None else x.contiguous() for x in outputs)


def join(outputs: list) -> list:
    """Pieces of [B, T, ...] tensors put together; what was not asked for is empty, or None, in each."""
    columns = zip(*outputs, strict=True)
    return [parts[0] if parts[0] is None or parts[0].ndim < 2 else torch.cat(parts, 1) for parts in columns]


def backward(grads: Gradients, saved: Saved, past: Past, how: Read, decays: bool = True) -> tuple:
    """dq, dk, dlam (None without lam); the gradients of the initial C and s; those of the initial weight and of the
    log-decay, where there is one and they are wanted (`decays`)."""
    q, k, k_rnorm, means, lam, kept, log_decay = saved
    g, dk_bar, d_moment, d_sum, d_weight = grads
    cut = pieces(q, past.cu_seqlens)
    if len(cut) > 1:
        # forward once more, for the states at which the pieces begin; then the pieces from the last to the first
        pasts = [following(past, cut[0], *start(k, past, log_decay is not None))]
        with exact_matmul(q):
            for piece, next_piece in pairwise(cut):
                k_i, rnorm_i, log_decay_i = of((k, k_rnorm, log_decay), piece)
                keys = chunk_keys(statistics_keys(k_i, rnorm_i, how.normalize), log_decay_i, pasts[-1])
                pasts.append(following(past, next_piece, *keys.final))
        outputs = []
        after: tuple = (d_moment, d_sum, d_weight)
        for piece, before in zip(reversed(cut), reversed(pasts), strict=True):
            here = Gradients(*of((g, dk_bar), piece), *after)
            *output, d_moment, d_sum, d_weight, d_log_decay = backward(
                here, Saved(*of(saved, piece)), before, how, decays
            )
            after = (d_moment, d_sum, d_weight)
            outputs.append([*output, d_log_decay])
        *output, d_log_decay = join(outputs[::-1])
        return *output, *after, d_log_decay
    with exact_matmul(q):
        q_rnorm = inv_norm(q) if how.normalize == "unit" else None
        q_read = high(q) if q_rnorm is None else high(q) * q_rnorm
        k_stat = statistics_keys(k, k_rnorm, how.normalize)
        g, dlam, direct = high(g), None, None  # direct: what of the query's gradient does not go through y
        gate = torch.full_like(g[..., :1], -1) if lam is None else lam.to(g.dtype)[..., None]  # dy: as if lam were -1
        if kept is not None:
            assert lam is not None
            direct, g, dlam = projected_backward(g, q_read, kept.to(g.dtype), gate)
            dlam, gate = dlam.squeeze(-1).to(lam.dtype), torch.full_like(gate, -1)

        keys = chunk_keys(k_stat, log_decay, past)
        decay, across = keys.decay, None if keys.decay is None else keys.decay.across
        qc, gc = to_grouped_chunks(q_read, keys), to_grouped_chunks(g, keys)
        w, scores_g, mean_g = read(keys, gc, how.centred)
        along = (qc * w).sum(-1, keepdim=True)  # q . Sigma g
        w = from_grouped_chunks(w, keys, q)
        if lam is None or direct is not None:
            dq = w if direct is None else w + direct
        else:
            dlam = -from_grouped_chunks(along, keys, q).squeeze(-1).to(lam.dtype)
            dq = g - gate * w

        d_moment = torch.zeros_like(keys.second_moment) if d_moment is None else d_moment
        d_sum = torch.zeros_like(keys.final_key_sum) if d_sum is None else d_sum
        weight = -to_grouped_chunks(gate, keys) / keys.t
        cg, cq = (weight * gc).flatten(2, 3), (weight * qc).flatten(2, 3)
        dk = scores(keys, qc).flatten(2, 3).mT @ cg
        dk += scores_g.flatten(2, 3).mT @ cq
        reached = qc if decay is None else qc * decay.start[:, :, None, :, None]  # by what a chunk begins with
        cross = reached.flatten(2, 3).mT @ cg
        later, d_first = scan(keys.layout, cross + cross.mT, d_moment + d_moment.mT, True, across)
        dk += to_end(keys, keys.k @ later)
        mean_q = None if mean_g is None else to_grouped_chunks(means[..., None], keys)
        if mean_g is None or mean_q is None:
            pull = torch.zeros_like(keys.k)
        else:
            pull = -(weight * (mean_q * gc + mean_g * qc)).sum(2)  # [M, Hk, C, K]
        through_s, d_first_sum = collect(keys, pull, d_sum)

        d_log_decay = d_start = None
        if decays and decay is not None and keys.final_weight is not None:  # the keys' side, which alone is left
            d_weight = torch.zeros_like(keys.final_weight) if d_weight is None else d_weight
            pull = -(weight * along).sum(2)
            if mean_g is not None and mean_q is not None:
                pull += (weight * mean_q * mean_g).sum(2)
            through_n, d_start = collect(keys, pull, d_weight[..., None])
            d_start = d_start.squeeze(-1)
            scaled = (keys.k * (dk / 2 + through_s)).sum(-1) + through_n.squeeze(-1)  # [M, Hk, C]
            scaled = scaled * to_chunks(k_stat.new_ones(*k.shape[:2], 1), keys.layout)  # only tokens that are there
            whole = (d_moment * keys.second_moment).sum((-1, -2)) + (d_sum * keys.final_key_sum).sum(-1)
            later, _ = scan(keys.layout, -scaled.sum(-1), whole + d_weight * keys.final_weight, True)
            d_log_decay = later[..., None] - scaled.flip(-1).cumsum(-1).flip(-1)
            d_log_decay = from_chunks(d_log_decay, keys.layout, *k.shape[:2])
        dk = from_chunks(dk + through_s, keys.layout, *k.shape[:2])
        if dk_bar is not None:
            dk += dk_bar.to(dk.dtype)

        if q_rnorm is not None:
            dq = unit_backward(dq, q_read, q_rnorm)
        if how.normalize != "none":
            dk = unit_backward(dk, k_stat, k_rnorm[..., None])
        return contiguous(dq.to(q.dtype), dk.to(k.dtype), dlam, d_first / 2, d_first_sum, d_start, d_log_decay)


def to_end(keys: Chunked, x: Tensor) -> Tensor:
    """x [M, Hk, C, ...] of the end of a chunk, at its tokens."""
    return x if keys.decay is None else x * keys.decay.end[..., None]


def collect(keys: Chunked, pull: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """What a token has added to sums at itself and later, of the gradients `pull` [M, Hk, C, ...] of these sums.

    And the gradient of what the sums began with; `last` is that of the sum after the last token.
    """
    decay = keys.decay
    if decay is None:
        after, first = scan(keys.layout, pull.sum(2), last, True)
        return after[:, :, None] + pull.flip(2).cumsum(2).flip(2), first
    after, first = scan(keys.layout, (decay.start[..., None] * pull).sum(2), last, True, decay.across)
    return decay.within.mT @ pull + to_end(keys, after[:, :, None]), first


def of(tensors: Iterable[Tensor | None], piece: slice) -> Any:
    """The piece of each [B, T, ...] tensor; what is not there stays empty, or None."""
    return [x if x is None or x.ndim < 2 else x[:, piece] for x in tensors]


def start(k: Tensor, past: Past, weighed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The initial C and s of k [B, T, Hk, K], zeros if there are none; and the weight [N, Hk], if it is `weighed`."""
    batch, _, heads, size = k.shape
    sequences = batch if past.cu_seqlens is None else len(past.cu_seqlens) - 1
    moment, total, seen = past[:3]
    if moment is None or total is None:
        moment = k.new_zeros(sequences, heads, size, size, dtype=stats_dtype(k.dtype))
        total = moment[..., 0].clone()
    if not weighed:
        return moment, total, None
    return moment, total, torch.zeros_like(total[..., 0]) if seen is None else weight_of(seen, heads, total.dtype)


def statistics_keys(k: Tensor, k_rnorm: Tensor, normalize: str) -> Tensor:
    """The keys of the statistics from what the backward is given."""
    return high(k) * k_rnorm[..., None] if normalize == "stats" else high(k)


def to_grouped_chunks(x: Tensor, keys: Chunked) -> Tensor:
    """[B, T, Hq, ...] -> [M, Hk, G, C, ...]"""
    return to_chunks(x.unflatten(2, (keys.k.shape[1], -1)), keys.layout).transpose(2, 3).contiguous()


def from_grouped_chunks(x: Tensor, keys: Chunked, q: Tensor) -> Tensor:
    """[M, Hk, G, C, ...] -> [B, T, Hq, ...], as q has them."""
    return from_chunks(x.transpose(2, 3), keys.layout, *q.shape[:2]).flatten(2, 3)
