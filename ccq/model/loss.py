"""Cross-entropy of a linear layer, a chunk of tokens at a time: the logits of all tokens never exist at once.

M tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ccq.mixers.linear import bare
from ccq.ops.choose import Call, autocasts, choose
from ccq.ops.precision import no_autocast, stats_dtype

IGNORE = -100  # the target of a token that is not scored
LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}  # of a chunk at most: of 2 or 4 bytes each


def linear_cross_entropy(
    hidden: Float[Tensor, "M D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " M"]
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """sum over scored tokens of logsumexp(W h) - (W h)[target], and how many were scored (target not -100).

    The products are computed in the dtype of hidden (autocast's where it is on), sums and the loss in fp32 (fp64 for
    fp64), as is the gradient of W until it is returned. The gradients are computed with the loss, while the logits of a
    chunk are there, so that nothing is computed twice.

    >>> loss, scored = linear_cross_entropy(torch.randn(6, 4), torch.zeros(10, 4), torch.tensor([1, 2, -100, 4, 5, 6]))
    >>> round(loss.item() / scored.item(), 4)  # log 10
    2.3026
    """
    kind = hidden.device.type
    if autocasts(hidden):
        hidden = hidden.to(torch.get_autocast_dtype(kind))  # what a Linear would do
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()  # or their gradients would be computed, and thrown away
    scored = targets != IGNORE
    if kind == "cpu" and not torch.compiler.is_compiling():  # no waiting for a device: look at scored tokens only
        hidden, targets = hidden[scored], targets[scored]
    return LinearCrossEntropy.apply(hidden, weight, targets), scored.sum()


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        high = stats_dtype(hidden.dtype)
        size = max(1, LOGITS.get(hidden.device.type, LOGITS["cuda"]) // weight.shape[0])
        total = torch.zeros((), device=hidden.device, dtype=high)
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=high) if want_weight else None
        with no_autocast(hidden):
            w = weight.to(hidden.dtype)
            for start in range(0, hidden.shape[0], size):
                chunk = slice(start, start + size)
                h, target = hidden[chunk], targets[chunk]
                loss, d_logits = cross_entropy(h @ w.mT, target, want_hidden or want_weight)
                total = total + loss
                if d_hidden is not None:
                    d_hidden[chunk] = d_logits @ w
                if d_weight is not None:
                    outer(d_logits, h, high, d_weight)
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # they are kept as numbers: of what is computed from them, a derivative would lack the loss's own part
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "the loss of a model has no second derivative (create_graph=True): take F.cross_entropy of its logits"
            )
        d_hidden, d_weight = ctx.saved_tensors
        return (  # d_total, a scalar in fp32, is not rounded to their dtype before it multiplies
            None if d_hidden is None else d_hidden * d_total,
            None if d_weight is None else d_weight * d_total,
            None,
        )


def cross_entropy(logits: Tensor, target: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and its gradient in place of the logits [C, V], which are gone."""
    if choose("loss", Call(logits.device, logits.dtype)) == "fla":
        from fla.modules.fused_cross_entropy.ops import cross_entropy_bwd, cross_entropy_fwd

        loss, _, lse, classes, first = cross_entropy_fwd(logits, target, ignore_index=IGNORE)
        if gradient:
            ones = torch.ones_like(loss)
            logits = cross_entropy_bwd(
                logits, target, lse, ones, ignore_index=IGNORE, total_classes=classes, class_start_idx=first,
                inplace_backward=True,
            )  # fmt: skip
        return loss.sum(), logits
    log_p = F.log_softmax(logits, dim=-1, dtype=stats_dtype(logits.dtype))
    loss = F.nll_loss(log_p, target, ignore_index=IGNORE, reduction="sum")
    if gradient:
        scored = (target != IGNORE)[:, None]
        d_logits = log_p.exp_().mul_(scored)
        d_logits.scatter_add_(1, target.clamp(min=0)[:, None], -scored.to(d_logits.dtype))
        logits = d_logits.to(logits.dtype)
    return loss, logits


def exact_logits(head: nn.Module, hidden: Float[Tensor, "M D"]) -> Float[Tensor, "M V"]:
    """fp32 logits (fp64 of fp64): in half precision the best ones would often be equal, and the first would win."""
    high = stats_dtype(hidden.dtype)
    if bare(head) and head.bias is None and type(head.weight) is nn.Parameter and head.weight.dtype == hidden.dtype:
        return outer(hidden.mT, head.weight.mT, high)
    return head(hidden).to(high)


def outer(d_logits: Tensor, h: Tensor, high: torch.dtype, total: Tensor | None = None) -> Float[Tensor, "V D"]:
    """d_logits^T h, added up and returned in `high`; added to `total`, in place, where that is given."""
    if d_logits.dtype != high and d_logits.is_cuda:
        if total is None:
            return torch.mm(d_logits.mT, h, out_dtype=high)
        return torch.addmm(total, d_logits.mT, h, out_dtype=high, out=total)
    x, y = d_logits.to(high).mT, h.to(high)
    return x @ y if total is None else total.addmm_(x, y)
