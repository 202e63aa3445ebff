"""The norms of decoder and mixers: fused kernels on a GPU (our own, and fla's of the rarer ones), PyTorch elsewhere.

Everything is computed in fp32 (fp64 for fp64) and returned in the dtype of x.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.mixers.linear import bare
from ccq.ops import precision
from ccq.ops.choose import Call, choose
from ccq.ops.precision import EPS, high


def fused(x: Tensor) -> bool:
    """Whether fla's kernels take `x`."""
    return choose("norm", Call(x.device, x.dtype)) == "fla"


def one_pass(op: str, x: Tensor) -> bool:
    """Whether the kernels of passes.py take `x`."""
    return choose(op, Call(x.device, x.dtype)) == "passes"


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    eps: float

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__(size, eps)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        if one_pass("add_norm", x):
            from ccq.mixers.passes import add_norm  # imports Triton

            return add_norm(x, None, self.weight, self.eps)[1]
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(RMSNorm):
    """rms_norm(x) * silu(gate), or rms_norm(x * silu(gate)) with `gate_first`, as Mamba2 has it.

    `sigmoid`: of the gate in the place of the SiLU, as KDA has it. `groups`: how many equal parts of the last dimension
    are normalised apart.
    """

    def __init__(
        self, size: int, eps: float = 1e-6, gate_first: bool = False, groups: int = 1, sigmoid: bool = False
    ) -> None:
        super().__init__(size, eps)
        self.gate_first, self.sigmoid = gate_first, sigmoid
        self.groups = groups

    def forward(self, x: Float[Tensor, "*B D"], gate: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:  # type: ignore[override]
        if self.gate_first or self.groups > 1:
            if fused(x):
                from fla.modules.norm.layernorm_gated import rmsnorm_fn

                options = {"group_size": x.shape[-1] // self.groups, "norm_before_gate": not self.gate_first}
                return rmsnorm_fn(x, self.weight, None, z=gate, eps=self.eps, **options)
        elif one_pass("gated_norm", x):
            from ccq.mixers.passes import gated_norm  # imports Triton

            return gated_norm(x, gate, self.weight, self.eps, self.sigmoid)
        activate = torch.sigmoid if self.sigmoid else F.silu
        y, opened, weight = high(x), activate(high(gate)), high(self.weight)
        if self.gate_first:
            y = y * opened
        parts = y.unflatten(-1, (self.groups, -1))
        y = F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * weight
        if not self.gate_first:
            y = y * opened
        return y.to(x.dtype)

    def then(
        self, linear: nn.Linear, x: Float[Tensor, "*B H D"], gate: Float[Tensor, "*B H D"]
    ) -> Float[Tensor, "*B O"]:
        """What the Linear makes of the heads, which a training step then need not keep."""
        ours = not (self.gate_first or self.groups > 1) and one_pass("gated_norm", x)
        if ours and bare(linear) and linear.bias is None:
            from ccq.mixers.passes import gated_norm  # imports Triton

            return gated_norm(x, gate, self.weight, self.eps, self.sigmoid, linear.weight)
        return linear(self(x, gate).flatten(-2))


def unit(x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B K"]:
    """x / sqrt(sum(x^2) + 1e-6): the length that `clean_query` gives to q and k."""
    if fused(x):
        from fla.modules.norm.l2norm import l2norm

        return l2norm(x, EPS)
    return precision.unit(x).to(x.dtype)
