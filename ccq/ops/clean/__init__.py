"""`clean_query`: the query, contracted along the directions in which the keys seen so far vary most, and `sigma_q`. Of
all tokens, or of one more of each sequence.

B sequences (or N packed ones), T tokens, Hq query heads, Hk key heads, K key size.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ccq.ops.checks import check_call, check_decays, check_read, check_values, has_tangent, refuse_transforms
from ccq.ops.clean import reference
from ccq.ops.clean.library import Gate, gate, plain_gate  # which defines torch.ops.ccq.clean_query
from ccq.ops.clean.reference import Read, symmetric
from ccq.ops.clean.state import CovarianceState
from ccq.ops.precision import no_autocast, stats_dtype, unit


def clean_query(
    q: Float[Tensor, "B T Hq K"],
    k: Float[Tensor, "B T Hk K"],
    lam: Float[Tensor, "B T Hq"] | Gate,
    centred: bool = True,
    normalize: str = "unit",
    initial_state: CovarianceState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    backend: str = "auto",
    step: str = "scaled",
    steps: int = 1,
    log_decay: Float[Tensor, "B T Hk"] | None = None,
) -> tuple[Float[Tensor, "B T Hq K"], Float[Tensor, "B T Hk K"], CovarianceState | None]:
    """Clean each query with the covariance of the keys up to and including its own position.

        q_clean_t = q_t - lam_t * Sigma_t q_t,    Sigma_t = C_t / t - s_t s_t^T / t^2
        C_t = sum_{j<=t} k_j k_j^T,   s_t = sum_{j<=t} k_j     (without `centred` the second term is dropped)

    The backbone reads its state with q_clean as it is (no second normalisation) and writes with k_bar.

    Args:
        q: queries.
        k: keys, of the same dtype. Hq is a multiple of Hk; query head h reads key head h // (Hq / Hk).
        lam: how far to contract, from 0 to 1; any float dtype, used in fp32. Or the `Gate(weight, bias)` that gives
            it, sigmoid(W q + b) of this q as it comes: one pass over q less than `gate`, three with the backward.
        normalize: "unit": q and k are divided by their norms first, k_bar is the unit key (the paper);
            "none": they are unit vectors already, k_bar is k;
            "stats": unit keys in Sigma only, q keeps its length, k_bar is k.
        initial_state: the statistics of what came before, one a sequence.
        output_final_state: whether to return the statistics after the last token.
        cu_seqlens: borders [0, ..., T] of N sequences packed along T (B = 1). Each starts its own statistics.
        backend: "reference", "chunk", "triton", or "auto", the fastest that can run; see `ccq.backends()`.
        step: "scaled": as above (the paper); "projected": lam is the share of what q has along y = Sigma_t q that is
            taken away, q_clean = q - lam (q . y) / (y . y) y, whatever the scale of Sigma.
        steps: how often the step is taken, on the same keys, from 1 to 4.
        log_decay: by what C, s and t are multiplied before a key is added, its logarithm, at most 0: the covariance of
            what is still remembered. Then t is a weight, one a head.

    Returns:
        q_clean and k_bar, in the dtype of q and k, and the final state (None unless asked for). Statistics are fp32,
        fp64 for fp64 inputs, under autocast too.

    >>> q, k = torch.randn(2, 100, 8, 64), torch.randn(2, 100, 4, 64)
    >>> lam = torch.full((2, 100, 8), 0.5)
    >>> q_clean, k_bar, state = clean_query(q, k, lam, output_final_state=True)
    >>> q_clean.shape, state.count
    (torch.Size([2, 100, 8, 64]), tensor([100, 100]))
    """
    how = Read(centred, normalize, step)
    check_call(q, k, lam, initial_state, cu_seqlens, how, backend, tokens=True)
    check_read(step, steps, log_decay, k)
    if isinstance(lam, tuple) and (steps > 1 or step not in reference.FUSED):  # one gate for all steps
        lam = plain_gate(q, *lam) if backend == "reference" else gate(q, *lam, backend=backend)
    for left in reversed(range(steps)):
        where = (log_decay, initial_state, output_final_state and not left, cu_seqlens, backend)
        if step in reference.FUSED:
            q, k_bar, state = _run("clean_query", q, k, lam, how, *where)
        else:
            check_values(lam, None, None, 0)  # type: ignore[arg-type]  # a gate is lam by now
            y, k_bar, state = _run("sigma_q", q, k, None, how._replace(step="scaled"), *where)
            q = read_with(step, q, y, lam, how.normalize)
        if how.normalize == "unit":  # once
            k, how = k_bar, how._replace(normalize="none")
    return q, k_bar, state


def read_with(step: str, q: Tensor, y: Tensor, lam: Any, normalize: str) -> Tensor:
    """q_clean of y = Sigma_t q as `sigma_q` gives it."""
    q_read = unit(q) if normalize == "unit" else q.to(y.dtype)
    return reference.STEPS[step](q_read, y, lam.to(y.dtype)[..., None]).to(q.dtype)


def sigma_q(
    q: Float[Tensor, "B T Hq K"],
    k: Float[Tensor, "B T Hk K"],
    centred: bool = True,
    normalize: str = "unit",
    initial_state: CovarianceState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    backend: str = "auto",
    log_decay: Float[Tensor, "B T Hk"] | None = None,
) -> tuple[Float[Tensor, "B T Hq K"], Float[Tensor, "B T Hk K"], CovarianceState | None]:
    """y = Sigma_t q, what `clean_query` takes away from a query when lam is 1: for reads that take it away otherwise.

    Arguments as there. With normalize="unit" it is Sigma_t of the unit query.

    Returns:
        y in fp32 (fp64 for fp64 inputs), k_bar and the final state. y is often smaller than the rounding of a bf16
        query. Differentiable in q, k and the initial state: dq = Sigma_t dy.

    >>> q, k = torch.randn(2, 100, 8, 64), torch.randn(2, 100, 4, 64)
    >>> y, k_bar, _ = sigma_q(q, k)
    >>> q_clean, _, _ = clean_query(q, k, torch.full((2, 100, 8), 0.5))
    >>> torch.allclose(torch.nn.functional.normalize(q, dim=-1) - 0.5 * y, q_clean, atol=1e-5)
    True
    """
    how = Read(centred, normalize)
    check_call(q, k, None, initial_state, cu_seqlens, how, backend, tokens=True)
    check_read("scaled", 1, log_decay, k)
    return _run("sigma_q", q, k, None, how, log_decay, initial_state, output_final_state, cu_seqlens, backend)


def correction(
    q: Float[Tensor, "B T Hq K"],
    k: Float[Tensor, "B T Hk K"],
    centred: bool = True,
    normalize: str = "unit",
    initial_state: CovarianceState | None = None,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    backend: str = "auto",
    log_decay: Float[Tensor, "B T Hk"] | None = None,
) -> Float[Tensor, "B T Hq K"]:
    """The y of `sigma_q` by itself."""
    return sigma_q(q, k, centred, normalize, initial_state, False, cu_seqlens, backend, log_decay)[0]


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


def _run(name, q, k, lam, how, log_decay, initial_state, output_final_state, cu_seqlens, backend):
    """q_clean, or y where there is no lam; k_bar, and the final state where asked for."""
    if backend == "reference":
        out, k_bar, state = _reference(q, k, lam, how, log_decay, initial_state, cu_seqlens)
    else:
        by = (None, *lam) if isinstance(lam, tuple) else (lam, None, None)
        initial: tuple = (None, None, None)
        if initial_state is not None:
            initial = (symmetric(initial_state.second_moment), initial_state.key_sum, initial_state.count)
        refuse_transforms(name, q, k, *by, log_decay, *initial[:2])
        if log_decay is None and initial[2] is not None and initial[2].is_floating_point():
            log_decay = k.new_zeros(k.shape[:-1], dtype=initial[2].dtype)  # its count is a weight already
        # q is kept for the backward, and a view would keep all that it is a view of: q, k and v of one convolution, say
        q = q.contiguous()
        given = (q, k, *by, log_decay, *initial)
        trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        out, k_bar, _, _, _, _, *final = torch.ops.ccq.clean_query(
            *given, cu_seqlens, *how, backend, output_final_state, trains and how.step == "projected"
        )
        state = CovarianceState(*final)
    return out, k_bar if how.normalize == "unit" else k, state if output_final_state else None


def _reference(q, k, lam, how, log_decay, state, cu_seqlens):
    given = plain_gate(q, *lam) if isinstance(lam, tuple) else q.new_ones(q.shape[:-1]) if lam is None else lam
    check_values(given, None if state is None else state.count, cu_seqlens, q.shape[1])
    if state is None:
        n = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = CovarianceState.zeros(n, k.shape[2], k.shape[3], dtype=stats_dtype(k.dtype), device=k.device)
    with no_autocast(q):
        q_clean, k_bar, state, y = reference.forward(q, k, given, state, cu_seqlens, how, log_decay)
    return y if lam is None else q_clean, k_bar, state


def _step(q, k, lam, state, how, log_decay, inplace, backend):
    """What reference.step returns, of arguments that are checked."""
    if state is None:
        raise TypeError("state: expected a CovarianceState, got None; CovarianceState.zeros(...) starts a sequence")
    check_call(q, k, lam, state, None, how, backend, tokens=False)
    lam = torch.ones_like(q[..., 0]) if lam is None else lam
    if inplace and log_decay is not None:
        check_decays(state)
    if inplace and (followed := wants_gradient(q, k, lam, state, log_decay)):
        raise RuntimeError(
            f"inplace: {followed} needs a gradient, which an update in place would destroy. "
            "Use inplace=False, or torch.no_grad() for decoding."
        )
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
