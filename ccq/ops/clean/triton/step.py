"""One decode step in Triton: update the covariance in place, read it, clean the query, in one launch.

The covariance is the traffic: K x K fp32 a head, read once and written once. A program owns one key head of one
sequence and goes through it BR rows at a time; a row block serves as rows (C q) and as columns (C^T q), so that the
symmetric part is what is read, as the contract says, without reading anything twice.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccq.ops.clean.state import CovarianceState
from ccq.ops.clean.triton.launch import block_size
from ccq.ops.precision import EPS


@triton.jit
def step_kernel(
    q, k, lam, second_moment, key_sum, count, tickets, scratch, q_clean, k_bar, H, G, K, eps,
    UNIT_Q: tl.constexpr, UNIT_K: tl.constexpr, STORE_K: tl.constexpr, CENTRED: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) // H).to(tl.int64)
    nh = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BK)
    inside = cols < K
    seen = tl.load(count + n)
    t = (seen + 1).to(tl.float32)

    key = tl.load(k + nh * K + cols, mask=inside, other=0.0).to(tl.float32)
    scale_k = 1.0
    if UNIT_K:
        scale_k = tl.rsqrt(tl.sum(key * key, 0) + eps)
        key *= scale_k
    if STORE_K:  # the statistics see the key as it is written: after rounding
        rounded = key.to(k_bar.dtype.element_ty)
        tl.store(k_bar + nh * K + cols, rounded, mask=inside)
        key = rounded.to(tl.float32)
    total = tl.load(key_sum + nh * K + cols, mask=inside, other=0.0) + key
    tl.store(key_sum + nh * K + cols, total, mask=inside)

    for member in range(G):  # the query heads that read this key head; the first one's pass writes the update
        at = (nh * G + member) * K
        query = tl.load(q + at + cols, mask=inside, other=0.0).to(tl.float32)
        scale_q = 1.0
        if UNIT_Q:
            scale_q = tl.rsqrt(tl.sum(query * query, 0) + eps)
        by_column = tl.zeros([BK], tl.float32)
        for first in range(0, K, BR):
            rows = first + tl.arange(0, BR)
            where = second_moment + nh * K * K + rows[:, None] * K + cols[None, :]
            mask = (rows < K)[:, None] & inside[None, :]
            block = tl.load(where, mask=mask, other=0.0)
            if member == 0:
                key_rows = tl.load(k + nh * K + rows, mask=rows < K, other=0.0).to(tl.float32) * scale_k
                if STORE_K:
                    key_rows = key_rows.to(k_bar.dtype.element_ty).to(tl.float32)
                block += key_rows[:, None] * key[None, :]
                tl.store(where, block, mask=mask)
            query_rows = tl.load(q + at + rows, mask=rows < K, other=0.0).to(tl.float32)
            by_column += tl.sum(block * query_rows[:, None], 0)
            by_row = tl.sum(block * query[None, :], 1)
            tl.store(scratch + at + rows, by_row, mask=rows < K)
        tl.debug_barrier()  # the rows come back to other threads than wrote them
        y = (by_column + tl.load(scratch + at + cols, mask=inside, other=0.0)) * (0.5 * scale_q / t)
        if CENTRED:
            y -= total * (tl.sum(total * query, 0) * scale_q / (t * t))
        gate = tl.load(lam + nh * G + member).to(tl.float32)
        tl.store(q_clean + at + cols, (query * scale_q - gate * y).to(q_clean.dtype.element_ty), mask=inside)

    # every head of a sequence reads the count, and the last to come advances it
    if tl.atomic_add(tickets + n, 1) == H - 1:
        tl.store(tickets + n, 0)
        tl.store(count + n, seen + 1)


@functools.cache
def tickets(device: torch.device, sequences: int) -> Tensor:
    """Zeros that the kernel leaves zero. Kept, so that captured graphs may use them again and again."""
    return torch.zeros(sequences, dtype=torch.int32, device=device)


def step(
    q: Tensor, k: Tensor, lam: Tensor, state: CovarianceState, centred: bool, normalize: str
) -> tuple[Tensor, Tensor]:
    """q_clean and k_bar of one token; `state` is updated in place."""
    for name in ("second_moment", "key_sum", "count"):
        if not getattr(state, name).is_contiguous():
            raise ValueError(f"state.{name}: expected a contiguous tensor to update in place, got a strided one")
    batch, heads, size = k.shape
    unit = normalize == "unit"
    k_bar = torch.empty_like(k, memory_format=torch.contiguous_format) if unit else k
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    scratch = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    block_k = block_size(size)
    step_kernel[(batch * heads,)](
        q.contiguous(), k.contiguous(), lam.contiguous(), state.second_moment, state.key_sum, state.count,
        tickets(q.device, batch), scratch, out, k_bar, heads, q.shape[1] // heads, size, EPS,
        UNIT_Q=unit, UNIT_K=normalize != "none", STORE_K=unit, CENTRED=centred,
        BR=16 if block_k < 256 else 32, BK=block_k, num_warps=8 if block_k >= 256 else 1,
    )  # fmt: skip
    return out, k_bar
