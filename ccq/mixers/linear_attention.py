"""The simplest writes, to show that the cleaning does not depend on them: none forgets by what it sees.

    linear attention    S_t = S_{t-1} + k_t v_t^T
    RetNet              S_t = exp(g) S_{t-1} + k_t v_t^T,    g = log(1 - 2^(-5-h)) in head h
    DeltaNet            S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,    beta_t = sigmoid(W_b x_t)

D hidden size, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import register
from ccq.mixers.gated_deltanet import high
from ccq.mixers.key_value import KeyValueMixer
from ccq.ops.precision import stats_dtype

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


@register("linear_attention")
class LinearAttention(KeyValueMixer):
    def gates(self, x: Float[Tensor, "*B D"], *projected: Tensor) -> tuple[None, None]:
        return None, None


@register("retnet")
class RetNet(KeyValueMixer):
    """RetNet's decays, from 1/32 of the state a token to 2^-(4+H); without its rotation of q and k."""

    def gates(self, x: Float[Tensor, "*B D"], *projected: Tensor) -> tuple[Float[Tensor, "*B H"], None]:
        head = torch.arange(self.heads, device=x.device, dtype=stats_dtype(x.dtype))
        return torch.log1p(-torch.exp2(-5 - head)).expand(*x.shape[:-1], -1), None


@register("deltanet")
class DeltaNet(KeyValueMixer):
    silu = True
    delta = True

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    @property
    def writers(self) -> list[nn.Linear]:
        return [self.b_proj]

    def gates(self, x: Float[Tensor, "*B D"], *projected: Float[Tensor, "*B H"]) -> tuple[None, Float[Tensor, "*B H"]]:
        (b,) = projected
        return None, high(b).sigmoid()
