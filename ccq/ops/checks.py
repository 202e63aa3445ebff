"""Every complaint about bad input, in one place: it names the argument, what was expected, and what came.

Shapes, dtypes and devices are checked at each call. Values live on the device, and looking at them waits for it: they
are checked for CPU tensors, and on a GPU only with CCQ_CHECK=1 in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ccq.ops.choose import check_backend, one_of
from ccq.ops.clean.reference import STEPS, Read
from ccq.ops.clean.state import CovarianceState
from ccq.ops.precision import stats_dtype

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NORMALIZE = ("unit", "none", "stats")
MOST_STEPS = 4


def check_tensor(
    name: str, x: Any, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, why: str = ""
) -> None:
    """Raise unless x is a tensor of this shape and dtype (any float without one); `why` the dtype is expected."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if dtype is None and x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {x.dtype}")
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}{why}, got {x.dtype}")


def same_device(q: Tensor, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {x.device}")


def same_dtype(q: Tensor, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected q's dtype {q.dtype}, got {x.dtype}")


def check_call(
    q: Tensor, k: Tensor, lam: Any, state: CovarianceState | None, cu_seqlens: Tensor | None, how: Read, backend: str,
    *, tokens: bool,
) -> None:  # fmt: skip
    """Raise unless the arguments fit together (None: there is no lam). `tokens`: q is [B, T, Hq, K], not [B, Hq, K]."""
    axes = "B, T, Hq, K" if tokens else "B, Hq, K"
    gated = isinstance(lam, tuple)
    if gated and not tokens:
        raise TypeError("lam: expected a tensor [B, Hq] for one token, got a tuple; ccq.ops.gate makes it of a Gate")
    if gated and len(lam) != 2:
        raise TypeError(f"lam: expected a tensor, or a Gate of weight and bias, got a tuple of {len(lam)}")
    lam, by = (None, lam) if gated else (lam, None)
    for name, x in (("q", q), ("k", k), ("lam", q if lam is None else lam)):
        check_tensor(name, x)
    if q.ndim != (4 if tokens else 3):
        raise ValueError(f"q: expected shape [{axes}], got {tuple(q.shape)}")
    heads, key_size = q.shape[-2], q.shape[-1]
    if key_size == 0 or heads == 0:
        raise ValueError(f"q: expected at least one head of at least one channel, got shape {tuple(q.shape)}")
    if k.ndim != q.ndim or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != key_size:
        raise ValueError(
            f"k: expected shape [{axes.replace('Hq', 'Hk')}] with q's sizes but for the heads, "
            f"q being {tuple(q.shape)}, got {tuple(k.shape)}"
        )
    if k.shape[-2] == 0 or heads % k.shape[-2]:
        raise ValueError(f"k: expected a number of heads that divides q's {heads}, got {k.shape[-2]}")
    if by is not None:
        check_gate(q, *by)
    elif lam is not None and lam.shape != q.shape[:-1]:
        shape = f"[{axes.removesuffix(', K')}] = {tuple(q.shape[:-1])}"
        raise ValueError(f"lam: expected shape {shape}, got {tuple(lam.shape)}")
    same_dtype(q, k=k)
    same_device(q, k=k, lam=lam)
    if not isinstance(how.centred, bool):
        raise TypeError(f"centred: expected True or False, got {how.centred!r}")
    one_of("normalize", how.normalize, NORMALIZE)
    check_backend(backend)
    sequences = q.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, q)
    if state is not None:
        _check_state("initial_state" if tokens else "state", state, sequences, k)


def check_read(step: str, steps: int, log_decay: Tensor | None, k: Tensor) -> None:
    """Raise unless these say how a query is read beside the paper's way, for keys k [..., Hk, K] that were checked."""
    one_of("step", step, tuple(STEPS))
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"steps: expected a whole number from 1 to {MOST_STEPS}, got {steps!r}")
    if log_decay is None:
        return
    check_tensor("k", k)
    check_tensor("log_decay", log_decay)
    if log_decay.shape != k.shape[:-1]:
        expected = f"one a token and key head, {tuple(k.shape[:-1])}"
        raise ValueError(f"log_decay: expected {expected}, got {tuple(log_decay.shape)}")
    same_device(k, log_decay=log_decay)
    if looked_at(log_decay) and log_decay.numel():
        largest = log_decay.detach().max().item()
        if largest > 0:
            raise ValueError(f"log_decay: expected values up to 0, got {largest:g}")


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, anywhere: bool = False) -> int:
    """How many sequences there are in q [B, T, ...]; `anywhere`: the borders may lie on another device."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an integer tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape [N + 1], N >= 1, got {tuple(cu_seqlens.shape)}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected sequences packed in a batch of 1, got a batch of {q.shape[0]}")
    if not anywhere:
        same_device(q, cu_seqlens=cu_seqlens)
    return cu_seqlens.shape[0] - 1


def _check_state(name: str, state: CovarianceState, sequences: int, k: Tensor) -> None:
    if not isinstance(state, CovarianceState):
        raise TypeError(f"{name}: expected a CovarianceState, got {type(state).__name__}")
    heads, size = k.shape[-2:]
    high, why = stats_dtype(k.dtype), f" for {k.dtype} keys"
    # C as it is stored: reading it would mend it, and decoding asks at every token
    check_tensor(f"{name}.second_moment", state._second_moment, (sequences, heads, size, size), high, why)
    check_tensor(f"{name}.key_sum", state.key_sum, (sequences, heads, size), high, why)
    if weighs(state):
        check_tensor(f"{name}.count", state.count, (sequences, heads), high, why)
    else:
        check_tensor(f"{name}.count", state.count, (sequences,), torch.int64, why)
    tensors = {"second_moment": state._second_moment, "key_sum": state.key_sum, "count": state.count}
    same_device(k, **{f"{name}.{field}": x for field, x in tensors.items()})


def weighs(state: CovarianceState) -> bool:
    """Whether a state counts in fractions: its covariance has decayed."""
    return isinstance(state.count, Tensor) and state.count.is_floating_point()


def check_decays(state: CovarianceState, name: str = "state") -> None:
    """Raise unless a state can decay in place."""
    if not weighs(state):
        raise ValueError(
            f"{name}.count: expected weights [B, Hk] to decay in place, got a count of keys; "
            "CovarianceState.zeros(..., decayed=True) begins such a state"
        )


def check_gate(q: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Raise unless weight and bias make a gate of q [..., H, K]."""
    check_tensor("q", q)
    if q.ndim < 2:
        raise ValueError(f"q: expected shape [..., H, K], got {tuple(q.shape)}")
    heads, size = q.shape[-2:]
    high, why = stats_dtype(q.dtype), f" for {q.dtype} queries"
    check_tensor("weight", weight, (heads, heads * size), high, why)
    check_tensor("bias", bias, (heads,), high, why)
    same_device(q, weight=weight, bias=bias)


