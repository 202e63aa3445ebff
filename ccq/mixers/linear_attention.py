"""The backbones of linear attention: what their state forgets, and how it is written.

    linear attention    S_t = S_{t-1} + k_t v_t^T
    RetNet              S_t = exp(g) S_{t-1} + k_t v_t^T,    g = log(1 - 2^(-5-h)) in head h
    GLA                 S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,    g_t = logsigmoid(W_2 W_1 x_t + b) / 16
    DeltaNet            S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,    beta_t = sigmoid(W_b x_t)
    Gated DeltaNet      the same with exp(g_t) S_{t-1} for S_{t-1},    g_t = -exp(A_log) softplus(W_a x_t + dt_bias)
    KDA                 the same with diag(exp(g_t)) S_{t-1},    W_2 W_1 for W_a
    MesaNet             [H_t, S_t] = exp(g_t) [H_{t-1}, S_{t-1}] + beta_t k_t [k_t, v_t]^T
                        o_t = S_t^T x*_t,    (H_t + diag(Lambda)) x*_t = q_t by conjugate gradient

The delta rule replaces what k stored before, instead of adding to it. W_1 is of rank 16 in GLA, of rank V in KDA, whose
output gate is of that rank too, and a sigmoid. In MesaNet g_t = logsigmoid(W_a x_t + b_a), beta_t = sigmoid(W_b x_t +
b_b), and Lambda = softplus(.) + 1/4, one a head and channel, from 1.

D hidden size, H heads, F features of a key, V value size.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ccq.mixers.attention import turned, turns_at
from ccq.mixers.base import LayerState, Sequences, register
from ccq.mixers.key_value import Gates, KeyValueMixer, low_rank
from ccq.mixers.linear import few_rows
from ccq.mixers.norms import fused
from ccq.ops.choose import Call, choose, unwatched
from ccq.ops.precision import high, stats_dtype
from ccq.ops.recurrence.mesa import flops, mesa, mesa_step

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig

LEAST = 0.25  # of Lambda, so that the system is never close to singular
START = math.log(math.expm1(1 - LEAST))  # softplus(START) + LEAST = 1


@register("linear_attention")
class LinearAttention(KeyValueMixer):
    def gates(self, x: Tensor, *projected: Tensor) -> Gates:
        return None, None


@register("retnet")
class RetNet(KeyValueMixer):
    """RetNet's decays, from 1/32 of the state a token to 2^-(4+H); with its rotation of q and k if `rotary`."""

    def gates(self, x: Tensor, *projected: Tensor) -> Gates:
        head = torch.arange(self.heads, device=x.device, dtype=stats_dtype(x.dtype))
        return torch.log1p(-torch.exp2(-5 - head)).expand(*x.shape[:-1], -1), None

    def mix(
        self, raw: Tensor, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences | None, state: Any,
        new: LayerState | None, *gates: Tensor | None,
    ) -> Float[Tensor, "*B H V"]:  # fmt: skip
        if not self.config.rotary:
            return super().mix(raw, q, k, v, seqs, state, new, *gates)
        if seqs is None:
            q, k = self.turned(state["length"], q, k)
            state["length"].add_(1)
            return super().mix(raw, q, k, v, seqs, state, new, *gates)
        tokens = q.shape[1]
        row, index = seqs.locate(tokens, q.device)
        past = index.new_zeros(seqs.count) if state is None else state["length"]
        q, k = self.turned(past[row] + index, q, k)
        o = super().mix(raw, q, k, v, seqs, state, new, *gates)
        if new is not None:
            new["length"] = past + (tokens if seqs.cu_seqlens is None else seqs.cu_seqlens.diff())
        return o

    def turned(self, positions: Int[Tensor, "*B"], *xs: Float[Tensor, "*B H F"]) -> list[Float[Tensor, "*B H F"]]:
        cos, sin = turns_at(positions, self.features, self.config.rope_theta, xs[0].dtype)
        return [turned(x, cos[..., None, :], sin[..., None, :]) for x in xs]

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        state = super().new_state(n, device, dtype, max_length)
        return state | {"length": torch.zeros(n, device=device, dtype=torch.int64)} if self.config.rotary else state


