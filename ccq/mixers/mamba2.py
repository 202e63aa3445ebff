"""Mamba2: a state space of matrices, which is linear attention with one data-dependent decay a head.

    S_t = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t x_t^T        dt_t = softplus(. + dt_bias)
    y_t = S_t^T C_t + D x_t

C is the query, B the key, dt x the value, and the read has no scale. G groups of heads share C and B, and with cleaning
have one lam each.

B batch, N sequences (B of them, or packed ones), T tokens, H heads (in G groups) of P values, K state size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ccq.mixers.base import LayerState, Mixer, Sequences, register
from ccq.mixers.cleaning import QueryCleaner
from ccq.mixers.conv import ShortConv, final_state
from ccq.mixers.gated_deltanet import inverse_softplus_of_times_, log_decay, log_uniform_
from ccq.mixers.norms import GatedRMSNorm
from ccq.ops.precision import stats_dtype
from ccq.ops.recurrence import flops

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


@register("mamba2")
class Mamba2(Mixer):
    no_weight_decay = ("A_log", "dt_bias", "D")
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    D: Tensor  # [H]

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.inner = config.expand * config.hidden_size
        self.head_size, self.state_size, self.groups = config.head_size, config.state_size, config.num_groups
        self.heads = self.inner // self.head_size
        self.key_width = self.groups * self.state_size
        self.conv_width = self.inner + 2 * self.key_width
        self.in_proj = nn.Linear(config.hidden_size, self.inner + self.conv_width + self.heads, bias=False)
        assert config.conv_size is not None  # the config has checked it
        self.conv_size = config.conv_size
        self.conv1d = ShortConv(self.conv_width, self.conv_size, bias=True, std=config.initializer_range)
        self.cleaner = QueryCleaner(config, self.groups, self.state_size)
        self.norm = GatedRMSNorm(self.inner, config.norm_eps, gate_first=True, groups=self.groups)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=False)
        for name in self.no_weight_decay:
            self.own(name, self.heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.fill("A_log", lambda a: log_uniform_(a, 1.0, 16.0))
        self.fill("dt_bias", inverse_softplus_of_times_)
        self.fill("D", nn.init.ones_)

    def parts(self, xBC: Float[Tensor, "*B C"]) -> tuple[Tensor, Tensor, Tensor]:
        """x [*B, H, P] and the keys B and queries C [*B, G, K], from what left the convolution."""
        x, b, c = xBC.split([self.inner, self.key_width, self.key_width], -1)
        return x.unflatten(-1, (self.heads, -1)), b.unflatten(-1, (self.groups, -1)), c.unflatten(-1, (self.groups, -1))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        seqs: Sequences,
        state: LayerState | None = None,
        output_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        new: LayerState = {}
        gate, xBC, dt = self.in_proj(x).split([self.inner, self.conv_width, self.heads], -1)
        past = None if state is None else state["conv"]
        if output_state:
            new["conv"] = final_state(xBC, seqs, self.conv_size, past)
        x, k, q = self.parts(self.conv1d(xBC, seqs, past))
        g, dt = log_decay(dt, self.A_log, self.dt_bias)
        v = (x * dt[..., None]).to(x.dtype)
        o, states = self.cleaner.mix(q, q, k, v, seqs, state, output_state, g, scale=1.0)
        return self.output(o, x, gate), new | states if output_state else None

    @torch.no_grad()
    def step(
        self, x: Float[Tensor, "B D"], state: LayerState, positions: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B D"]:
        gate, xBC, dt = self.in_proj(x).split([self.inner, self.conv_width, self.heads], -1)
        x, k, q = self.parts(self.conv1d.step(xBC, state["conv"], self.config.backend))
        g, dt = log_decay(dt, self.A_log, self.dt_bias)
        v = (x * dt[..., None]).to(x.dtype)
        return self.output(self.cleaner.step(q, q, k, v, state, g, scale=1.0), x, gate)

    def output(self, o: Float[Tensor, "*B H P"], x: Float[Tensor, "*B H P"], gate: Float[Tensor, "*B I"]) -> Tensor:
        y = o + self.D.to(o.dtype)[:, None] * x
        return self.out_proj(self.norm(y.flatten(-2), gate))

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        shape = (n, self.heads, self.state_size, self.head_size)
        return {
            "conv": torch.zeros(n, self.conv_width, self.conv_size - 1, device=device, dtype=dtype),
            "recurrent": torch.zeros(shape, device=device, dtype=stats_dtype(dtype)),
            **self.cleaner.new_state(n, device, dtype),
        }

    def flops(self, length: int) -> float:
        conv = 2.0 * self.conv_size * self.conv_width
        return conv + self.cleaner.flops() + flops(self.heads, self.state_size, self.head_size)
