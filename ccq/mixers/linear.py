"""Linears that see the same x: one launch for the few rows of a decode step on a GPU, one gradient of x in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.ops.choose import Call, autocasts, choose, unwatched


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
        from ccq.mixers import kernels  # imports Triton

        return kernels.project(x, [linear.weight for linear in linears])
    if call.device.type == "cuda" and one_gradient(x, linears):
        return together(x, [linear.weight for linear in linears])
    return [linear(x) for linear in linears]


def one_gradient(x: Tensor, linears: Sequence[nn.Linear]) -> bool:
    """Whether autograd would add up gradients of x that `Project` can add up in the products which make them."""
    if not (torch.is_grad_enabled() and x.requires_grad) or torch.compiler.is_compiling() or autocasts(x):
        return False
    return all(plain(linear, x.dtype) and linear.bias is None for linear in linears)


NARROW, ALIGNED = 64, 8  # columns of a product: below the first they share one, whose number the second divides


def together(x: Float[Tensor, "*B D"], weights: Sequence[Float[Tensor, "_ D"]]) -> list[Tensor]:
    """x W^T of each W. The narrow ones share a product: a GPU is slow at three columns, or six."""
    narrow = [weight for weight in weights if len(weight) < NARROW]
    if not narrow:
        return list(Project.apply(x, *weights))
    joined = torch.cat(narrow)
    fill = -len(joined) % ALIGNED
    *wide, shared = Project.apply(x, *(w for w in weights if len(w) >= NARROW), F.pad(joined, (0, 0, 0, fill)))
    parts = shared.split([*map(len, narrow), fill], -1)
    outs, parts = iter(wide), iter(parts)
    return [next(parts) if len(weight) < NARROW else next(outs) for weight in weights]


class Project(torch.autograd.Function):
    """x W^T for several W. The gradient of x is added up inside the products that make it: it is not read and written
    once more for every W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, dx, d_weights = x.flatten(0, -2), None, []
        for d_out, weight, wanted in zip(d_outs, weights, ctx.needs_input_grad[1:], strict=True):
            d_out = d_out.flatten(0, -2)
            dx = d_out @ weight if dx is None else dx.addmm_(d_out, weight)
            d_weights.append(d_out.mT @ rows if wanted else None)
        assert dx is not None
        return dx.view(x.shape), *d_weights
