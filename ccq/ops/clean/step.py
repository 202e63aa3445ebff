"""One decode step: (q, k, lam, state) -> (q_clean, k_bar, state)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from ccq.ops.checks import check_call, check_values, has_tangent
from ccq.ops.choose import resolve
from ccq.ops.clean import reference
from ccq.ops.clean.state import CovarianceState
from ccq.ops.precision import no_autocast


def clean_query_step(
    q: Float[Tensor, "B Hq K"],
    k: Float[Tensor, "B Hk K"],
    lam: Float[Tensor, "B Hq"],
    state: CovarianceState,
    centred: bool = True,
    normalize: str = "unit",
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B Hq K"], Float[Tensor, "B Hk K"], CovarianceState]:
    """`clean_query` for one more token of each of B sequences.

    With `inplace` the tensors of `state` (its count too) are updated and the same object comes back: what decoding
    wants. Without it the call is functional, and differentiable to any order.

    >>> state = CovarianceState.zeros(1, heads=4, key_size=64)
    >>> q, k, lam = torch.randn(1, 4, 64), torch.randn(1, 4, 64), torch.full((1, 4), 0.5)
    >>> q_clean, k_bar, state = clean_query_step(q, k, lam, state)
    >>> state.count
    tensor([1])
    """
    if state is None:
        raise TypeError("state: expected a CovarianceState, got None; CovarianceState.zeros(...) begins a sequence")
    check_call(q, k, lam, state, None, centred, normalize, backend, tokens=False)
    differentiable = wants_gradient(q, k, lam, state)
    if inplace and differentiable:
        raise RuntimeError(
            f"inplace: {differentiable} needs a gradient, which an update in place would destroy. "
            "Use inplace=False, or torch.no_grad() for decoding."
        )
    if not torch.compiler.is_compiling():
        check_values(lam, state.count, None, 1, state="state")
        if resolve(backend, q.device, q.dtype, q.shape[-1]) == "triton" and not differentiable:
            from ccq.ops.clean.triton import step as fused_step  # imports Triton

            if not inplace:
                state = pytree.tree_map(lambda x: x.clone(memory_format=torch.contiguous_format), state)
            q_clean, k_bar = fused_step.step(q, k, lam, state, centred, normalize)
            return q_clean, k_bar, state
    if not inplace:
        state = CovarianceState(reference.symmetric(state.second_moment), state.key_sum, state.count)
    with no_autocast(q):
        q_clean, k_bar, state, _ = reference.step(q, k, lam, state, centred, normalize, inplace)
    return q_clean, k_bar if normalize == "unit" else k, state


def wants_gradient(q: Tensor, k: Tensor, lam: Tensor, state: CovarianceState) -> str | None:
    """The first argument that autograd is to follow."""
    backward = torch.is_grad_enabled()
    named = (("q", q), ("k", k), ("lam", lam), ("state", state.second_moment), ("state", state.key_sum))
    return next((name for name, x in named if (backward and x.requires_grad) or has_tangent(x)), None)
