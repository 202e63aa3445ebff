"""The Linears of a decode step, those that see the same x in one launch.

A step reads every weight once and multiplies it with a few rows: it waits for memory, and for the memory to be asked
again after each launch. One launch over many weights keeps it busy.

    project    y_i = x W_i^T                            for each W_i
    swiglu     y = silu(x W_gate^T) * (x W_up^T)

M rows, K inputs, N outputs. Sums are fp32, and a product is rounded to the dtype of x before anything is done with it,
as if it had been stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.choose import ROWS
from ccq.ops.clean.triton.configs import cdiv


class Tiles(NamedTuple):
    """Outputs and inputs of a tile, and how it runs."""

    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 4


PROJECT = Tiles(32, 128)
SWIGLU = Tiles(16, 128)  # each program has two tiles, of both weights


@triton.jit
def product(
    x, weight, first, M, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """[BM, BN] of x W^T, the outputs from `first`, rounded to the dtype of x."""
    rows = tl.arange(0, BM)
    cols = first + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        at = begin + tl.arange(0, BK)
        mask_x, mask_w = (rows < M)[:, None], (cols < N)[:, None]
        if K % BK != 0:
            mask_x, mask_w = mask_x & (at < K)[None, :], mask_w & (at < K)[None, :]
        a = tl.load(x + rows[:, None] * K + at[None, :], mask=mask_x, other=0.0)
        if N % BN == 0 and K % BK == 0:
            b = tl.load(weight + cols[:, None] * K + at[None, :])
        else:
            b = tl.load(weight + cols[:, None] * K + at[None, :], mask=mask_w, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=IP)
    return acc.to(x.dtype.element_ty)


@triton.jit
def store(y, value, first, M, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.arange(0, BM)
    cols = first + tl.arange(0, BN)
    tl.store(y + rows[:, None] * N + cols[None, :], value, mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def project_kernel(
    x, weights, outputs, M, K: tl.constexpr, SIZES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """BN outputs of one of the weights. A branch for each, so that every load knows how its pointer is aligned."""
    block = tl.program_id(0)
    for i in tl.static_range(len(SIZES)):
        if (block >= 0) & (block < tl.cdiv(SIZES[i], BN)):
            value = product(x, weights[i], block * BN, M, K, SIZES[i], BM, BN, BK, IP)
            store(outputs[i], value, block * BN, M, SIZES[i], BM, BN)
        block -= tl.cdiv(SIZES[i], BN)


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(
    x, gate, up, y, M, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    rows = tl.arange(0, BM)
    cols = first + tl.arange(0, BN)
    g_acc = tl.zeros([BM, BN], tl.float32)
    u_acc = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        at = begin + tl.arange(0, BK)
        inside = at < K
        mask = (cols < N)[:, None] & inside[None, :]
        where = cols[:, None] * K + at[None, :]
        a = tl.load(x + rows[:, None] * K + at[None, :], mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        if N % BN == 0 and K % BK == 0:
            g, u = tl.load(gate + where), tl.load(up + where)
        else:
            g, u = tl.load(gate + where, mask=mask, other=0.0), tl.load(up + where, mask=mask, other=0.0)
        g_acc = tl.dot(a, tl.trans(g), g_acc, input_precision=IP)
        u_acc = tl.dot(a, tl.trans(u), u_acc, input_precision=IP)
    dtype = x.dtype.element_ty
    g, u = g_acc.to(dtype).to(tl.float32), u_acc.to(dtype).to(tl.float32)
    store(y, (g * tl.sigmoid(g) * u).to(dtype), first, M, N, BM, BN)


def options(x: Tensor, tiles: Tiles) -> dict:
    return {
        "K": x.shape[1], "BM": ROWS, "BN": tiles.outputs, "BK": tiles.inputs, "IP": "ieee",
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


def project(x: Tensor, weights: Sequence[Tensor], tiles: Tiles = PROJECT) -> list[Tensor]:
    """x W^T [M, N] for x [M, K] of up to ROWS rows and each W [N, K], all dense."""
    x = x.contiguous()
    outputs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    sizes = tuple(weight.shape[0] for weight in weights)
    blocks = sum(cdiv(size, tiles.outputs) for size in sizes)
    project_kernel[(blocks,)](x, tuple(weights), tuple(outputs), x.shape[0], SIZES=sizes, **options(x, tiles))
    return outputs


def swiglu(x: Tensor, gate: Tensor, up: Tensor, tiles: Tiles = SWIGLU) -> Tensor:
    """silu(x gate^T) * (x up^T) [M, N] for x [M, K] of up to ROWS rows; gate and up [N, K], dense."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], gate.shape[0])
    swiglu_kernel[(cdiv(gate.shape[0], tiles.outputs),)](
        x, gate, up, y, x.shape[0], N=gate.shape[0], **options(x, tiles)
    )
    return y
