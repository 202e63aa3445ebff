"""The decode step of the short convolution in one launch: plain PyTorch takes five, for three convolutions a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _step(
    x, state, weight, bias, y, x_stride, state_stride, C,
    PAST: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    state += sequence * state_stride + channel * PAST
    weight += channel * (PAST + 1)
    new = tl.load(x + sequence * x_stride + channel, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(weight + PAST, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(PAST):
        old = tl.load(state + i, mask=inside, other=0.0)
        total += old.to(tl.float32) * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        if i > 0:  # each input moves one place to the left
            tl.store(state + i - 1, old, mask=inside)
    if PAST > 0:
        tl.store(state + PAST - 1, new, mask=inside)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(y + sequence * C + channel, total, mask=inside)


def step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = True) -> Tensor:
    """y [B, C] for x [B, C], state [B, C, W-1] (updated in place; channels of a larger one), weight [C, 1, W]."""
    batch, channels = x.shape
    if state.numel() and state.stride()[1:] != (state.shape[2], 1):
        raise ValueError(f"state: expected dense channels, got strides {state.stride()} for {tuple(state.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (batch, triton.cdiv(channels, BLOCK))
    _step[grid](
        x, state, weight, bias, y, x.stride(0), state.stride(0), channels,
        PAST=weight.shape[-1] - 1, HAS_BIAS=bias is not None, SILU=silu, BLOCK=BLOCK,
    )  # fmt: skip
    return y
