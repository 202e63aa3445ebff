"""Softmax attention as Llama has it: rotary positions, scaled dot products, grouped key heads.

B batch, N sequences, T tokens, H query heads, Hk key heads (each read by H / Hk of them), K head size, L length of the
buffers of keys and values.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ccq.mixers.base import LayerState, Mixer, Sequences, register
from ccq.ops.choose import Call, choose
from ccq.ops.precision import stats_dtype

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig

GROW = 256  # buffers of keys grow by at least this, and by half of what they are


@register("attention")
class Attention(Mixer):
    """softmax(q k^T / sqrt(K)) v over the tokens so far, q and k turned by their positions."""

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.heads = config.num_heads
        self.key_heads = config.num_kv_heads or config.num_heads
        self.size = config.hidden_size // config.num_heads
        self.theta = config.rope_theta
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.key_heads * self.size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.key_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def project(self, x: Float[Tensor, "*B D"]) -> tuple[Tensor, Tensor, Tensor]:
        """q [*B, H, K] and k, v [*B, Hk, K], not turned yet."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def forward(
        self, x: Float[Tensor, "B T D"], seqs: Sequences, state: LayerState | None = None, output_state: bool = False
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        q, k, v = self.project(x)
        tokens = x.shape[1]
        longest = tokens if seqs.longest is None else seqs.longest
        if state is None and seqs.cu_seqlens is None:  # the plain case needs no indices
            q, k = rotate(q, None, tokens, self.theta), rotate(k, None, tokens, self.theta)
            new = {"k": k, "v": v, "length": torch.full((seqs.count,), tokens, device=x.device)}
            return self.o_proj(dot_product(q, k, v, is_causal=True).flatten(-2)), new if output_state else None

        if state is None:
            room, past = longest, torch.zeros(seqs.count, device=x.device, dtype=torch.int64)
        else:
            room, past = state["k"].shape[1] + longest, state["length"]
        row, index = seqs.locate(tokens, x.device)
        positions = past[row] + index if seqs.positions is None else seqs.positions
        q, k = rotate(q, positions, room, self.theta), rotate(k, positions, room, self.theta)
        new = {"length": past + (tokens if seqs.cu_seqlens is None else seqs.cu_seqlens.diff())}
        if output_state or state is not None:
            for name, y in (("k", k), ("v", v)):
                buffer = y.new_zeros(seqs.count, longest, *y.shape[2:])
                if state is not None:
                    buffer = torch.cat([state[name], buffer], dim=1)
                new[name] = buffer.index_put((row, positions), y.to(buffer.dtype))
        if state is None:
            o = packed_attention(q, k, v, seqs)
        elif seqs.cu_seqlens is None:
            o = read(q, new["k"], new["v"], positions)
        else:  # [1, T] tokens as N rows of queries, and back
            rows = q.new_zeros(seqs.count, longest, *q.shape[2:]).index_put((row, index), q)
            at = positions.new_zeros(seqs.count, longest).index_put((row, index), positions)
            o = read(rows, new["k"], new["v"], at)[row, index]
        return self.o_proj(o.flatten(-2)), new if output_state else None

    def step(
        self, x: Float[Tensor, "B D"], state: LayerState, positions: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B D"]:
        q, k, v = self.project(x[:, None])
        at = (state["length"] if positions is None else positions)[:, None]
        room = state["k"].shape[1]
        q, k = rotate(q, at, room, self.theta), rotate(k, at, room, self.theta)
        row = torch.arange(x.shape[0], device=x.device)[:, None]
        state["k"].index_put_((row, at), k.to(state["k"].dtype))
        state["v"].index_put_((row, at), v.to(state["v"].dtype))
        y = self.o_proj(read(q, state["k"], state["v"], at).flatten(1))
        state["length"].add_(1)
        return y

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        shape = (n, GROW if max_length is None else max_length, self.key_heads, self.size)
        k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return {"k": k, "v": v, "length": torch.zeros(n, device=device, dtype=torch.int64)}

    def reserve(self, state: LayerState, length: int) -> None:
        """Make room in `state` for sequences of `length` tokens: longer buffers, where they do not fit."""
        have = state["k"].shape[1]
        if length > have:
            more = max(length - have, GROW, have // 2)
            for name in ("k", "v"):
                state[name] = F.pad(state[name], (0, 0, 0, 0, 0, more))

    def flops(self, length: int) -> float:
        """Two products with half of the sequence, on the average."""
        return 2 * 2 * self.heads * self.size * (length + 1) / 2


def rotate(x: Float[Tensor, "B T H K"], positions: Tensor | None, room: int, theta: float) -> Float[Tensor, "B T H K"]:
    """RoPE: pair (j, j + K/2) of a head at position p turned by the angle p * theta^(-2j/K).

    positions are below `room`; None: 0..T-1.
    """
    cos, sin = turns(room, x.shape[-1], theta, x.dtype, x.device)
    if positions is None:
        cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]  # [T, 1, K/2]
    else:
        cos, sin = cos[positions][..., None, :], sin[positions][..., None, :]  # [B, T, 1, K/2]
    return turned(x, cos, sin)


def turned(x: Float[Tensor, "*B K"], cos: Tensor, sin: Tensor) -> Float[Tensor, "*B K"]:
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


_TURNS: dict[tuple, tuple[Tensor, Tensor]] = {}


def turns(room: int, size: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE's angles at positions below `room` at least, each [L, K/2], in fp32 (fp64 for fp64).

    All layers share them. Lengths are powers of two and no table is ever dropped: a captured graph may read it.
    """
    if torch.compiler.is_compiling():
        return turns_at(torch.arange(room, device=device), size, theta, dtype)
    room = max(4096, 1 << (room - 1).bit_length())
    key = (room, size, theta, stats_dtype(dtype), device)
    if key not in _TURNS:
        with torch.inference_mode(False):  # it outlives the call that happens to make it
            table = turns_at(torch.arange(room, device=device), size, theta, dtype)
        if type(table[0]) is not Tensor:  # without numbers: a call that only traces or counts
            return table
        _TURNS[key] = table
    return _TURNS[key]


def turns_at(positions: Int[Tensor, "*B"], size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE's angles at these positions, each [*B, K/2]."""
    frequency = theta ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float64) / size)
    angle, high = positions.double()[..., None] * frequency, stats_dtype(dtype)
    return angle.cos().to(high), angle.sin().to(high)


