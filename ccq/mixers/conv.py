"""The short convolution before the recurrence: each channel looks at its last W tokens. And zoology's BaseConv.

    y_t = silu( sum_{i<W} weight_i x_{t-W+1+i} + bias )          (without the SiLU in BaseConv)

B batch, N sequences (B of them, or packed ones), T tokens, C channels, W width, D hidden size. The state holds the last
W - 1 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import LayerState, Mixer, Sequences
from ccq.ops.choose import Call, choose
from ccq.ops.precision import high

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


class ShortConv(nn.Module):
    """Causal depthwise convolution of width W, then SiLU; it does not look over the border of a sequence."""

    def __init__(self, channels: int, width: int, bias: bool = False, std: float = 0.02, silu: bool = True) -> None:
        super().__init__()
        self.std, self.silu = std, silu
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Float[Tensor, "B T C"], seqs: Sequences, state: Float[Tensor, "N C W1"] | None = None
    ) -> Float[Tensor, "B T C"]:
        """y, continuing from `state`; `final_state` gives the next one."""
        past = self.weight.shape[-1] - 1
        how = choose("conv", Call(x.device, x.dtype, width=past + 1))
        if how == "gluon" and state is None:
            return GluonConv.apply(x, self.weight.squeeze(1), self.bias, self.silu, seqs.cu_seqlens)
        if how in ("gluon", "fla"):
            from fla.modules.causal_conv1d import causal_conv1d

            if state is not None:  # fla keeps W inputs and reads the last W - 1 of them
                state = F.pad(state, (1, 0))
            weight, activation = self.weight.squeeze(1), "silu" if self.silu else None
            return causal_conv1d(
                x, weight, self.bias, initial_state=state, activation=activation, cu_seqlens=seqs.cu_seqlens
            )[0]
        length, channels = x.shape[1:]
        before = x.new_zeros(seqs.count, past, channels) if state is None else state.mT.to(x.dtype)
        if seqs.cu_seqlens is None:
            padded, tokens = torch.cat([before, x], 1), None
        else:  # each sequence behind its own W - 1 earlier inputs
            sequence = seqs.locate(length, x.device)[0][0]
            tokens = torch.arange(length, device=x.device) + past * (sequence + 1)
            starts = seqs.cu_seqlens[:-1, None] + past * torch.arange(seqs.count, device=x.device)[:, None]
            rows = (starts + torch.arange(past, device=x.device)).flatten()
            padded = x.new_zeros(1, length + past * seqs.count, channels)
            padded = padded.index_copy(1, tokens, x).index_copy(1, rows, before.flatten(0, 1)[None])
        weight, padded = high(self.weight), high(padded)
        y = padded[:, past:] * weight[:, 0, past]
        for i in range(past):
            y = y + padded[:, i : padded.shape[1] - past + i] * weight[:, 0, i]
        return self.finish(y if tokens is None else y.index_select(1, tokens - past), x.dtype)

    def finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Bias and SiLU of the sum, which is in fp32 or fp64."""
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return (F.silu(y) if self.silu else y).to(dtype)


