"""The operator as PyTorch knows it: `ccq::clean_query` and its backward, with shapes for tracing and autograd.

Plain tensors in, plain tensors out, never an input among the outputs; what was not asked for comes back empty. Inside,
one of the backends runs. torch.compile sees an opaque call, so it takes any model that uses it without a graph break.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ccq.ops.checks import check_values
from ccq.ops.choose import Call, choose
from ccq.ops.clean import chunk
from ccq.ops.clean.chunk import Gradients, Past, Saved
from ccq.ops.clean.gating import run_gate, run_gate_backward
from ccq.ops.precision import stats_dtype

_GATE = "Tensor? weight, Tensor? bias"  # with a gate there is no lam; with neither, y stands in the place of q_clean
_STATE = "Tensor? second_moment, Tensor? key_sum, Tensor? count, Tensor? cu_seqlens"
_OPTIONS = "bool centred, str normalize, str backend"
torch.library.define(
    "ccq::clean_query",
    f"(Tensor q, Tensor k, Tensor? lam, {_GATE}, {_STATE}, {_OPTIONS}, bool output_final_state)"
    " -> (Tensor q_clean, Tensor k_bar, Tensor k_rnorm, Tensor means, Tensor lam_out,"
    " Tensor second_moment_out, Tensor key_sum_out, Tensor count_out)",
)
torch.library.define(
    "ccq::clean_query_backward",
    "(Tensor g, Tensor? dk_bar, Tensor? d_second_moment, Tensor? d_key_sum,"
    f" Tensor q, Tensor k, Tensor k_rnorm, Tensor means, Tensor? lam, Tensor? weight, {_STATE}, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dlam, Tensor d_second_moment_in, Tensor d_key_sum_in,"
    " Tensor d_weight, Tensor d_bias)",
)


def implementation(op: str, q: Tensor, backend: str) -> ModuleType:
    """The module whose `forward` and `backward` run."""
    if choose(op, Call.of(q), backend) == "chunk":
        return chunk
    from ccq.ops.clean.triton import launch  # imports Triton

    return launch


Layout = list[tuple[Sequence[int], torch.dtype]]  # shapes and dtypes of results


def complete(layout: Layout, like: Tensor, given: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """The results, unfilled where none is given: made only then, so that no memory is taken twice."""
    given = [None] * len(layout) if given is None else given
    return tuple(
        like.new_empty(shape, dtype=dtype) if x is None else x for x, (shape, dtype) in zip(given, layout, strict=True)
    )


def outputs(
    q, k, lam, weight, bias, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend, final
) -> Layout:
    """Of `ccq::clean_query`."""
    high = stats_dtype(q.dtype)
    batch, _, heads, size = k.shape
    n = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return [
        (q.shape, high if lam is None and weight is None else q.dtype),
        (k.shape if normalize == "unit" else (0,), k.dtype),
        (k.shape[:-1] if normalize != "none" else (0,), high),
        (q.shape[:-1] if centred else (0,), high),
        ((0,) if weight is None else q.shape[:-1], high),
        ((n, heads, size, size) if final else (0,), high),
        ((n, heads, size) if final else (0,), high),
        ((n if final else 0,), torch.int64),
    ]


def final_count(q: Tensor, count: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        seen = torch.full((q.shape[0],), q.shape[1], dtype=torch.int64, device=q.device)
    else:
        seen = cu_seqlens.diff().long()
    return seen if count is None else seen + count


def _clean_query(*arguments):
    q, k, lam, weight, bias, *past, centred, normalize, backend, output_final_state = arguments
    second_moment, key_sum, count, cu_seqlens = past
    op = "sigma_q" if lam is None and weight is None else "clean_query"
    module = implementation(op, q, backend)
    layout = outputs(*arguments)
    check_values(q[..., :0] if lam is None else lam, count, cu_seqlens, q.shape[1])
    if q.numel() == 0:  # nothing to launch; the state stays what it was
        empty = complete(layout, q)
        if output_final_state:
            for out, start in zip(empty[5:7], (second_moment, key_sum), strict=True):
                out.zero_() if start is None else out.copy_(start)
            empty[7].copy_(final_count(q, count, cu_seqlens))
        return empty
    if weight is not None:
        lam = run_gate(q, weight, bias, backend)
    out, k_bar, k_rnorm, means, *final = module.forward(q, k, lam, Past(*past), centred, normalize, output_final_state)
    given = (
        out,
        k_bar if normalize == "unit" else None,
        k_rnorm if normalize != "none" else None,
        means,
        None if weight is None else lam,
        *(final if output_final_state else (None, None)),
        final_count(q, count, cu_seqlens) if output_final_state else None,
    )
    return complete(layout, q, given)


def _clean_query_backward(*arguments):
    grads, saved, past = Gradients(*arguments[:4]), Saved(*arguments[4:9]), Past(*arguments[10:14])
    weight, centred, normalize, backend = arguments[9], *arguments[14:]
    q, lam = saved.q, saved.lam
    layout = gradients(*arguments)
    if q.numel() == 0:
        empty = complete(layout, q)
        if past.second_moment is not None:
            for out, after in zip(empty[3:5], grads[2:], strict=True):
                out.zero_() if after is None else out.copy_(after)
        for out in empty[5:]:
            out.zero_()
        return empty
    module = implementation("sigma_q" if lam is None else "clean_query", q, backend)
    dq, dk, dlam, *d_initial = module.backward(grads, saved, past, centred, normalize)
    d_gate: Sequence[Tensor | None] = (None, None)
    if weight is not None:
        assert lam is not None  # the gate's
        dq, *d_gate = run_gate_backward(dlam, q, weight, lam, backend, dq)
    d_initial = (None, None) if past.second_moment is None else d_initial
    return complete(layout, q, (dq, dk, dlam, *d_initial, *d_gate))


def gradients(
    g, dk_bar, dC, ds, q, k, k_rnorm, means, lam, weight, second_moment, key_sum, count, cu_seqlens, *options
) -> Layout:
    """Of `ccq::clean_query_backward`."""
    high = stats_dtype(q.dtype)
    return [
        (q.shape, q.dtype),
        (k.shape, k.dtype),
        ((0,), high) if lam is None else (lam.shape, lam.dtype),
        ((0,) if second_moment is None else second_moment.shape, high),
        ((0,) if key_sum is None else key_sum.shape, high),
        ((0,) if weight is None else weight.shape, high),
        ((0,) if weight is None else weight.shape[:1], high),
    ]


def _setup_context(ctx, inputs, output):
    q, k, lam, weight, _, second_moment, key_sum, count, cu_seqlens, centred, normalize, backend, _ = inputs
    _, k_bar, k_rnorm, means, lam_out, _, _, final = output
    # q is shared with the gate and k_bar with the backbone, so that CCQ keeps only a few numbers a token of its own
    ctx.save_for_backward(
        q, k_bar if normalize == "unit" else k, k_rnorm, means, lam if weight is None else lam_out, weight,
        second_moment, key_sum, count, cu_seqlens,
    )  # fmt: skip
    ctx.options = centred, normalize, backend
    ctx.mark_non_differentiable(k_rnorm, means, lam_out, final)
    ctx.set_materialize_grads(False)


def _backward(ctx, g, dk_bar, _, __, ___, d_second_moment, d_key_sum, ____):
    q, k, k_rnorm, means, lam, weight, second_moment, key_sum, count, cu_seqlens = ctx.saved_tensors
    if g is None:
        g = torch.zeros_like(q)
    given = [None if d is None or d.numel() == 0 else d for d in (dk_bar, d_second_moment, d_key_sum)]
    dq, dk, dlam, *d_initial, d_weight, d_bias = torch.ops.ccq.clean_query_backward(
        g, *given, q, k, k_rnorm, means, lam, weight, second_moment, key_sum, count, cu_seqlens, *ctx.options
    )
    if second_moment is None:
        d_initial = [None, None]
    through = (None if lam is None else dlam, None, None) if weight is None else (None, d_weight, d_bias)
    return dq, dk, *through, *d_initial, *[None] * 6


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "clean_query and sigma_q have no second derivative in backend='chunk' and 'triton'. "
        "backend='reference' can be differentiated to any order."
    )


def _no_vmap(info, in_dims, *args):
    raise RuntimeError(
        "clean_query and sigma_q cannot be mapped by torch.vmap: put the mapped axis into the batch axis B or the "
        "heads instead, or use backend='reference'."
    )


def register(
    name: str, forward: tuple, backward: tuple, autograd: Callable, setup_context: Callable, like: int
) -> None:
    """An operator and its NAME_backward, each a function and its layout; `like`: which argument of the latter is q."""
    for each, (function, layout), at in ((name, forward, 0), (f"{name}_backward", backward, like)):
        torch.library.impl(each, "default", function)
        torch.library.register_fake(each, functools.partial(_fake, layout, at))
        torch.library.register_vmap(each, _no_vmap)
    torch.library.register_autograd(name, autograd, setup_context=setup_context)
    torch.library.register_autograd(f"{name}_backward", _no_double_backward)


def _fake(layout: Callable[..., Layout], at: int, *given):
    return complete(layout(*given), given[at])


register(
    "ccq::clean_query", (_clean_query, outputs), (_clean_query_backward, gradients), _backward, _setup_context, like=4
)
