"""The operators as PyTorch knows them: `ccq::clean_query`, `ccq::gate` and their backwards, with shapes for tracing and
autograd.

Plain tensors in, plain tensors out, never an input among the outputs; what was not asked for comes back empty. Inside,
one of the backends runs. torch.compile sees an opaque call, so it takes any model that uses it without a graph break.

The gate is lam = sigmoid(W q + b), of the whole query of a token. W [H, H * K] and b [H] stay fp32 under autocast, and
so does lam: in bf16 a bias near -4.6 could not move by a step of 1e-3. q is read once, in its own dtype.

B sequences, T tokens, H query heads, K key size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ccq.ops.checks import check_gate, check_values, refuse_transforms
from ccq.ops.choose import Call, choose
from ccq.ops.clean import chunk
from ccq.ops.clean.chunk import Gradients, Past, Saved, kept_dtype
from ccq.ops.clean.reference import Read
from ccq.ops.clean.state import weight_of
from ccq.ops.precision import no_autocast, stats_dtype

torch.library.define("ccq::gate", "(Tensor q, Tensor weight, Tensor bias, str backend) -> Tensor")
torch.library.define(
    "ccq::gate_backward", "(Tensor d_lam, Tensor q, Tensor weight, Tensor lam, str backend) -> (Tensor, Tensor, Tensor)"
)
# with a gate there is no lam; with neither, y stands in the place of q_clean
_STATE = "Tensor? second_moment, Tensor? key_sum, Tensor? count, Tensor? cu_seqlens"
_OPTIONS = "bool centred, str normalize, str step, str backend"
torch.library.define(
    "ccq::clean_query",
    f"(Tensor q, Tensor k, Tensor? lam, Tensor? weight, Tensor? bias, Tensor? log_decay, {_STATE}, {_OPTIONS},"
    " bool output_final_state, bool keep_y)"
    " -> (Tensor q_clean, Tensor k_bar, Tensor k_rnorm, Tensor means, Tensor lam_out, Tensor y,"
    " Tensor second_moment_out, Tensor key_sum_out, Tensor count_out)",
)
torch.library.define(
    "ccq::clean_query_backward",
    "(Tensor g, Tensor? dk_bar, Tensor? d_second_moment, Tensor? d_key_sum, Tensor? d_count,"
    " Tensor q, Tensor k, Tensor k_rnorm, Tensor means, Tensor? lam, Tensor y, Tensor? weight, Tensor? log_decay,"
    f" {_STATE}, {_OPTIONS}, bool decays)"
    " -> (Tensor dq, Tensor dk, Tensor dlam, Tensor d_second_moment_in, Tensor d_key_sum_in, Tensor d_count_in,"
    " Tensor d_log_decay, Tensor d_weight, Tensor d_bias)",
)


class Gate(NamedTuple):
    """W and b, to be given to `clean_query` in the place of lam: it then gates by the query that it cleans."""

    weight: Float[Tensor, "H HK"]
    bias: Float[Tensor, " H"]


def gate(
    q: Float[Tensor, "*B H K"], weight: Float[Tensor, "H HK"], bias: Float[Tensor, " H"], backend: str = "auto"
) -> Float[Tensor, "*B H"]:
    """sigmoid(W q + b) in fp32 (fp64 for fp64), from the query before normalisation and feature map.

    >>> q = torch.randn(2, 100, 4, 64)
    >>> lam = gate(q, torch.zeros(4, 4 * 64), torch.full((4,), -4.6))
    >>> lam.shape, round(lam[0, 0, 0].item(), 3)
    (torch.Size([2, 100, 4]), 0.01)
    """
    check_gate(q, weight, bias)
    if backend == "reference":
        return plain_gate(q, weight, bias)
    refuse_transforms("gate", q, weight, bias)
    return torch.ops.ccq.gate(q, weight, bias, backend)


def plain_gate(q: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with no_autocast(q):
        return torch.sigmoid(torch.nn.functional.linear(q.flatten(-2).to(weight.dtype), weight, bias))


def run_gate(q: Tensor, weight: Tensor, bias: Tensor, backend: str) -> Tensor:
    if q.numel() and choose("gate", Call.of(q), backend) == "triton":
        from ccq.ops.clean.triton import gate as kernels  # imports Triton

        return kernels.forward(q, weight, bias)
    return plain_gate(q, weight, bias)


def run_gate_backward(
    d_lam: Tensor, q: Tensor, weight: Tensor, lam: Tensor, backend: str, dq: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (added to `dq`, whose memory may be used, where it is given), W and b."""
    if q.numel() and choose("gate", Call.of(q), backend) == "triton":
        from ccq.ops.clean.triton import gate as kernels

        return kernels.backward(d_lam, q, weight, lam, dq)
    with no_autocast(q):
        dz = (d_lam * lam * (1 - lam)).reshape(-1, weight.shape[0])
        through = (dz @ weight).to(q.dtype).view(q.shape)
        d_weight = dz.mT @ q.reshape(-1, weight.shape[1]).to(dz.dtype)
        return through if dq is None else dq + through, d_weight, dz.sum(0)


