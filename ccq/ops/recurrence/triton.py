"""`decode_step` in Triton, in two launches: the covariance, then the backbone's state. A read of several steps has one
more between them for each step after the first.

The states are the traffic: K x V fp32 a head, read and written, and K x K of the covariance, of which only the lower
blocks are touched. Each launch is split finely, so that few heads still fill the chip, and no program reads what
another of the same launch writes: the first leaves what it read of C q as partial sums, one a block, and the second
adds them up, having fetched its part of the state while the first still ran. Nothing is kept between calls, so that
steps may be captured, and run on several streams.

P = NB (NB + 1) / 2 lower blocks of BB x BB a head; the rest as in decode.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ccq.ops.checks import weighs
from ccq.ops.choose import arch
from ccq.ops.clean.triton.configs import cdiv, power_of_2
from ccq.ops.clean.triton.launch import block_size, processors
from ccq.ops.clean.triton.reads import SMALLEST
from ccq.ops.clean.triton.scans import lower_block
from ccq.ops.precision import EPS
from ccq.ops.recurrence.decode import Cleaning

BLOCK = 64  # of the covariance's side


@triton.jit
def covariance_kernel(
    q, k, lam, raw, weight, bias, log_decay, second_moment, key_sum, count, partial, H, K, R, D, eps,
    UNIT: tl.constexpr, ROUND: tl.constexpr, GATE: tl.constexpr, DECAY: tl.constexpr, WEIGHTS: tl.constexpr,
    OVERLAP: tl.constexpr, BD: tl.constexpr,
    NB: tl.constexpr, NR: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """C += k k^T and s += k on one lower block, and what it adds to C q. A head's last program: its gate, and t.

    DECAY: all of them fade first, by the mean of D log-decays. WEIGHTS: t is a weight, one a head, and no count.
    """
    if OVERLAP:
        gdc_launch_dependents()
    nh = tl.program_id(0).to(tl.int64)
    decay = 1.0
    if DECAY:
        part = tl.arange(0, BD)
        parts = tl.load(log_decay + nh * D + part, mask=part < D, other=0.0).to(tl.float32)
        decay = tl.exp(tl.sum(parts, 0) / D)
    if tl.program_id(1) == NB * (NB + 1) // 2:
        h = nh % H
        if GATE:
            at = tl.arange(0, NR)[:, None] * BK + tl.arange(0, BK)[None, :]
            x = tl.load(raw + (nh // H) * R + at, mask=at < R, other=0.0).to(tl.float32)
            x *= tl.load(weight + h * R + at, mask=at < R, other=0.0)
            tl.store(lam + nh, tl.sigmoid(tl.sum(tl.sum(x, 0), 0) + tl.load(bias + h)))
        if WEIGHTS:
            tl.store(count + nh, tl.load(count + nh) * decay + 1.0)
        elif h == 0:
            seen = count + nh // H
            tl.store(seen, tl.load(seen) + 1)
        return
    i, j = lower_block(tl.program_id(1))
    rows = i * BB + tl.arange(0, BB)
    cols = j * BB + tl.arange(0, BB)
    where = second_moment + nh * K * K + rows[:, None] * K + cols[None, :]
    mask = (rows < K)[:, None] & (cols < K)[None, :]
    block = tl.load(where, mask=mask, other=0.0)
    key_i = tl.load(k + nh * K + rows, mask=rows < K, other=0.0).to(tl.float32)
    key_j = tl.load(k + nh * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    if UNIT:
        every = tl.arange(0, BK)
        key = tl.load(k + nh * K + every, mask=every < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(key * key, 0) + eps)
        key_i *= scale
        key_j *= scale
    if ROUND:  # the statistics see the key as it is written
        key_i = key_i.to(k.dtype.element_ty).to(tl.float32)
        key_j = key_j.to(k.dtype.element_ty).to(tl.float32)
    if DECAY:
        block *= decay
    block += key_i[:, None] * key_j[None, :]
    tl.store(where, block, mask=mask)

    query_i = tl.load(q + nh * K + rows, mask=rows < K, other=0.0).to(tl.float32)
    query_j = tl.load(q + nh * K + cols, mask=cols < K, other=0.0).to(tl.float32)
    store_products(partial + nh * NB * K, block, query_i, query_j, i, j, rows, cols, K)
    if i == j:
        total = tl.load(key_sum + nh * K + rows, mask=rows < K, other=0.0)
        if DECAY:
            total *= decay
        tl.store(key_sum + nh * K + rows, total + key_i, mask=rows < K)


@triton.jit
def store_products(partial, block, query_i, query_j, i, j, rows, cols, K):
    """What block (i, j) of C and its mirror image add to C q."""
    tl.store(partial + j * K + rows, tl.sum(block * query_j[None, :], 1), mask=rows < K)
    if i != j:
        tl.store(partial + i * K + cols, tl.sum(block * query_i[:, None], 0), mask=cols < K)


@triton.jit
def cleaned(
    query, q_rnorm, lam, key_sum, count, partial, nh, H, K, rows,
    CENTRED: tl.constexpr, PROJECTED: tl.constexpr, WEIGHTS: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The query after one step; `partial` are of it as it came, without its norm's inverse q_rnorm."""
    if WEIGHTS:
        t = tl.load(count + nh)
    else:
        t = tl.load(count + nh // H).to(tl.float32)
    y = tl.zeros([BK], tl.float32)
    for block in tl.static_range(NB):
        y += tl.load(partial + (nh * NB + block) * K + rows, mask=rows < K, other=0.0)
    y *= q_rnorm / t
    if CENTRED:
        total = tl.load(key_sum + nh * K + rows, mask=rows < K, other=0.0) / t
        y -= total * tl.sum(total * query, 0)
    taken = tl.load(lam + nh).to(tl.float32)
    if PROJECTED:
        taken *= tl.sum(query * y, 0) / (tl.sum(y * y, 0) + SMALLEST)
    return query - taken * y


@triton.jit
def again_kernel(
    q, lam, second_moment, key_sum, count, partial, q_out, partial_out, H, K, eps,
    UNIT: tl.constexpr, CENTRED: tl.constexpr, PROJECTED: tl.constexpr, WEIGHTS: tl.constexpr,
    NB: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The query after one step, as it is rounded between steps, and what one lower block adds to its product with C."""
    nh = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, BK)
    query = tl.load(q + nh * K + every, mask=every < K, other=0.0).to(tl.float32)
    q_rnorm = 1.0
    if UNIT:
        q_rnorm = tl.rsqrt(tl.sum(query * query, 0) + eps)
        query *= q_rnorm
    query = cleaned(
        query, q_rnorm, lam, key_sum, count, partial, nh, H, K, every, CENTRED, PROJECTED, WEIGHTS, NB, BK
    ).to(q_out.dtype.element_ty)
    i, j = lower_block(tl.program_id(1))
    if i == 0:
        tl.store(q_out + nh * K + every, query, mask=every < K)
    rows = i * BB + tl.arange(0, BB)
    cols = j * BB + tl.arange(0, BB)
    at = second_moment + nh * K * K + rows[:, None] * K + cols[None, :]
    block = tl.load(at, mask=(rows < K)[:, None] & (cols < K)[None, :], other=0.0)
    query = query.to(tl.float32)[None, :]
    query_i = tl.sum(tl.where(rows[:, None] == every[None, :], query, 0.0), 1)
    query_j = tl.sum(tl.where(cols[:, None] == every[None, :], query, 0.0), 1)
    store_products(partial_out + nh * NB * K, block, query_i, query_j, i, j, rows, cols, K)


@triton.jit
def read_kernel(
    q, k, v, g, beta, recurrent, o, lam, key_sum, count, partial, H, G, K, V, scale, eps,
    UNIT: tl.constexpr, UNIT_Q: tl.constexpr, CLEAN: tl.constexpr, CENTRED: tl.constexpr, PROJECTED: tl.constexpr,
    WEIGHTS: tl.constexpr, SCALAR: tl.constexpr, CHANNEL: tl.constexpr,
    DELTA: tl.constexpr, OVERLAP: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV columns of one head's state: decay, write, and read with the cleaned query."""
    nv = tl.program_id(0).to(tl.int64)
    nh = nv // G
    rows = tl.arange(0, BK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = rows < K
    where = recurrent + nv * K * V + rows[:, None].to(tl.int64) * V + cols[None, :]
    mask = inside[:, None] & (cols < V)[None, :]
    state = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(v + nv * V + cols, mask=cols < V, other=0.0).to(tl.float32)
    query = tl.load(q + nh * K + rows, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(k + nh * K + rows, mask=inside, other=0.0).to(tl.float32)
    if SCALAR:
        state *= tl.exp(tl.load(g + nv).to(tl.float32))
    if CHANNEL:
        state *= tl.exp(tl.load(g + nh * K + rows, mask=inside, other=0.0).to(tl.float32))[:, None]
    q_rnorm = 1.0
    if UNIT_Q:
        q_rnorm = tl.rsqrt(tl.sum(query * query, 0) + eps)
        query *= q_rnorm
    if UNIT:
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        key = key.to(k.dtype.element_ty).to(tl.float32)
    if OVERLAP:  # all above was there before the covariance's launch; what follows it wrote
        gdc_wait()
    if CLEAN:
        query = cleaned(
            query, q_rnorm, lam, key_sum, count, partial, nh, H, K, rows, CENTRED, PROJECTED, WEIGHTS, NB, BK
        )
    if UNIT_Q or CLEAN:
        query = query.to(q.dtype.element_ty).to(tl.float32)
    if DELTA:
        value = tl.load(beta + nv).to(tl.float32) * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * value[None, :]
    tl.store(where, state, mask=mask)
    out = scale * tl.sum(state * query[:, None], 0)
    tl.store(o + nv * V + cols, out.to(o.dtype.element_ty), mask=cols < V)


def update_covariance(q: Tensor, k: Tensor, cleaning: Cleaning) -> tuple[Tensor, Tensor]:
    """C, s and t of the covariance include this token; lam, and C q in parts [B, H, NB, K]."""
    batch, heads, size = q.shape
    state = cleaning.covariance
    second_moment = state.lower_triangle()
    for name, x in (("second_moment", second_moment), ("key_sum", state.key_sum), ("count", state.count)):
        if not x.is_contiguous():
            raise ValueError(f"covariance.{name}: expected a contiguous tensor to update in place, got a strided one")
    raw = (q if cleaning.raw is None else cleaning.raw).contiguous()
    weight, bias = (None, None) if cleaning.gate is None else (x.contiguous() for x in cleaning.gate)
    gated = cleaning.lam is None
    log_decay = None if cleaning.log_decay is None else cleaning.log_decay.contiguous()
    lam = q.new_empty(batch, heads, dtype=torch.float32) if cleaning.lam is None else cleaning.lam.contiguous()
    block_k, width = block_size(size), raw.numel() // batch
    side = min(BLOCK, block_k)
    blocks = cdiv(size, side)
    partial = q.new_empty(batch, heads, blocks, size, dtype=torch.float32)
    parts = 1 if log_decay is None else log_decay.numel() // (batch * heads)
    covariance_kernel[(batch * heads, blocks * (blocks + 1) // 2 + 1)](
        q, k, lam, raw, weight, bias, log_decay, second_moment, state.key_sum, state.count, partial,
        heads, size, width, parts, EPS,
        UNIT=cleaning.normalize != "none", ROUND=cleaning.normalize == "unit", GATE=gated,
        DECAY=log_decay is not None, WEIGHTS=weighs(state), OVERLAP=arch(q.device).overlaps, BD=power_of_2(parts),
        NB=blocks, NR=power_of_2(cdiv(width, block_k)), BB=side, BK=block_k,
        num_warps=warps(block_k),
    )  # fmt: skip
    return lam, partial


def step_again(q: Tensor, lam: Tensor, partial: Tensor, cleaning: Cleaning, unit: bool) -> tuple[Tensor, Tensor]:
    """The query after one step, and its products with C in parts."""
    batch, heads, size = q.shape
    state, block_k, blocks = cleaning.covariance, block_size(size), partial.shape[2]
    made = torch.empty_like(q), torch.empty_like(partial)
    again_kernel[(batch * heads, blocks * (blocks + 1) // 2)](
        q, lam, state.lower_triangle(), state.key_sum, state.count, partial, *made, heads, size, EPS,
        UNIT=unit, CENTRED=cleaning.centred, PROJECTED=cleaning.step == "projected", WEIGHTS=weighs(state),
        NB=blocks, BB=min(BLOCK, block_k), BK=block_k, num_warps=warps(block_k),
    )  # fmt: skip
    return made


def decode_step(
    q: Tensor, k: Tensor, v: Tensor, recurrent: Tensor, g: Tensor | None, beta: Tensor | None,
    scale: float, unit_qk: bool, cleaning: Cleaning | None,
) -> Tensor:  # fmt: skip
    """As `ccq.ops.decode_step`."""
    if not recurrent.is_contiguous():
        raise ValueError("recurrent: expected a contiguous tensor to update in place, got a strided one")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, beta = (None if x is None else x.contiguous() for x in (g, beta))
    batch, heads, size = q.shape
    value_heads, value_size = v.shape[1:]
    lam = partial = state = None
    unit_key = unit_qk
    if cleaning is not None:
        state = cleaning.covariance
        lam, partial = update_covariance(q, k, cleaning)
        unit_key = unit_qk = cleaning.normalize == "unit"
        for _ in range(cleaning.steps - 1):
            q, partial, unit_qk = *step_again(q, lam, partial, cleaning, unit_qk), False
    out = torch.empty_like(v)
    # a step in between reads what the launch before it wrote, so the one after it waits for both
    overlap = cleaning is not None and cleaning.steps == 1 and arch(q.device).overlaps
    block_k = block_size(size)
    block_v = columns(batch * value_heads, value_size, q.device)
    read_kernel[(batch * value_heads, cdiv(value_size, block_v))](
        q, k, v, g, beta, recurrent, out,
        lam, None if state is None else state.key_sum, None if state is None else state.count, partial,
        heads, value_heads // heads, size, value_size, scale, EPS,
        UNIT=unit_key, UNIT_Q=unit_qk, CLEAN=cleaning is not None, CENTRED=cleaning is not None and cleaning.centred,
        PROJECTED=cleaning is not None and cleaning.step == "projected", WEIGHTS=state is not None and weighs(state),
        SCALAR=g is not None and g.ndim == 2, CHANNEL=g is not None and g.ndim == 3, DELTA=beta is not None,
        OVERLAP=overlap, NB=1 if partial is None else partial.shape[2], BK=block_k, BV=block_v,
        num_warps=warps(block_k), **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return out


def warps(block_k: int) -> int:
    """One where a key is short: several would hold its channels twice over, and write them to shared memory so."""
    return 4 if block_k >= 256 else 1


def columns(heads: int, value_size: int, device: torch.device) -> int:
    """BV: 32 values a program are whole 128-byte lines; half of them where that would leave the chip half empty."""
    return 16 if heads * cdiv(value_size, 32) < 2 * processors(device) else 32
