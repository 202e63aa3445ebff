"""Linears that see the same x: one launch for the few rows of a decode step on a GPU, one by one elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ccq.ops.choose import Call, choose, unwatched


def few_rows(x: Tensor, linears: Sequence[nn.Linear]) -> Call:
    """The call of a kernel that stands for these: plain Linears, nothing hooked to them, and few rows."""
    if x.ndim != 2 or not unwatched(x):
        return Call(x.device, x.dtype)
    return Call(x.device, x.dtype, rows=x.shape[0], unwatched=all(plain(linear, x.dtype) for linear in linears))


def bare(linear: nn.Module) -> bool:
    """Whether x W^T + b is all that calling it does: an adapter in its place, a hook, another forward want a call."""
    return type(linear) is nn.Linear and not watched(linear)


def watched(module: nn.Module) -> bool:
    """Whether somebody has hooked something to a module, or put a forward of their own into it."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(hooks) or "forward" in module.__dict__


def plain(linear: nn.Linear, dtype: torch.dtype) -> bool:
    return (
        bare(linear)
        and type(linear.weight) in (nn.Parameter, Tensor)
        and linear.weight.dtype == dtype
        and linear.weight.is_contiguous()
    )


def project(x: Float[Tensor, "*B D"], linears: Sequence[nn.Linear], backend: str = "auto") -> list[Tensor]:
    """What each of the Linears makes of x."""
    call = few_rows(x, linears)  # it asks first: what stands in the place of a Linear may have no bias to look at
    if choose("linear", call, backend) == "triton" and all(linear.bias is None for linear in linears):
        from ccq.mixers import fused_linear  # imports Triton

        return fused_linear.project(x, [linear.weight for linear in linears])
    return [linear(x) for linear in linears]
