"""A layer of someone else's model, run with the functions that read its memory replaced: they clean the query first.

A layer's `forward` finds those functions in the module where it was written. Here it is run with other ones in their
place, for one call of one layer: no module is changed, and layers that nothing is attached to never notice.

B sequences, T tokens, H key heads, K key size.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ccq.errors import UserError
from ccq.mixers import QueryCleaner
from ccq.mixers.base import Sequences
from ccq.mixers.norms import unit
from ccq.model.packing import borders_at
from ccq.ops import CovarianceState

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx")

AT = "covariance_at"  # attribute of a cache layer: the first of three indices among its states


class AttachError(UserError, ValueError):
    """Cleaning cannot be put into this model, or not be used in this way."""


@dataclass
class Call:
    """One forward of an attached layer, as the functions that stand in for its own see it."""

    cleaner: QueryCleaner
    scope: dict[str, Any]  # the names that the layer's forward sees
    real: Tensor | None  # [B, T], where tokens are not padding; None: nowhere is any
    before: CovarianceState | None
    keep: bool  # whether the covariance after the last token is wanted
    after: CovarianceState | None = None

    def clean(
        self,
        raw: Float[Tensor, "B T H K"],
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T H K"],
        g: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
        """What to read with and what to write with. A key of padding is no key: it is not counted."""
        state = None if self.before is None else {"covariance": self.before}
        if self.real is None:
            seqs = Sequences(len(q) if cu_seqlens is None else len(cu_seqlens) - 1, cu_seqlens)
            q_clean, k_bar, self.after = self.cleaner(raw, q, k, seqs, state, self.keep, g)
            return q_clean, k_bar
        lengths = self.real.sum(1, dtype=torch.int64)
        seqs = Sequences(len(q), F.pad(lengths.cumsum(0), (1, 0)))
        found = [None if x is None else x[self.real][None] for x in (raw, q, k, g)]
        found[0] = found[1] if raw is q else found[0]
        q_clean, k_bar, self.after = self.cleaner(*found[:3], seqs, state, self.keep, found[3])
        return tuple(x.index_put((self.real,), new[0]) for x, new in ((q, q_clean), (k, k_bar)))  # type: ignore


def delta_rule(call: Call, function: Callable, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Gated DeltaNet and KDA: unit q and k, which may be repeated to the value heads.

    The norm is the layer's own, so that with lam = 0 not a bit changes: fla's kernel rounds what it normalised, the
    token loops and transformers' functions go on in fp32.
    """
    if not options.pop("use_qk_l2norm_in_kernel", False):
        raise AttachError(f"{call.scope['__name__']}: expected a layer that reads with unit q and k, and it does not")
    repeats = query.shape[2] // call.cleaner.heads
    q, k = (x[:, :, ::repeats].contiguous() for x in (query, key))
    fused = query.is_cuda and importlib.util.find_spec("fla") is not None
    if fused and "chunk" in function.__name__:
        unit_q, unit_k = unit(q), unit(k)
    else:
        unit_q, unit_k = (call.scope["l2norm"](x.float(), dim=-1, eps=1e-6) for x in (q, k))
    found = call.clean(q, unit_q, unit_k, options["g"])
    unit_q, unit_k = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in found)
    o, state = function(unit_q, unit_k, value, use_qk_l2norm_in_kernel=False, **options)
    return o.to(query.dtype), state


def fla_rule(call: Call, function: Callable, *, q: Tensor, k: Tensor, cu_seqlens: Any = None, **options: Any) -> Any:
    """fla's own layers: they take padding out, and hand on g before their kernels make a log-decay of it."""
    raw, g = q, options["gk" if "gk" in options else "g"]
    if options.get("use_qk_l2norm_in_kernel"):
        options["use_qk_l2norm_in_kernel"] = False
        q, k = unit(q), unit(k)
    if call.cleaner.covariance_decay == "backbone" and options.get("use_gate_in_kernel"):
        if options.get("lower_bound") is not None:
            raise AttachError("covariance_decay: expected 'none' or 'learned' where the decay of the layer is bounded")
        g = F.softplus(g.float() + options["dt_bias"].float().view(g.shape[2:]))
        g = -options["A_log"].float().exp().view(-1, *[1] * (g.ndim - 3)) * g
    q, k = call.clean(raw, q, k, g, cu_seqlens)
    return function(q=q, k=k, cu_seqlens=cu_seqlens, **options)


def scan(
    call: Call, function: Callable, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **options: Any
) -> Any:
    """Mamba2, all tokens: C [B, T, H, K] is the query, B the key, in groups of heads."""
    time = dt if options.get("dt_bias") is None else dt + options["dt_bias"]
    time = (F.softplus(time.float()) if options.get("dt_softplus") else time.float()).clamp(*options["dt_limit"])
    C, B = call.clean(C, C, B, time * A)
    return function(x, dt, A, B, C, *rest, **options)


def state_update(
    call: Call, function: Callable, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any,
    **options: Any,
) -> Any:  # fmt: skip
    """Mamba2, one token: C and B [B, H, K]; dt [B, heads, P] and A [heads, P, K] are the same for all of P and K."""
    time = F.softplus((dt + options["dt_bias"])[..., 0].float())
    C, B = (y[:, 0] for y in call.clean(C[:, None], C[:, None], B[:, None], (time * A[:, 0, 0])[:, None]))
    return function(state, x, dt, A, B, C, *rest, **options)


def nothing(call: Call, function: Callable, *args: Any, **options: Any) -> None:
    """Mamba2's whole layer in one kernel, which would clean no query: transformers goes on where it returns None."""