def check_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor | None, name: str, n: int,
    half: bool = False,
) -> None:  # fmt: skip
    """Raise unless these write to and read a state, called `name`, of `n` sequences; `half`: it may be bfloat16."""
    *lead, heads, size = q.shape
    if k.shape != q.shape:
        raise ValueError(f"k: expected the shape of q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.ndim != q.ndim or v.shape[:-2] != q.shape[:-2] or v.shape[-2] == 0 or v.shape[-2] % heads:
        axes = ", ".join(map(str, lead))
        raise ValueError(f"v: expected shape [{axes}, Hv, V], Hv a multiple of q's {heads} heads, got {tuple(v.shape)}")
    per_head = (*lead, v.shape[-2])
    if g is not None and tuple(g.shape) not in (per_head, tuple(q.shape)):
        raise ValueError(f"g: expected shape {per_head} or {tuple(q.shape)}, got {tuple(g.shape)}")
    if beta is not None:
        check_tensor("beta", beta, per_head)
    expected, high = (n, v.shape[-2], size, v.shape[-1]), stats_dtype(q.dtype)
    if half and state is not None and state.dtype == torch.bfloat16:
        high = torch.bfloat16
    if state is not None and (tuple(state.shape) != expected or state.dtype != high):
        raise ValueError(f"{name}: expected {high} of shape {expected}, got {state.dtype} of {tuple(state.shape)}")


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation follows x."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def refuse_transforms(function: str, *tensors: Tensor | None) -> None:
    """Raise where PyTorch would drop a derivative without a word, or say something that helps nobody."""
    if torch.compiler.is_compiling():
        return
    innermost = torch._C._functorch.peek_interpreter_stack()
    if any(has_tangent(x) for x in tensors if x is not None):
        what = "in forward mode (torch.func.jvp, jacfwd, torch.autograd.forward_ad)"
    elif innermost is not None and innermost.key() == torch._C._functorch.TransformType.Grad:
        what = "under torch.func.grad"
    else:
        return
    raise NotImplementedError(
        f"{function} has no derivative {what} but with backend='reference', which is plain PyTorch; "
        "torch.autograd.grad and .backward() work with every backend."
    )


def looked_at(x: Tensor) -> bool:
    """Whether the values of x are checked: neither a compiler nor vmap lets anybody look."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return x.device.type == "cpu" or (not x.is_meta and os.environ.get("CCQ_CHECK") == "1")


def check_values(
    lam: Tensor, count: Tensor | None, cu_seqlens: Tensor | None, length: int, state: str = "initial_state"
) -> None:
    """Raise on values no sequence can have; `state` is what the caller calls it. NaN passes and shows in the output."""
    if not looked_at(lam):
        return
    if lam.numel():
        low, high = (x.item() for x in lam.detach().aminmax())
        if low < 0 or high > 1:
            raise ValueError(f"lam: expected values from 0 to 1, got {low:g} to {high:g}")
    if count is not None and count.numel() and count.min().item() < 0:
        raise ValueError(f"{state}.count: expected values from 0, got {count.min().item()}")
    if cu_seqlens is not None:
        check_borders(cu_seqlens.tolist(), length)


def check_borders(borders: list[int], length: int) -> None:
    """Raise unless `borders` of packed sequences run from 0 to `length` without going back."""
    if borders[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {borders[0]}")
    for i, (a, b) in enumerate(pairwise(borders)):
        if b < a:
            raise ValueError(f"cu_seqlens: expected no decrease, got {a} then {b} at index {i + 1}")
    if borders[-1] != length:
        raise ValueError(f"cu_seqlens: expected to end at T = {length}, got {borders[-1]}")