def dot_product(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B L Hk K"], v: Float[Tensor, "B L Hk K"], mask: Tensor | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "B T H K"]:  # fmt: skip
    """softmax(q k^T / sqrt(K)) v, where `mask` [B, 1, T, L] is true."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2).to(q.dtype),
        v.transpose(1, 2).to(q.dtype),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def read(
    q: Float[Tensor, "N T H K"], k: Float[Tensor, "N L Hk K"], v: Float[Tensor, "N L Hk K"],
    positions: Int[Tensor, "N T"],
) -> Float[Tensor, "N T H K"]:  # fmt: skip
    """Queries at `positions` read the buffers up to there."""
    seen = torch.arange(k.shape[1], device=k.device) <= positions[..., None]  # [N, T, L]
    return dot_product(q, k, v, mask=seen[:, None])


def packed_attention(
    q: Float[Tensor, "1 T H K"], k: Float[Tensor, "1 T Hk K"], v: Float[Tensor, "1 T Hk K"], seqs: Sequences
) -> Float[Tensor, "1 T H K"]:
    """Causal attention within each of the packed sequences."""
    assert seqs.cu_seqlens is not None
    tokens = q.shape[1]
    if choose("packed_attention", Call.of(q)) == "flash":
        return flash(q, k, v, seqs.cu_seqlens, tokens if seqs.longest is None else seqs.longest)
    if torch.compiler.is_compiling():  # it cannot take the sequences apart
        row, index = seqs.locate(tokens, q.device)
        return dot_product(q, k, v, mask=(row.mT == row) & (index <= index.mT))
    pieces = [slice(a, b) for a, b in pairwise(seqs.cu_seqlens.tolist()) if a < b]  # a mask is of T x T
    return torch.cat([dot_product(q[:, s], k[:, s], v[:, s], is_causal=True) for s in pieces], dim=1)


def flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    from torch.nn.attention import varlen

    group = q.shape[2] // k.shape[2]
    q, k, v = (x[0].contiguous() for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    # the argument that says "causal" was renamed after 2.10
    renamed = "window_size" in inspect.signature(varlen.varlen_attn).parameters
    causal: dict = {"window_size": (-1, 0)} if renamed else {"is_causal": True}
    borders = cu_seqlens.int()
    o: Any = varlen.varlen_attn(q, k, v, borders, borders, longest, longest, **causal)
    return o[None]