def implementation(op: str, q: Tensor, backend: str) -> ModuleType:
    """The module whose `forward` and `backward` run."""
    if choose(op, Call.of(q), backend) == "chunk":
        return chunk
    from ccq.ops.clean.triton import launch  # imports Triton

    return launch


Layout = list[tuple[Sequence[int], torch.dtype]]  # shapes and dtypes of results
NONE = (0,)  # the shape of one that nobody asked for


def complete(layout: Layout, like: Tensor, given: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """The results, unfilled where none is given or asked for: made only then, so that no memory is taken twice."""
    given = [None] * len(layout) if given is None else given
    return tuple(
        like.new_empty(shape, dtype=dtype) if x is None or shape == NONE else x
        for x, (shape, dtype) in zip(given, layout, strict=True)
    )


def outputs(
    q, k, lam, weight, bias, log_decay, second_moment, key_sum, count, cu_seqlens, centred, normalize, step, backend,
    final, keep_y,
) -> Layout:  # fmt: skip
    """Of `ccq::clean_query`."""
    high = stats_dtype(q.dtype)
    batch, _, heads, size = k.shape
    n = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    cleans = lam is not None or weight is not None
    count_out = (((n,), torch.int64) if log_decay is None else ((n, heads), high)) if final else (NONE, torch.int64)
    return [
        (q.shape, q.dtype if cleans else high),
        (k.shape if normalize == "unit" else NONE, k.dtype),
        (k.shape[:-1] if normalize != "none" else NONE, high),
        (q.shape[:-1] if centred else NONE, high),
        (NONE if weight is None else q.shape[:-1], high),
        (q.shape if keep_y and cleans and step == "projected" else NONE, kept_dtype(q.dtype)),
        ((n, heads, size, size) if final else NONE, high),
        ((n, heads, size) if final else NONE, high),
        count_out,
    ]


def final_count(q: Tensor, count: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        seen = torch.full((q.shape[0],), q.shape[1], dtype=torch.int64, device=q.device)
    else:
        seen = cu_seqlens.diff().long()
    return seen if count is None else seen + count


def _clean_query(*arguments):
    q, k, lam, weight, bias, log_decay, *past, centred, normalize, step, backend, final, keep_y = arguments
    second_moment, key_sum, count, cu_seqlens = past
    op = "sigma_q" if lam is None and weight is None else "clean_query"
    module = implementation(op, q, backend)
    layout = outputs(*arguments)
    check_values(q[..., :0] if lam is None else lam, count, cu_seqlens, q.shape[1])
    if q.numel() == 0:  # nothing to launch; the state stays what it was
        empty = complete(layout, q)
        if final:
            weights = None if count is None else weight_of(count, k.shape[2], empty[6].dtype)
            seen = weights if log_decay is not None else final_count(q, count, cu_seqlens)
            for out, start in zip(empty[6:], (second_moment, key_sum, seen), strict=True):
                out.zero_() if start is None else out.copy_(start)
        return empty
    if weight is not None:
        lam = run_gate(q, weight, bias, backend)
    how = Read(centred, normalize, step)
    out, k_bar, k_rnorm, means, y, *state, weights = module.forward(
        q, k, lam, log_decay, Past(*past), how, final, keep_y
    )
    seen = weights if log_decay is not None or not final else final_count(q, count, cu_seqlens)
    return complete(layout, q, (out, k_bar, k_rnorm, means, lam, y, *state, seen))


def _clean_query_backward(*arguments):
    g, dk_bar, *d_final, q, k, k_rnorm, means, lam, y, weight, log_decay = arguments[:13]
    *past, centred, normalize, step, backend, decays = arguments[13:]
    layout = gradients(*arguments)
    if q.numel() == 0:
        empty = complete(layout, q)
        for out, after in zip(empty[3:], (*d_final, None, None, None), strict=True):
            out.zero_() if after is None or not out.numel() else out.copy_(after)
        return empty
    module = implementation("sigma_q" if lam is None else "clean_query", q, backend)
    saved = Saved(q, k, k_rnorm, means, lam, y if y.numel() else None, log_decay)
    how = Read(centred, normalize, step)
    dq, dk, dlam, *found = module.backward(Gradients(g, dk_bar, *d_final), saved, Past(*past), how, decays)
    d_gate: Sequence[Tensor | None] = (None, None)
    if weight is not None:
        assert lam is not None  # the gate's
        dq, *d_gate = run_gate_backward(dlam, q, weight, lam, backend, dq)
    return complete(layout, q, (dq, dk, dlam, *found, *d_gate))


def gradients(
    g, dk_bar, dC, ds, dn, q, k, k_rnorm, means, lam, y, weight, log_decay, second_moment, key_sum, count, *options
) -> Layout:
    """Of `ccq::clean_query_backward`."""
    high, decays = stats_dtype(q.dtype), options[-1]
    weighs = decays and count is not None and count.is_floating_point()
    return [
        (q.shape, q.dtype),
        (k.shape, k.dtype),
        (NONE, high) if lam is None else (lam.shape, lam.dtype),
        (NONE if second_moment is None else second_moment.shape, high),
        (NONE if key_sum is None else key_sum.shape, high),
        (count.shape if weighs else NONE, high),
        (log_decay.shape if decays and log_decay is not None else NONE, high),
        (NONE if weight is None else weight.shape, high),
        (NONE if weight is None else weight.shape[:1], high),
    ]


def _fake(layout: Callable[..., Layout], at: int, *given):
    return complete(layout(*given), given[at])


def _setup_context(ctx, inputs, output):
    q, k, lam, weight, _, log_decay, *past, centred, normalize, step, backend, _, _ = inputs
    _, k_bar, k_rnorm, means, lam_out, y, _, _, count = output
    # q is shared with the gate and k_bar with the backbone, so that CCQ keeps only a few numbers a token of its own
    ctx.save_for_backward(
        q, k_bar if normalize == "unit" else k, k_rnorm, means, lam if weight is None else lam_out, y, weight,
        log_decay, *past,
    )  # fmt: skip
    ctx.options = centred, normalize, step, backend
    ctx.mark_non_differentiable(k_rnorm, means, lam_out, y, *([] if count.is_floating_point() else [count]))
    ctx.set_materialize_grads(False)


def _backward(ctx, g, dk_bar, _, __, ___, ____, *d_final):
    saved = ctx.saved_tensors  # once: gradient checkpointing gives them out no second time
    q, _, _, _, lam, _, weight, log_decay, second_moment, _, count, _ = saved
    if g is None:
        g = torch.zeros_like(q)
    given = [None if d is None or d.numel() == 0 else d for d in (dk_bar, *d_final)]
    weighs = count is not None and count.is_floating_point()
    decays = log_decay is not None and (ctx.needs_input_grad[5] or weighs)
    dq, dk, dlam, *d_initial, d_count, d_log_decay, d_weight, d_bias = torch.ops.ccq.clean_query_backward(
        g, *given, *saved, *ctx.options, decays
    )
    if second_moment is None:
        d_initial = [None, None]
    through = (None if lam is None else dlam, None, None) if weight is None else (None, d_weight, d_bias)
    d_decay = d_log_decay.to(log_decay.dtype) if decays and log_decay is not None else None
    return dq, dk, *through, d_decay, *d_initial, d_count if decays and weighs else None, *[None] * 7


def _gate_backward(ctx, d_lam):
    return *torch.ops.ccq.gate_backward(d_lam, *ctx.saved_tensors, ctx.backend), None


def _gate_context(ctx, inputs, output):
    q, weight, _, ctx.backend = inputs
    ctx.save_for_backward(q, weight, output)


def refuse(message: str) -> Callable:
    """What raises whenever it is called."""

    def refused(*_: object) -> None:
        raise RuntimeError(message)

    return refused


_no_vmap = refuse(
    "clean_query and sigma_q cannot be mapped by torch.vmap: put the mapped axis into the batch axis B or the "
    "heads instead, or use backend='reference'."
)
for _name, _function, _layout, _at in (  # which of the arguments is q
    ("ccq::clean_query", _clean_query, outputs, 0),
    ("ccq::clean_query_backward", _clean_query_backward, gradients, 5),
):
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, functools.partial(_fake, _layout, _at))
    torch.library.register_vmap(_name, _no_vmap)
torch.library.register_autograd("ccq::clean_query", _backward, setup_context=_setup_context)
torch.library.register_autograd(
    "ccq::clean_query_backward",
    refuse(
        "clean_query and sigma_q have no second derivative in backend='chunk' and 'triton'. "
        "backend='reference' can be differentiated to any order."
    ),
)
torch.library.impl("ccq::gate", "default", run_gate)
torch.library.impl("ccq::gate_backward", "default", run_gate_backward)
torch.library.register_fake("ccq::gate", lambda q, weight, bias, backend: weight.new_empty(q.shape[:-1]))
torch.library.register_fake(
    "ccq::gate_backward",
    lambda d_lam, q, weight, lam, backend: (q.new_empty(q.shape), torch.empty_like(weight), weight[:, 0].clone()),
)
torch.library.register_autograd("ccq::gate", _gate_backward, setup_context=_gate_context)
torch.library.register_autograd(
    "ccq::gate_backward",
    refuse("gate has no second derivative: write torch.sigmoid(linear(q)) where one is needed."),
)
