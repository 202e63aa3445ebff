"""Mamba2: a state space of matrices, which is linear attention with one data-dependent decay a head.

    S_t = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t x_t^T        dt_t = softplus(. + dt_bias)
    y_t = S_t^T C_t + D x_t

C is the query, B the key, dt x the value, and the read has no scale. G groups of heads share C and B, and with cleaning
have one lam each.

B batch, N sequences (B of them, or packed ones), T tokens, H heads (in G groups) of P values, K state size.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ccq.mixers.base import LayerState, Sequences, register
from ccq.mixers.cleaning import QueryCleaner
from ccq.mixers.conv import ShortConv, convolve
from ccq.mixers.key_value import RecurrentMixer
from ccq.mixers.linear_attention import inverse_softplus_of_times_, log_decay, log_uniform_
from ccq.mixers.norms import GatedRMSNorm

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


@register("mamba2")
class Mamba2(RecurrentMixer):
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    D: Tensor  # [H]

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.inner = config.expand * config.hidden_size
        self.value_size, self.groups = config.head_size, config.num_groups
        self.state_size = self.features = config.state_size
        self.heads = self.inner // self.value_size
        self.key_width = self.groups * self.state_size
        self.conv_width = self.inner + 2 * self.key_width
        self.widths = [self.conv_width]
        self.in_proj = nn.Linear(config.hidden_size, self.inner + self.conv_width + self.heads, bias=False)
        assert config.conv_size is not None  # the config has checked it
        self.conv_size = config.conv_size
        self.conv1d = ShortConv(self.conv_width, self.conv_size, bias=True, std=config.initializer_range)
        self.cleaner = QueryCleaner(config, self.groups, self.state_size)
        self.norm = GatedRMSNorm(self.inner, config.norm_eps, gate_first=True, groups=self.groups)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=False)
        self.own("A_log", self.heads, start=functools.partial(log_uniform_, low=1.0))
        self.own("dt_bias", self.heads, start=inverse_softplus_of_times_)
        self.own("D", self.heads, start=1.0)

    def run(self, x: Tensor, seqs: Sequences | None, state: Any, new: LayerState | None) -> Tensor:
        gate, xBC, dt = self.in_proj(x).split([self.inner, self.conv_width, self.heads], -1)
        (xBC,) = convolve([self.conv1d], [xBC], seqs, state, new, self.config.backend)
        x, k, q = xBC.split([self.inner, self.key_width, self.key_width], -1)
        x = x.unflatten(-1, (self.heads, -1))  # [*B, H, P]
        k, q = (y.unflatten(-1, (self.groups, -1)) for y in (k, q))  # [*B, G, K]
        g, dt = log_decay(dt, self.A_log, self.dt_bias)
        v = (x * dt[..., None]).to(x.dtype)
        o = self.cleaner.mix(q, q, k, v, seqs, state, new, g, scale=1.0)
        y = o + self.D.to(o.dtype)[:, None] * x
        return self.out_proj(self.norm(y.flatten(-2), gate))
