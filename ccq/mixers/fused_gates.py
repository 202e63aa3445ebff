"""How much a state forgets and writes, in one launch: plain PyTorch takes eight or three, and a step waits for each.

    g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)          the gated delta rule
    g = logsigmoid(W x + b) / normalizer                                    gated linear attention, x of low rank

H heads, M rows, R the rank, N channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.clean.triton.configs import cdiv, power_of_2

BLOCK = 256


@triton.jit
def _gates(a, b, A_log, dt_bias, g, beta, size, H, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    head = at % H
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head, mask=inside, other=0.0)
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(1 + e) with the digits of a small e
    softplus = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    dt = tl.where(x > 20.0, x, softplus)
    tl.store(g + at, -tl.exp(tl.load(A_log + head, mask=inside, other=0.0)) * dt, mask=inside)
    tl.store(beta + at, tl.sigmoid(tl.load(b + at, mask=inside, other=0.0).to(tl.float32)), mask=inside)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta in fp32, for a and b [..., H]. Not differentiable."""
    a, b = a.contiguous(), b.contiguous()
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    _gates[(cdiv(a.numel(), BLOCK),)](a, b, A_log, dt_bias, g, beta, a.numel(), a.shape[-1], BLOCK=BLOCK)
    return g, beta


@triton.jit
def _low_rank_decay(
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
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))  # with the digits of a small e
    y = (tl.minimum(z, 0.0) - log1p) / normalizer
    tl.store(g + row * N + cols, y.to(g.dtype.element_ty), mask=inside)


def low_rank_decay(x: Tensor, weight: Tensor, bias: Tensor, normalizer: float) -> Tensor:
    """g [M, N] in the dtype of x [M, R], for weight [N, R] and bias [N]. Not differentiable."""
    x = x.contiguous()
    g = x.new_empty(x.shape[0], weight.shape[0])
    rank = x.shape[1]
    _low_rank_decay[(x.shape[0], cdiv(weight.shape[0], BLOCK))](
        x, weight.contiguous(), bias, g, float(normalizer), weight.shape[0],
        R=rank, BR=power_of_2(rank), BLOCK=BLOCK,
    )  # fmt: skip
    return g
