"""MesaNet: the query that reads is the one that solves for the keys, by conjugate gradient.

    [H_t, S_t] = exp(g_t) [H_{t-1}, S_{t-1}] + beta_t k_t [k_t, v_t]^T        g_t = logsigmoid(W_a x_t + b_a)
    o_t = S_t^T x*_t,    (H_t + diag(Lambda)) x*_t = q_t                      beta_t = sigmoid(W_b x_t + b_b)

Lambda = softplus(.) + 1/4, one a head and channel, from 1. Values pass no convolution. Its state counts H beside S.
D hidden size, H heads, F features of a key.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import LayerState, Sequences, register
from ccq.mixers.key_value import Gates, KeyValueMixer
from ccq.ops.precision import high
from ccq.ops.recurrence.mesa import flops, mesa, mesa_step

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig

LEAST = 0.25  # of Lambda, so that the system is never close to singular
START = math.log(math.expm1(1 - LEAST))  # softplus(START) + LEAST = 1


@register("mesa")
class Mesa(KeyValueMixer):
    convolved = 2
    lambda_params: Tensor  # [H * F]

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.cg_steps = config.cg_steps
        self.a_proj = nn.Linear(config.hidden_size, self.heads)
        self.b_proj = nn.Linear(config.hidden_size, self.heads)
        self.own("lambda_params", self.heads * self.features, start=START)

    @property
    def writers(self) -> list[nn.Linear]:
        return [self.a_proj, self.b_proj]

    @property
    def memory_width(self) -> int:
        return self.features + self.value_size

    def gates(self, x: Tensor, *projected: Tensor) -> Gates:
        a, b = projected
        return F.logsigmoid(high(a)), high(b).sigmoid()

    @property
    def ridge(self) -> Float[Tensor, "H F"]:
        """Lambda."""
        return (F.softplus(self.lambda_params) + LEAST).unflatten(0, (self.heads, -1))

    def mix(
        self, raw: Tensor, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences | None, state: Any,
        new: LayerState | None, g: Tensor, beta: Tensor,
    ) -> Float[Tensor, "*B H V"]:  # fmt: skip
        q, k = self.cleaner.prepare(q, k)
        how = (q, k, v, g, beta, self.ridge, self.cg_steps)
        if seqs is None:
            return mesa_step(*how, state["recurrent"])
        o, recurrent = mesa(*how, None if state is None else state["recurrent"], new is not None, seqs.cu_seqlens)
        if new is not None:
            new["recurrent"] = recurrent
        return o

    def memory_flops(self) -> float:
        return flops(self.heads, self.features, self.value_size, self.cg_steps)
