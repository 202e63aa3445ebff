"""Gated DeltaNet: the state forgets at one rate a head, and what k stored before is replaced, not added to.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    g_t = -exp(A_log) softplus(W_a x_t + dt_bias)        beta_t = sigmoid(W_b x_t)

Kimi Delta Attention (KDA) is the same with keys that forget channel by channel, diag(exp(g_t)) for exp(g_t): W_2 W_1
stands for W_a, W_1 of rank V. Its output gate is of rank V too, and a sigmoid.

D hidden size, H heads, F features of a key, V value size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import register
from ccq.mixers.key_value import KeyValueMixer, low_rank
from ccq.ops.choose import Call, choose, unwatched
from ccq.ops.precision import stats_dtype

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


@register("gated_deltanet")
class GatedDeltaNet(KeyValueMixer):
    silu = True
    delta = True
    no_weight_decay = ("A_log", "dt_bias")
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    least_rate = 0.0  # exp(A_log) starts between this and 16

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        decays = self.add_projection(config.hidden_size)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.own("A_log", self.heads)
        self.own("dt_bias", decays)
        self.reset_parameters()

    def add_projection(self, hidden: int) -> int:
        """Add what the decays are made from; how many there are."""
        self.a_proj = nn.Linear(hidden, self.heads, bias=False)
        return self.heads

    def reset_parameters(self) -> None:
        self.fill("A_log", lambda a: log_uniform_(a, self.least_rate, 16.0))
        self.fill("dt_bias", inverse_softplus_of_times_)

    @property
    def writers(self) -> list[nn.Linear]:
        return [self.a_proj, self.b_proj]

    def gates(
        self, x: Float[Tensor, "*B D"], *projected: Float[Tensor, "*B H"]
    ) -> tuple[Float[Tensor, "*B H"], Float[Tensor, "*B H"]]:
        a, b = projected
        call = Call(a.device, a.dtype, unwatched=unwatched(a))
        if a.numel() and choose("decay", call, self.config.backend) == "triton":
            from ccq.mixers import fused_gates  # imports Triton

            return fused_gates.gates(a, b, self.A_log, self.dt_bias)
        return log_decay(a, self.A_log, self.dt_bias)[0], high(b).sigmoid()


@register("kda")
class KimiDeltaAttention(GatedDeltaNet):
    low_rank_gate = True
    least_rate = 1.0
    dt_bias: Tensor  # [H * F]

    def add_projection(self, hidden: int) -> int:
        self.f_proj = low_rank(hidden, self.value_size, self.heads * self.features)
        return self.heads * self.features

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


def high(x: Tensor) -> Tensor:
    return x.to(stats_dtype(x.dtype))


def log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """-exp(A_log) * dt and dt = softplus(x + dt_bias), in fp32 (fp64 for fp64): Mamba2's time step and decay."""
    x = high(x)
    dt = F.softplus(x + dt_bias.to(x.dtype))
    return -A_log.to(x.dtype).exp() * dt, dt


def log_uniform_(x: Tensor, low: float, up: float) -> None:
    """log of a uniform number."""
    nn.init.uniform_(x, low, up).clamp_(min=1e-6).log_()  # the draw may be 0, and its log must be finite


def inverse_softplus_of_times_(x: Tensor, least: float = 1e-3, most: float = 0.1) -> None:
    """b with softplus(b) between `least` and `most`, uniform in the logarithm."""
    dt = nn.init.uniform_(x, math.log(least), math.log(most)).exp()
    x.copy_(dt + torch.log(-torch.expm1(-dt)))
