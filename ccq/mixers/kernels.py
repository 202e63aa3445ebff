"""Kernels of a decode step: one launch for what plain PyTorch takes many, since a step waits for each.

The Linears that see the same x: a step reads every weight once and multiplies it with a few rows. It waits for memory,
and for the memory to be asked again after each launch; one launch over many weights keeps it busy.

    project    y_i = x W_i^T                            for each W_i
    swiglu     y = silu(x W_gate^T) * (x W_up^T)

Sums are fp32, and a product is rounded to the dtype of x before anything is done with it, as if it had been stored.
How much a state forgets and writes:

    gates             g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)          the gated delta rule
    low_rank_decay    g = logsigmoid(W x + b) / normalizer                                    GLA, x of low rank

And the short convolutions of a layer (`conv_step`). M rows, K inputs, N outputs or channels, H heads, R the rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.choose import ROWS
from ccq.ops.clean.triton.configs import cdiv, power_of_2

BLOCK = 256  # channels of a program, where there are no products
PROJECT, SWIGLU = 32, 16  # outputs of a tile; of SwiGLU, each program has two tiles, of both weights


@triton.jit
def product(
    x, weight, first, M, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """[BM, BN] of x W^T, the outputs from `first`, rounded to the dtype of x."""
    rows = tl.arange(0, BM)
    cols = first + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        at = begin + tl.arange(0, BK)
        mask_x, mask_w = (rows < M)[:, None], (cols < N)[:, None]
        if K % BK != 0:
            mask_x, mask_w = mask_x & (at < K)[None, :], mask_w & (at < K)[None, :]
        a = tl.load(x + rows[:, None] * K + at[None, :], mask=mask_x, other=0.0)
        if N % BN == 0 and K % BK == 0:
            b = tl.load(weight + cols[:, None] * K + at[None, :])
        else:
            b = tl.load(weight + cols[:, None] * K + at[None, :], mask=mask_w, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=IP)
    return acc.to(x.dtype.element_ty)


@triton.jit
def store(y, value, first, M, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.arange(0, BM)
    cols = first + tl.arange(0, BN)
    tl.store(y + rows[:, None] * N + cols[None, :], value, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def project_kernel(
    x, weights, outputs, M, K: tl.constexpr, SIZES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """BN outputs of one of the weights. A branch for each, so that every load knows how its pointer is aligned."""
    block = tl.program_id(0)
    for i in tl.static_range(len(SIZES)):
        if (block >= 0) & (block < tl.cdiv(SIZES[i], BN)):
            value = product(x, weights[i], block * BN, M, K, SIZES[i], BM, BN, BK, IP)
            store(outputs[i], value, block * BN, M, SIZES[i], BM, BN)
        block -= tl.cdiv(SIZES[i], BN)


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(
    x, gate, up, y, M, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    rows = tl.arange(0, BM)
    cols = first + tl.arange(0, BN)
    g_acc = tl.zeros([BM, BN], tl.float32)
    u_acc = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        at = begin + tl.arange(0, BK)
        inside = at < K
        mask = (cols < N)[:, None] & inside[None, :]
        where = cols[:, None] * K + at[None, :]
        a = tl.load(x + rows[:, None] * K + at[None, :], mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        if N % BN == 0 and K % BK == 0:
            g, u = tl.load(gate + where), tl.load(up + where)
        else:
            g, u = tl.load(gate + where, mask=mask, other=0.0), tl.load(up + where, mask=mask, other=0.0)
        g_acc = tl.dot(a, tl.trans(g), g_acc, input_precision=IP)
        u_acc = tl.dot(a, tl.trans(u), u_acc, input_precision=IP)
    dtype = x.dtype.element_ty
    g, u = g_acc.to(dtype).to(tl.float32), u_acc.to(dtype).to(tl.float32)
    store(y, (g * tl.sigmoid(g) * u).to(dtype), first, M, N, BM, BN)


def options(x: Tensor, outputs: int) -> dict:
    return {"K": x.shape[1], "BM": ROWS, "BN": outputs, "BK": 128, "IP": "ieee", "num_warps": 4, "num_stages": 4}


def project(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x W^T [M, N] for x [M, K] of up to ROWS rows and each W [N, K], all dense."""
    x = x.contiguous()
    outputs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    sizes = tuple(weight.shape[0] for weight in weights)
    blocks = sum(cdiv(size, PROJECT) for size in sizes)
    project_kernel[(blocks,)](x, tuple(weights), tuple(outputs), x.shape[0], SIZES=sizes, **options(x, PROJECT))
    return outputs


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x gate^T) * (x up^T) [M, N] for x [M, K] of up to ROWS rows; gate and up [N, K], dense."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], gate.shape[0])
    blocks = cdiv(gate.shape[0], SWIGLU)
    swiglu_kernel[(blocks,)](x, gate, up, y, x.shape[0], N=gate.shape[0], **options(x, SWIGLU))
    return y


