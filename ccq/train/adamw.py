"""AdamW on one GPU: one pass over memory that clips, moves the masters, and rounds them to what is computed with.

    g <- factor g        m <- m + (1 - beta1) (g - m)        v <- v + (1 - beta2) (g^2 - v)
    p <- p - lr (decay p + m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps))

The gradient is read as the backward left it, in bf16 too. PyTorch's own needs it in fp32, and clips and rounds in
passes of their own: 52 bytes a parameter, here 28. Where the step is not finite nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from ccq.ops.clean.triton.configs import cdiv

BLOCK = 2048  # elements of a program


@triton.jit
def adamw_kernel(
    gradient, master, mean, square, copy, numbers, steps, size, scale, decay, log_beta1, log_beta2, rest1, rest2, eps,
    COPY: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`numbers`: whether all is finite, the rate, the factor that clips. log_beta: to base 2; rest: 1 - beta."""
    if tl.load(numbers) != 0.0:
        lr = tl.load(numbers + 1) * scale
        t = tl.load(steps)
        begin = tl.program_id(0).to(tl.int64) * BLOCK
        at = tl.arange(0, BLOCK)
        inside = None if EVEN else at < size - begin
        g = tl.load(gradient + begin + at, mask=inside).to(tl.float32) * tl.load(numbers + 2)
        p = tl.load(master + begin + at, mask=inside)
        m = tl.load(mean + begin + at, mask=inside)
        v = tl.load(square + begin + at, mask=inside)
        m += rest1 * (g - m)
        v += rest2 * (g * g - v)
        unbiased = tl.sqrt_rn(v / (1.0 - tl.exp2(t * log_beta2)))
        p -= lr * (decay * p + m / (1.0 - tl.exp2(t * log_beta1)) / (unbiased + eps))
        tl.store(master + begin + at, p, mask=inside)
        tl.store(mean + begin + at, m, mask=inside)
        tl.store(square + begin + at, v, mask=inside)
        if COPY:
            tl.store(copy + begin + at, p, mask=inside)


@torch.no_grad()
def update(
    optimizer: torch.optim.AdamW, copies: Iterable[tuple[Tensor, Tensor]], finite: Bool[Tensor, ""],
    lr: Float[Tensor, ""], factor: Float[Tensor, ""] | float,
) -> None:  # fmt: skip
    """One step of `optimizer`, whose state it changes as the optimizer would.

    A master's gradient is its own, or that of its copy (`copies`: copy and master), which then follows the master.
    """
    copy_of = {master: copy for copy, master in copies}
    numbers = torch.stack([torch.as_tensor(x, device=lr.device).float() for x in (finite, lr, factor)])
    for group in optimizer.param_groups:
        betas = group["betas"]
        logs, rests = [math.log2(x) if x else -math.inf for x in betas], [1 - x for x in betas]
        options = (group["scale"], group["weight_decay"], *logs, *rests)
        found = []
        for master in group["params"]:
            copy = copy_of.get(master)
            gradient = master.grad if copy is None or copy.grad is None else copy.grad
            if gradient is not None:
                found.append((master, gradient, copy))
        if not found:
            continue
        steps = [optimizer.state[master]["step"] for master, _, _ in found]
        torch._foreach_add_(steps, [numbers[0]] * len(steps))  # one tensor for all would be read by the host
        for master, gradient, copy in found:
            if gradient.stride() != master.stride():  # elements are taken in the order in which they lie
                gradient = torch.empty_like(master, dtype=gradient.dtype).copy_(gradient)
            state, size = optimizer.state[master], master.numel()
            adamw_kernel[(cdiv(size, BLOCK),)](
                gradient, master, state["exp_avg"], state["exp_avg_sq"], copy, numbers, state["step"], size, *options,
                group["eps"], COPY=copy is not None, EVEN=size % BLOCK == 0, BLOCK=BLOCK,
            )  # fmt: skip
