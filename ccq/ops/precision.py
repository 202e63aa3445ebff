"""In which precision statistics and states are kept, and how a vector is made unit: one rule for every operation."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

EPS = 1e-6  # inside the square root, so that a zero vector gives zero and a finite gradient, never NaN


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half-precision keys (sums of thousands of terms need the bits), fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def high(x: Tensor) -> Tensor:
    return x.to(stats_dtype(x.dtype))


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast would turn the products of the statistics into half precision."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def exact_matmul(x: Tensor) -> AbstractContextManager:
    """fp32 products in fp32: neither autocast nor TF32, which errs by 1e-3, may reach the statistics. A compiler cannot
    trace the setting of TF32: compiled code follows the user's."""
    return _no_tf32(x) if x.is_cuda and not torch.compiler.is_compiling() else no_autocast(x)


_LOCK = threading.Lock()
_BEFORE: list[str] = []  # for each block that is open in any thread, the setting before the first of them


@contextmanager
def _no_tf32(x: Tensor):
    matmul = torch.backends.cuda.matmul
    with _LOCK:
        _BEFORE.append(_BEFORE[0] if _BEFORE else matmul.fp32_precision)
        matmul.fp32_precision = "ieee"
    try:
        with no_autocast(x):
            yield
    finally:
        with _LOCK:
            precision = _BEFORE.pop()
            if not _BEFORE:
                matmul.fp32_precision = precision


def inv_norm(x: Tensor) -> Tensor:
    """1 / |x| over the last axis, in the precision of the statistics."""
    return torch.rsqrt(high(x).square().sum(-1, keepdim=True) + EPS)


def unit(x: Tensor) -> Tensor:
    return high(x) * inv_norm(x)


def unit_backward(dxn: Tensor, xn: Tensor, rnorm: Tensor) -> Tensor:
    """Gradient through xn = x * rsqrt(|x|^2 + eps): exact with the eps, since d rnorm / dx = -rnorm^3 x."""
    return rnorm * (dxn - xn * (xn * dxn).sum(-1, keepdim=True))
