"""The memory of linear attention: write k v^T at each token, forget, read with q. One definition for every backbone.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T                                      (additive: RetNet, GLA, Mamba2, ...)
    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T  (delta rule: DeltaNet, Gated DeltaNet, KDA)
    o_t = scale * S_t^T q_t

B sequences (or N packed ones), T tokens, H query and key heads, Hv value heads (a multiple of H: value head h belongs
to key head h // (Hv / H)), K key size, V value size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ccq.ops.checks import check_cu_seqlens, check_recurrence, same_dtype
from ccq.ops.choose import Call, choose, one_of
from ccq.ops.recurrence import chunk

BACKENDS = ("auto", "chunk", "triton")


def recurrence(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T Hv V"],
    g: Float[Tensor, "B T Hv"] | Float[Tensor, "B T H K"] | None = None,
    beta: Float[Tensor, "B T Hv"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N Hv K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B T Hv V"], Float[Tensor, "N Hv K V"] | None]:
    """Write and read along the sequence; see the equations above.

    Args:
        g: log-decay, at most 0: one a value head [B, T, Hv], one a channel [B, T, H, K], or None for no decay.
        beta: strength of the delta rule; None writes additively.
        scale: of the read, K^-0.5 unless given.
        initial_state: what the sequences begin with, fp32 (fp64 for fp64 inputs).
        output_final_state: whether to return the state after the last token.
        cu_seqlens: borders [0, ..., T] of N sequences packed along T (B = 1); empty ones are allowed.
        backend: "chunk", plain PyTorch on any device; "triton", fla's kernels; "auto", those where they run.

    Returns:
        o, in the dtype of v, and the final state (None unless asked for). Both are differentiable.

    >>> q, k, v = torch.randn(2, 100, 4, 16), torch.randn(2, 100, 4, 16), torch.randn(2, 100, 4, 32)
    >>> o, state = recurrence(q, k, v, g=-torch.rand(2, 100, 4), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([2, 100, 4, 32]), torch.Size([2, 4, 16, 32]))
    """
    if q.ndim != 4 or 0 in q.shape[2:]:
        raise ValueError(f"q: expected shape [B, T, H, K], got {tuple(q.shape)}")
    sequences = q.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, q)
    check_recurrence(q, k, v, g, beta, initial_state, "initial_state", sequences)
    same_dtype(q, k=k, v=v)
    one_of("backend", backend, BACKENDS)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)  # an integer breaks fla's chunk_h on some GPUs
    if v.shape[0] * v.shape[1] == 0:
        state = chunk.memory(initial_state, cu_seqlens, q, *v.shape[2:]) if output_final_state else None
        return v * 1, state  # no tokens: empty, but a function of v for autograd
    arguments = (q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)
    if choose("recurrence", Call.of(q, delta=beta is not None), backend) != "chunk":
        from ccq.ops.recurrence import fla  # torch.compiler.disable loads half of the compiler

        return fla.run(*arguments)
    if torch.compiler.is_exporting():
        o, state = exported(*arguments[:7], cu_seqlens)
        return o, state if output_final_state else None
    return chunk.run(*arguments)


@torch.library.custom_op("ccq::recurrence", mutates_args=())
def exported(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loop over chunks as one node of what torch.export makes: traced, it would be of one length alone."""
    o, state = chunk.run(q, k, v, g, beta, scale, initial_state, True, cu_seqlens)
    return o.contiguous(), state


@exported.register_fake
def _(q, k, v, g, beta, scale, initial_state, cu_seqlens):
    return v.new_empty(v.shape), chunk.memory(None, cu_seqlens, q, *v.shape[2:])


def flops(heads: int, key_size: int, value_size: int, delta: bool = False) -> float:
    """Of the chunkwise form, forward, a token: the scores in a chunk and what they read; the state read and written."""
    pairs = chunk.CHUNK * (key_size + value_size)
    state = 2 * key_size * value_size
    if delta:  # + k k^T, the triangular solve for both right-hand sides, and the read of k
        pairs += chunk.CHUNK * (2 * key_size + value_size)
        state += key_size * value_size
    return 2.0 * heads * (pairs + state)
