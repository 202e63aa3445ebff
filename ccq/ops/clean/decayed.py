"""y = Sigma_t q with a covariance that decays, as PyTorch knows it: `ccq::decayed_sigma_q`, chunkwise on every device.

The kernels do not decay yet; `ccq doctor` says so.
"""

from __future__ import annotations

import torch

from ccq.ops.clean import chunk
from ccq.ops.clean.library import Layout, complete, register
from ccq.ops.clean.state import weight_of
from ccq.ops.precision import stats_dtype

_INPUTS = "Tensor q, Tensor k, Tensor log_decay, Tensor? second_moment, Tensor? key_sum, Tensor? count"
torch.library.define(
    "ccq::decayed_sigma_q",
    f"({_INPUTS}, Tensor? cu_seqlens, bool centred, str normalize)"
    " -> (Tensor y, Tensor k_bar, Tensor k_rnorm, Tensor means, Tensor second_moment_out, Tensor key_sum_out,"
    " Tensor count_out)",
)
torch.library.define(
    "ccq::decayed_sigma_q_backward",
    "(Tensor dy, Tensor? dk_bar, Tensor? d_second_moment, Tensor? d_key_sum, Tensor? d_count, Tensor k_rnorm,"
    f" Tensor means, {_INPUTS}, Tensor? cu_seqlens, bool centred, str normalize)"
    " -> (Tensor dq, Tensor dk, Tensor d_log_decay, Tensor d_second_moment_in, Tensor d_key_sum_in, Tensor d_count_in)",
)


def outputs(q, k, log_decay, second_moment, key_sum, count, cu_seqlens, centred, normalize) -> Layout:
    high = stats_dtype(q.dtype)
    batch, _, heads, size = k.shape
    n = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return [
        (q.shape, high),
        (k.shape if normalize == "unit" else (0,), k.dtype),
        (k.shape[:-1] if normalize != "none" else (0,), high),
        (q.shape[:-1] if centred else (0,), high),
        ((n, heads, size, size), high),
        ((n, heads, size), high),
        ((n, heads), high),
    ]


def _forward(q, k, log_decay, second_moment, key_sum, count, cu_seqlens, centred, normalize):
    layout = outputs(q, k, log_decay, second_moment, key_sum, count, cu_seqlens, centred, normalize)
    if q.numel() == 0:
        empty = complete(layout, q)
        starts = (second_moment, key_sum, None if count is None else weight_of(count, k.shape[2], empty[6].dtype))
        for out, start in zip(empty[4:], starts, strict=True):
            out.zero_() if start is None else out.copy_(start)
        return empty
    y, k_bar, k_rnorm, *rest = chunk.decayed_forward(
        q, k, None, log_decay, second_moment, key_sum, count, cu_seqlens, centred, normalize
    )
    kept = (k_bar if normalize == "unit" else None, k_rnorm if normalize != "none" else None)
    return complete(layout, q, (y, *kept, *rest))


def gradients(q, k, log_decay, second_moment, key_sum, count) -> Layout:
    high = stats_dtype(q.dtype)
    states = [(0,) if x is None else x.shape for x in (second_moment, key_sum)]
    weighs = count is not None and count.is_floating_point()
    return [
        (q.shape, q.dtype),
        (k.shape, k.dtype),
        (log_decay.shape, log_decay.dtype),
        (states[0], high),
        (states[1], high),
        (count.shape if weighs else (0,), high),
    ]


def _backward(
    dy, dk_bar, d_second_moment, d_key_sum, d_count, k_rnorm, means,
    q, k, log_decay, second_moment, key_sum, count, cu_seqlens, centred, normalize,
):  # fmt: skip
    layout = gradients(q, k, log_decay, second_moment, key_sum, count)
    if q.numel() == 0:
        empty = complete(layout, q)
        for out, after in zip(empty[3:], (d_second_moment, d_key_sum, d_count), strict=True):
            out.zero_() if after is None or not out.numel() else out.copy_(after)
        return empty
    dq, dk, _, d_log_decay, *d_initial = chunk.decayed_backward(
        dy, dk_bar, (d_second_moment, d_key_sum, d_count), q, k, k_rnorm, means, None, log_decay,
        (second_moment, key_sum, count), cu_seqlens, centred, normalize,
    )  # fmt: skip
    kept = [d if shape != (0,) else None for d, (shape, _) in zip(d_initial, layout[3:], strict=True)]
    return complete(layout, q, (dq, dk, d_log_decay.to(log_decay.dtype), *kept))


def _setup_context(ctx, inputs, output):
    q, k, log_decay, second_moment, key_sum, count, cu_seqlens, centred, normalize = inputs
    _, k_bar, k_rnorm, means, *_ = output
    ctx.save_for_backward(
        k_rnorm, means, q, k_bar if normalize == "unit" else k, log_decay, second_moment, key_sum, count, cu_seqlens
    )
    ctx.options = centred, normalize
    ctx.mark_non_differentiable(k_rnorm, means)
    ctx.set_materialize_grads(False)


def _autograd(ctx, dy, dk_bar, _, __, d_second_moment, d_key_sum, d_count):
    k_rnorm, means, q, k, log_decay, second_moment, key_sum, count, cu_seqlens = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(q)
    dq, dk, d_log_decay, *d_initial = torch.ops.ccq.decayed_sigma_q_backward(
        dy, dk_bar, d_second_moment, d_key_sum, d_count, k_rnorm, means,
        q, k, log_decay, second_moment, key_sum, count, cu_seqlens, *ctx.options,
    )  # fmt: skip
    weighs = count is not None and count.is_floating_point()
    given = (second_moment is not None, key_sum is not None, weighs)
    d_initial = [d if there else None for d, there in zip(d_initial, given, strict=True)]
    return dq, dk, d_log_decay, *d_initial, None, None, None


def _forward_fake(q, *others):
    return complete(outputs(q, *others), q)


def _backward_fake(*given):
    inputs = given[7:13]
    return complete(gradients(*inputs), inputs[0])


register("ccq::decayed_sigma_q", (_forward, _forward_fake), (_backward, _backward_fake), _autograd, _setup_context)
