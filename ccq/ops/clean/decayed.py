"""y = Sigma_t q with a covariance that decays, as PyTorch knows it: `ccq::decayed_sigma_q`, chunkwise on every device.

The kernels do not decay yet; `ccq doctor` says so.
"""

from __future__ import annotations

import torch

from ccq.ops.clean import chunk
from ccq.ops.clean.chunk import Gradients, Past, Saved
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
    """Of `ccq::decayed_sigma_q`."""
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


def _forward(*arguments):
    q, k, log_decay, *past, centred, normalize = arguments
    layout = outputs(*arguments)
    if q.numel() == 0:
        empty = complete(layout, q)
        second_moment, key_sum, count, _ = past
        starts = (second_moment, key_sum, None if count is None else weight_of(count, k.shape[2], empty[6].dtype))
        for out, start in zip(empty[4:], starts, strict=True):
            out.zero_() if start is None else out.copy_(start)
        return empty
    y, k_bar, k_rnorm, *rest = chunk.decayed_forward(q, k, None, log_decay, Past(*past), centred, normalize)
    kept = (k_bar if normalize == "unit" else None, k_rnorm if normalize != "none" else None)
    return complete(layout, q, (y, *kept, *rest))


def gradients(*arguments) -> Layout:
    """Of `ccq::decayed_sigma_q_backward`."""
    q, k, log_decay, second_moment, key_sum, count = arguments[7:13]
    high = stats_dtype(q.dtype)
    weighs = count is not None and count.is_floating_point()
    return [
        (q.shape, q.dtype),
        (k.shape, k.dtype),
        (log_decay.shape, log_decay.dtype),
        *(((0,) if x is None else x.shape, high) for x in (second_moment, key_sum)),
        (count.shape if weighs else (0,), high),
    ]


def _backward(*arguments):
    dy, dk_bar, *d_final, k_rnorm, means = arguments[:7]
    q, k, log_decay, *past, centred, normalize = arguments[7:]
    layout = gradients(*arguments)
    if q.numel() == 0:
        empty = complete(layout, q)
        for out, after in zip(empty[3:], d_final, strict=True):
            out.zero_() if after is None or not out.numel() else out.copy_(after)
        return empty
    saved = Saved(q, k, k_rnorm, means, None)
    dq, dk, _, *d_initial, d_log_decay = chunk.decayed_backward(
        Gradients(dy, dk_bar, *d_final[:2]), saved, log_decay, Past(*past), centred, normalize, d_final[2]
    )
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


def _autograd(ctx, dy, dk_bar, _, __, *d_final):
    q, count = ctx.saved_tensors[2], ctx.saved_tensors[7]
    dy = torch.zeros_like(q) if dy is None else dy
    dk_bar = None if dk_bar is None or dk_bar.numel() == 0 else dk_bar
    dq, dk, d_log_decay, *d_initial = torch.ops.ccq.decayed_sigma_q_backward(
        dy, dk_bar, *d_final, *ctx.saved_tensors, *ctx.options
    )
    given = (*(x is not None for x in ctx.saved_tensors[5:7]), count is not None and count.is_floating_point())
    d_initial = [d if there else None for d, there in zip(d_initial, given, strict=True)]
    return dq, dk, d_log_decay, *d_initial, None, None, None


register("ccq::decayed_sigma_q", (_forward, outputs), (_backward, gradients), _autograd, _setup_context, like=7)
