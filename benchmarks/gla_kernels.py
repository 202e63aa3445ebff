"""A candidate: gated linear attention, whose channels forget apart, by kernels of our own, forward and backward.

`python benchmarks/gla_beside_fla.py` measures it beside fla's on a GPU. It moves into the package if it takes 2% off a
training step, and goes if it does not.

In a chunk of C tokens let G_i be the sum of g from its first token to i. With r = G_C / 2, for each channel, and
q' = scale q exp(G - r) and k' = k exp(r - G) a chunk knows no decay:

    A = tril(q' k'^T)        o = q' h + A v             h = exp(r) S,  S the state before the chunk
    S_next = exp(G_C) S + exp(r) k'^T v

and neither does its backward. With d = exp(r) dS_next and dA = tril(do v^T):

    dq' = dA k' + do h^T        dv = A^T do + k' d          dS = exp(G_C) dS_next + exp(r) q'^T do
    dk' = dA^T q' + v d^T       dG = q' dq' - k' dk', and of G_C also the sum over v of S_next dS_next

So forward and backward share their kernels, with q and k, o and v in each other's place: `scores_kernel` makes A and
dA, `states_kernel` runs through the chunks of a sequence, `outputs_kernel` reads.

Both exponents are within G_C / 2. A channel where that is large, that forgets more than STEEP in a chunk, is steep. It
takes r = 0 in q' and G_C in k', where no exponent is above 0: they serve what passes between chunks. Its part of A, dq
and dk, of which they bring next to nothing, is computed pair by pair: exact for every decay, but slow. (Trained models
have next to none: in a chunk of 64, STEEP is 1.25 a token.)

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

STEEP = tl.constexpr(80.0)  # e^80 times a product of q and k is within the range of fp32 and bf16
LEAST = tl.constexpr(-100.0)  # a log-decay: e^-100 is nothing, and sums of larger ones would lose their small ones
# tokens of a chunk; of each kernel, how it cuts keys and values, and what a launch takes. benchmarks/gla_beside_fla.py
# tries others
CHUNK = 64
SIZES: dict[str, dict[str, int]] = {
    "scaled": {"BK": 64, "num_warps": 4},
    "scores": {"BK": 64, "num_warps": 4},
    "states": {"BK": 64, "BV": 64, "num_warps": 4},
    "outputs": {"BK": 64, "BV": 128, "num_warps": 4},
    "gradients": {"BK": 64, "BV": 64, "num_warps": 8},
    "steep": {"BK": 32, "num_warps": 8},
}


@triton.jit
def place(n, borders, firsts, T, NC, PACKED: tl.constexpr, C: tl.constexpr):
    """The first token of chunk n, and how many it has: 0 or less behind the last chunk."""
    if PACKED:
        start = tl.load(firsts + n)
        return start, tl.minimum(tl.load(borders + n) - start, C)
    start = (n // NC) * T + (n % NC) * C
    return start, tl.minimum(T - (n % NC) * C, C)


@triton.jit
def decays(g, at, mask):
    """Log-decays of a chunk."""
    return tl.maximum(tl.load(g + at, mask=mask, other=0.0).to(tl.float32), LEAST)


@triton.jit
def reference(end):
    """r of q' by G_C. That of k' is what is left of G_C: the same, but for steep channels."""
    return tl.where(end < -STEEP, 0.0, end / 2)


@triton.jit
def scaled_kernel(
    q, k, g, q_scaled, k_scaled, ends, borders, firsts, scale, T, NC, H,
    K: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """q', k' and G_C of some channels of a chunk and head."""
    block, nh = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    n, h = nh // H, nh % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    rows, channels = tl.arange(0, C), block * BK + tl.arange(0, BK)
    at = ((start + rows).to(tl.int64) * H + h)[:, None] * K + channels[None, :]
    mask = (rows < count)[:, None] & (channels < K)[None, :]
    x = decays(g, at, mask)
    end = tl.sum(x, 0)
    G = tl.cumsum(x, 0)
    r = reference(end)
    query, key = tl.load(q + at, mask=mask, other=0.0), tl.load(k + at, mask=mask, other=0.0)
    query, key = (
        query.to(tl.float32) * scale * tl.exp(G - r[None, :]),
        key.to(tl.float32) * tl.exp((end - r)[None, :] - G),
    )
    tl.store(q_scaled + at, query.to(q_scaled.dtype.element_ty), mask=mask)
    tl.store(k_scaled + at, key.to(k_scaled.dtype.element_ty), mask=mask)
    tl.store(ends + (n.to(tl.int64) * H + h) * K + channels, end, mask=channels < K)


@triton.jit
def scores_kernel(
    x, y, scores, borders, firsts, T, NC, H,
    K: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """tril(x y^T) of a chunk and head: A from q' and k', and dA from do and v, whose K is that of values."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    rows = tl.arange(0, C)
    head = (start + rows).to(tl.int64) * H + h
    inside = (rows < count)[:, None]
    total = tl.zeros([C, C], tl.float32)
    for first in range(0, K, BK):
        channels = first + tl.arange(0, BK)
        at = head[:, None] * K + channels[None, :]
        mask = inside & (channels < K)[None, :]
        total += tl.dot(tl.load(x + at, mask=mask, other=0.0), tl.trans(tl.load(y + at, mask=mask, other=0.0)))
    total = tl.where(rows[:, None] >= rows[None, :], total, 0.0)
    tl.store(scores + head[:, None] * C + rows[None, :], total.to(scores.dtype.element_ty), mask=inside)


