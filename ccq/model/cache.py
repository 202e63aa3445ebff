"""What sequences leave behind in every layer, in the shape that transformers' `generate` expects of a cache.

N sequences. The states are those of the mixers: recurrent, convolution, covariance, or keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache

if TYPE_CHECKING:
    from ccq.mixers import LayerState, Mixer


class CCQCache(Cache):
    """The states of N sequences in all layers; empty until a model fills it.

    >>> cache = CCQCache()
    >>> cache.get_seq_length()
    0
    """

    # `generate` would compile the model and build 4D masks, while decoding has its own graphs; and see `crop`
    is_compileable = is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])  # transformers' own kinds of layers: none of them
        self.states: list[LayerState] = []
        self.lengths: Int[Tensor, " N"] | None = None  # real tokens of each sequence, padding not counted
        self.seen = 0  # columns of all calls so far, padding counted: what `generate` cuts its prompt by

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __bool__(self) -> bool:  # an empty cache is a cache
        return True

    def __repr__(self) -> str:
        return f"CCQCache({len(self)} layers, {max(self.batch_size, 0)} sequences, {self.seen} tokens seen)"

    @property
    def batch_size(self) -> int:
        return -1 if self.lengths is None else self.lengths.shape[0]

    @property
    def is_initialized(self) -> bool:
        return bool(self.states)

    @property
    def rows(self) -> Int[Tensor, " N"]:
        """`lengths` of a cache that is not empty."""
        if self.lengths is None:
            raise ValueError("the cache is empty: no model has filled it yet")
        return self.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all states, the covariances counted."""
        return sum(x.nbytes for x in pytree.tree_leaves(self.states))

    def map(self, function: Callable[[Tensor], Tensor]) -> CCQCache:
        """The cache with `function` applied to every tensor; its first dimension is that of the sequences."""
        new = CCQCache()
        new.states = pytree.tree_map(function, self.states)
        new.lengths = None if self.lengths is None else function(self.lengths)
        new.seen = self.seen
        return new

    def take(self, other: CCQCache) -> None:
        self.states, self.lengths, self.seen = other.states, other.lengths, other.seen

    def clone(self) -> CCQCache:
        return self.map(torch.clone)

    def __deepcopy__(self, memo: dict) -> CCQCache:
        return self.clone()

    def to(self, device: torch.device | str) -> CCQCache:
        """The cache on another device: offloaded with `.to("cpu")`, and back."""
        return self.map(lambda x: x.to(device, copy=True))  # a copy where it is there already too: steps are in place

    def select(self, indices: Int[Tensor, " M"]) -> CCQCache:
        """Sequences `indices`, in that order, repeats allowed."""
        return self.map(lambda x: x.index_select(0, indices.to(x.device)))

    def follow(self, states: list[LayerState], lengths: Int[Tensor, " N"], columns: int) -> None:
        """Take the states after a call that added so many real tokens, and so many columns."""
        self.states = states
        self.lengths = lengths if self.lengths is None else self.lengths + lengths
        self.seen += columns

    def check_kinds(self, kinds: Sequence[set[str] | None]) -> None:
        """Raise unless the states, if there are any, are of these kinds, a set for each layer (None: of any)."""
        if not self.states:
            return
        if len(self.states) != len(kinds):
            raise ValueError(f"past_key_values: expected a cache of {len(kinds)} layers, got one of {len(self.states)}")
        for layer, (expected, state) in enumerate(zip(kinds, self.states, strict=True)):
            if expected is not None and state.keys() != expected:
                raise ValueError(
                    f"past_key_values: expected {', '.join(sorted(expected))} in layer {layer}, "
                    f"got {', '.join(sorted(state))}: the cache of another model?"
                )

    def make_room(self, mixers: Iterable[Mixer]) -> None:
        """Before a step in place: no buffer is full, none is of a kind that only inference mode may change."""
        if self.rows.is_inference() and not torch.is_inference_mode_enabled():
            self.take(self.clone())
        for mixer, state in zip(mixers, self.states, strict=True):
            mixer.reserve(state, self.seen + 1)

    # what beam search and contrastive search call: they change the cache they are called on
    def reorder_cache(self, beam_idx: Int[Tensor, " M"]) -> None:
        self.take(self.select(beam_idx))

    batch_select_indices = reorder_cache  # type: ignore[assignment]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.take(self.map(lambda x: x.repeat_interleave(repeats, dim=0)))

    def reset(self) -> None:
        self.take(CCQCache())

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise NotImplementedError(
            f"CCQCache.crop({tokens_to_remove}): a recurrent state cannot give back the tokens it has absorbed. "
            "Keep a copy.deepcopy(cache) of the moment to return to."
        )

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("CCQCache.update: the mixers of ccq change their states themselves")
