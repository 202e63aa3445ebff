"""A candidate: gated linear attention, whose channels forget apart, by kernels of our own, forward and backward.

`python benchmarks/gla_beside_fla.py` measures it beside fla's on a GPU. It moves into the package if it takes 2% off a
training step, and goes if it does not.

In a chunk of C tokens let G_i be the sum of g from its first token to i, and S the state before it. For each channel

    q~_i = scale exp(G_i) q_i        k~_i = exp(G_C - G_i) k_i        A_ij = scale q_i . exp(G_i - G_j) k_j, i >= j
    o = q~ S + A v                   S_next = exp(G_C) S + k~^T v

and the backward has the same form. With dA = do v^T where i >= j, and d = dS_next:

    dv = A^T do + k~ d               dS = exp(G_C) d + q~^T do
    dq = exp(G) do S^T + what dA brings; dk likewise, from d;  dG = q dq - k dk, of G_C also the sum over v of S_next d

So forward and backward share `states_kernel`, which runs through the chunks of a sequence, and `outputs_kernel`, which
reads, with q~ and k~, v and do in each other's place.

exp(G_i - G_j) is a factor of q_i times one of k_j, but neither may overflow, and trained channels forget e^-100 and
more in 64 tokens. So a chunk has two halves. Across them, q_i forgets from the border of the halves, and k_j up to it.
Within one, both count from the middle of what it forgets: exponents of at most D / 2, where D is the sum of its g. A
channel is steep in a half where -D is over STEEP, 4.4 a token. There A, dq and dk are computed pair by pair, which is
exact for every decay, but slow. Channels of the shipped models are hardly ever steep, as a test says. Sums of g over
tokens are products with ones, which take fewer instructions than shuffles between threads.

M tokens of all sequences, H heads, K key size, V value size, N chunks of all sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ccq.ops.clean.triton.configs import cdiv, power_of_2

STEEP = tl.constexpr(140.0)  # e^70 times q or k, and e^-70 times it, are within the range of bf16
LEAST = tl.constexpr(-100.0)  # a log-decay: e^-100 is nothing, and sums of larger ones would lose their small ones
# tokens of a chunk; of each kernel, how it cuts keys and values, and what a launch takes. benchmarks/gla_beside_fla.py
# tries others
CHUNK = 64
SIZES: dict[str, dict[str, int]] = {
    "prepare": {"BK": 32, "num_warps": 4},
    "states": {"BK": 64, "BV": 64, "num_warps": 4},
    "outputs": {"BK": 64, "BV": 128, "num_warps": 4},
    "between": {"BK": 64, "BV": 64, "num_warps": 8},
    "within": {"BK": 16, "num_warps": 2},
    "steep": {"BK": 32, "num_warps": 4},
}


@triton.jit
def place(n, borders, firsts, T, NC, PACKED: tl.constexpr, C: tl.constexpr):
    """The first token of chunk n, and how many it has: 0 or less behind the last chunk."""
    if PACKED:
        start, border = tl.load(firsts + n), tl.load(borders + n)
    else:
        start, border = (n // NC) * T + (n % NC) * C, (n // NC + 1) * T
    return start, tl.minimum(border - start, C)


@triton.jit
def product(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def decays(g, at, mask):
    """Log-decays of a chunk."""
    return tl.maximum(tl.load(g + at, mask=mask, other=0.0).to(tl.float32), LEAST)


@triton.jit
def sums_before(x, PARTS: tl.constexpr, REVERSE: tl.constexpr = False):
    """The sums of x from the first row to each, or from the last: a product with ones, x in so many bf16 parts."""
    N: tl.constexpr = x.shape[0]
    rows = tl.arange(0, N)
    before = rows[:, None] >= rows[None, :]
    if REVERSE:
        before = rows[:, None] <= rows[None, :]
    ones = tl.where(before, 1.0, 0.0).to(tl.bfloat16)  # Triton's interpreter makes no bf16 of integers
    part = x.to(tl.bfloat16)
    total = tl.dot(ones, part)
    for _ in tl.static_range(1, PARTS):
        x -= part.to(tl.float32)
        part = x.to(tl.bfloat16)
        total = tl.dot(ones, part, total)
    return total


@triton.jit
def centres(total):
    """Of a half of a chunk, by channel: from where q counts, and k; and what is left from the half's start to where q
    counts from, as from where k does to the half's end. Steep channels count from the start and to the end, so that
    their pairs come out as nothing."""
    middle = tl.where(total >= -STEEP, total / 2, 0.0)
    return middle, total - middle, tl.exp(middle)


@triton.jit
def causal(C: tl.constexpr):
    """Which pairs of tokens [i, j] A has."""
    return tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]


@triton.jit
def prepare_kernel(
    q, k, g, q_read, k_write, sums, scores, borders, firsts, scale, T, NC, H,
    K: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """q~, k~, the sums of g in both halves, and A, of a chunk and head."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    S: tl.constexpr = C // 2
    rows = tl.arange(0, S)
    one, two = (start + rows).to(tl.int64) * H + h, (start + S + rows).to(tl.int64) * H + h
    in_one, in_two = (rows < count)[:, None], (rows < count - S)[:, None]
    A_one, A_two, A_far = tl.zeros([S, S], tl.float32), tl.zeros([S, S], tl.float32), tl.zeros([S, S], tl.float32)
    kind = q_read.dtype.element_ty
    for first in range(0, K, BK):
        channels = first + tl.arange(0, BK)
        known = channels < K
        at_one, at_two = one[:, None] * K + channels[None, :], two[:, None] * K + channels[None, :]
        mask_one, mask_two = in_one & known[None, :], in_two & known[None, :]
        g_one, g_two = decays(g, at_one, mask_one), decays(g, at_two, mask_two)
        total_one, total_two = tl.sum(g_one, 0), tl.sum(g_two, 0)
        at_sums = (n.to(tl.int64) * H + h) * 2 * K + channels
        tl.store(sums + at_sums, total_one, mask=known)
        tl.store(sums + at_sums + K, total_two, mask=known)

        q_from, k_from, left_one = centres(total_one)
        inner = sums_before(g_one, PARTS)
        query = tl.load(q + at_one, mask=mask_one, other=0.0).to(tl.float32) * scale * tl.exp(inner - q_from[None, :])
        key = tl.load(k + at_one, mask=mask_one, other=0.0).to(tl.float32) * tl.exp(k_from[None, :] - inner)
        tl.store(q_read + at_one, (query * left_one[None, :]).to(kind), mask=mask_one)
        tl.store(k_write + at_one, (key * (left_one * tl.exp(total_two))[None, :]).to(kind), mask=mask_one)
        if scores is not None:
            A_one += product(query.to(kind), tl.trans(key.to(kind)))
            far = tl.trans((key * left_one[None, :]).to(kind))

        q_from, k_from, left_two = centres(total_two)
        inner = sums_before(g_two, PARTS)
        query = tl.load(q + at_two, mask=mask_two, other=0.0).to(tl.float32) * scale * tl.exp(inner - q_from[None, :])
        key = tl.load(k + at_two, mask=mask_two, other=0.0).to(tl.float32) * tl.exp(k_from[None, :] - inner)
        tl.store(q_read + at_two, (query * (left_two * tl.exp(total_one))[None, :]).to(kind), mask=mask_two)
        tl.store(k_write + at_two, (key * left_two[None, :]).to(kind), mask=mask_two)
        if scores is not None:
            A_two += product(query.to(kind), tl.trans(key.to(kind)))
            A_far += product((query * left_two[None, :]).to(kind), far)
    if scores is not None:
        # of pairs that are not causal, A may be infinite
        causal = rows[:, None] >= rows[None, :]
        at_one, at_two = scores + one[:, None] * C + rows[None, :], scores + two[:, None] * C + rows[None, :]
        tl.store(at_one, tl.where(causal, A_one, 0.0).to(kind), mask=in_one)
        tl.store(at_one + S, tl.zeros([S, S], kind), mask=in_one)
        tl.store(at_two, A_far.to(kind), mask=in_two)
        tl.store(at_two + S, tl.where(causal, A_two, 0.0).to(kind), mask=in_two)