@triton.jit
def states_kernel(
    x, y, ends, seen, initial, final, borders, firsts, of_sequence, T, NC, H, V,
    K: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S through the chunks of a sequence, from x = k' and y = v; what each chunk reads of it goes to `seen`.

    REVERSE: dS from the last chunk to the first, from x = q' and y = do.
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
        place_of = n.to(tl.int64) * H + h
        end = tl.load(ends + place_of * K + channels, mask=channels < K, other=0.0)
        part = tl.exp(reference(end))[:, None]
        tl.store(seen + place_of * K * V + at_state, (state * part).to(seen.dtype.element_ty), mask=mask)
        inside = (rows < count)[:, None]
        x_tile = tl.load(x + head[:, None] * K + channels[None, :], mask=inside & (channels < K)[None, :], other=0.0)
        y_tile = tl.load(y + head[:, None] * V + cols[None, :], mask=inside & (cols < V)[None, :], other=0.0)
        state = state * tl.exp(end)[:, None] + tl.dot(tl.trans(x_tile), y_tile) * part
    if final is not None:
        tl.store(final + sh.to(tl.int64) * K * V + at_state, state, mask=mask)


@triton.jit
def outputs_kernel(
    x, y, scores, seen, out, borders, firsts, T, NC, H, V,
    K: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o = q' h + A v of a chunk and head, from x = q' and y = v.

    REVERSE: dv = k' d + A^T do, from x = k' and y = do.
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
        total += tl.dot(x_tile, tl.load(seen + channels[:, None] * V + cols[None, :], mask=mask, other=0.0))
    tile = tl.load(scores + head[:, None] * C + rows[None, :], mask=inside, other=0.0)
    if REVERSE:
        tile = tl.trans(tile)
    at = head[:, None] * V + cols[None, :]
    mask = inside & (cols < V)[None, :]
    total += tl.dot(tile, tl.load(y + at, mask=mask, other=0.0))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gradients_kernel(
    g, v, do, q_scaled, k_scaled, d_scores, seen, d_seen, dq, dk, dg, borders, firsts, scale, T, NC, H, V,
    K: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of some channels of a chunk and head."""
    block, nh = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    n, h = nh // H, nh % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    rows, channels = tl.arange(0, C), block * BK + tl.arange(0, BK)
    head = (start + rows).to(tl.int64) * H + h
    inside = (rows < count)[:, None]
    place_of = n.to(tl.int64) * H + h
    d_query = tl.zeros([C, BK], tl.float32)
    d_key = tl.zeros([C, BK], tl.float32)
    both = tl.zeros([BK], tl.float32)
    for first in range(0, V, BV):
        cols = first + tl.arange(0, BV)
        at = head[:, None] * V + cols[None, :]
        mask = inside & (cols < V)[None, :]
        value, d_out = tl.load(v + at, mask=mask, other=0.0), tl.load(do + at, mask=mask, other=0.0)
        at = place_of * K * V + channels[:, None] * V + cols[None, :]
        mask = (channels < K)[:, None] & (cols < V)[None, :]
        h_tile, d_tile = tl.load(seen + at, mask=mask, other=0.0), tl.load(d_seen + at, mask=mask, other=0.0)
        d_query += tl.dot(d_out, tl.trans(h_tile))
        d_key += tl.dot(value, tl.trans(d_tile))
        both += tl.sum(h_tile.to(tl.float32) * d_tile.to(tl.float32), 1)

    at = head[:, None] * K + channels[None, :]
    mask = inside & (channels < K)[None, :]
    q_tile, k_tile = tl.load(q_scaled + at, mask=mask, other=0.0), tl.load(k_scaled + at, mask=mask, other=0.0)
    x = decays(g, at, mask)
    end = tl.sum(x, 0)
    r = reference(end)
    # S_next dS_next, from what chunks read of both
    later = both * tl.exp(end - 2 * r) + tl.sum(k_tile.to(tl.float32) * d_key, 0)
    dA = tl.load(d_scores + head[:, None] * C + rows[None, :], mask=inside, other=0.0)
    d_query += tl.dot(dA, k_tile)
    d_key += tl.dot(tl.trans(dA), q_tile)
    d_decay = tl.cumsum(q_tile.to(tl.float32) * d_query - k_tile.to(tl.float32) * d_key, 0, reverse=True)
    G = tl.cumsum(x, 0)
    tl.store(dg + at, (d_decay + later[None, :]).to(dg.dtype.element_ty), mask=mask)
    tl.store(dq + at, (d_query * tl.exp(G - r[None, :]) * scale).to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, (d_key * tl.exp((end - r)[None, :] - G)).to(dk.dtype.element_ty), mask=mask)


@triton.jit
def row_of(x, j, C: tl.constexpr):
    """Row j of a tile."""
    return tl.sum(tl.where((tl.arange(0, C) == j)[:, None], x, 0.0), 0)


@triton.jit
def since(G, j, steep, C: tl.constexpr):
    """exp(G_i - G_j) in steep channels, 0 in the others; where i is before j, it is not asked for."""
    return tl.where(steep[None, :], tl.exp(tl.minimum(G - row_of(G, j, C)[None, :], 0.0)), 0.0)


@triton.jit
def steep_kernel(
    q, k, g, ends, scores, dq, dk, dg, borders, firsts, scale, T, NC, H,
    K: tl.constexpr, BACKWARD: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds to A of a chunk and head what its steep channels bring. BACKWARD: to dq, dk and dg, from dA."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, count = place(n, borders, firsts, T, NC, PACKED, C)
    if count <= 0:
        return
    rows = tl.arange(0, C)
    head = (start + rows).to(tl.int64) * H + h
    inside = (rows < count)[:, None]
    at_scores = head[:, None] * C + rows[None, :]
    added = tl.zeros([C, C], tl.float32)
    found = 0
    for first in range(0, K, BK):
        channels = first + tl.arange(0, BK)
        end = tl.load(ends + (n.to(tl.int64) * H + h) * K + channels, mask=channels < K, other=0.0)
        steep = end < -STEEP
        if tl.max(steep.to(tl.int32), 0) > 0:
            found = 1
            at = head[:, None] * K + channels[None, :]
            mask = inside & (channels < K)[None, :]
            G = tl.cumsum(decays(g, at, mask), 0)
            query = tl.load(q + at, mask=mask, other=0.0).to(tl.float32) * scale
            key = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
            if BACKWARD:
                dA = tl.load(scores + at_scores, mask=inside, other=0.0).to(tl.float32)
                d_query = tl.zeros([C, BK], tl.float32)
                d_key = tl.zeros([C, BK], tl.float32)
                dG = tl.zeros([C, BK], tl.float32)
                for j in range(count):
                    of_j = (rows == j)[:, None]
                    # of all queries with key j
                    with_j = tl.sum(tl.where((rows == j)[None, :], dA, 0.0), 1)[:, None] * since(G, j, steep, C)
                    d_query += with_j * row_of(key, j, C)[None, :]
                    d_key += tl.where(of_j, tl.sum(with_j * query, 0)[None, :], 0.0)
                    pairs = with_j * query * row_of(key, j, C)[None, :]
                    dG += pairs - tl.where(of_j, tl.sum(pairs, 0)[None, :], 0.0)
                d_decay = tl.cumsum(dG, 0, reverse=True)
                tl.store(dq + at, (tl.load(dq + at, mask=mask) + d_query * scale).to(dq.dtype.element_ty), mask=mask)
                tl.store(dk + at, (tl.load(dk + at, mask=mask) + d_key).to(dk.dtype.element_ty), mask=mask)
                tl.store(dg + at, (tl.load(dg + at, mask=mask) + d_decay).to(dg.dtype.element_ty), mask=mask)
            else:
                for j in range(count):
                    column = tl.sum(query * row_of(key, j, C)[None, :] * since(G, j, steep, C), 1)
                    added += tl.where((rows == j)[None, :] & (rows[:, None] >= j), column[:, None], 0.0)
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
            self.borders = cu_seqlens[1:].index_select(0, sequence)

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


def scaled(layout: Layout, q: Tensor, k: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q', k' and G_C [N, H, K]."""
    K = layout.size
    q_scaled, k_scaled = torch.empty_like(q), torch.empty_like(k)
    ends = q.new_empty(layout.chunks, layout.heads, K, dtype=torch.float32)
    by = sizes("scaled", K)
    grid = (layout.chunks * layout.heads * cdiv(K, by["BK"]),)
    scaled_kernel[grid](q, k, g, q_scaled, k_scaled, ends, scale=scale, **layout.where, **by)
    return q_scaled, k_scaled, ends


def scores(layout: Layout, x: Tensor, y: Tensor) -> Tensor:
    """tril(x y^T) of each chunk, [B, T, H, C]."""
    found = x.new_empty(*x.shape[:3], layout.chunk)
    grid = (layout.chunks * layout.heads,)
    scores_kernel[grid](x, y, found, **layout.where, **sizes("scores", x.shape[-1]))
    return found


def states(
    layout: Layout,
    x: Tensor,
    y: Tensor,
    ends: Tensor,
    initial: Tensor | None,
    output_final: bool,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What each chunk reads of the state before it, [N, H, K, V], and the last state."""
    K, V = x.shape[-1], y.shape[-1]
    seen = x.new_empty(layout.chunks, layout.heads, K, V)
    final = ends.new_empty(layout.sequences, layout.heads, K, V) if output_final else None
    by = sizes("states", K, V)
    grid = (layout.sequences * layout.heads * cdiv(K, by["BK"]) * cdiv(V, by["BV"]),)
    more = {"of_sequence": layout.of_sequence, "REVERSE": reverse}
    states_kernel[grid](x, y, ends, seen, initial, final, **more, **layout.where, **by)
    return seen, final


def outputs(layout: Layout, x: Tensor, y: Tensor, A: Tensor, seen: Tensor, reverse: bool = False) -> Tensor:
    out, V = torch.empty_like(y), y.shape[-1]
    by = sizes("outputs", layout.size, V)
    grid = (layout.chunks * layout.heads * cdiv(V, by["BV"]),)
    outputs_kernel[grid](x, y, A, seen, out, REVERSE=reverse, **layout.where, **by)
    return out


def gradients(
    layout: Layout, g, v, do, q_scaled, k_scaled, dA: Tensor, seen: Tensor, d_seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and g."""
    dq, dk, dg = torch.empty_like(q_scaled), torch.empty_like(k_scaled), torch.empty_like(g)
    by = sizes("gradients", layout.size, v.shape[-1])
    grid = (layout.chunks * layout.heads * cdiv(layout.size, by["BK"]),)
    gradients_kernel[grid](
        g, v, do, q_scaled, k_scaled, dA, seen, d_seen, dq, dk, dg, scale=scale, **layout.where, **by
    )
    return dq, dk, dg


def steep(layout: Layout, q, k, g, ends, found: Tensor, scale: float, gradients: tuple[Tensor, ...] = ()) -> None:
    """Add what steep channels bring to A, or, from dA, to `gradients` of q, k and g."""
    dq, dk, dg = gradients or (None, None, None)
    grid = (layout.chunks * layout.heads,)
    steep_kernel[grid](
        q, k, g, ends, found, dq, dk, dg, scale=scale, BACKWARD=bool(gradients), **layout.where,
        **sizes("steep", layout.size),
    )  # fmt: skip


class GatedLinearAttention(torch.autograd.Function):
    """Of what is as large as q or a state nothing is kept for the backward; it is computed again."""

    @staticmethod
    def forward(ctx, q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        initial = None if initial_state is None else initial_state.contiguous()
        layout = Layout(q, cu_seqlens)
        q_scaled, k_scaled, ends = scaled(layout, q, k, g, scale)
        A = scores(layout, q_scaled, k_scaled)
        steep(layout, q, k, g, ends, A, scale)
        seen, final = states(layout, k_scaled, v, ends, initial, output_final_state)
        ctx.save_for_backward(q, k, v, g, initial, A)
        ctx.layout, ctx.scale = layout, scale
        return outputs(layout, q_scaled, v, A, seen), final

    @staticmethod
    def backward(ctx, do, d_final):
        q, k, v, g, initial, A = ctx.saved_tensors
        layout, scale, do = ctx.layout, ctx.scale, do.contiguous()
        d_final = None if d_final is None else d_final.contiguous()
        q_scaled, k_scaled, ends = scaled(layout, q, k, g, scale)
        seen, _ = states(layout, k_scaled, v, ends, initial, False)
        d_seen, d_initial = states(layout, q_scaled, do, ends, d_final, initial is not None, reverse=True)
        dv = outputs(layout, k_scaled, do, A, d_seen, reverse=True)
        dA = scores(layout, do, v)
        dq, dk, dg = gradients(layout, g, v, do, q_scaled, k_scaled, dA, seen, d_seen, scale)
        steep(layout, q, k, g, ends, dA, scale, (dq, dk, dg))
        return dq, dk, dv, dg, None, d_initial, None, None


def gla(q, k, v, g, scale, initial_state=None, output_final_state=False, cu_seqlens=None):
    """As `ccq.ops.recurrence.recurrence`, for arguments it has checked."""
    return GatedLinearAttention.apply(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
