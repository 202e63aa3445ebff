"""`clean_query`: the query, contracted along the directions in which the keys seen so far vary most.

B sequences (or N packed ones), T tokens, Hq query heads, Hk key heads, K key size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ccq.ops.checks import check_call, check_values, refuse_transforms
from ccq.ops.clean import library, reference
from ccq.ops.clean.gating import Gate, plain_gate
from ccq.ops.clean.state import CovarianceState
from ccq.ops.precision import no_autocast, stats_dtype


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
) -> tuple[Float[Tensor, "B T Hq K"], Float[Tensor, "B T Hk K"], CovarianceState | None]:
    """Clean each query with the covariance of the keys up to and including its own position.

        q_clean_t = q_t - lam_t * Sigma_t q_t,    Sigma_t = C_t / t - s_t s_t^T / t^2
        C_t = sum_{j<=t} k_j k_j^T,   s_t = sum_{j<=t} k_j     (without `centred` the second term is dropped)

    The backbone reads its state with q_clean as it is (no second normalisation) and writes with k_bar.

    Args:
        q, k: queries and keys, of one dtype. Hq is a multiple of Hk; query head h reads key head h // (Hq / Hk).
        lam: how far to contract, from 0 to 1; any float dtype, used in fp32. Or the `Gate(weight, bias)` that gives
            it, sigmoid(W q + b) of this q as it comes: one pass over q less than `gate`, three with the backward.
        normalize: "unit": q and k are divided by their norms first, k_bar is the unit key (the paper);
            "none": they are unit vectors already, k_bar is k;
            "stats": unit keys in Sigma only, q keeps its length, k_bar is k.
        initial_state: the statistics of what came before, one a sequence.
        output_final_state: whether to return the statistics after the last token.
        cu_seqlens: borders [0, ..., T] of N sequences packed along T (B = 1). Each starts its own statistics.
        backend: "reference", "chunk", "triton", or "auto", the fastest that can run; see `ccq.backends()`.

    Returns:
        q_clean and k_bar, in the dtype of q and k, and the final state (None unless asked for). Statistics are fp32,
        fp64 for fp64 inputs, under autocast too.

    >>> q, k = torch.randn(2, 100, 8, 64), torch.randn(2, 100, 4, 64)
    >>> lam = torch.full((2, 100, 8), 0.5)
    >>> q_clean, k_bar, state = clean_query(q, k, lam, output_final_state=True)
    >>> q_clean.shape, state.count
    (torch.Size([2, 100, 8, 64]), tensor([100, 100]))
    """
    check_call(q, k, lam, initial_state, cu_seqlens, centred, normalize, backend, tokens=True)
    if backend == "reference":
        given = plain_gate(q, *lam) if isinstance(lam, tuple) else lam
        q_clean, k_bar, state, _ = _reference(q, k, given, initial_state, cu_seqlens, centred, normalize)
        return q_clean, k_bar if normalize == "unit" else k, state if output_final_state else None
    by = (None, *lam) if isinstance(lam, tuple) else (lam, None, None)
    initial = _tensors(initial_state)
    refuse_transforms("clean_query", q, k, *by, *initial[:2])
    # q is kept for the backward, and a view would keep all that it is a view of: q, k and v of one convolution, say
    q_clean, k_bar, _, _, _, second_moment, key_sum, count = torch.ops.ccq.clean_query(
        q.contiguous(), k, *by, *initial, cu_seqlens, centred, normalize, backend, output_final_state
    )
    state = CovarianceState(second_moment, key_sum, count) if output_final_state else None
    return q_clean, k_bar if normalize == "unit" else k, state


@torch.no_grad()
def correction(
    q: Float[Tensor, "B T Hq K"],
    k: Float[Tensor, "B T Hk K"],
    centred: bool = True,
    normalize: str = "unit",
    initial_state: CovarianceState | None = None,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B T Hq K"]:
    """y = Sigma_t q by itself, in fp32 (fp64 for fp64), from the code that `clean_query` runs.

    For tests and analysis: y is often smaller than the rounding of a bf16 q_clean, so that it cannot be seen there.
    Not differentiable.
    """
    lam = torch.ones(q.shape[:-1], device=q.device) if isinstance(q, Tensor) else q
    check_call(q, k, lam, initial_state, cu_seqlens, centred, normalize, backend, tokens=True)
    if backend == "reference":
        return _reference(q, k, lam, initial_state, cu_seqlens, centred, normalize)[3]
    state = _tensors(initial_state)
    check_values(lam, state[2], cu_seqlens, q.shape[1])
    module = library.implementation(q, backend)
    if q.numel() == 0 or q.is_meta:
        return q.new_empty(q.shape, dtype=stats_dtype(q.dtype))
    return module.forward(q, k, lam, *state, cu_seqlens, centred, normalize, False, output_correction=True)[0]


def _tensors(state: CovarianceState | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The state as the custom op takes it."""
    if state is None:
        return None, None, None
    return reference.symmetric(state.second_moment), state.key_sum, state.count


def _reference(q, k, lam, state, cu_seqlens, centred, normalize):
    if not torch.compiler.is_compiling():
        check_values(lam, None if state is None else state.count, cu_seqlens, q.shape[1])
    if state is None:
        n = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = CovarianceState.zeros(n, k.shape[2], k.shape[3], dtype=stats_dtype(k.dtype), device=k.device)
    with no_autocast(q):
        return reference.forward(q, k, lam, state, cu_seqlens, centred, normalize)
