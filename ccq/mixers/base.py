"""What a mixer is: the part of a layer that looks along the sequence. The decoder knows no more of it than this.

B batch, N sequences (B of them, or packed ones), T tokens, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ccq.ops.choose import one_of
from ccq.ops.precision import stats_dtype

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig

# Of one layer: tensors whose first dimension is N, and a CovarianceState under "covariance". A pytree.
#   "recurrent" [N, H, K, V] (of Mesa [N, H, K, K + V])   "conv" [N, C, W-1]   "covariance" CovarianceState
#   "k", "v" [N, L, H, K]   "length" [N]
LayerState = dict[str, Any]


@dataclass(frozen=True)
class Sequences:
    """Which sequences the tokens of a call belong to; made once by the model for all layers."""

    count: int  # N: B without cu_seqlens
    cu_seqlens: Int[Tensor, " N1"] | None = None  # borders of sequences packed along T (then B == 1)
    positions: Int[Tensor, "B T"] | None = None  # of each token in its sequence, the cached ones counted; None: 0..T-1
    longest: int | None = None  # tokens of the longest sequence of the call, where the host knows them

    def locate(self, tokens: int, device: torch.device) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."]]:
        """The sequence of each token of a call, and its index there, found without waiting for the device: two tensors
        that broadcast to [B, T]."""
        index = torch.arange(tokens, device=device)[None]
        if self.cu_seqlens is None:
            return torch.arange(self.count, device=device)[:, None], index
        row = torch.searchsorted(self.cu_seqlens, index, right=True) - 1
        return row, index - self.cu_seqlens[row]


class Owner(nn.Module):
    """A module whose own parameters, few and delicate, stay fp32 in a half-precision model; its submodules do not.

    bf16 cannot represent a step of 1e-3 at the bias -4.6 of a gate, and rounds a log-decay before it is multiplied by
    thousands of tokens. `reset_parameters` fills them; it may be called again, and on a module made on the meta device.
    """

    no_weight_decay: tuple[str, ...] = ()  # which of them weight decay must not touch

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[str, Callable[[Tensor], Any] | float] = {}

    def own(self, name: str, *shape: int, start: Callable[[Tensor], Any] | float, decays: bool = False) -> None:
        """Add a parameter in fp32 (fp64 where that is the default dtype), all `start`, or filled by it in place.

        Weight decay touches it only if it `decays`.
        """
        parameter = nn.Parameter(torch.empty(*shape, dtype=stats_dtype(torch.get_default_dtype())))
        self.register_parameter(name, parameter)
        self.starts[name] = start
        if not decays:
            self.no_weight_decay += (name,)
        self.fill(name)

    def fill(self, name: str) -> None:
        """A parameter as it starts, unless transformers has loaded it."""
        parameter, start = getattr(self, name), self.starts[name]
        if name in self.no_weight_decay:
            parameter._no_weight_decay = True
        if not getattr(parameter, "_is_hf_initialized", False):
            with torch.no_grad():
                start(parameter) if callable(start) else parameter.fill_(start)

    def reset_parameters(self) -> None:
        """Fill the parameters that this module itself owns."""
        for name in self.starts:
            self.fill(name)

    def _apply(self, fn, recurse=True):
        for child in self.children() if recurse else ():
            child._apply(fn)

        def keep(x: Tensor) -> Tensor:
            y = fn(x)
            return x.to(y.device, torch.float32) if y.dtype in (torch.bfloat16, torch.float16) else y

        return super()._apply(keep, recurse=False)


class Mixer(Owner):
    """One layer's view along the sequence."""

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer

    def forward(
        self, x: Float[Tensor, "B T D"], seqs: Sequences, state: LayerState | None = None, output_state: bool = False
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        """All tokens of a call, differentiable; continues from `state`, which it leaves as it is.

        Returns y and, where asked for, the state after the last token of each sequence.
        """
        new: LayerState | None = {} if output_state else None
        return self.run(x, seqs, state, new), new

    @torch.no_grad()
    def step(
        self, x: Float[Tensor, "B D"], state: LayerState, positions: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B D"]:
        """One more token of each of B sequences, without autograd. The state's tensors are updated in place."""
        return self.run(x, None, state, None)

    def run(
        self, x: Float[Tensor, "*B D"], seqs: Sequences | None, state: Any, new: LayerState | None
    ) -> Float[Tensor, "*B D"]:
        """y of `forward`, which puts the states after the last tokens into `new` if there is one; and of `step`, which
        has no `seqs`."""
        raise NotImplementedError

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        """The state of `n` sequences before their first token; `dtype` is that of the activations."""
        raise NotImplementedError

    @functools.cached_property
    def state_kinds(self) -> set[str] | None:
        """What the mixer keeps of a sequence, by name; None where it begins a state in `forward` alone."""
        try:
            return set(self.new_state(0, "meta", torch.float32))
        except NotImplementedError:
            return None

    def reserve(self, state: LayerState, length: int) -> None:
        """Make room in `state` for sequences of `length` tokens; only attention needs any."""

    def state_bytes(self, length: int = 0) -> int:
        """Bytes to remember one sequence of `length` tokens, as stored, the covariance counted."""
        return sum(x.nbytes for x in pytree.tree_leaves(self.new_state(1, "meta", self.dtype, length)))

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, which is that of the matrices: what a module owns itself is fp32."""
        return next(x.dtype for name, x in self.named_parameters() if x.ndim == 2 and "gate_weight" not in name)

    def flops(self, length: int) -> float:
        """Forward FLOPs a token, in a sequence of `length`, beyond those of the mixer's Linears."""
        raise NotImplementedError


MIXERS: dict[str, type[Mixer]] = {}
M = TypeVar("M", bound=type[Mixer])


def register(name: str) -> Callable[[M], M]:
    """Make the decorated class the mixer that `CCQConfig(mixer=name)` asks for."""

    def add(cls: M) -> M:
        if name in MIXERS:
            raise ValueError(f"mixer {name!r} is already registered by {MIXERS[name].__qualname__}")
        MIXERS[name] = cls
        return cls

    return add


def make_mixer(config: CCQConfig, layer: int) -> Mixer:
    """The mixer of one layer, by `config.mixer`; with `base_conv_size`, layers 0, 2, ... are zoology's BaseConv."""
    one_of("mixer", config.mixer, tuple(MIXERS))
    if config.base_conv_size is not None and layer % 2 == 0:
        from ccq.mixers.conv import BaseConv  # a Mixer itself

        return BaseConv(config, layer)
    return MIXERS[config.mixer](config, layer)


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters of `model` that weight decay must not touch.

    A module names its own in `no_weight_decay`. They carry `_no_weight_decay = True` too, but a tensor that replaces
    another one (loading, leaving the meta device) does not, so ask this function.
    """
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "no_weight_decay", ())
    }
