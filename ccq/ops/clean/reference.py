"""The definition: q_clean = q - lam * Sigma_t q, one token after another. Every other backend must agree with it.

Beside the paper's step, "scaled", stands the projected one, whose lam is a share of what q has along y = Sigma_t q:

    q_clean = q - lam * (q . y) / (y . y + eps) * y

B sequences, T tokens, Hq query heads reading Hk key heads (query head h reads key head h // (Hq / Hk)), K key size.
Plain PyTorch, differentiable to any order, any float dtype, a Python step a token: for reading and for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ccq.ops.clean.state import CovarianceState
from ccq.ops.precision import high, stats_dtype, unit

# Below this y is rounding: at the first token, and where all keys are equal, the projected step leaves the query alone.
# A y worth taking away is far above: in trained models |y|^2 is 1e-6 and more.
LEAST = 1e-10


def scaled(q: Tensor, y: Tensor, lam: Tensor) -> Tensor:
    return q - lam * y


def projected(q: Tensor, y: Tensor, lam: Tensor) -> Tensor:
    along = (q * y).sum(-1, keepdim=True) / (y.square().sum(-1, keepdim=True) + LEAST)
    return q - lam * along * y


def projected_backward(g: Tensor, q: Tensor, y: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of g, the gradient of q_clean: what goes to q beside y, what goes to y, and what goes to lam [..., 1]."""
    size = y.square().sum(-1, keepdim=True) + LEAST
    along = (q * y).sum(-1, keepdim=True) / size
    moved = (g * y).sum(-1, keepdim=True)
    d_along = -lam * moved / size
    return g + d_along * y, -lam * along * g + d_along * (q - 2 * along * y), -along * moved


# q_clean from q, y = Sigma_t q and lam [..., 1], in fp32 or fp64. Another one is a function here: clean_query(step=its
# name) and CCQConfig(clean=True, step=its name) train, prefill and decode with it, through `sigma_q` and autograd.
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"scaled": scaled, "projected": projected}
FUSED = ("scaled", "projected")  # the backends have these whole, with a derived backward


class Read(NamedTuple):
    """How a call reads."""

    centred: bool = True
    normalize: str = "unit"
    step: str = "scaled"  # of STEPS


def symmetric(x: Tensor) -> Tensor:
    """second_moment is symmetric by contract: only this part of it counts, and so its gradient is symmetric too."""
    return (x + x.mT) / 2


def prepare(q: Tensor, k: Tensor, normalize: str) -> tuple[Tensor, Tensor, Tensor]:
    """The query that is cleaned, the key that enters the statistics, and the key k_bar that the backbone writes."""
    if normalize == "unit":
        k_bar = unit(k).to(k.dtype)
        return unit(q), high(k_bar), k_bar  # the statistics see the key that is written: after rounding
    if normalize == "stats":
        return high(q), unit(k), k
    return high(q), high(k), k


def absorb(state: CovarianceState, k: Tensor, log_decay: Tensor | None, inplace: bool = False) -> CovarianceState:
    """C_t = C_{t-1} + k k^T, s_t = s_{t-1} + k, t = t + 1, for k [B, Hk, K]; with a decay all three fade first."""
    sums = [state.second_moment, state.key_sum, state.count if inplace or log_decay is None else state.weight]
    added: tuple[Any, ...] = (k[..., :, None] * k[..., None, :], k, 1)
    if log_decay is not None:
        decay = log_decay.to(k.dtype).exp()
        factors = (decay[..., None, None], decay[..., None], decay)
        sums = [x.mul_(f) if inplace else x * f for x, f in zip(sums, factors, strict=True)]
    sums = [x.add_(new) if inplace else x + new for x, new in zip(sums, added, strict=True)]
    return state if inplace else CovarianceState(*sums)


def read(state: CovarianceState, q: Tensor, centred: bool) -> Tensor:
    """y = Sigma_t q = C_t q / t - s_t (s_t . q) / t^2, for q [B, Hq, K]."""
    q = q.unflatten(1, (state.key_sum.shape[1], -1))  # [B, Hk, G, K]: G query heads read one key head
    t = state.weight[..., None, None]
    y = q @ symmetric(state.second_moment) / t
    if centred:
        key_sum = state.key_sum.unsqueeze(2)
        y = y - key_sum * (key_sum * q).sum(-1, keepdim=True) / t.square()
    return y.flatten(1, 2)


def step(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    state: CovarianceState,
    how: Read,
    log_decay: Tensor | None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor, CovarianceState, Tensor]:
    """One token, the paper's recurrent algorithm: q [B, Hq, K], k [B, Hk, K], lam [B, Hq], log_decay [B, Hk].

    Returns q_clean, k_bar, the state that includes this token, and the correction y by itself.
    """
    q_read, k_stat, k_bar = prepare(q, k, how.normalize)
    state = absorb(state, k_stat, log_decay, inplace)
    y = read(state, q_read, how.centred)
    q_clean = STEPS[how.step](q_read, y, lam.to(y.dtype)[..., None])
    return q_clean.to(q.dtype), k_bar, state, y


def forward(
    q: Tensor, k: Tensor, lam: Tensor, state: CovarianceState, cu_seqlens: Tensor | None, how: Read,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor, CovarianceState, Tensor]:  # fmt: skip
    """The loop over q [B, T, Hq, K], k [B, T, Hk, K], lam [B, T, Hq], log_decay [B, T, Hk], beginning at `state`.

    Returns q_clean, k_bar, the final state, and the correction y by itself.
    """
    decays = [None] * q.shape[1] if log_decay is None else log_decay.unbind(1)
    columns = (x.unbind(1) for x in (q, k, lam))  # q[:, t] would cost T^2 in the backward
    tokens = list(zip(*columns, decays, strict=True))
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []
    finals: list[CovarianceState] = []
    borders = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    for sequence, (begin, end) in enumerate(pairwise(borders)):
        here = state if cu_seqlens is None else state.index_select(torch.tensor([sequence]))
        count = here.count if log_decay is None else here.weight
        here = CovarianceState(symmetric(here.second_moment), here.key_sum, count)
        for q_t, k_t, lam_t, decay in tokens[begin:end]:
            q_clean, k_bar, here, y = step(q_t, k_t, lam_t, here, how, decay)
            outputs.append((q_clean, k_bar, y))
        finals.append(here)
    final = pytree.tree_map(lambda *parts: torch.cat(parts), *finals)
    if not outputs:
        return q.clone(), k.clone(), final, q.to(stats_dtype(q.dtype), copy=True)
    q_clean, k_bar, y = (torch.stack(column, dim=1) for column in zip(*outputs, strict=True))
    return q_clean, k_bar, final, y
