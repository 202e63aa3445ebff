"""What lies between products in training, forward and backward: one pass over memory each.

    swiglu        z = silu(gate) * up
    gated_norm    y = x / sqrt(mean(x^2) + eps) * weight * silu(gate), or sigmoid(gate)
    add_norm      total = x + y, and total / sqrt(mean(total^2) + eps) * weight

The first two may be followed by a Linear. Then what was given is kept for the backward, not what the Linear saw: the
pass that makes the gradients makes that again, which costs one write and saves a tensor of every layer.

Sums are fp32, and everything is rounded when it is stored. N elements, R rows of D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from ccq.ops.clean.triton.configs import cdiv, power_of_2

BLOCK = 2048  # elements of a program at a time: two loads of 16 bytes a thread
PROGRAMS = 2048  # that share the rows, so that as many parts of the weight's gradient are left to add up


@triton.jit
def swiglu_forward_kernel(gate, up, z, size, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = None if EVEN else at < size - begin
    g = tl.load(gate + begin + at, mask=inside).to(tl.float32)
    u = tl.load(up + begin + at, mask=inside).to(tl.float32)
    tl.store(z + begin + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def swiglu_backward_kernel(
    gate, up, dz, d_gate, d_up, z, size, STORE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = None if EVEN else at < size - begin
    g = tl.load(gate + begin + at, mask=inside).to(tl.float32)
    u = tl.load(up + begin + at, mask=inside).to(tl.float32)
    d = tl.load(dz + begin + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(d_gate + begin + at, d * u * s * (1.0 + g * (1.0 - s)), mask=inside)
    tl.store(d_up + begin + at, d * (g * s), mask=inside)
    if STORE:
        tl.store(z + begin + at, g * s * u, mask=inside)


@triton.jit
def tile(first, rows, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Where the elements of BT rows are, from the first one on, and which of them there are."""
    row, col = tl.arange(0, BT)[:, None], tl.arange(0, BD)[None, :]
    return row * D + col, (row < rows - first) & (col < D)


@triton.jit
def norm_forward_kernel(
    x, y, gate, weight, total, out, scale, rows, eps,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    ADD: tl.constexpr = False, GATED: tl.constexpr = False, SIGMOID: tl.constexpr = False,
):  # fmt: skip
    """ADD: of x + y, which is stored as `total`. GATED: by silu(gate), or sigmoid(gate)."""
    first = tl.program_id(0).to(tl.int64) * BT
    at, inside = tile(first, rows, D, BT, BD)
    a = tl.load(x + first * D + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        a += tl.load(y + first * D + at, mask=inside, other=0.0).to(tl.float32)
        stored = a.to(total.dtype.element_ty)
        tl.store(total + first * D + at, stored, mask=inside)
        a = stored.to(tl.float32)  # the backward knows no other
    if GATED:  # not after the sum along a row, for which all threads wait
        g = tl.load(gate + first * D + at, mask=inside, other=0.0).to(tl.float32)
    col, row = tl.arange(0, BD), tl.arange(0, BT)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(a * a, 1) / D + eps)
    normed = a * r[:, None] * w[None, :]
    if GATED:
        s = tl.sigmoid(g)
        normed *= s if SIGMOID else g * s
    tl.store(out + first * D + at, normed, mask=inside)
    tl.store(scale + first + row, r, mask=row < rows - first)


@triton.jit(do_not_specialize=["tiles"])
def norm_backward_kernel(
    x, gate, weight, scale, d_total, d_out, d_x, d_gate, d_weight, out, rows, tiles,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    ADD: tl.constexpr = False, GATED: tl.constexpr = False, SIGMOID: tl.constexpr = False, STORE: tl.constexpr = False,
):  # fmt: skip
    """`tiles` times BT rows; d_weight gets this program's part. ADD: d_total to d_x. STORE: what the forward stored."""
    program = tl.program_id(0).to(tl.int64)
    col, row = tl.arange(0, BD), tl.arange(0, BT)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    part = tl.zeros([BT, BD], tl.float32)
    for i in range(tiles):
        first = (program * tiles + i) * BT
        at, inside = tile(first, rows, D, BT, BD)
        unit = tl.load(x + first * D + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_out + first * D + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + first + row, mask=row < rows - first, other=0.0)[:, None]
        past = tl.load(d_total + first * D + at, mask=inside, other=0.0).to(tl.float32) if ADD else 0.0
        unit *= r
        if GATED:
            g = tl.load(gate + first * D + at, mask=inside, other=0.0).to(tl.float32)
            s = tl.sigmoid(g)
            opened = s if SIGMOID else g * s
            slope = s * (1.0 - s) if SIGMOID else s * (1.0 + g * (1.0 - s))
            if STORE:
                tl.store(out + first * D + at, unit * w * opened, mask=inside)
            tl.store(d_gate + first * D + at, d * (unit * w) * slope, mask=inside)
            d *= opened
        part += d * unit
        d *= w
        along = tl.sum(d * unit, 1) / D
        tl.store(d_x + first * D + at, past + (d - unit * along[:, None]) * r, mask=inside)
    tl.store(d_weight + program * D + col, tl.sum(part, 0), mask=col < D)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        z, size = torch.empty_like(gate), gate.numel()
        swiglu_forward_kernel[(cdiv(size, BLOCK),)](gate, up, z, size, EVEN=size % BLOCK == 0, BLOCK=BLOCK)
        ctx.save_for_backward(gate, up, weight)
        return z if weight is None else F.linear(z, weight)

    @staticmethod
    @custom_bwd(device_type="cuda")
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        dz = d_out.contiguous() if weight is None else back(d_out, weight)
        d_gate, d_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        z = torch.empty_like(gate) if ctx.needs_input_grad[2] else None
        swiglu_backward_kernel[(cdiv(size, BLOCK),)](
            gate, up, dz, d_gate, d_up, z, size, STORE=z is not None, EVEN=size % BLOCK == 0, BLOCK=BLOCK
        )
        return d_gate, d_up, None if z is None else of_weight(d_out, z)


