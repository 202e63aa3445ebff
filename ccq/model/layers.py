"""The layers of the decoder beside the mixers."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.linear import bare, few_rows, project
from ccq.mixers.norms import RMSNorm, fused
from ccq.ops.choose import choose

__all__ = ["RMSNorm", "SwiGLU", "add_norm"]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        how = choose("swiglu", few_rows(x, (self.gate_proj, self.up_proj)))
        if how == "triton":
            from ccq.mixers import kernels  # imports Triton

            return self.down_proj(kernels.swiglu(x, self.gate_proj.weight, self.up_proj.weight))
        gate, up = project(x, (self.gate_proj, self.up_proj))
        if how == "fla":
            from fla.modules.activations import swiglu, swiglu_linear

            if bare(self.down_proj):
                return swiglu_linear(gate, up, self.down_proj.weight, None)
            return self.down_proj(swiglu(gate, up))
        return self.down_proj(F.silu(gate) * up)


def add_norm(x: Float[Tensor, "*B D"], y: Float[Tensor, "*B D"], norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + y, and its norm: one pass over memory on a GPU."""
    if fused(x):
        from fla.modules.norm.layernorm import rms_norm

        normed, total = rms_norm(y, norm.weight, None, residual=x, eps=norm.eps, prenorm=True)
        return total, normed
    x = x + y
    return x, norm(x)