@triton.jit
def log1p(e):
    """log(1 + e) with the digits of a small e."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def gates_kernel(a, b, A_log, dt_bias, g, beta, size, H, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    head = at % H
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head, mask=inside, other=0.0)
    dt = tl.where(x > 20.0, x, log1p(tl.exp(tl.minimum(x, 20.0))))
    tl.store(g + at, -tl.exp(tl.load(A_log + head, mask=inside, other=0.0)) * dt, mask=inside)
    tl.store(beta + at, tl.sigmoid(tl.load(b + at, mask=inside, other=0.0).to(tl.float32)), mask=inside)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta in fp32, for a and b [..., H]. Not differentiable."""
    a, b = a.contiguous(), b.contiguous()
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    gates_kernel[(cdiv(a.numel(), BLOCK),)](a, b, A_log, dt_bias, g, beta, a.numel(), a.shape[-1], BLOCK=BLOCK)
    return g, beta


@triton.jit
def low_rank_decay_kernel(
    x, weight, bias, g, normalizer, N, R: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, BR)
    inside = cols < N
    low = tl.load(x + row * R + ranks, mask=ranks < R, other=0.0).to(tl.float32)
    where = cols[:, None] * R + ranks[None, :]
    w = tl.load(weight + where, mask=inside[:, None] & (ranks < R)[None, :], other=0.0).to(tl.float32)
    z = tl.sum(w * low[None, :], 1) + tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    z = z.to(x.dtype.element_ty).to(tl.float32)  # as if it had been stored
    y = (tl.minimum(z, 0.0) - log1p(tl.exp(-tl.abs(z)))) / normalizer
    tl.store(g + row * N + cols, y.to(g.dtype.element_ty), mask=inside)


def low_rank_decay(x: Tensor, weight: Tensor, bias: Tensor, normalizer: float) -> Tensor:
    """g [M, N] in the dtype of x [M, R], for weight [N, R] and bias [N]. Not differentiable."""
    x = x.contiguous()
    g = x.new_empty(x.shape[0], weight.shape[0])
    rank = x.shape[1]
    low_rank_decay_kernel[(x.shape[0], cdiv(weight.shape[0], BLOCK))](
        x, weight.contiguous(), bias, g, float(normalizer), weight.shape[0],
        R=rank, BR=power_of_2(rank), BLOCK=BLOCK,
    )  # fmt: skip
    return g


@triton.jit
def conv_step_kernel(
    xs, state, weights, bias, ys, x_strides, state_stride, SIZES: tl.constexpr,
    PAST: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one of the convolutions; their channels follow each other in the state."""
    sequence = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    state += sequence * state_stride
    for i in tl.static_range(len(SIZES)):
        if (block >= 0) & (block < tl.cdiv(SIZES[i], BLOCK)):
            channel = block * BLOCK + tl.arange(0, BLOCK)
            inside = channel < SIZES[i]
            past = state + channel * PAST
            weight = weights[i] + channel * (PAST + 1)
            new = tl.load(xs[i] + sequence * x_strides[i] + channel, mask=inside, other=0.0)
            total = new.to(tl.float32) * tl.load(weight + PAST, mask=inside, other=0.0).to(tl.float32)
            for j in tl.static_range(PAST):
                old = tl.load(past + j, mask=inside, other=0.0)
                total += old.to(tl.float32) * tl.load(weight + j, mask=inside, other=0.0).to(tl.float32)
                if j > 0:  # each input moves one place to the left
                    tl.store(past + j - 1, old, mask=inside)
            if PAST > 0:
                tl.store(past + PAST - 1, new, mask=inside)
            if HAS_BIAS:
                total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
            if SILU:
                total = total * tl.sigmoid(total)
            tl.store(ys[i] + sequence * SIZES[i] + channel, total, mask=inside)
        block -= tl.cdiv(SIZES[i], BLOCK)
        state += SIZES[i] * PAST


def conv_step(
    xs: Sequence[Tensor], state: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None, silu: bool = True
) -> list[Tensor]:
    """y [B, C] for each x [B, C] and weight [C, 1, W]; state [B, sum of C, W-1] is updated in place.

    The state may be channels of a larger one; `bias` [C] is that of a convolution alone.
    """
    if state.numel() and state.stride()[1:] != (state.shape[2], 1):
        raise ValueError(f"state: expected dense channels, got strides {state.stride()} for {tuple(state.shape)}")
    assert bias is None or len(xs) == 1
    xs = tuple(x if x.stride(1) == 1 else x.contiguous() for x in xs)
    ys = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs)
    sizes = tuple(x.shape[1] for x in xs)
    grid = (xs[0].shape[0], sum(cdiv(size, BLOCK) for size in sizes))
    conv_step_kernel[grid](
        xs, state, tuple(weights), bias, ys, tuple(x.stride(0) for x in xs), state.stride(0), SIZES=sizes,
        PAST=weights[0].shape[-1] - 1, HAS_BIAS=bias is not None, SILU=silu, BLOCK=BLOCK,
    )  # fmt: skip
    return list(ys)
