"""The operator as PyTorch knows it: `ccq::clean_query` and its backward, with shapes for tracing and autograd.

Plain tensors in, plain tensors out, never an input among the outputs; what was not asked for comes back empty. Inside,
one of the backends runs. torch.compile sees an opaque call, so it takes any model that uses it without a graph break.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ccq.ops import chunk
from ccq.ops.checks import check_values
from ccq.ops.dispatch import resolve
from ccq.ops.reference import stats_dtype

_STATE = "Tensor? second_moment, Tensor? key_sum, Tensor? count, Tensor? cu_seqlens"
_OPTIONS = "bool centred, str normalize, str backend"
torch.library.define(
    "ccq::clean_query",
    f"(Tensor q, Tensor k, Tensor lam, {_STATE}, {_OPTIONS}, bool output_final_state)"
    " -> (Tensor q_clean, Tensor k_bar, Tensor k_rnorm, Tensor means,"
    " Tensor second_moment_out, Tensor key_sum_out, Tensor count_out)",
)
torch.library.define(
    "ccq::clean_query_backward",
    "(Tensor g, Tensor? dk_bar, Tensor? d_second_moment, Tensor? d_key_sum,"
    f" Tensor q, Tensor k, Tensor k_rnorm, Tensor means, Tensor lam, {_STATE}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dlam, Tensor d_second_moment_in, Tensor d_key_sum_in)",
)


def implementation(q: Tensor, backend: str) -> ModuleType:
    """The module whose `forward` and `backward` run."""
    name = resolve(backend, q.device, q.dtype, q.shape[-1])
    if name == "triton":
        from ccq.ops import fused  # imports Triton

        return fused
    return chunk


def outputs(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, centred: bool, normalize: str, final: bool
) -> tuple[Tensor, ...]:
    """Unfilled results of `ccq::clean_query`."""
    high = stats_dtype(q.dtype)
    batch, _, heads, size = k.shape
    n = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape if normalize == "unit" else 0),
        k.new_empty(k.shape[:-1] if normalize != "none" else 0, dtype=high),
        q.new_empty(q.shape[:-1] if centred else 0, dtype=high),
        k.new_empty((n, heads, size, size) if final else 0, dtype=high),
        k.new_empty((n, heads, size) if final else 0, dtype=high),
        k.new_empty(n if final else 0, dtype=torch.int64),
    )


def final_count(q: Tensor, count: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        seen = torch.full((q.shape[0],), q.shape[1], dtype=torch.int64, device=q.device)
    else:
        seen = cu_seqlens.diff().long()
    return seen if count is None else seen + count


def _clean_query(q, k, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend, output_final_state):
    check_values(lam, count, cu_seqlens, q.shape[1])
    module = implementation(q, backend)
    empty = outputs(q, k, cu_seqlens, centred, normalize, output_final_state)
    if q.numel() == 0:  # nothing to launch; the state stays what it was
        if output_final_state:
            for out, start in zip(empty[4:6], (second_moment, key_sum), strict=True):
                out.zero_() if start is None else out.copy_(start)
            empty[6].copy_(final_count(q, count, cu_seqlens))
        return empty
    q_clean, k_bar, k_rnorm, means, final_moment, final_sum = module.forward(
        q, k, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize, output_final_state
    )
    return (
        q_clean,
        k_bar if normalize == "unit" else empty[1],
        k_rnorm if normalize != "none" else empty[2],
        means,
        final_moment if output_final_state else empty[4],
        final_sum if output_final_state else empty[5],
        final_count(q, count, cu_seqlens) if output_final_state else empty[6],
    )


def _clean_query_fake(
    q, k, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend, output_final_state
):
    return outputs(q, k, cu_seqlens, centred, normalize, output_final_state)


def _clean_query_backward(
    g, dk_bar, d_second_moment, d_key_sum,
    q, k, k_rnorm, means, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend,
):  # fmt: skip
    if q.numel() == 0:
        empty = _clean_query_backward_fake(
            g, dk_bar, d_second_moment, d_key_sum,
            q, k, k_rnorm, means, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend,
        )  # fmt: skip
        if second_moment is not None:
            for out, after in zip(empty[3:], (d_second_moment, d_key_sum), strict=True):
                out.zero_() if after is None else out.copy_(after)
        return empty
    grads = implementation(q, backend).backward(
        g, dk_bar, d_second_moment, d_key_sum,
        q, k, k_rnorm, means, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize,
    )  # fmt: skip
    if second_moment is None:
        high = stats_dtype(q.dtype)
        return (*grads[:3], q.new_empty(0, dtype=high), q.new_empty(0, dtype=high))
    return grads


def _clean_query_backward_fake(
    g, dk_bar, d_second_moment, d_key_sum,
    q, k, k_rnorm, means, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend,
):  # fmt: skip
    high = stats_dtype(q.dtype)
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        lam.new_empty(lam.shape),
        q.new_empty(0 if second_moment is None else second_moment.shape, dtype=high),
        q.new_empty(0 if key_sum is None else key_sum.shape, dtype=high),
    )


def _setup_context(ctx, inputs, output):
    q, k, lam, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend, _ = inputs
    _, k_bar, k_rnorm, means, _, _, final = output
    # q is shared with the gate and k_bar with the backbone, so that CCQ keeps only a few numbers a token of its own
    ctx.save_for_backward(
        q, k_bar if normalize == "unit" else k, k_rnorm, means, lam, second_moment, key_sum, count, cu_seqlens
    )
    ctx.options = centred, normalize, backend
    ctx.mark_non_differentiable(k_rnorm, means, final)
    ctx.set_materialize_grads(False)


def _backward(ctx, g, dk_bar, _, __, d_second_moment, d_key_sum, ___):
    q, k, k_rnorm, means, lam, second_moment, key_sum, count, cu_seqlens = ctx.saved_tensors
    if g is None:
        g = torch.zeros_like(q)
    given = [None if d is None or d.numel() == 0 else d for d in (dk_bar, d_second_moment, d_key_sum)]
    dq, dk, dlam, d_initial_moment, d_initial_sum = torch.ops.ccq.clean_query_backward(
        g, *given, q, k, k_rnorm, means, lam, second_moment, key_sum, count, cu_seqlens, *ctx.options
    )
    if second_moment is None:
        d_initial_moment = d_initial_sum = None
    return dq, dk, dlam, d_initial_moment, d_initial_sum, *[None] * 6


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "clean_query has no second derivative in backend='chunk' and 'triton'. "
        "backend='reference' can be differentiated to any order."
    )


def _no_vmap(info, in_dims, *args):
    raise RuntimeError(
        "clean_query cannot be mapped by torch.vmap: put the mapped axis into the batch axis B or the heads instead, "
        "or use backend='reference'."
    )


for name, function, fake in (
    ("ccq::clean_query", _clean_query, _clean_query_fake),
    ("ccq::clean_query_backward", _clean_query_backward, _clean_query_backward_fake),
):
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)
    torch.library.register_vmap(name, _no_vmap)
torch.library.register_autograd("ccq::clean_query", _backward, setup_context=_setup_context)
torch.library.register_autograd("ccq::clean_query_backward", _no_double_backward)
