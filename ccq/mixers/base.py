"""What a mixer is: the part of a layer that looks along the sequence. The decoder knows no more of it than this.

B batch, N sequences (B of them, or packed ones), T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ccq.ops.dispatch import nearest

if TYPE_CHECKING:
    from ccq.model.config import CCQConfig

# Of one layer: tensors whose first dimension is N, and a CovarianceState under "covariance". A pytree.
#   "recurrent" [N, H, K, V]   "conv" [N, C, W-1]   "covariance" CovarianceState   "k", "v" [N, L, H, K]   "length" [N]
LayerState = dict[str, Any]


@dataclass(frozen=True)
class Sequences:
    """Which sequences the tokens of a call belong to; made once by the model for all layers."""

    count: int  # N: B without cu_seqlens
    cu_seqlens: Int[Tensor, " N1"] | None = None  # borders of sequences packed along T (then B == 1)
    positions: Int[Tensor, "B T"] | None = (
        None  # of each token in its own sequence, what is cached counted; None: 0..T-1
    )


class Mixer(nn.Module):
    """One layer's view along the sequence. A subclass says how many numbers a sequence has to remember.

    Parameters are filled by `reset_parameters`, which may be called again, and on a module that was made on the meta
    device; it touches only what the module owns itself, never its submodules.
    """

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        seqs: Sequences,
        state: LayerState | None = None,
        output_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        """All tokens of a call, differentiable; continues from `state`, which it leaves as it is.

        Returns y and, where asked for, the state after the last token of each sequence.
        """
        raise NotImplementedError

    def step(
        self, x: Float[Tensor, "B D"], state: LayerState, positions: Int[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B D"]:
        """One more token of each of B sequences, without autograd. The state's tensors are updated in place."""
        raise NotImplementedError

    def new_state(
        self, n: int, device: torch.device | str | None, dtype: torch.dtype, max_length: int | None = None
    ) -> LayerState:
        """The state of `n` sequences before their first token; `dtype` is that of the activations."""
        raise NotImplementedError

    def state_bytes(self, length: int = 0) -> int:
        """Bytes to remember one sequence of `length` tokens, as stored, the covariance counted."""
        raise NotImplementedError

    def flops(self, length: int) -> float:
        """Forward FLOPs a token, in a sequence of `length`, beyond those of the mixer's Linears."""
        raise NotImplementedError


MIXERS: dict[str, type[Mixer]] = {}
M = TypeVar("M", bound=type[Mixer])


def register(name: str) -> Callable[[M], M]:
    """Make the decorated class the mixer that `CCQConfig(mixer=name)` asks for."""

    def add(cls: M) -> M:
        if name in MIXERS:
            raise ValueError(f"mixer {name!r} is registered already, by {MIXERS[name].__qualname__}")
        MIXERS[name] = cls
        return cls

    return add


def make_mixer(config: CCQConfig, layer: int) -> Mixer:
    """The mixer of one layer, by `config.mixer`."""
    if config.mixer not in MIXERS:
        known = tuple(MIXERS)
        raise ValueError(
            f"mixer: expected one of {', '.join(known)}, got {config.mixer!r}.{nearest(config.mixer, known)}"
        )
    return MIXERS[config.mixer](config, layer)
