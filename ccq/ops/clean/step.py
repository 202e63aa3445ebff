"""One more token: (q, k, lam, state) -> (q_clean, k_bar, state)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ccq.ops.checks import check_call, check_decays, check_read, check_values, has_tangent
from ccq.ops.clean import read_with, reference
from ccq.ops.clean.reference import Read
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
    step: str = "scaled",
    steps: int = 1,
    log_decay: Float[Tensor, "B Hk"] | None = None,
) -> tuple[Float[Tensor, "B Hq K"], Float[Tensor, "B Hk K"], CovarianceState]:
    """`clean_query` for one more token of each of B sequences.

    With `inplace` the tensors of `state` (its count too) are updated and the same object comes back: what decoding
    wants. Without it the call is functional, and differentiable to any order.

    A step is plain PyTorch, the definition's own, whatever the backend; `decode_step` has it in the kernel that writes
    and reads the backbone's state.

    >>> state = CovarianceState.zeros(1, heads=4, key_size=64)
    >>> q, k, lam = torch.randn(1, 4, 64), torch.randn(1, 4, 64), torch.full((1, 4), 0.5)
    >>> q_clean, k_bar, state = clean_query_step(q, k, lam, state)
    >>> state.count
    tensor([1])
    """
    check_read(step, steps, log_decay, k)
    how = Read(centred, normalize, step)
    q, k_bar, state, y = _step(q, k, lam, state, how, log_decay, inplace, backend)
    with no_autocast(q):
        for _ in range(steps - 1):
            y = reference.read(state, q.to(y.dtype), centred)
            q = read_with(step, q, y, lam, "none")
    return q, k_bar, state


def sigma_q_step(
    q: Float[Tensor, "B Hq K"],
    k: Float[Tensor, "B Hk K"],
    state: CovarianceState,
    centred: bool = True,
    normalize: str = "unit",
    inplace: bool = False,
    log_decay: Float[Tensor, "B Hk"] | None = None,
) -> tuple[Float[Tensor, "B Hq K"], Float[Tensor, "B Hk K"], CovarianceState]:
    """`sigma_q` for one more token: y = Sigma_t q in fp32 (fp64 for fp64), k_bar, and the state."""
    check_read("scaled", 1, log_decay, k)
    _, k_bar, state, y = _step(q, k, None, state, Read(centred, normalize), log_decay, inplace, "auto")
    return y, k_bar, state


def _step(q, k, lam, state, how, log_decay, inplace, backend):
    """What reference.step returns, of arguments that are checked."""
    if state is None:
        raise TypeError("state: expected a CovarianceState, got None; CovarianceState.zeros(...) begins a sequence")
    check_call(q, k, lam, state, None, how, backend, tokens=False)
    lam = torch.ones_like(q[..., 0]) if lam is None else lam
    if inplace and log_decay is not None:
        check_decays(state)
    if inplace and (followed := wants_gradient(q, k, lam, state, log_decay)):
        raise RuntimeError(
            f"inplace: {followed} needs a gradient, which an update in place would destroy. "
            "Use inplace=False, or torch.no_grad() for decoding."
        )
    if not torch.compiler.is_compiling():
        check_values(lam, state.count, None, 1, state="state")
    if not inplace:
        state = CovarianceState(reference.symmetric(state.second_moment), state.key_sum, state.count)
    with no_autocast(q):
        q_clean, k_bar, state, y = reference.step(q, k, lam, state, how, log_decay, inplace)
    return q_clean, k_bar if how.normalize == "unit" else k, state, y


def wants_gradient(q: Tensor, k: Tensor, lam: Tensor, state: CovarianceState, log_decay: Tensor | None) -> str | None:
    """The first argument that autograd is to follow."""
    backward = torch.is_grad_enabled()
    named = [("q", q), ("k", k), ("lam", lam), ("state", state.second_moment), ("state", state.key_sum)]
    if log_decay is not None:
        named.append(("log_decay", log_decay))
    return next((name for name, x in named if (backward and x.requires_grad) or has_tangent(x)), None)
