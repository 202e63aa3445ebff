"""Gated linear attention: each channel of the key forgets at its own, data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T        g_t = logsigmoid(W_2 W_1 x_t + b) / 16, W_1 of rank 16

D hidden size, H heads, F features of a key, R the rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import register
from ccq.mixers.key_value import KeyValueMixer, low_rank
from ccq.mixers.linear import few_rows
from ccq.mixers.norms import fused
from ccq.ops.choose import choose

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


@register("gla")
class GatedLinearAttention(KeyValueMixer):
    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.normalizer = config.gate_normalizer
        self.gk_proj = low_rank(config.hidden_size, config.gate_low_rank, self.heads * self.features, bias=True)

    @property
    def low_rank(self) -> list[nn.Linear]:
        return list(self.gk_proj)  # type: ignore[arg-type]

    @property
    def writers(self) -> list[nn.Linear]:
        return [self.low_rank[0]]

    def gates(
        self, x: Float[Tensor, "*B D"], *projected: Float[Tensor, "*B R"]
    ) -> tuple[Float[Tensor, "*B H F"], None]:
        (low,) = projected
        last = self.low_rank[1]
        if choose("linear", few_rows(low, [last]), self.config.backend) == "triton":
            from ccq.mixers import fused_gates  # imports Triton

            g = fused_gates.low_rank_decay(low, last.weight, last.bias, self.normalizer)
            return g.unflatten(-1, (self.heads, -1)), None
        raw = last(low).unflatten(-1, (self.heads, -1))
        if fused(raw):
            from fla.modules.activations import logsigmoid

            return logsigmoid(raw, self.normalizer), None
        return F.logsigmoid(raw) / self.normalizer, None
