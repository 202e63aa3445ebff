"""What tests/interpreter.py puts into Triton's interpreter gives the same numbers as PyTorch."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is not in use", allow_module_level=True)

import triton
import triton.language as tl

SIDE = 16
AT = tl.constexpr(SIDE)


@triton.jit
def product_kernel(x, y, out, rounded):
    rows, cols = tl.arange(0, AT)[:, None], tl.arange(0, AT)[None, :]
    product = tl.dot(tl.load(x + rows * AT + cols), tl.load(y + rows * AT + cols))
    tl.store(out + rows * AT + cols, product)
    tl.store(rounded + rows * AT + cols, product.to(rounded.dtype.element_ty))


@triton.jit
def sum_kernel(x, out):
    rows, cols = tl.arange(0, AT)[:, None], tl.arange(0, AT)[None, :]
    tl.store(out + rows * AT + cols, tl.cumsum(tl.load(x + rows * AT + cols), 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_and_roundings(dtype):
    """Of small integers a product is exact, in whatever order it adds; of bf16 too, but for the last rounding."""
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-9, 10, (SIDE, SIDE), generator=rng).to(dtype) for _ in range(2))
    out, rounded = torch.empty(SIDE, SIDE), torch.empty(SIDE, SIDE, dtype=dtype)
    product_kernel[(1,)](x, y, out, rounded)
    assert torch.equal(out, x.float() @ y.float())
    assert out.abs().max() > 256, "nothing here is rounded"
    assert torch.equal(rounded, out.to(dtype))


@triton.jit
def round_kernel(x, out):
    at = tl.arange(0, AT)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def test_what_is_no_number_stays_none():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38, -0.0, 0.0, 1e-40, 1.00390625] + [1.01171875] * 8)
    out = torch.empty(SIDE, dtype=torch.bfloat16)
    round_kernel[(1,)](x, out)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out[1:].view(torch.int16), x[1:].bfloat16().view(torch.int16))


def test_sums_along_an_axis():
    x = torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE)
    out = torch.empty_like(x)
    sum_kernel[(1,)](x, out)
    assert torch.equal(out, x.cumsum(0))
