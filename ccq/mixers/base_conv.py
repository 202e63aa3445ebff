"""zoology's BaseConv: a short convolution times a projection. Its recall models have one before the mixer they compare.

    y_t = (sum_{i<W} weight_i x_{t-W+1+i} + bias) * (W_p x_t + b_p) + x_t

It puts each key beside its value, so that what the mixer has to do is to store and to find. Its projection of a channel
cannot mix tokens, so the recall itself is the mixer's.

B batch, N sequences (B of them, or packed ones), T tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ccq.mixers.base import LayerState, Mixer, Sequences
from ccq.mixers.conv import ShortConv, final_state

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


class BaseConv(Mixer):
    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.base_conv_size is not None
        self.hidden, self.width = config.hidden_size, config.base_conv_size
        self.proj = nn.Linear(self.hidden, self.hidden)
        # the variance of nn.Conv1d's start, as zoology leaves it: at initializer_range it would begin by doing nothing
        self.conv1d = ShortConv(self.hidden, self.width, bias=True, std=(3 * self.width) ** -0.5, silu=False)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        seqs: Sequences,
        state: LayerState | None = None,
        output_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        past = None if state is None else state["conv"]
        new = {"conv": final_state(x, seqs, self.width, past)} if output_state else None
        return self.conv1d(x, seqs, past) * self.proj(x) + x, new

    @torch.no_grad()
    def step(
        self, x: Float[Tensor, "B D"], state: LayerState, positions: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B D"]:
        return self.conv1d.step(x, state["conv"], self.config.backend) * self.proj(x) + x

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        return {"conv": torch.zeros(n, self.hidden, self.width - 1, device=device, dtype=dtype)}

    def flops(self, length: int) -> float:
        return 2.0 * (self.width + 1) * self.hidden
