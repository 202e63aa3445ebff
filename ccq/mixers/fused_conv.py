"""The decode step of short convolutions in one launch: plain PyTorch takes five, for each of the three of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.clean.triton.configs import cdiv

BLOCK = 256


@triton.jit
def _step(
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


def step(
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
    _step[grid](
        xs, state, tuple(weights), bias, ys, tuple(x.stride(0) for x in xs), state.stride(0), SIZES=sizes,
        PAST=weights[0].shape[-1] - 1, HAS_BIAS=bias is not None, SILU=silu, BLOCK=BLOCK,
    )  # fmt: skip
    return list(ys)
