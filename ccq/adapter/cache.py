"""The covariance in other people's caches, where they reorder, reset and move what they hold."""

from __future__ import annotations

from typing import Any

import torch

from ccq.ops import CovarianceState

AT = "covariance_at"  # attribute of a cache layer: the first of three indices among its states


def read_covariance(cache: Any, layer: int) -> CovarianceState | None:
    """That of the tokens in the cache; None: there are none."""
    if of_fla(cache):
        state = (cache[layer] if len(cache) > layer else None) or {}
        at, filled = state.get("covariance"), state.get("recurrent_state") is not None
    else:
        held = cache.layers[layer]
        at, filled = getattr(held, AT, None), held.has_previous_state[0]
    if at is None:
        if filled:
            raise ValueError(
                "past_key_values: expected a cache that the model filled with cleaning attached, got others'"
            )
        return None
    if of_fla(cache):
        return at
    return CovarianceState(*(held.recurrent_states[at + i] for i in range(3))) if held.has_previous_state[at] else None


def write_covariance(cache: Any, layer: int, state: CovarianceState) -> None:
    """transformers' LinearAttentionLayer holds several recurrent states, each with a convolution: three more. fla's
    cache holds a dict."""
    if of_fla(cache):
        cache[layer]["covariance"] = state
        return
    held = cache.layers[layer]
    if not hasattr(held, AT):
        setattr(held, AT, held.number_of_states)
        for index in range(held.number_of_states, held.number_of_states + 3):
            held.recurrent_states[index] = None
            held.is_conv_states_initialized[index] = held.is_recurrent_states_initialized[index] = False
            held.conv_states[index], held.conv_kernel_size[index] = torch.empty(0), 0  # `crop` cuts it
        held.number_of_states += 3
    at = getattr(held, AT)
    for index, x in enumerate((state.second_moment, state.key_sum, state.count), at):
        cache.update_recurrent_state(x, layer, state_idx=index)
        held.has_previous_state[index] = True


def of_fla(cache: Any) -> bool:
    return any(cls.__module__.startswith("fla.") for cls in type(cache).__mro__)
