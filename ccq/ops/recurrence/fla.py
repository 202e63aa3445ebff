"""The recurrence by fla's kernels. Imported where they run: torch.compiler.disable loads half of the compiler."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from ccq.ops.choose import Call, qla_refuses


@torch.compiler.disable
def run(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    """As `recurrence`, for arguments it has checked. fla keeps its states as [N, Hv, K, V] too."""
    options = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    group = v.shape[2] // q.shape[2]
    # With its states laid out as [V, K], the backward of the gated delta rule is faster. Nobody sees how they lie where
    # none comes in or goes out.
    layout = {"state_v_first": torch.is_grad_enabled() and initial_state is None and not output_final_state}
    if beta is None:
        if g is not None and g.ndim == 4:
            from fla.ops.gla import chunk_gla as additive
        else:
            from fla.ops.simple_gla import chunk_simple_gla as additive

        def expanded(q, k, v, g):
            if group > 1:
                q, k = (x.repeat_interleave(group, 2) for x in (q, k))
                g = g if g is None or g.ndim == 3 else g.repeat_interleave(group, 2)
            return additive(q, k, v, g, **options, **layout)

        if group > 1 and torch.is_grad_enabled():  # else q and k are kept once a value head: gigabytes for Mamba2
            return checkpoint(expanded, q, k, v, g, use_reentrant=False, preserve_rng_state=False)
        return expanded(q, k, v, g)
    if g is None and group == 1 and q.dtype != torch.float32:
        from fla.ops.delta_rule import chunk_delta_rule  # refuses fp32

        return chunk_delta_rule(q, k, v, beta, **options)
    if g is not None and g.ndim == 4:
        from fla.ops.kda import chunk_kda

        g = g if group == 1 else g.repeat_interleave(group, 2)
        return chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **options, **layout)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    g = torch.zeros_like(beta, dtype=torch.float32) if g is None else g.float()  # flash-qla's backward wants fp32

    def gated(**borders):
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **options | borders, **layout)

    if cu_seqlens is None or v.shape[-1] != 128 or qla_refuses(Call.of(q, delta=True)) is not None:
        return gated()
    return without_empty(gated, initial_state, options["cu_seqlens"])


def without_empty(call, initial_state, cu_seqlens):
    """`call` of the packed sequences that have tokens: flash-qla refuses the others, whose state stays what it was."""
    full = cu_seqlens.diff() > 0
    if full.all():
        return call()
    some = None if initial_state is None else initial_state[full]
    o, state = call(initial_state=some, cu_seqlens=torch.cat([cu_seqlens[:1], cu_seqlens[1:][full]]))
    if state is not None:
        begun = state.new_zeros(len(full), *state.shape[1:]) if initial_state is None else initial_state
        state = begun.index_put((full.nonzero().squeeze(1),), state)
    return o, state


@torch.compiler.disable
def mesa(q, k, v, g, beta, ridge, steps, initial_state, output_final_state, cu_seqlens):
    """As `ccq.ops.recurrence.mesa.mesa`. fla keeps the two parts of a state apart."""
    from fla.ops.mesa_net import chunk_mesa_net

    parts = (None, None) if initial_state is None else initial_state.split([k.shape[-1], v.shape[-1]], -1)
    o, *state = chunk_mesa_net(
        q, k, v, g.float(), beta.float(), ridge.float(),
        *(None if x is None else x.contiguous() for x in parts), output_final_state, steps,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )  # fmt: skip
    return o, torch.cat(state, -1) if output_final_state else None
