"""Decoding through a CUDA graph: the whole step, from token to logits, is one launch.

At small batches launches, not arithmetic, are what a step waits for. A graph replays kernels on the memory it was
captured with, so it owns the tokens, the states and the logits; the states of a prefill are copied in. `generate` does
this by itself for greedy decoding and sampling; everything but the capture is the same on a CPU.

B sequences, V vocabulary.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ccq.mixers.linear import watched
from ccq.model.cache import CCQCache
from ccq.model.packing import decodes
from ccq.ops.choose import BackendFallbackWarning

if TYPE_CHECKING:
    from ccq.model.decoder import CCQForCausalLM

DEVICES = {"cuda"}  # where decoding goes through a graph; a test adds "cpu"
WARM_UP = 3  # steps before the capture: kernels are compiled and tuned, libraries make their workspaces
ROOM = 256  # buffers of keys are a multiple of this, so that similar lengths share a graph


class DecodeGraph:
    """One decode step of `model` for a batch of B, captured once and replayed.

    Args:
        max_length: the longest sequence that attention has room for; other mixers do not grow.
    """

    def __init__(self, model: CCQForCausalLM, batch: int, max_length: int) -> None:
        mixers = [layer.mixer for layer in model.model.blocks()]
        self.key = identity(model, batch)
        self.room = -(-max(max_length, WARM_UP + 1) // ROOM) * ROOM
        self.grows = any(mixer.state_bytes(1) != mixer.state_bytes(0) for mixer in mixers)
        with torch.inference_mode(False), torch.no_grad():  # the buffers outlive this call
            self.tokens = torch.zeros(batch, dtype=torch.int64, device=model.device)
            self.lengths = torch.zeros_like(self.tokens)
            self.states = [mixer.new_state(batch, model.device, model.dtype, self.room) for mixer in mixers]
            self.given: list = []  # what the cache that it decodes has of them
            self.run = capture(lambda: model.decode(self.tokens, self.states, self.lengths), model.device)

    def has_room(self, length: int) -> bool:
        return not self.grows or length <= self.room

    def load(self, cache: CCQCache) -> None:
        """Copy the states of `cache` in; from now on they are the buffers, and change with every step."""
        with torch.inference_mode(False), torch.no_grad():
            pytree.tree_map(copy_into, self.states, cache.states)
            self.lengths.copy_(cache.rows)
        self.given = [dict(state) for state in self.states]  # a cache that outgrows them makes room in its own
        cache.states, cache.lengths = self.given, self.lengths

    def __call__(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """The logits after one more token of each sequence, in memory that the next call writes over."""
        with torch.inference_mode(False), torch.no_grad():
            self.tokens.copy_(tokens)
            return self.run()


class Decoding:
    """All that generation keeps with a model: its graph, once it has one, and who decodes with that, one at a time."""

    def __init__(self) -> None:
        self.graph: DecodeGraph | None = None
        self.failed = False  # to capture one: it is not tried again
        self.cache: weakref.ref[CCQCache] | None = None  # whose states the graph's buffers are
        self.thread: int | None = None  # in which it is decoded

    def __reduce__(self) -> tuple:  # a copy of the model captures its own
        return Decoding, ()

    def holds(self, cache: CCQCache) -> bool:
        return self.graph is not None and cache.states is self.graph.given

    def step(
        self, model: CCQForCausalLM, ids: Tensor | None, mask: Tensor | None, cache: CCQCache | None, max_length: int
    ) -> Float[Tensor, "B 1 V"] | None:
        """The logits of a decode step, in the graph's memory until the next one; None for any other call, and where
        there can be no graph."""
        if ids is None or not isinstance(cache, CCQCache) or not decodes(ids, mask, None, cache):
            return None
        graph = self.graph_for(model, cache, max(max_length, cache.seen + 1))
        if graph is None:
            return None
        cache.seen += 1
        return graph(ids[:, 0])[:, None]

    def graph_for(self, model: CCQForCausalLM, cache: CCQCache, max_length: int) -> DecodeGraph | None:
        """The graph with `cache` in it, captured unless there is one that fits."""
        if self.graph is not None and self.holds(cache):
            if self.graph.has_room(cache.seen + 1):
                return self.graph
            self.detach()
        busy = self.thread not in (None, threading.get_ident())  # another thread decodes with it
        if busy or self.failed or refusal(model) is not None:
            return None
        self.detach()
        key = identity(model, cache.batch_size)
        if self.graph is None or self.graph.key != key or not self.graph.has_room(max_length):
            self.graph = None  # its memory first
            try:
                self.graph = DecodeGraph(model, cache.batch_size, max_length)
            except RuntimeError as error:
                slower = f"decoding runs without a CUDA graph, several times slower at small batches: {error}"
                warnings.warn(slower, BackendFallbackWarning, stacklevel=2)
                self.failed = True
                return None
        self.graph.load(cache)
        self.cache, self.thread = weakref.ref(cache), threading.get_ident()
        return self.graph

    def detach(self) -> None:
        """Give the cache whose states the buffers are, if it still exists, states of its own."""
        cache = None if self.cache is None else self.cache()
        if cache is not None and self.holds(cache):
            cache.take(cache.clone())
        self.cache = self.thread = None

    def release(self) -> None:
        """The end of a generation: its cache, if it lives on, no longer changes with the graph."""
        if self.thread == threading.get_ident():
            self.detach()


def capture(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """`function`, which takes and returns fixed memory, as a single launch; itself where there is no CUDA."""
    if device.type != "cuda":
        return function
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may use the device meanwhile
            result = function()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def copy_into(buffer: Tensor, state: Tensor) -> None:
    """Copy a state into its buffer; one that grows with the sequence is shorter or longer than that."""
    if buffer.shape == state.shape:
        buffer.copy_(state)
    else:
        length = min(buffer.shape[1], state.shape[1])  # what lies behind it was never written
        buffer.zero_()[:, :length].copy_(state[:, :length])


def identity(model: CCQForCausalLM, batch: int) -> tuple:
    """What must not change between capture and replay: the batch, the memory of the weights, and what others' modules
    (adapters) are set to: which of them is on, a graph would not ask."""
    others = [m for m in model.modules() if type(m).__module__.partition(".")[0] not in ("ccq", "torch")]
    set_to = [(type(m).__qualname__, settings(m.__dict__)) for m in others if not isinstance(m, PreTrainedModel)]
    return batch, model.dtype, tuple(parameter.data_ptr() for parameter in model.parameters()), repr(set_to)


def settings(thing: Any, depth: int = 3) -> Any:
    """Of a module's attributes what may be a setting: switches, names, scales, and lists and dicts of them. No whole
    numbers: those count."""
    if isinstance(thing, dict) and depth:
        return {str(key): settings(value, depth - 1) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set) and depth:
        return [settings(value, depth - 1) for value in thing]
    return thing if isinstance(thing, bool | float | str | None) else ...


def refusal(model: CCQForCausalLM) -> str | None:
    """Why a graph of this model would not do what the model does, or None."""
    device = model.device.type
    if device not in DEVICES:
        return f"graphs are for {', '.join(sorted(DEVICES))}, and the model is on {device}"
    if torch.is_autocast_enabled(device):
        return "autocast is on"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "its weights are on several devices"
    for module in model.modules():
        if watched(module):
            return f"{type(module).__name__} has hooks or a forward put into it, which a graph would not call"
        if getattr(module, "intervention", None) is not None or getattr(module, "record", False):
            return f"{type(module).__name__} is watched or intervened in, which a graph would not do"
    return None
