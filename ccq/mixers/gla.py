"""Gated linear attention: each channel of the key forgets at its own, data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T        g_t = logsigmoid(W_2 W_1 x_t + b) / 16, W_1 of rank 16

D hidden size, H heads, F features of a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import register
from ccq.mixers.key_value import KeyValueMixer

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


@register("gla")
class GatedLinearAttention(KeyValueMixer):
    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.normalizer = config.gate_normalizer
        self.gk_proj = nn.Sequential(
            nn.Linear(config.hidden_size, config.gate_low_rank, bias=False),
            nn.Linear(config.gate_low_rank, self.heads * self.features),
        )

    def write(self, x: Float[Tensor, "*B D"]) -> tuple[Float[Tensor, "*B H F"], None]:
        return F.logsigmoid(self.gk_proj(x)).unflatten(-1, (self.heads, -1)) / self.normalizer, None