@dataclass(frozen=True)
class Family:
    replaced: dict[str, Callable]  # by the name of the layer's own: its stand-in, called with the Call and that one
    heads: str  # the attribute of the layer that says how many key heads it has
    size: str  # and how large they are
    unit: bool  # whether it reads with unit q and k by itself
    packs: bool = False  # whether it keeps packed sequences apart, and padding out, by itself


FAMILIES = (
    Family(dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), delta_rule),
           heads="num_k_heads", size="head_k_dim", unit=True),
    Family(dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), delta_rule),
           heads="num_heads", size="head_dim", unit=True),
    Family({"mamba2_chunk_scan": scan, "mamba2_selective_state_update": state_update,
            "mamba2_split_conv1d_scan_combined": nothing}, heads="n_groups", size="ssm_state_size", unit=False),
    *(
        Family(dict.fromkeys((f"chunk_{rule}", f"fused_recurrent_{rule}"), fla_rule),
               heads="num_heads", size="head_k_dim", unit=rule != "gla", packs=True)
        for rule in ("gla", "gated_delta_rule", "kda")
    ),
)  # fmt: skip


def family_of(cls: type[nn.Module]) -> Family | None:
    """The family of a class of layers, by the functions that its forward calls."""
    code = getattr(own_forward(cls), "__code__", None)
    return next((x for x in FAMILIES if code is not None and x.replaced.keys() <= set(code.co_names)), None)


def own_forward(cls: type[nn.Module]) -> Any:
    """The forward that the author of a layer wrote, without what decorators put around it."""
    return inspect.unwrap(cls.forward)


class Cleaned(nn.Module):
    """What the class of a layer becomes a subclass of, beside its own."""

    cleaner: QueryCleaner
    layer_idx: int
    original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple:  # its class is made here, and found by no name
        return revived, (self.original,), self.__dict__

    @torch.compiler.disable  # it makes a function at each call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward, family = own_forward(self.original), family_of(self.original)
        assert family is not None, "attach has found it"
        given = inspect.signature(forward).bind(self, *args, **kwargs)
        hidden, packing = given.arguments["hidden_states"], given.arguments.get("kwargs", {})
        borders = borders_of(packing, hidden.shape[1])
        given.arguments["kwargs"] = {name: value for name, value in packing.items() if name not in PACKED}
        if len(borders) > 2 and family.packs:
            given.arguments["kwargs"]["cu_seqlens"] = torch.tensor(borders, device=hidden.device)
        elif len(borders) > 2:
            return self.each(forward, family, given, borders)
        return self.run(forward, family, given)

    def run(self, forward: Any, family: Family, given: inspect.BoundArguments) -> Any:
        told = given.arguments
        hidden, mask = told["hidden_states"], None if family.packs else told.get("attention_mask")
        cache = told.get("cache_params", told.get("past_key_values"))
        before = None if cache is None else read_covariance(cache, self.layer_idx)
        scope = dict(forward.__globals__)
        real = None if mask is None else mask[:, -hidden.shape[1] :].bool()
        call = Call(self.cleaner, scope, real, before, keep=cache is not None)
        for name in forward.__code__.co_names:
            function = scope.get(name)
            if isinstance(function, types.FunctionType):
                # on a CPU transformers' own functions: fla and mamba_ssm, where installed, stand in for them, and fail
                function = function if hidden.is_cuda else inspect.unwrap(function)
                stand_in = family.replaced.get(name)
                scope[name] = function if stand_in is None else functools.partial(stand_in, call, function)
        run = types.FunctionType(forward.__code__, scope, None, forward.__defaults__, forward.__closure__)
        run.__kwdefaults__ = forward.__kwdefaults__
        output = run(*given.args, **given.kwargs)
        if cache is not None:
            assert call.after is not None, "a forward that calls none of the functions that were replaced"
            write_covariance(cache, self.layer_idx, call.after)
        return output

    def each(self, forward: Any, family: Family, given: inspect.BoundArguments, borders: list[int]) -> Tensor:
        """Packed sequences, one after the other: what separate ones give, whatever the functions could do."""
        hidden = given.arguments["hidden_states"]
        for name in ("cache_params", "attention_mask"):
            if given.arguments.get(name) is not None:
                raise AttachError(f"{name}: expected none beside packed sequences (use_cache=False, no padding)")
        if len(hidden) != 1:
            raise AttachError(f"packed sequences: expected a batch of 1, got {len(hidden)}")
        outputs = []
        for begin, end in itertools.pairwise(borders):
            if end > begin:
                given.arguments["hidden_states"] = hidden[:, begin:end]
                outputs.append(self.run(forward, family, given))
        return torch.cat(outputs, dim=1)


@functools.cache
def cleaned(cls: Any) -> type[nn.Module]:
    return type(f"Cleaned{cls.__name__}", (Cleaned, cls), {"original": cls, "__module__": cls.__module__})


def revived(cls: Any) -> nn.Module:
    return object.__new__(cleaned(cls))


def borders_of(packing: dict[str, Any], length: int) -> list[int]:
    """Where packed sequences begin and end, by any of the names that it is said under; [0, length]: one sequence."""
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        if packing.get(name) is not None:
            return packing[name].tolist()
    seq_idx = packing.get("seq_idx")
    return [0, length] if seq_idx is None else borders_at(seq_idx[0].diff() != 0)


# -- the covariance in other people's caches, where they reorder, reset and move what they hold ------------------------


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
            raise ValueError("past_key_values: expected a cache that was filled with cleaning attached, got others'")
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
