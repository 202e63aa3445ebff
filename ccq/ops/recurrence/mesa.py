"""MesaNet's memory: read with the query that solves for the keys, not with the query itself.

    [H_t, S_t] = exp(g_t) [H_{t-1}, S_{t-1}] + beta_t k_t [k_t, v_t]^T
    o_t = S_t^T x_t,    (H_t + diag(ridge)) x_t = q_t

x_t is what `steps` steps of conjugate gradient from 0 make of it: one step only rescales q, two lie in the span of q
and H_t q. H and S are one state, that of linear attention with values [k, v].

In plain PyTorch on any device. The states before all chunks are found once; then each step is a few products over all
chunks at a time. The gradient is that of the steps taken, by autograd; they are computed again for it, so that what is
kept is linear in T. On a GPU fla's kernels stand for it where they do the same: from SOLVED steps on, since their
gradient is that of the solution.

B sequences (or N packed ones), T tokens, H heads, K key size, V value size; M chunks of C tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ccq.ops.choose import Call, choose
from ccq.ops.chunks import from_chunks, make_layout, scan, spans, to_chunks
from ccq.ops.precision import exact_matmul, stats_dtype
from ccq.ops.recurrence.chunk import CHUNK, after, memory

SOLVED = 20  # steps after which little of a system is left to solve


def conjugate_gradient(product: Callable[[Tensor], Tensor], q: Float[Tensor, "*B K"], steps: int) -> Tensor:
    """x with A x = q after so many steps from 0, where product(p) = A p, and A is symmetric and positive definite.

    Where the residual is rounding a step is left out: it would divide nothing by nothing.
    """
    x, r, p = torch.zeros_like(q), q, q
    size = q.square().sum(-1, keepdim=True)
    least = size.detach() * torch.finfo(q.dtype).eps ** 2
    for _ in range(steps):
        going = size.detach() > least
        ap = product(p)
        alpha = torch.where(going, size / torch.where(going, (p * ap).sum(-1, keepdim=True), 1), 0)
        x = x + alpha * p
        r = r - alpha * ap
        left = r.square().sum(-1, keepdim=True)
        p = r + torch.where(going, left / torch.where(going, size, 1), 0) * p
        size = left
    return x


def mesa(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"], g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"], ridge: Float[Tensor, "H K"], steps: int,
    initial_state: Float[Tensor, "N H K KV"] | None = None, output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K KV"] | None]:  # fmt: skip
    """Write and read along the sequence; see the equations above. g is at most 0, ridge positive, beta not negative."""
    if q.shape[0] * q.shape[1] == 0:
        shape = (k.shape[2], k.shape[3] + v.shape[3])
        return v * 1, memory(initial_state, cu_seqlens, q, *shape) if output_final_state else None
    if steps >= SOLVED and v.shape == k.shape and choose("mesa", Call.of(q)) == "fla":
        from ccq.ops.recurrence import fla

        return fla.mesa(q, k, v, g, beta, ridge, steps, initial_state, output_final_state, cu_seqlens)
    arguments = (q, k, v, g, beta, ridge, steps, initial_state, cu_seqlens)
    if torch.compiler.is_exporting():
        o, state = exported(*arguments)
    elif torch.is_grad_enabled():
        o, state = checkpoint(_run, *arguments, use_reentrant=False, preserve_rng_state=False)
    else:
        o, state = _run(*arguments)
    return o, state if output_final_state else None


@torch.library.custom_op("ccq::mesa", mutates_args=())
def exported(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ridge: Tensor, steps: int, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `ccq::recurrence`: one node of what torch.export makes."""
    o, state = _run(q, k, v, g, beta, ridge, steps, initial_state, cu_seqlens)
    return o.contiguous(), state


@exported.register_fake
def _(q, k, v, g, beta, ridge, steps, initial_state, cu_seqlens):
    return v.new_empty(v.shape), memory(None, cu_seqlens, q, k.shape[2], k.shape[3] + v.shape[3])


def _run(q, k, v, g, beta, ridge, steps, initial_state, cu_seqlens):
    batch, length, _, size = q.shape
    high, dtype = stats_dtype(q.dtype), v.dtype
    layout = make_layout(batch, length, cu_seqlens, q.device, CHUNK)
    state = memory(initial_state, cu_seqlens, q, k.shape[2], size + v.shape[3])
    with exact_matmul(q):
        q, k, v, g, beta = (to_chunks(x.to(high), layout) for x in (q, k, v, g[..., None], beta[..., None]))
        up_to = g.cumsum(-2).exp()  # [M, H, C, 1]
        pairs = spans(g[..., 0]) * beta.mT
        written = (k * beta * after(g).exp()).mT @ torch.cat([k, v], -1)
        before, final = scan(layout, written, state, decay=up_to[..., -1, 0])
        keys, values = before.split([size, v.shape[-1]], -1)

        def read(x: Tensor, start: Tensor, of: Tensor) -> Tensor:
            return (x * up_to) @ start + (x @ k.mT * pairs) @ of

        ridge = ridge.to(high)[:, None]
        x = conjugate_gradient(lambda p: read(p, keys, k) + ridge * p, q, steps)
        o = from_chunks(read(x, values, v), layout, batch, length).to(dtype)
        return o, final


@torch.no_grad()
def mesa_step(
    q: Float[Tensor, "B H K"], k: Float[Tensor, "B H K"], v: Float[Tensor, "B H V"], g: Float[Tensor, "B H"],
    beta: Float[Tensor, "B H"], ridge: Float[Tensor, "H K"], steps: int, state: Float[Tensor, "B H K KV"],
) -> Float[Tensor, "B H V"]:  # fmt: skip
    """o_t for one more token of each sequence; the state is updated in place."""
    high = state.dtype
    q, k, values, g, beta = (x.to(high) for x in (q, k, torch.cat([k, v], -1), g, beta))
    with exact_matmul(q):
        state.mul_(g.exp()[..., None, None]).add_((beta[..., None] * k)[..., None] * values[..., None, :])
        keys, memory = state.split([k.shape[-1], v.shape[-1]], -1)
        ridge = ridge.to(high)

        def read(x: Tensor, memory: Tensor) -> Tensor:
            return (x[..., None, :] @ memory)[..., 0, :]

        x = conjugate_gradient(lambda p: read(p, keys) + ridge * p, q, steps)
        return read(x, memory).to(v.dtype)


def flops(heads: int, key_size: int, value_size: int, steps: int) -> float:
    """Forward, a token: states written, then a read of H for each step and of S for the output."""
    reads = steps * key_size * (key_size + 2 * CHUNK) + key_size * value_size + CHUNK * (key_size + value_size)
    return 2.0 * heads * (key_size * (key_size + value_size) + reads)
