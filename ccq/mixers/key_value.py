"""The layer that linear-attention backbones share: only how their state forgets and writes is their own.

B batch, N sequences (B of them, or packed ones), T tokens, D hidden size, H heads, K key size, F features of a key
(K without a feature map), V value size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.base import LayerState, Mixer, Sequences
from ccq.mixers.cleaning import QueryCleaner
from ccq.mixers.conv import ShortConv, convolve
from ccq.mixers.linear import project
from ccq.mixers.norms import GatedRMSNorm, RMSNorm
from ccq.ops.precision import no_autocast, stats_dtype
from ccq.ops.recurrence import flops

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig


Gates = tuple[Tensor | None, Tensor | None]  # log-decay g and strength beta of the delta rule


class Hedgehog(nn.Module):
    """softmax of [2 W x, -2 W x], with W [F / 2, K] learned and shared by the heads.

    W starts semi-orthogonal. Positive features that can be as peaked as a softmax over keys.
    """

    def __init__(self, size: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features // 2, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight.is_meta or getattr(self.weight, "_is_hf_initialized", False):
            return
        drawn = torch.empty_like(self.weight, dtype=stats_dtype(self.weight.dtype))  # no QR in half precision
        with torch.no_grad():
            self.weight.copy_(nn.init.orthogonal_(drawn))

    def forward(self, x: Float[Tensor, "*B H K"]) -> Float[Tensor, "*B H F"]:
        y = F.linear(x, self.weight.to(x.dtype))
        with no_autocast(x):  # which would return fp32
            y = 2 * y.to(stats_dtype(x.dtype))
            return torch.cat([y, -y], -1).softmax(-1).to(x.dtype)


class ElementwiseProduct(nn.Module):
    """(W1 x + b1) * (W2 x + b2): what fla's linear attention does unless told otherwise."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Float[Tensor, "*B H K"]) -> Float[Tensor, "*B H K"]:
        return self.layer1(x) * self.layer2(x)


def make_feature_map(name: str, size: int, half_features: int) -> tuple[nn.Module, int]:
    """The map called `name` for heads of `size`, and how many features it gives."""
    if name == "identity":
        return nn.Identity(), size
    if name == "elementwise_product":
        return ElementwiseProduct(size), size
    return Hedgehog(size, 2 * half_features), 2 * half_features


class RecurrentMixer(Mixer):
    """A mixer whose state is that of a convolution (where it has one), of `recurrence`, and of the cleaning."""

    delta = False  # whether it writes by the delta rule
    heads: int
    features: int
    value_size: int
    conv_size: int | None
    widths: list[int]  # channels of what is convolved, in the order in which they lie in the convolution's state
    cleaner: QueryCleaner
    keys_too = False  # whether keys are remembered under a key, before the values

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        state: LayerState = {}
        if self.conv_size is not None:
            state["conv"] = torch.zeros(n, sum(self.widths), self.conv_size - 1, device=device, dtype=dtype)
        shape = (n, self.heads, self.features, self.value_size + (self.features if self.keys_too else 0))
        half = self.cleaner.half_states and not self.keys_too  # Mesa solves with what it remembers
        kept = torch.bfloat16 if half else stats_dtype(dtype)
        state["recurrent"] = torch.zeros(shape, device=device, dtype=kept)
        return state | self.cleaner.new_state(n, device, dtype)

    def flops(self, length: int) -> float:
        conv = 0.0 if self.conv_size is None else 2.0 * self.conv_size * sum(self.widths)
        return conv + self.cleaner.flops() + self.memory_flops()

    def memory_flops(self) -> float:
        return flops(self.heads, self.features, self.value_size, self.delta)