class GatedNorm(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool, linear: Tensor | None
    ) -> Tensor:
        x, gate, weight = x.contiguous(), gate.contiguous(), weight.contiguous()
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        y, scale = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.shape = {"D": size, "BT": cdiv(BLOCK, power_of_2(size)), "BD": power_of_2(size)}
        ctx.shape |= {"GATED": True, "SIGMOID": sigmoid}
        grid = (cdiv(rows, ctx.shape["BT"]),)
        norm_forward_kernel[grid](x, None, gate, weight, None, y, scale, rows, eps, **ctx.shape)
        ctx.save_for_backward(x, gate, weight, scale, linear)
        return y if linear is None else F.linear(y.flatten(-2), linear)

    @staticmethod
    @custom_bwd(device_type="cuda")
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, scale, linear = ctx.saved_tensors
        dy = d_out.contiguous() if linear is None else back(d_out, linear)
        dx, d_gate, y = torch.empty_like(x), torch.empty_like(gate), None
        if ctx.needs_input_grad[5]:
            y = torch.empty_like(x)
        tiles = cdiv(scale.numel(), ctx.shape["BT"])
        programs = max(1, min(PROGRAMS, tiles))
        parts = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
        norm_backward_kernel[(programs,)](
            x, gate, weight, scale, None, dy, dx, d_gate, parts, y, scale.numel(), cdiv(tiles, programs),
            STORE=y is not None, num_warps=8, **ctx.shape,
        )  # fmt: skip
        d_linear = None if y is None else of_weight(d_out, y.flatten(-2))
        return dx, d_gate, parts.sum(0).to(weight.dtype), None, None, d_linear


class AddNorm(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, y, weight = x.contiguous(), None if y is None else y.contiguous(), weight.contiguous()
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        ctx.shape = {"D": size, "BT": cdiv(BLOCK, power_of_2(size)), "BD": power_of_2(size)}
        ctx.shape["num_warps"] = 8 if size <= 4096 else 16  # of a row of 2048, 16 bytes a thread
        total, normed = x if y is None else torch.empty_like(x), torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        norm_forward_kernel[(cdiv(rows, ctx.shape["BT"]),)](
            x, y, None, weight, total, normed, scale, rows, eps, ADD=y is not None, **ctx.shape
        )
        ctx.save_for_backward(total, weight, scale)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @custom_bwd(device_type="cuda")
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        has_y = ctx.needs_input_grad[1]
        if d_normed is None:
            return d_total, d_total if has_y else None, None, None
        total, weight, scale = ctx.saved_tensors
        d_total, d_normed = None if d_total is None else d_total.contiguous(), d_normed.contiguous()
        d_x, tiles = torch.empty_like(total), cdiv(scale.numel(), ctx.shape["BT"])
        programs = max(1, min(PROGRAMS // 2, tiles))  # the parts are as wide as the model
        parts = torch.empty(programs, total.shape[-1], dtype=torch.float32, device=total.device)
        norm_backward_kernel[(programs,)](
            total, None, weight, scale, d_total, d_normed, d_x, None, parts, None, scale.numel(), cdiv(tiles, programs),
            ADD=d_total is not None, **ctx.shape,
        )  # fmt: skip
        return d_x, d_x if has_y else None, parts.sum(0).to(weight.dtype), None


def back(d_out: Tensor, weight: Tensor) -> Tensor:
    """The gradient of what a Linear saw, dense."""
    return d_out.flatten(0, -2) @ weight


def of_weight(d_out: Tensor, seen: Tensor) -> Tensor:
    return d_out.flatten(0, -2).mT @ seen.flatten(0, -2)


def swiglu(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    """silu(gate) * up, and with a weight [.., N] what a Linear with it makes of that."""
    return SwiGLU.apply(gate, up, weight)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, sigmoid: bool = False, linear: Tensor | None = None
) -> Tensor:
    """The norm of the last dimension, gated; with the weight of a Linear, what it makes of the last two, flattened."""
    return GatedNorm.apply(x, gate, weight, eps, sigmoid, linear)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its norm, in the dtype of x. Without y: x, so that the backward adds the gradients of both."""
    return AddNorm.apply(x, y, weight, eps)