@register("gla")
class GatedLinearAttention(KeyValueMixer):
    """Gated linear attention: each channel of the key forgets at its own, data-dependent rate."""

    written_by = ("gk_proj",)

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.normalizer = config.gate_normalizer
        self.gk_proj = low_rank(config.hidden_size, config.gate_low_rank, self.heads * self.features, bias=True)

    def gates(self, x: Tensor, *projected: Tensor) -> Gates:
        (low,) = projected
        last: nn.Linear = self.gk_proj[1]  # type: ignore[assignment]
        if choose("linear", few_rows(low, [last]), self.config.backend) == "triton":
            from ccq.mixers import kernels  # imports Triton

            g = kernels.low_rank_decay(low, last.weight, last.bias, self.normalizer)
            return g.unflatten(-1, (self.heads, -1)), None
        raw = last(low).unflatten(-1, (self.heads, -1))
        if fused(raw):
            from fla.modules.activations import logsigmoid

            return logsigmoid(raw, self.normalizer), None
        return F.logsigmoid(raw) / self.normalizer, None


@register("deltanet")
class DeltaNet(KeyValueMixer):
    silu = delta = True
    written_by = ("b_proj",)

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def gates(self, x: Tensor, *projected: Tensor) -> Gates:
        return None, high(projected[0]).sigmoid()


@register("gated_deltanet")
class GatedDeltaNet(KeyValueMixer):
    silu = delta = True
    written_by: tuple[str, ...] = ("a_proj", "b_proj")
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    least_rate = 0.0  # exp(A_log) starts between this and 16

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        decays = self.add_projection(config.hidden_size)
        self.b_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.own("A_log", self.heads, start=functools.partial(log_uniform_, low=self.least_rate))
        self.own("dt_bias", decays, start=inverse_softplus_of_times_)

    def add_projection(self, hidden: int) -> int:
        """Add what the decays are made from; how many there are."""
        self.a_proj = nn.Linear(hidden, self.heads, bias=False)
        return self.heads

    def gates(self, x: Tensor, *projected: Tensor) -> Gates:
        a, b = projected
        call = Call(a.device, a.dtype, unwatched=unwatched(a))
        if a.numel() and choose("decay", call, self.config.backend) == "triton":
            from ccq.mixers import kernels  # imports Triton

            return kernels.gates(a, b, self.A_log, self.dt_bias)
        return log_decay(a, self.A_log, self.dt_bias)[0], high(b).sigmoid()


@register("kda")
class KimiDeltaAttention(GatedDeltaNet):
    low_rank_gate = True
    written_by = ("f_proj", "b_proj")
    least_rate = 1.0
    dt_bias: Tensor  # [H * F]

    def add_projection(self, hidden: int) -> int:
        self.f_proj = low_rank(hidden, self.value_size, self.heads * self.features)
        return self.heads * self.features

    def gates(self, x: Tensor, *projected: Tensor) -> Gates:
        low, b = projected
        a = self.f_proj[1](low).unflatten(-1, (self.heads, -1))
        g, _ = log_decay(a, self.A_log[:, None], self.dt_bias.unflatten(0, (self.heads, -1)))
        return g, high(b).sigmoid()


@register("mesa")
class Mesa(KeyValueMixer):
    """MesaNet, whose query solves for the keys before it reads. Its state counts H too; values pass no convolution."""

    convolved = 2
    keys_too = True
    written_by = ("a_proj", "b_proj")
    lambda_params: Tensor  # [H * F]

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.cg_steps = config.cg_steps
        self.a_proj = nn.Linear(config.hidden_size, self.heads)
        self.b_proj = nn.Linear(config.hidden_size, self.heads)
        self.own("lambda_params", self.heads * self.features, start=START)

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


def log_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """-exp(A_log) * dt and dt = softplus(x + dt_bias), in fp32 (fp64 for fp64): Mamba2's time step and decay."""
    x = high(x)
    dt = F.softplus(x + dt_bias.to(x.dtype))
    return -A_log.to(x.dtype).exp() * dt, dt


def log_uniform_(x: Tensor, low: float) -> None:
    """log of a uniform number between `low` and 16."""
    nn.init.uniform_(x, low, 16.0).clamp_(min=1e-6).log_()  # the draw may be 0, and its log must be finite


def inverse_softplus_of_times_(x: Tensor, least: float = 1e-3, most: float = 0.1) -> None:
    """b with softplus(b) between `least` and `most`, uniform in the logarithm."""
    dt = nn.init.uniform_(x, math.log(least), math.log(most)).exp()
    x.copy_(dt + torch.log(-torch.expm1(-dt)))
