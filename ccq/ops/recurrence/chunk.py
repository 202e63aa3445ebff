"""The recurrence in plain PyTorch, on any device: chunks of C tokens, G = Hv / H; the rest as in __init__.py.

With G_t the sum of g from the chunk's first token to t and S the state before the chunk:

    o_t = scale * [ exp(G_t) q_t S + sum_{j<=t} (q_t . k_j exp(G_t - G_j)) u_j ]
    S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T

where u_j = v_j for an additive write. For the delta rule u solves a triangular system, the WY form of a product of
Householder-like factors:

    u_t + beta_t sum_{j<t} (k_t . k_j exp(G_t - G_j)) u_j = beta_t (v_t - exp(G_t) S^T k_t)

Every exponent is a sum of log-decays over the tokens it spans, added up directly and never as the difference of two
longer sums: it is at most 0, so that nothing overflows, and it keeps its digits beside a neighbour of -50.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ccq.ops.chunks import from_chunks, in_order, make_layout, spans, to_chunks
from ccq.ops.precision import exact_matmul, stats_dtype

CHUNK = 64  # C, a power of two


def after(g: Tensor) -> Tensor:
    """Sum of g over the tokens behind each one, [..., C, *]."""
    shifted = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return shifted.flip(-2).cumsum(-2).flip(-2)


def channel_scores(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_c q_ic k_jc exp(sum of g_c behind j up to i) for j <= i, else 0: [..., C, K] -> [..., C, C].

    Every pair of tokens is parted once by the border between the halves of a block of 2, 4, ..., or C tokens. The decay
    from j to i is that from j to the border, which goes to k, times that from the border to i, which goes to q: the
    later half's scores with the earlier one are then one product.

    Returns also the sums of g up to each token and behind it, which come with the blocks.
    """
    scores = (q * k).sum(-1)[..., None, None]  # of blocks, [..., C, 1, 1]: each token with itself
    up_to = g.unsqueeze(-2)  # in a block, [..., C, 1, K]
    behind = torch.zeros_like(up_to)
    half = 1
    while half < q.shape[-2]:
        (first, second), (up_to_1, up_to_2), (behind_1, behind_2) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (scores, up_to, behind)
        )
        (k_1, _), (_, q_2) = (x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (k, q))
        cross = (q_2 * up_to_2.exp()) @ (k_1 * behind_1.exp()).mT
        scores = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)
        up_to, behind = (
            torch.cat([up_to_1, up_to_2 + up_to_1[..., -1:, :]], -2),
            torch.cat([behind_1 + up_to_2[..., -1:, :], behind_2], -2),
        )
        half *= 2
    return scores.squeeze(-3), up_to.squeeze(-3), behind.squeeze(-3)


def run(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    batch, length, heads, key_size = q.shape
    high = stats_dtype(q.dtype)
    layout = make_layout(batch, length, cu_seqlens, q.device, CHUNK)
    state = memory(initial_state, cu_seqlens, q, *v.shape[2:])
    state = in_order(state, layout.order).unflatten(1, (heads, -1))  # [N, H, G, K, V]

    def grid(x: Tensor) -> Tensor:
        """[B, T, H or Hv, *] -> [M, H, 1 or G, C, *]"""
        return to_chunks(x.to(high), layout).unflatten(1, (heads, -1)).contiguous()

    with exact_matmul(q):
        q, k, u = grid(q) * scale, grid(k), grid(v)
        read, write, decays = q, k, None  # what meets the state before the chunk, and what adds to it
        # the delta rule asks how k meets the earlier ones, as the read asks it of q
        both = q[None] if beta is None else torch.stack([q, k.expand_as(q)])
        if g is None:
            scores = (both @ k.mT).tril()
        elif g.ndim == 4:
            scores, up_to, behind = channel_scores(both, k, grid(g))
        else:
            g = grid(g[..., None])
            scores, up_to, behind = both @ k.mT * spans(g[..., 0]), g.cumsum(-2), after(g)
        if g is not None:
            read, write = q * up_to.exp(), k * behind.exp()
            decays = up_to[..., -1, :].exp()[..., None].split(layout.counts)  # [n, H, G, 1 or K, 1]
        seen = None
        if beta is not None:
            strength = grid(beta[..., None])
            # u = u_0 - w S, linear in the state before the chunk: both are solved for at once
            known = torch.cat([strength * u, strength * (k if g is None else k * up_to.exp())], -1)
            system = strength * scores[1]
            u, w = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split(
                [v.shape[-1], key_size], -1
            )
            seen = w.split(layout.counts)

        outputs, finished = [], []
        parts = zip(*(x.split(layout.counts) for x in (read, write, u, scores[0])), strict=True)
        for i, (read_i, write_i, u_i, scores_i) in enumerate(parts):
            running = layout.counts[i]
            if running < state.shape[0]:
                state, done = state.split([running, state.shape[0] - running])
                finished.append(done)
            if seen is not None:
                u_i = u_i - seen[i] @ state
            outputs.append(read_i @ state + scores_i @ u_i)
            if decays is not None:
                state = state * decays[i]
            state = state + write_i.mT @ u_i
        o = from_chunks(torch.cat(outputs).flatten(1, 2), layout, batch, length).to(v.dtype)
        if not output_final_state:
            return o, None
        return o, in_order(torch.cat([state, *reversed(finished)]).flatten(1, 2), layout.place)


def memory(initial_state: Tensor | None, cu_seqlens: Tensor | None, q: Tensor, heads: int, width: int) -> Tensor:
    """A state to begin with, not the caller's own tensor: zeros [N, heads, K, width], where there is none."""
    if initial_state is not None:
        return initial_state.clone()
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_zeros(sequences, heads, q.shape[3], width, dtype=stats_dtype(q.dtype))
