"""Kimi Delta Attention: Gated DeltaNet whose keys forget channel by channel.

    S_t = diag(exp(g_t)) S_{t-1} + beta_t k_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)^T
    g_t = -exp(A_log) softplus(W_2 W_1 x_t + dt_bias), W_1 of rank V        beta_t = sigmoid(W_b x_t)

The output gate is of rank V too, and a sigmoid. D hidden size, H heads, F features of a key, V value size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import register
from ccq.mixers.gated_deltanet import high, inverse_softplus_of_times_, log_decay, log_uniform_
from ccq.mixers.key_value import KeyValueMixer, low_rank

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


@register("kda")
class KimiDeltaAttention(KeyValueMixer):
    silu = True
    delta = True
    low_rank_gate = True
    no_weight_decay = ("A_log", "dt_bias")
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H * F]

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.f_proj = low_rank(config.hidden_size, self.value_size, self.heads * self.features)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.own("A_log", self.heads)
        self.own("dt_bias", self.heads * self.features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.fill("A_log", lambda a: log_uniform_(a, 1.0, 16.0))
        self.fill("dt_bias", inverse_softplus_of_times_)

    @property
    def writers(self) -> list[nn.Linear]:
        return [self.f_proj[0], self.b_proj]  # type: ignore[list-item]

    def gates(
        self, x: Float[Tensor, "*B D"], *projected: Tensor
    ) -> tuple[Float[Tensor, "*B H F"], Float[Tensor, "*B H"]]:
        low, b = projected
        a = self.f_proj[1](low).unflatten(-1, (self.heads, -1))
        g, _ = log_decay(a, self.A_log[:, None], self.dt_bias.unflatten(0, (self.heads, -1)))
        return g, high(b).sigmoid()
