"""lam = sigmoid(W q + b): how far each query is contracted, from the whole query of its token.

B sequences, T tokens, H query heads, K key size. W [H, H * K] and b [H] stay fp32 under autocast, and so does lam: in
bf16 a bias near -4.6 could not move by a step of 1e-3. q is read once, in its own dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ccq.ops.checks import check_gate, refuse_transforms
from ccq.ops.choose import Call, choose
from ccq.ops.precision import no_autocast

torch.library.define("ccq::gate", "(Tensor q, Tensor weight, Tensor bias, str backend) -> Tensor")
torch.library.define(
    "ccq::gate_backward", "(Tensor d_lam, Tensor q, Tensor weight, Tensor lam, str backend) -> (Tensor, Tensor, Tensor)"
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


def _backward(ctx, d_lam):
    return *torch.ops.ccq.gate_backward(d_lam, *ctx.saved_tensors, ctx.backend), None


def _setup_context(ctx, inputs, output):
    q, weight, _, ctx.backend = inputs
    ctx.save_for_backward(q, weight, output)


def _no_double_backward(*_):
    raise RuntimeError("gate has no second derivative: write torch.sigmoid(linear(q)) where one is needed.")


torch.library.impl("ccq::gate", "default", run_gate)
torch.library.impl("ccq::gate_backward", "default", run_gate_backward)
torch.library.register_fake("ccq::gate", lambda q, weight, bias, backend: weight.new_empty(q.shape[:-1]))
torch.library.register_fake(
    "ccq::gate_backward",
    lambda d_lam, q, weight, lam, backend: (q.new_empty(q.shape), torch.empty_like(weight), weight[:, 0].clone()),
)
torch.library.register_autograd("ccq::gate", _backward, setup_context=_setup_context)
torch.library.register_autograd("ccq::gate_backward", _no_double_backward)
