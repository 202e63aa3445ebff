"""The simplest writes, to show that the cleaning does not depend on them: none forgets by what it sees.

    linear attention    S_t = S_{t-1} + k_t v_t^T
    RetNet              S_t = exp(g) S_{t-1} + k_t v_t^T,    g = log(1 - 2^(-5-h)) in head h
    DeltaNet            S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,    beta_t = sigmoid(W_b x_t)

D hidden size, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ccq.mixers.attention import locate, turned, turns_at
from ccq.mixers.base import LayerState, Sequences, register
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
    """RetNet's decays, from 1/32 of the state a token to 2^-(4+H); with its rotation of q and k if `rotary`."""

    def gates(self, x: Float[Tensor, "*B D"], *projected: Tensor) -> tuple[Float[Tensor, "*B H"], None]:
        head = torch.arange(self.heads, device=x.device, dtype=stats_dtype(x.dtype))
        return torch.log1p(-torch.exp2(-5 - head)).expand(*x.shape[:-1], -1), None

    def turned(self, x: Float[Tensor, "*B H F"], positions: Int[Tensor, "*B"]) -> Float[Tensor, "*B H F"]:
        cos, sin = turns_at(positions, x.shape[-1], self.config.rope_theta, x.dtype)
        return turned(x, cos[..., None, :], sin[..., None, :])

    def mix(
        self, raw: Tensor, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, state: LayerState | None, *arguments: Any
    ) -> tuple[Float[Tensor, "B T H V"], LayerState]:
        if not self.config.rotary:
            return super().mix(raw, q, k, v, seqs, state, *arguments)
        tokens = q.shape[1]
        past = torch.zeros(seqs.count, device=q.device, dtype=torch.int64) if state is None else state["length"]
        row, index = locate(seqs, tokens, q.device)
        q, k = (self.turned(x, past[row] + index) for x in (q, k))
        o, new = super().mix(raw, q, k, v, seqs, state, *arguments)
        return o, new | {"length": past + (tokens if seqs.cu_seqlens is None else seqs.cu_seqlens.diff())}

    def mix_step(
        self, raw: Tensor, q: Tensor, k: Tensor, v: Tensor, state: LayerState, *arguments: Any
    ) -> Float[Tensor, "B H V"]:
        if self.config.rotary:
            q, k = (self.turned(x, state["length"]) for x in (q, k))
            state["length"].add_(1)
        return super().mix_step(raw, q, k, v, state, *arguments)

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        state = super().new_state(n, device, dtype, max_length)
        return state | {"length": torch.zeros(n, device=device, dtype=torch.int64)} if self.config.rotary else state


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