class GluonConv(torch.autograd.Function):
    """fla's convolution in Gluon, which computes in the backward again what it needs. fla itself takes it only where an
    environment variable says so, and never in a process that has joined others."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None
    ) -> Tensor:
        from fla.modules.causal_conv1d.backends.gluon import causal_conv1d_fwd_gluon

        ctx.save_for_backward(x, weight, bias, cu_seqlens)
        ctx.activation = "silu" if silu else None
        return causal_conv1d_fwd_gluon(x, weight, bias, activation=ctx.activation, cu_seqlens=cu_seqlens)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fla.modules.causal_conv1d.backends.gluon import causal_conv1d_bwd_gluon

        x, weight, bias, cu_seqlens = ctx.saved_tensors
        found = causal_conv1d_bwd_gluon(x, dy, None, weight, bias, activation=ctx.activation, cu_seqlens=cu_seqlens)
        return *found[:3], None, None


def step_together(
    convs: Sequence[ShortConv], xs: Sequence[Float[Tensor, "B C"]], state: Float[Tensor, "B C2 W1"], backend: str
) -> list[Tensor]:
    """y [B, C] of each for one more token of the sequences; `state` is updated in place.

    The convolutions are of one width, without bias if several; their channels follow each other in the state.
    """
    if choose("conv_step", Call(xs[0].device, xs[0].dtype), backend) == "triton":
        from ccq.mixers import kernels  # imports Triton

        return kernels.conv_step(xs, state, [conv.weight for conv in convs], convs[0].bias, convs[0].silu)
    ys = []
    for conv, x, past in zip(convs, xs, state.split([x.shape[-1] for x in xs], 1), strict=True):
        window = torch.cat([past, x[..., None].to(past.dtype)], -1)
        past.copy_(window[..., 1:])
        ys.append(conv.finish((high(window) * high(conv.weight.squeeze(1))).sum(-1), x.dtype))
    return ys


def convolve(
    convs: Sequence[ShortConv],
    xs: list[Tensor],
    seqs: Sequences | None,
    state: Any,
    new: LayerState | None,
    backend: str,
) -> list[Tensor]:
    """The convolutions of a mixer, of `step_together`, as `Mixer.run` has them."""
    if seqs is None:
        return step_together(convs, xs, state["conv"], backend)
    pasts = [None] * len(xs) if state is None else state["conv"].split([x.shape[-1] for x in xs], 1)
    if new is not None:
        width = convs[0].weight.shape[-1]
        new["conv"] = torch.cat([final_state(x, seqs, width, past) for x, past in zip(xs, pasts, strict=True)], 1)
    return [conv(x, seqs, past) for conv, x, past in zip(convs, xs, pasts, strict=True)]


def final_state(
    x: Float[Tensor, "B T C"], seqs: Sequences, width: int, state: Float[Tensor, "N C W1"] | None = None
) -> Float[Tensor, "N C W1"]:
    """The last W - 1 inputs of each sequence, those of `state` counted, zeros before the first; T >= 1."""
    past, length, channels = width - 1, x.shape[1], x.shape[2]
    before = x.new_zeros(seqs.count, past, channels) if state is None else state.mT.to(x.dtype)
    if seqs.cu_seqlens is None:
        inputs = torch.cat([before, x[:, max(0, length - past) :]], 1)
        return inputs[:, inputs.shape[1] - past :].mT.contiguous()
    begins, ends = seqs.cu_seqlens[:-1, None], seqs.cu_seqlens[1:, None]
    index = ends - past + torch.arange(past, device=x.device)  # [N, W-1] in x, or before its sequence began
    earlier = (index - begins + past).clamp(0, past - 1)[..., None].expand(-1, -1, channels)
    inputs = torch.where((index >= begins)[..., None], x[0, index.clamp(min=0)], before.gather(1, earlier))
    return inputs.mT.contiguous()


class BaseConv(Mixer):
    """A short convolution times a projection. zoology's recall models have one before the mixer they compare.

        y_t = (sum_{i<W} weight_i x_{t-W+1+i} + bias) * (W_p x_t + b_p) + x_t

    It puts each key beside its value, so that what the mixer has to do is to store and to find. Its projection of a
    channel cannot mix tokens, so the recall itself is the mixer's.
    """

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.base_conv_size is not None
        self.hidden, self.width = config.hidden_size, config.base_conv_size
        self.proj = nn.Linear(self.hidden, self.hidden)
        # the variance of nn.Conv1d's start, as zoology leaves it: at initializer_range it would begin by doing nothing
        self.conv1d = ShortConv(self.hidden, self.width, bias=True, std=(3 * self.width) ** -0.5, silu=False)

    def run(self, x: Tensor, seqs: Sequences | None, state: Any, new: LayerState | None) -> Tensor:
        (y,) = convolve([self.conv1d], [x], seqs, state, new, self.config.backend)
        return y * self.proj(x) + x

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        return {"conv": torch.zeros(n, self.hidden, self.width - 1, device=device, dtype=dtype)}

    def flops(self, length: int) -> float:
        return 2.0 * (self.width + 1) * self.hidden