class KeyValueMixer(RecurrentMixer):
    """q, k, v -> (short convolution) -> (feature map) -> (cleaning) -> state -> norm, gate -> output.

    A subclass gives `gates`, the log-decay g and the strength beta of the delta rule, and `writers`, the Linears that
    they see x through.
    """

    silu = False  # whether q, k and v pass a SiLU without a convolution too
    convolved = 3  # how many of q, k, v pass the convolution
    low_rank_gate = False  # whether the output gate is KDA's: two Linears, then a sigmoid
    written_by: tuple[str, ...] = ()  # the writers' names; of one of low rank its first Linear sees x

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        hidden, self.heads = config.hidden_size, config.num_heads
        self.key_size, self.value_size = config.key_size, config.value_size
        self.key_width, self.value_width = self.heads * self.key_size, self.heads * self.value_size
        self.q_proj = nn.Linear(hidden, self.key_width, bias=False)
        self.k_proj = nn.Linear(hidden, self.key_width, bias=False)
        self.v_proj = nn.Linear(hidden, self.value_width, bias=False)
        self.conv_size = config.conv_size
        self.widths = [self.key_width, self.key_width, self.value_width][: self.convolved]
        if self.conv_size is not None:
            for name, width in zip("qkv", self.widths, strict=False):
                conv = ShortConv(width, self.conv_size, std=config.initializer_range)
                self.add_module(f"{name}_conv1d", conv)
        maps = (config.feature_map, self.key_size, config.feature_map_size)
        (self.feature_map_q, self.features), (self.feature_map_k, _) = make_feature_map(*maps), make_feature_map(*maps)
        self.cleaner = QueryCleaner(config, self.heads, self.key_size, self.features)
        self.g_proj: Any = None
        self.o_norm: Any  # gated where there is a g_proj
        if not config.output_gate:
            self.o_norm = RMSNorm(self.value_size, config.norm_eps)
        elif self.low_rank_gate:
            self.g_proj = low_rank(hidden, self.value_size, self.value_width, bias=True)
            self.o_norm = GatedRMSNorm(self.value_size, config.norm_eps, sigmoid=True)
        else:
            self.g_proj = nn.Linear(hidden, self.value_width, bias=False)
            self.o_norm = GatedRMSNorm(self.value_size, config.norm_eps)
        self.o_proj = nn.Linear(self.value_width, hidden, bias=False)

    @property
    def convs(self) -> list[ShortConv]:
        return [getattr(self, f"{name}_conv1d") for name in "qkv"[: self.convolved]]

    @property
    def writers(self) -> list[nn.Linear]:
        found: list[Any] = [getattr(self, name) for name in self.written_by]
        return [x[0] if isinstance(x, nn.Sequential) else x for x in found]  # type: ignore[misc]

    def gates(self, x: Float[Tensor, "*B D"], *projected: Tensor) -> Gates:
        """g [*B, H] or [*B, H, F] and beta [*B, H]; None for no decay, and for an additive write.

        `projected` is what the `writers` made of x.
        """
        raise NotImplementedError

    def projected(self, x: Float[Tensor, "*B D"]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Of x: q, k and v; what the writers make of it; and the output gate."""
        linears: list[Any] = [self.q_proj, self.k_proj, self.v_proj, *self.writers]
        if self.g_proj is not None:
            linears.append(self.g_proj[0] if self.low_rank_gate else self.g_proj)
        made = project(x, linears, self.config.backend)
        gate = None if self.g_proj is None else made.pop()
        if gate is not None and self.low_rank_gate:
            gate = self.g_proj[1](gate)
        return made[:3], made[3:], gate

    def run(self, x: Tensor, seqs: Sequences | None, state: Any, new: LayerState | None) -> Tensor:
        qkv, written, gate = self.projected(x)
        if self.conv_size is not None:
            inputs = qkv[: self.convolved]
            qkv[: self.convolved] = convolve(self.convs, inputs, seqs, state, new, self.config.backend)
        elif self.silu:
            qkv = [F.silu(y) for y in qkv]
        raw, k, v = (y.unflatten(-1, (self.heads, -1)) for y in qkv)
        q, k = self.feature_map_q(raw), self.feature_map_k(k)
        return self.output(self.mix(raw, q, k, v, seqs, state, new, *self.gates(x, *written)), gate)

    def output(self, o: Float[Tensor, "*B H V"], gate: Float[Tensor, "*B HV"] | None) -> Float[Tensor, "*B D"]:
        if gate is None:
            return self.o_proj(self.o_norm(o).flatten(-2))
        return self.o_norm.then(self.o_proj, o, gate.unflatten(-1, (self.heads, -1)))

    def mix(self, *arguments: Any) -> Float[Tensor, "*B H V"]:
        """What `QueryCleaner.mix` is asked, of a backbone whose memory is the one of `recurrence`."""
        return self.cleaner.mix(*arguments)

    def flops(self, length: int) -> float:
        maps = [w for m in (self.feature_map_q, self.feature_map_k) for w in m.parameters()]
        return super().flops(length) + sum(2.0 * self.heads * w.numel() for w in maps)


def low_rank(width: int, rank: int, out: int, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=bias))