@triton.jit
def states_kernel(
    x, y, sums, seen, initial, final, borders, firsts, of_sequence, T, NC, H, V,
    K: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S through the chunks of a sequence, from x = k~ and y = v; S before each chunk goes to `seen`.

    REVERSE: dS from the last chunk to the first, from x = q~ and y = do; d of each chunk goes there.
    """
    of_values, pair = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    of_keys, sh = pair % tl.cdiv(K, BK), pair // tl.cdiv(K, BK)
    s, h = sh // H, sh % H
    channels = of_keys * BK + tl.arange(0, BK)
    cols = of_values * BV + tl.arange(0, BV)
    mask = (channels < K)[:, None] & (cols < V)[None, :]
    at_state = channels[:, None] * V + cols[None, :]
    state = tl.zeros([BK, BV], tl.float32)
    if initial is not None:
        state += tl.load(initial + sh.to(tl.int64) * K * V + at_state, mask=mask, other=0.0)
    begin, chunks = s * NC, NC
    if PACKED:
        begin = tl.load(of_sequence + s)
        chunks = tl.load(of_sequence + s + 1) - begin
    for i in range(chunks):
        n = begin + i
        if REVERSE:
            n = begin + chunks - 1 - i
        start, count = place(n, borders, firsts, T, NC, PACKED, C)
        rows = tl.arange(0, C)
        head = (start + rows).to(tl.int64) * H + h
        nh = n.to(tl.int64) * H + h
        tl.store(seen + nh * K * V + at_state, state.to(seen.dtype.element_ty), mask=mask)
        end = tl.load(sums + nh * 2 * K + channels, mask=channels < K, other=0.0)
        end += tl.load(sums + nh * 2 * K + K + channels, mask=channels < K, other=0.0)
        inside = (rows < count)[:, None]
        x_tile = tl.load(x + head[:, None] * K + channels[None, :], mask=inside & (channels < K)[None, :], other=0.0)
        y_tile = tl.load(y + head[:, None] * V + cols[None, :], mask=inside & (cols < V)[None, :], other=0.0)
        state = state * tl.exp(end)[:, None] + product(tl.trans(x_tile), y_tile)
    if final is not None:
        tl.store(final + sh.to(tl.int64) * K * V + at_state, state, mask=mask)


@triton.jit
def outputs_kernel(
    x, y, scores, seen, out, borders, firsts, T, NC, H, V,
    K: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o = q~ S + A v of a chunk and head, from x = q~ and y = v.

    REVERSE: dv = k~ d + A^T do, from x = k~ and y = do.
    """
    block, nh = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    n, h = nh // H, nh % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    rows, cols = tl.arange(0, C), block * BV + tl.arange(0, BV)
    head = (start + rows).to(tl.int64) * H + h
    inside = (rows < count)[:, None]
    seen += (n.to(tl.int64) * H + h) * K * V
    total = tl.zeros([C, BV], tl.float32)
    for first in range(0, K, BK):
        channels = first + tl.arange(0, BK)
        x_tile = tl.load(x + head[:, None] * K + channels[None, :], mask=inside & (channels < K)[None, :], other=0.0)
        mask = (channels < K)[:, None] & (cols < V)[None, :]
        total += product(x_tile, tl.load(seen + channels[:, None] * V + cols[None, :], mask=mask, other=0.0))
    tile = tl.load(scores + head[:, None] * C + rows[None, :], mask=inside, other=0.0)
    if REVERSE:
        tile = tl.trans(tile)
    at = head[:, None] * V + cols[None, :]
    mask = inside & (cols < V)[None, :]
    total += product(tile, tl.load(y + at, mask=mask, other=0.0))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def between_kernel(
    v, do, seen, d_seen, dq, dk, both, d_scores, borders, firsts, T, NC, H, V,
    K: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradients of q~ (to dq) and k~ (to dk) for some channels of a chunk and head, and the sum over v of S d.

    The programs of the first channels keep dA.
    """
    block, nh = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    n, h = nh // H, nh % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    rows, channels = tl.arange(0, C), block * BK + tl.arange(0, BK)
    head = (start + rows).to(tl.int64) * H + h
    inside = (rows < count)[:, None]
    at_states = nh.to(tl.int64) * K * V + channels[:, None] * V
    d_query, d_key = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    of_both = tl.zeros([BK], tl.float32)
    for first in range(0, V, BV):
        cols = first + tl.arange(0, BV)
        at = head[:, None] * V + cols[None, :]
        mask = inside & (cols < V)[None, :]
        value, d_out = tl.load(v + at, mask=mask, other=0.0), tl.load(do + at, mask=mask, other=0.0)
        at = at_states + cols[None, :]
        mask = (channels < K)[:, None] & (cols < V)[None, :]
        state, d_state = tl.load(seen + at, mask=mask, other=0.0), tl.load(d_seen + at, mask=mask, other=0.0)
        d_query += product(d_out, tl.trans(state))
        d_key += product(value, tl.trans(d_state))
        dA += product(d_out, tl.trans(value))
        of_both += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
    at = head[:, None] * K + channels[None, :]
    mask = inside & (channels < K)[None, :]
    tl.store(dq + at, d_query.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, d_key.to(dk.dtype.element_ty), mask=mask)
    tl.store(both + nh.to(tl.int64) * K + channels, of_both, mask=channels < K)
    if block == 0:
        dA = tl.where(causal(C), dA, 0.0)
        tl.store(d_scores + head[:, None] * C + rows[None, :], dA.to(d_scores.dtype.element_ty), mask=inside)


@triton.jit
def within_kernel(
    q, k, g, sums, d_scores, both, dq, dk, dg, borders, firsts, scale, T, NC, H,
    K: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """From what between_kernel left: dq, dk and dg of some channels of a chunk and head."""
    block, nh = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    n, h = nh // H, nh % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    S: tl.constexpr = C // 2
    PARTS_OF_SUMS: tl.constexpr = 2 if d_scores.dtype.element_ty == tl.bfloat16 else 3
    rows, channels = tl.arange(0, S), block * BK + tl.arange(0, BK)
    known = channels < K
    one, two = (start + rows).to(tl.int64) * H + h, (start + S + rows).to(tl.int64) * H + h
    in_one, in_two = (rows < count)[:, None], (rows < count - S)[:, None]
    at_one, at_two = one[:, None] * K + channels[None, :], two[:, None] * K + channels[None, :]
    mask_one, mask_two = in_one & known[None, :], in_two & known[None, :]
    at_sums = nh.to(tl.int64) * 2 * K + channels
    total_one = tl.load(sums + at_sums, mask=known, other=0.0)
    total_two = tl.load(sums + at_sums + K, mask=known, other=0.0)
    kind = d_scores.dtype.element_ty

    # the gradient of g is what is left of sums that nearly cancel: both sides take the same roundings
    q_from, k_from, left_one = centres(total_one)
    inner = sums_before(decays(g, at_one, mask_one), PARTS)
    q_one, k_one = tl.exp(inner - q_from[None, :]), tl.exp(k_from[None, :] - inner)
    query_one = (tl.load(q + at_one, mask=mask_one, other=0.0).to(tl.float32) * scale * q_one).to(kind)
    key_one = (tl.load(k + at_one, mask=mask_one, other=0.0).to(tl.float32) * k_one).to(kind)
    dA = tl.load(d_scores + one[:, None] * C + rows[None, :], mask=in_one, other=0.0)
    dq_one = product(dA, key_one)
    dk_one = product(tl.trans(dA), query_one)

    q_from, k_from, left_two = centres(total_two)
    inner = sums_before(decays(g, at_two, mask_two), PARTS)
    q_two, k_two = tl.exp(inner - q_from[None, :]), tl.exp(k_from[None, :] - inner)
    query_two = (tl.load(q + at_two, mask=mask_two, other=0.0).to(tl.float32) * scale * q_two).to(kind)
    key_two = (tl.load(k + at_two, mask=mask_two, other=0.0).to(tl.float32) * k_two).to(kind)
    dA = tl.load(d_scores + two[:, None] * C + S + rows[None, :], mask=in_two, other=0.0)
    dq_two = product(dA, key_two)
    dk_two = product(tl.trans(dA), query_two)

    # not by left_one * left_two, which may be nothing where what it is multiplied with is large
    dA = tl.load(d_scores + two[:, None] * C + rows[None, :], mask=in_two, other=0.0)
    dq_two += product(dA, key_one) * left_one[None, :] * left_two[None, :]
    dk_one += product(tl.trans(dA), query_two) * left_two[None, :] * left_one[None, :]

    forgets_one, forgets_two = tl.exp(total_one), tl.exp(total_two)
    dq_one += tl.load(dq + at_one, mask=mask_one, other=0.0).to(tl.float32) * left_one[None, :]
    dq_two += tl.load(dq + at_two, mask=mask_two, other=0.0).to(tl.float32) * (left_two * forgets_one)[None, :]
    dk_part_one = tl.load(dk + at_one, mask=mask_one, other=0.0).to(tl.float32) * (left_one * forgets_two)[None, :]
    dk_part_two = tl.load(dk + at_two, mask=mask_two, other=0.0).to(tl.float32) * left_two[None, :]
    later = tl.load(both + nh.to(tl.int64) * K + channels, mask=known, other=0.0) * forgets_one * forgets_two
    later += tl.sum(key_one * dk_part_one + key_two * dk_part_two, 0)  # S_next d
    dk_one += dk_part_one
    dk_two += dk_part_two
    dg_two = query_two * dq_two - key_two * dk_two
    dg_one = query_one * dq_one - key_one * dk_one
    later_one = later + tl.sum(dg_two, 0)
    dg_two = sums_before(dg_two, PARTS_OF_SUMS, REVERSE=True) + later[None, :]
    dg_one = sums_before(dg_one, PARTS_OF_SUMS, REVERSE=True) + later_one[None, :]
    tl.store(dg + at_one, dg_one.to(dg.dtype.element_ty), mask=mask_one)
    tl.store(dg + at_two, dg_two.to(dg.dtype.element_ty), mask=mask_two)
    tl.store(dq + at_one, (dq_one * q_one * scale).to(dq.dtype.element_ty), mask=mask_one)
    tl.store(dq + at_two, (dq_two * q_two * scale).to(dq.dtype.element_ty), mask=mask_two)
    tl.store(dk + at_one, (dk_one * k_one).to(dk.dtype.element_ty), mask=mask_one)
    tl.store(dk + at_two, (dk_two * k_two).to(dk.dtype.element_ty), mask=mask_two)


@triton.jit
def row_of(x, j, N: tl.constexpr):
    """Row j of a tile of N."""
    return tl.sum(tl.where((tl.arange(0, N) == j)[:, None], x, 0.0), 0)


@triton.jit
def steep_kernel(
    q, k, g, sums, scores, dq, dk, dg, borders, firsts, scale, T, NC, H,
    K: tl.constexpr, BACKWARD: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds to A what the steep channels of half a chunk bring. BACKWARD: to dq, dk and dg, from dA."""
    S: tl.constexpr = C // 2
    half, nh = tl.program_id(0) % 2, tl.program_id(0) // 2
    n, h = nh // H, nh % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    start, count = start + half * S, tl.minimum(count - half * S, S)
    if count <= 0:
        return
    rows = tl.arange(0, S)
    head = (start + rows).to(tl.int64) * H + h
    inside = (rows < count)[:, None]
    at_scores = head[:, None] * C + half * S + rows[None, :]
    added = tl.zeros([S, S], tl.float32)
    found = 0
    for first in range(0, K, BK):
        channels = first + tl.arange(0, BK)
        total = tl.load(sums + (nh.to(tl.int64) * 2 + half) * K + channels, mask=channels < K, other=0.0)
        steep = total < -STEEP
        if tl.max(steep.to(tl.int32), 0) > 0:
            found = 1
            at = head[:, None] * K + channels[None, :]
            mask = inside & (channels < K)[None, :]
            inner = tl.cumsum(decays(g, at, mask), 0)
            query = tl.load(q + at, mask=mask, other=0.0).to(tl.float32) * scale
            key = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
            d_query, d_key = tl.zeros([S, BK], tl.float32), tl.zeros([S, BK], tl.float32)
            dA = tl.zeros([S, S], tl.float32)
            if BACKWARD:
                dA += tl.load(scores + at_scores, mask=inside, other=0.0)
            for j in range(count):
                # exp(G_i - G_j); where i is before j, nobody asks
                part = tl.exp(tl.minimum(inner - row_of(inner, j, S)[None, :], 0.0))
                part = tl.where(steep[None, :], part, 0.0)
                of_j = rows == j
                if BACKWARD:
                    part *= tl.sum(tl.where(of_j[None, :], dA, 0.0), 1)[:, None]
                    d_query += part * row_of(key, j, S)[None, :]
                    d_key += tl.where(of_j[:, None], tl.sum(part * query, 0)[None, :], 0.0)
                else:
                    column = tl.sum(query * row_of(key, j, S)[None, :] * part, 1)
                    added += tl.where(of_j[None, :] & (rows >= j)[:, None], column[:, None], 0.0)
            if BACKWARD:
                d_decay = tl.cumsum(query * d_query - key * d_key, 0, reverse=True)
                tl.store(dq + at, (tl.load(dq + at, mask=mask) + d_query * scale).to(dq.dtype.element_ty), mask=mask)
                tl.store(dk + at, (tl.load(dk + at, mask=mask) + d_key).to(dk.dtype.element_ty), mask=mask)
                tl.store(dg + at, (tl.load(dg + at, mask=mask) + d_decay).to(dg.dtype.element_ty), mask=mask)
    if not BACKWARD:
        if found > 0:
            tile = tl.load(scores + at_scores, mask=inside, other=0.0).to(tl.float32) + added
            tl.store(scores + at_scores, tile.to(scores.dtype.element_ty), mask=inside)


class Layout:
    """Where the chunks of each sequence lie."""

    def __init__(self, q: Tensor, cu_seqlens: Tensor | None) -> None:
        self.batch, self.length, self.heads, self.size = q.shape
        self.chunk = CHUNK
        self.packed = cu_seqlens is not None
        self.firsts = self.borders = self.of_sequence = None
        self.each = cdiv(self.length, self.chunk)
        self.sequences, self.chunks = self.batch, self.batch * self.each
        if cu_seqlens is not None:
            self.sequences = len(cu_seqlens) - 1
            self.chunks = self.length // self.chunk + self.sequences  # at most; who counts them waits for the GPU
            ends = (cu_seqlens.diff() + self.chunk - 1).div(self.chunk, rounding_mode="floor").cumsum(0)
            self.of_sequence = F.pad(ends, (1, 0))
            n = torch.arange(self.chunks, device=q.device)
            sequence = torch.searchsorted(ends, n, right=True).clamp(max=self.sequences - 1)
            first = n - self.of_sequence.index_select(0, sequence)  # of its sequence's chunks
            self.firsts = cu_seqlens.index_select(0, sequence) + first * self.chunk
            self.borders = cu_seqlens.index_select(0, sequence + 1)

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of all kernels."""
        parts = {"borders": self.borders, "firsts": self.firsts, "T": self.length, "NC": self.each, "H": self.heads}
        return parts | {"PACKED": self.packed, "C": self.chunk}


def sizes(kernel: str, K: int, V: int = 0) -> dict[str, int]:
    """How a kernel cuts K keys and V values, at most as SIZES says, and what its launch takes."""
    found = dict(SIZES[kernel], K=K)
    for name, size in (("BK", K), ("BV", V)):
        if name in found:
            found[name] = min(found[name], max(16, power_of_2(size)))
    return found | ({"V": V} if V else {})


def parts(g: Tensor) -> int:
    """Of bf16, that log-decays have."""
    return 1 if g.dtype == torch.bfloat16 else 3


def prepare(layout: Layout, q: Tensor, k: Tensor, g: Tensor, scale: float, scores: bool = False) -> tuple[Tensor, ...]:
    """q~, k~, sums of g [N, H, 2, K], and A [B, T, H, C] if asked for."""
    q_read, k_write = torch.empty_like(q), torch.empty_like(k)
    sums = q.new_empty(layout.chunks, layout.heads, 2, layout.size, dtype=torch.float32)
    A = q.new_empty(*q.shape[:3], layout.chunk) if scores else None
    grid = (layout.chunks * layout.heads,)
    by = sizes("prepare", layout.size)
    prepare_kernel[grid](q, k, g, q_read, k_write, sums, A, scale=scale, PARTS=parts(g), **layout.where, **by)
    return q_read, k_write, sums, *((A,) if A is not None else ())


def states(
    layout: Layout,
    x: Tensor,
    y: Tensor,
    sums: Tensor,
    initial: Tensor | None,
    output_final: bool,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S before each chunk, or d behind it, [N, H, K, V], and the last one of each sequence."""
    K, V = x.shape[-1], y.shape[-1]
    seen = x.new_empty(layout.chunks, layout.heads, K, V)
    final = sums.new_empty(layout.sequences, layout.heads, K, V) if output_final else None
    by = sizes("states", K, V)
    grid = (layout.sequences * layout.heads * cdiv(K, by["BK"]) * cdiv(V, by["BV"]),)
    more = {"of_sequence": layout.of_sequence, "REVERSE": reverse}
    states_kernel[grid](x, y, sums, seen, initial, final, **more, **layout.where, **by)
    return seen, final


def outputs(layout: Layout, x: Tensor, y: Tensor, A: Tensor, seen: Tensor, reverse: bool = False) -> Tensor:
    out, V = torch.empty_like(y), y.shape[-1]
    by = sizes("outputs", layout.size, V)
    grid = (layout.chunks * layout.heads * cdiv(V, by["BV"]),)
    outputs_kernel[grid](x, y, A, seen, out, REVERSE=reverse, **layout.where, **by)
    return out


def between(layout: Layout, q, k, v, do, seen: Tensor, d_seen: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q~ and k~, the sum over v of S d, and dA."""
    dq, dk, dA = torch.empty_like(q), torch.empty_like(k), q.new_empty(*q.shape[:3], layout.chunk)
    both = q.new_empty(layout.chunks, layout.heads, layout.size, dtype=torch.float32)
    by = sizes("between", layout.size, v.shape[-1])
    grid = (layout.chunks * layout.heads * cdiv(layout.size, by["BK"]),)
    between_kernel[grid](v, do, seen, d_seen, dq, dk, both, dA, **layout.where, **by)
    return dq, dk, both, dA


def within(layout: Layout, q, k, g, sums, dq, dk, both: Tensor, dA: Tensor, scale: float) -> Tensor:
    """Makes dq and dk the gradients of q and k, but for what steep channels bring, and returns that of g."""
    dg = torch.empty_like(g)
    by = sizes("within", layout.size)
    grid = (layout.chunks * layout.heads * cdiv(layout.size, by["BK"]),)
    within_kernel[grid](q, k, g, sums, dA, both, dq, dk, dg, scale=scale, PARTS=parts(g), **layout.where, **by)
    return dg


def steep(layout: Layout, q, k, g, sums, found: Tensor, scale: float, gradients: tuple[Tensor, ...] = ()) -> None:
    """Add what steep channels bring to A, or, from dA, to `gradients` of q, k and g."""
    grid = (2 * layout.chunks * layout.heads,)
    steep_kernel[grid](
        q, k, g, sums, found, *(gradients or (None,) * 3), scale=scale, BACKWARD=bool(gradients), **layout.where,
        **sizes("steep", layout.size),
    )  # fmt: skip


class GatedLinearAttention(torch.autograd.Function):
    """Of what is as large as q or a state nothing is kept for the backward; it is computed again."""

    @staticmethod
    def forward(ctx, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        initial = None if initial_state is None else initial_state.contiguous()
        layout = Layout(q, cu_seqlens)
        q_read, k_write, sums, A = prepare(layout, q, k, g, scale, scores=True)
        steep(layout, q, k, g, sums, A, scale)
        seen, final = states(layout, k_write, v, sums, initial, output_final_state)
        ctx.save_for_backward(q, k, v, g, initial, A)
        ctx.layout, ctx.scale = layout, scale
        return outputs(layout, q_read, v, A, seen), final

    @staticmethod
    def backward(ctx, do, d_final):
        q, k, v, g, initial, A = ctx.saved_tensors
        layout, scale, do = ctx.layout, ctx.scale, do.contiguous()
        d_final = None if d_final is None else d_final.contiguous()
        q_read, k_write, sums = prepare(layout, q, k, g, scale)
        seen, _ = states(layout, k_write, v, sums, initial, False)
        d_seen, d_initial = states(layout, q_read, do, sums, d_final, initial is not None, reverse=True)
        dv = outputs(layout, k_write, do, A, d_seen, reverse=True)
        dq, dk, both, dA = between(layout, q, k, v, do, seen, d_seen)
        dg = within(layout, q, k, g, sums, dq, dk, both, dA, scale)
        steep(layout, q, k, g, sums, dA, scale, (dq, dk, dg))
        return dq, dk, dv, dg, None, d_initial, None, None


def gla(q, k, v, g, scale, initial_state=None, output_final_state=False, cu_seqlens=None):
    """As `ccq.ops.recurrence.recurrence`, for arguments it has checked."""
    return GatedLinearAttention.apply(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
