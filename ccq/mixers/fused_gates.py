"""What the delta rule writes with, in one launch: plain PyTorch takes eight, and a decode step waits for each.

    g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)

H heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    _gates[(triton.cdiv(a.numel(), BLOCK),)](a, b, A_log, dt_bias, g, beta, a.numel(), a.shape[-1], BLOCK=BLOCK)
    return g, beta
