"""Greedy decoding and sampling with the device one step ahead of the host.

transformers' loop asks each step whether every row has ended, waits for the answer, and only then launches the next
step: the device idles while Python prepares it. Here the next step is launched first, from the tokens just chosen. If
the answer is yes, its logits are dropped: no processor, criterion or streamer has seen them and nothing was drawn from
the random generator, so the tokens are those of transformers, and so is all that follows. Only the cache is then a
token ahead, which is why this loop runs where nobody keeps it.

B sequences, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ccq.model.graphs import refusal

if TYPE_CHECKING:
    from ccq.model.cache import CCQCache
    from ccq.model.decoder import CCQForCausalLM

# the arguments that this loop knows what to do with
KNOWN = {"attention_mask", "graph_length", "logits_to_keep", "use_cache", "streamer", "synced_gpus"}


def applies(model: CCQForCausalLM, settings: Any, arguments: dict) -> bool:
    """Whether `sample` gives what transformers' loop would; anything unusual is left to that."""
    # what a call returns beside the tokens would have the cache in it
    unusual = settings.return_dict_in_generate or settings.is_assistant or settings.prefill_chunk_size is not None
    if unusual or arguments.get("synced_gpus") or not arguments.keys() <= KNOWN:
        return False
    return bool(arguments.get("use_cache") and arguments.get("graph_length")) and refusal(model) is None


def sample(
    model: CCQForCausalLM, ids: Int[Tensor, "B T"], processors: Any, criteria: Any, settings: Any, **arguments: Any
) -> Int[Tensor, "B T2"]:
    """`GenerationMixin._sample` for the calls that `applies` takes."""
    streamer = arguments.pop("streamer", None)
    arguments.pop("synced_gpus", None)
    first = model(**model.prepare_inputs_for_generation(ids, is_first_iteration=True, **arguments), return_dict=True)
    cache, logits = first.past_key_values, first.logits[:, -1]
    del first
    padding = settings._pad_token_tensor if any(hasattr(one, "eos_token_id") for one in criteria) else None
    unfinished = torch.ones(ids.shape[0], dtype=torch.int64, device=ids.device)
    host = HostCopy(unfinished, 1 if streamer is None else 2)
    while True:
        scores = processors(ids, logits.to(torch.float32, copy=True))
        if settings.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        if padding is not None:
            tokens = tokens * unfinished + padding * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], 1)
        unfinished = unfinished & ~criteria(ids, None)
        host.send(unfinished, *(() if streamer is None else (tokens,)))
        last = settings.max_length is not None and ids.shape[1] >= settings.max_length
        ahead = None if last else step(model, tokens, cache, arguments["graph_length"])
        going, *chosen = host.receive()
        if streamer is not None:
            streamer.put(chosen[0])
        if not going.any():
            break
        logits = step(model, tokens, cache, arguments["graph_length"]) if ahead is None else ahead
    if streamer is not None:
        streamer.end()
    return ids


def step(model: CCQForCausalLM, tokens: Int[Tensor, " B"], cache: CCQCache, graph_length: int) -> Float[Tensor, "B V"]:
    """The logits after `tokens`, in memory that the next step may write over."""
    logits = model.decoding.step(model, tokens[:, None], None, cache, graph_length)
    if logits is None:  # another thread has the graph, or it cannot be captured
        logits = model(tokens[:, None], past_key_values=cache, return_dict=True).logits
    return logits[:, -1]


class HostCopy:
    """Tensors [B] of int64 on their way to the host, past what is launched after them."""

    def __init__(self, like: Int[Tensor, " B"], count: int) -> None:
        self.device = like.device
        self.memory = torch.empty(count, *like.shape, dtype=torch.int64, device="cpu", pin_memory=like.is_cuda)
        self.arrived = torch.cuda.Event() if like.is_cuda else None

    def send(self, *values: Int[Tensor, " B"]) -> None:
        for slot, value in zip(self.memory, values, strict=True):
            slot.copy_(value, non_blocking=True)
        if self.arrived is not None:
            self.arrived.record(torch.cuda.current_stream(self.device))

    def receive(self) -> tuple[Int[Tensor, " B"], ...]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.memory.clone().unbind()
