"""One decode step of a linear-attention layer: clean the query, write the key and value, read.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T                                      (additive write)
    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T    (delta rule)
    o_t = scale * S_t^T q_t

B sequences, H query and key heads, Hv value heads (a multiple of H: value head h is read by query head h // (Hv / H)),
K key size, V value size, R width of the query the gate sees. Decoding is bound by the states' traffic, so they are
updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ccq.ops import checks
from ccq.ops.choose import Call, choose
from ccq.ops.clean import clean_query_step
from ccq.ops.clean.library import Gate, gate
from ccq.ops.clean.reference import FUSED, Read
from ccq.ops.clean.state import CovarianceState
from ccq.ops.precision import exact_matmul, stats_dtype, unit


@dataclass(frozen=True)
class Cleaning:
    """How a step cleans its query: the covariance, updated in place, and either lam or the gate that gives it.

    `gate` has weight [H, R], bias [H] and sees `raw` [B, ..., K'] (R values a token; q itself unless given).
    """

    covariance: CovarianceState
    lam: Tensor | None = None
    gate: Gate | tuple[Tensor, Tensor] | None = None
    raw: Tensor | None = None
    centred: bool = True
    normalize: str = "unit"
    step: str = "scaled"  # or "projected"
    log_decay: Tensor | None = None  # of the covariance, [B, H], or [B, H, D] to be averaged: its count is a weight
    steps: int = 1


@torch.no_grad()
def decode_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B Hv V"],
    recurrent: Float[Tensor, "B Hv K V"],
    g: Float[Tensor, "B Hg"] | Float[Tensor, "B H K"] | None = None,
    beta: Float[Tensor, "B Hv"] | None = None,
    scale: float | None = None,
    *,
    unit_qk: bool = False,
    cleaning: Cleaning | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B Hv V"]:
    """o_t for one more token of each sequence; `recurrent` and the covariance are updated in place.

    `recurrent` is fp32 (fp64 for fp64 inputs), or bf16: then it is computed in fp32, and rounded when it is stored.
    Of the symmetric C a GPU updates one half only: read it as `covariance.second_moment`, which mends the other, and
    not through a view of its memory that was taken before.

    Args:
        g: log-decay: one a value head [B, Hv], one a channel [B, H, K], or None for no decay.
        beta: strength of the delta rule; None writes additively.
        scale: of the read, K^-0.5 unless given.
        unit_qk: divide q and k by their norms first. With `cleaning`, its `normalize` decides instead.
        cleaning: clean the query before it reads; None reads with q.

    >>> q, k, v = torch.randn(1, 2, 16), torch.randn(1, 2, 16), torch.randn(1, 2, 32)
    >>> recurrent, seen = torch.zeros(1, 2, 16, 32), CovarianceState.zeros(1, heads=2, key_size=16)
    >>> o = decode_step(q, k, v, recurrent, cleaning=Cleaning(seen, lam=torch.full((1, 2), 0.5)))
    >>> o.shape, seen.count
    (torch.Size([1, 2, 32]), tensor([1]))
    """
    _check(q, k, v, recurrent, g, beta, cleaning)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q.numel() and choose("decode_step", Call.of(q), backend) == "triton":
        from ccq.ops.recurrence import triton  # imports Triton

        return triton.decode_step(q, k, v, recurrent, g, beta, scale, unit_qk, cleaning)
    if cleaning is not None:
        lam, decay = cleaning.lam, cleaning.log_decay
        if lam is None:
            assert cleaning.gate is not None  # one of them is given: checked
            lam = gate(q if cleaning.raw is None else cleaning.raw, *cleaning.gate, backend=backend)
        q, k, _ = clean_query_step(
            q, k, lam, cleaning.covariance, cleaning.centred, cleaning.normalize, inplace=True, backend=backend,
            step=cleaning.step, steps=cleaning.steps,
            log_decay=decay.mean(-1) if decay is not None and decay.ndim == 3 else decay,
        )  # fmt: skip
    elif unit_qk:
        q, k = unit(q).to(q.dtype), unit(k).to(k.dtype)
    return write_and_read(q, k, v, recurrent, g, beta, scale)


def write_and_read(q, k, v, recurrent, g, beta, scale) -> Tensor:
    """The backbone's part, in plain PyTorch."""
    group = v.shape[1] // q.shape[1]
    high = stats_dtype(recurrent.dtype)
    kept, recurrent = recurrent, recurrent.to(high)
    q, k = (x.to(high).repeat_interleave(group, 1) for x in (q, k))
    if g is not None:
        decay = g.to(high).exp()
        decay = decay[..., None, None] if g.ndim == 2 else decay.repeat_interleave(group, 1)[..., None]
        recurrent.mul_(decay)
    value = v.to(high)
    with exact_matmul(recurrent):
        if beta is not None:
            value = beta.to(high)[..., None] * (value - torch.einsum("bhk,bhkv->bhv", k, recurrent))
        recurrent.add_(k[..., :, None] * value[..., None, :])
        if kept is not recurrent:
            kept.copy_(recurrent)
        return (scale * torch.einsum("bhk,bhkv->bhv", q, recurrent)).to(v.dtype)


def _check(q, k, v, recurrent, g, beta, cleaning) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3 or x.dtype not in checks.FLOATS:
            what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected a float tensor of shape [B, heads, size], got {what}")
    batch, heads, _ = q.shape
    checks.check_recurrence(q, k, v, g, beta, recurrent, "recurrent", batch, half=True)
    checks.same_device(q, v=v, recurrent=recurrent, g=g, beta=beta)
    if cleaning is None:
        checks.same_dtype(q, k=k)
        return
    if (cleaning.lam is None) == (cleaning.gate is None):
        raise ValueError("cleaning: expected either lam or gate")
    if cleaning.gate is not None:
        raw = q if cleaning.raw is None else cleaning.raw
        if raw.ndim != 3 or raw.shape[:2] != q.shape[:2]:
            raise ValueError(f"cleaning.raw: expected shape {(batch, heads)} and a size, got {tuple(raw.shape)}")
        checks.check_gate(raw, *cleaning.gate)
        checks.same_device(q, **{"cleaning.raw": raw})
    lam = q[..., 0] if cleaning.lam is None else cleaning.lam  # the gate's will be of that shape
    how = Read(cleaning.centred, cleaning.normalize)
    checks.check_call(q, k, lam, cleaning.covariance, None, how, "auto", tokens=False)
    if cleaning.step not in FUSED:
        raise ValueError(f"cleaning.step: expected one of {', '.join(FUSED)}, got {cleaning.step!r}")
    decay = cleaning.log_decay
    one = decay[..., 0] if decay is not None and decay.ndim == 3 else decay
    checks.check_read(cleaning.step, cleaning.steps, one, k)
    if decay is not None:
        checks.check_decays(cleaning.covariance, "cleaning.covariance")
    if cleaning.lam is not None:
        checks.check_values(lam, cleaning.covariance.count, None, 1, state="cleaning.covariance")
