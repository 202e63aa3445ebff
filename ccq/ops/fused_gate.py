"""The gate in Triton: q is read once forward and once backward, in its own dtype; W and the sums stay fp32.

M tokens, H heads, D = H * K. Where products are bf16, W and dz go in as two parts each: of lam and of the gradients of
W and b no bit is lost to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def dot_parts(a, b, acc, DT: tl.constexpr, IP: tl.constexpr, SPLIT_A: tl.constexpr):
    """acc + a b, where one of them (a if SPLIT_A, else b) is fp32 and taken in two parts of DT."""
    if SPLIT_A:
        head = a.to(DT)
        acc = tl.dot(head, b, acc, input_precision=IP)
        return tl.dot((a - head.to(tl.float32)).to(DT), b, acc, input_precision=IP)
    else:
        head = b.to(DT)
        acc = tl.dot(a, head, acc, input_precision=IP)
        return tl.dot(a, (b - head.to(tl.float32)).to(DT), acc, input_precision=IP)


@triton.jit(do_not_specialize=["M"])
def gate_kernel(
    q, weight, bias, lam, M, H, D,
    BM: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """lam of BM tokens."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    heads = tl.arange(0, BH)
    acc = tl.zeros([BM, BH], tl.float32)
    for first in range(0, D, BD):
        cols = first + tl.arange(0, BD)
        x = tl.load(q + rows[:, None] * D + cols[None, :], mask=(rows < M)[:, None] & (cols < D)[None, :], other=0.0)
        w = tl.load(
            weight + heads[None, :] * D + cols[:, None], mask=(heads < H)[None, :] & (cols < D)[:, None], other=0.0
        )
        acc = dot_parts(x.to(DT), w, acc, DT, IP, False)
    z = acc + tl.load(bias + heads, mask=heads < H, other=0.0)[None, :]
    mask = (rows < M)[:, None] & (heads < H)[None, :]
    tl.store(lam + rows[:, None] * H + heads[None, :], 1.0 / (1.0 + tl.exp(-z)), mask=mask)


@triton.jit(do_not_specialize=["M", "per_split"])
def gate_backward_kernel(
    d_lam, q, weight, lam, dq, d_weight, d_bias, M, H, D, per_split,
    BM: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """dq for BD columns and the rows of one split, and the split's share of dW and db."""
    split = tl.program_id(1)
    cols = tl.program_id(0) * BD + tl.arange(0, BD)
    heads = tl.arange(0, BH)
    inside = (heads < H)[:, None] & (cols < D)[None, :]
    w = tl.load(weight + heads[:, None] * D + cols[None, :], mask=inside, other=0.0).to(DT)
    acc = tl.zeros([BD, BH], tl.float32)
    total = tl.zeros([BH], tl.float32)
    for first in range(split * per_split, tl.minimum((split + 1) * per_split, M), BM):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BM)
        small = (rows < M)[:, None] & (heads < H)[None, :]
        at = rows[:, None] * H + heads[None, :]
        gate = tl.load(lam + at, mask=small, other=0.0)
        dz = tl.load(d_lam + at, mask=small, other=0.0) * gate * (1.0 - gate)
        total += tl.sum(dz, 0)
        large = (rows < M)[:, None] & (cols < D)[None, :]
        x = tl.load(q + rows[:, None] * D + cols[None, :], mask=large, other=0.0).to(DT)
        acc = dot_parts(tl.trans(x), dz, acc, DT, IP, False)
        grad = dot_parts(dz, w, tl.zeros([BM, BD], tl.float32), DT, IP, True)
        tl.store(dq + rows[:, None] * D + cols[None, :], grad.to(dq.dtype.element_ty), mask=large)
    at = split * H * D + heads[None, :] * D + cols[:, None]
    tl.store(d_weight + at, acc, mask=(heads < H)[None, :] & (cols < D)[:, None])
    if tl.program_id(0) == 0:
        tl.store(d_bias + split * H + heads, total, mask=heads < H)


ROWS, COLUMNS = 64, 64  # tokens of a program of the forward, and how much of a query it takes at a time


def fits(heads: int, block_k: int) -> bool:
    """Whether W of one head's channels and its gradient have room in the backward of the operator."""
    return padded(heads) * block_k <= 16 * 256


def padded(heads: int) -> int:
    return max(16, triton.next_power_of_2(heads))


def options(q: Tensor, heads: int) -> dict:
    half = q.dtype == torch.bfloat16 and q.is_cuda  # Triton's interpreter multiplies bf16 as if it were integers
    return {
        "BH": padded(heads),
        "DT": tl.bfloat16 if half else tl.float32,
        "IP": "tf32" if half else "tf32x3",
    }


def forward(q: Tensor, weight: Tensor, bias: Tensor, lam: Tensor | None = None) -> Tensor:
    """lam, written into the one given."""
    q = q.contiguous()
    heads, width = weight.shape
    rows = q.numel() // width
    if lam is None:
        lam = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    gate_kernel[(triton.cdiv(rows, ROWS),)](
        q, weight.contiguous(), bias.contiguous(), lam, rows, heads, width,
        BM=ROWS, BD=COLUMNS, **options(q, heads), num_stages=3 if q.dtype == torch.bfloat16 else 1,
    )  # fmt: skip
    return lam


def backward(d_lam: Tensor, q: Tensor, weight: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, W and b."""
    q = q.contiguous()
    heads, width = weight.shape
    rows = q.numel() // width
    splits = max(1, min(32, triton.cdiv(rows, 64)))
    dq = torch.empty_like(q)
    d_weight = torch.empty(splits, heads, width, dtype=torch.float32, device=q.device)
    d_bias = torch.empty(splits, heads, dtype=torch.float32, device=q.device)
    per_split = triton.cdiv(triton.cdiv(rows, splits), 64) * 64
    chosen = options(q, heads)
    columns, stages = (128, 3) if chosen["BH"] == 16 and chosen["DT"] == tl.bfloat16 else (64, 1)  # what fits
    gate_backward_kernel[(triton.cdiv(width, columns), splits)](
        d_lam.contiguous(), q, weight.contiguous(), lam, dq, d_weight, d_bias, rows, heads, width, per_split,
        BM=64, BD=columns, **chosen, num_stages=stages,
    )  # fmt: skip
    return dq, d_weight.sum(0), d_bias.sum(0)
