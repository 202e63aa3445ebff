"""The gate in Triton: q is read once forward and once backward, in its own dtype; W and the sums stay fp32.

M tokens, H heads, D = H * K. Where products are bf16, W and dz go in as two parts each: of lam and of the gradients of
W and b no bit is lost to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.clean.triton.configs import cdiv, power_of_2


@triton.jit
def parts(x, DT: tl.constexpr):
    """x in fp32 as the sum of two of DT."""
    head = x.to(DT)
    return head, (x - head.to(tl.float32)).to(DT)


@triton.jit(do_not_specialize=["M"])
def gate_kernel(
    q, weight, bias, lam, M, H, D,
    BM: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """lam of BM tokens."""
    begin = tl.program_id(0).to(tl.int64) * BM
    local = tl.arange(0, BM)
    valid = local < M - begin
    heads = tl.arange(0, BH)
    q += begin * D
    acc = tl.zeros([BM, BH], tl.float32)
    for first in range(0, D, BD):
        cols = first + tl.arange(0, BD)
        x = tl.load(q + local[:, None] * D + cols[None, :], mask=valid[:, None] & (cols < D)[None, :], other=0.0)
        inside = (heads < H)[:, None] & (cols < D)[None, :]
        head, tail = parts(tl.load(weight + heads[:, None] * D + cols[None, :], mask=inside, other=0.0), DT)
        acc = tl.dot(x.to(DT), tl.trans(head), acc, input_precision=IP)
        acc = tl.dot(x.to(DT), tl.trans(tail), acc, input_precision=IP)
    z = acc + tl.load(bias + heads, mask=heads < H, other=0.0)[None, :]
    mask = valid[:, None] & (heads < H)[None, :]
    tl.store(lam + begin * H + local[:, None] * H + heads[None, :], 1.0 / (1.0 + tl.exp(-z)), mask=mask)


@triton.jit(do_not_specialize=["M", "per_split"])
def gate_backward_kernel(
    d_lam, q, weight, lam, dq, d_weight, d_bias, M, H, D, per_split,
    ADD: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq for BD columns and the rows of one split (added to what is there, if ADD), and the split's share of dW and db.

    All that a loop loads is fetched STAGES ahead: it waits for nothing but memory.
    """
    split = tl.program_id(1)
    begin = split.to(tl.int64) * per_split
    rows = tl.minimum(M - begin, per_split).to(tl.int32)  # of this split; none, where the earlier ones had all
    cols = tl.program_id(0) * BD + tl.arange(0, BD)
    heads = tl.arange(0, BH)
    inside = (heads < H)[:, None] & (cols < D)[None, :]
    w = tl.load(weight + heads[:, None] * D + cols[None, :], mask=inside, other=0.0).to(DT)
    acc = tl.zeros([BH, BD], tl.float32)
    total = tl.zeros([BH], tl.float32)
    lam += begin * H
    d_lam += begin * H
    q += begin * D
    dq += begin * D
    for first in tl.range(0, rows, BM, num_stages=STAGES):
        local = first + tl.arange(0, BM)
        small = (local < rows)[:, None] & (heads < H)[None, :]
        at = local[:, None] * H + heads[None, :]
        gate = tl.load(lam + at, mask=small, other=0.0)
        dz = tl.load(d_lam + at, mask=small, other=0.0) * gate * (1.0 - gate)
        total += tl.sum(dz, 0)
        head, tail = parts(dz, DT)
        large = (local < rows)[:, None] & (cols < D)[None, :]
        at = local[:, None] * D + cols[None, :]
        x = tl.load(q + at, mask=large, other=0.0).to(DT)
        acc = tl.dot(tl.trans(head), x, acc, input_precision=IP)
        acc = tl.dot(tl.trans(tail), x, acc, input_precision=IP)
        grad = tl.dot(head, w, input_precision=IP)
        grad = tl.dot(tail, w, grad, input_precision=IP)
        if ADD:
            grad += tl.load(dq + at, mask=large, other=0.0).to(tl.float32)
        tl.store(dq + at, grad.to(dq.dtype.element_ty), mask=large)
    tl.store(d_weight + split * H * D + heads[:, None] * D + cols[None, :], acc, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(d_bias + split * H + heads, total, mask=heads < H)


@triton.jit
def add_splits_kernel(
    d_weight, d_bias, weight_out, bias_out, splits, H, width,
    BS: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The sums of all splits' shares, BC numbers of W; the first program also b."""
    split = tl.arange(0, BS)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = (split < splits)[:, None] & (cols < width)[None, :]
    shares = tl.load(d_weight + split[:, None] * width + cols[None, :], mask=inside, other=0.0)
    tl.store(weight_out + cols, tl.sum(shares, 0), mask=cols < width)
    if tl.program_id(0) == 0:
        heads = tl.arange(0, BH)
        inside_b = (split < splits)[:, None] & (heads < H)[None, :]
        shares_b = tl.load(d_bias + split[:, None] * H + heads[None, :], mask=inside_b, other=0.0)
        tl.store(bias_out + heads, tl.sum(shares_b, 0), mask=heads < H)


ROWS, COLUMNS = 64, 64  # tokens of a program of the forward, and how much of a query it takes at a time
SPLITS = 64  # of the rows, at most, in the backward


def options(q: Tensor, heads: int) -> dict:
    half = q.dtype == torch.bfloat16 and q.is_cuda  # Triton's interpreter multiplies bf16 as if it were integers
    dtype, products = (tl.bfloat16, "tf32") if half else (tl.float32, "tf32x3")
    return {"BH": max(16, power_of_2(heads)), "DT": dtype, "IP": products}


def forward(q: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """lam in fp32."""
    q = q.contiguous()
    heads, width = weight.shape
    rows = q.numel() // width
    lam = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    gate_kernel[(cdiv(rows, ROWS),)](
        q, weight.contiguous(), bias.contiguous(), lam, rows, heads, width,
        BM=ROWS, BD=COLUMNS, **options(q, heads), num_stages=3 if q.dtype == torch.bfloat16 else 1,
    )  # fmt: skip
    return lam


def backward(
    d_lam: Tensor, q: Tensor, weight: Tensor, lam: Tensor, dq: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (added to `dq`, in place, if given), W and b."""
    q = q.contiguous()
    heads, width = weight.shape
    rows = q.numel() // width
    chosen = options(q, heads)
    columns, stages = (128, 3) if chosen["BH"] == 16 and chosen["DT"] == tl.bfloat16 else (64, 1)  # what fits
    splits = max(1, min(SPLITS, cdiv(rows, 64)))
    per_split = cdiv(cdiv(rows, splits), 64) * 64
    add = dq is not None
    dq = torch.empty_like(q) if dq is None else dq
    d_weight, d_bias = (weight.new_empty(splits, heads, size) for size in (width, 1))
    gate_backward_kernel[(cdiv(width, columns), splits)](
        d_lam.contiguous(), q, weight.contiguous(), lam, dq, d_weight, d_bias, rows, heads, width, per_split,
        ADD=add, BM=32, BD=columns, **chosen, STAGES=stages,
    )  # fmt: skip
    sums = torch.empty_like(weight, memory_format=torch.contiguous_format), weight.new_empty(heads)
    add_splits_kernel[(cdiv(heads * width, 64),)](
        d_weight, d_bias, *sums, splits, heads, heads * width,
        BS=power_of_2(splits), BC=64, BH=chosen["BH"],
    )  # fmt: skip
    return dq, *sums
