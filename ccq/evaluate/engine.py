"""One engine for every suite: answers `requests` with a Hugging Face causal LM, and needs torch and transformers alone.

    B sequences of a batch, T tokens, D width, V vocabulary

Logits of a whole batch, [B, T, V], are never built where the model parts into a body and a head (it does if the head of
the body's states gives the model's own logits; measured once): the head is applied to some scored positions at a time.
Batches are right-padded and causal, or of equal lengths where the cache goes on to be used, so that no model's
treatment of padding is trusted before it is measured.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from ccq.evaluate.requests import Request, RequestSet
from ccq.model.loss import exact_logits
from ccq.names import grouped

GENERATED = 4  # times as many tokens a batch in decoding, where a step costs about the same for few rows and for many
LOGITS = 2**26  # elements of the largest block of logits: 256 MB in fp32


@dataclass
class Engine:
    """Answers requests."""

    model: Any  # a causal LM on its device
    batch_size: int | None = None  # sequences a batch; None takes as many as fit `batch_tokens`
    batch_tokens: int = 0  # padded tokens that are run at once; 0 is 32,768 on a GPU and 4,096 elsewhere
    chunk: int = 2048  # tokens a piece in which a window is run where the model's cache does not grow with its length

    def __post_init__(self) -> None:
        self.model.eval()
        self.device = next(self.model.parameters()).device
        self.batch_tokens = self.batch_tokens or (32_768 if self.device.type == "cuda" else 4_096)
        self.body, self.head = parts(self.model, self.device)
        self.recurrent, self.pads = cache_properties(self.body, self.device)
        # on a GPU kernels compile and tune anew for each size of a batch (fla's cumsum), and steps are captured for one
        self.few_sizes = self.device.type == "cuda" and self.batch_size is None

    def run(self, asked: RequestSet, requests: Sequence[Request] | None = None) -> Iterator[tuple[Request, dict]]:
        """Answer each of `requests` (all of `asked` unless given), batch by batch, in an order of its own.

        An answer has `seconds`, its share of its batch's time, and by kind
            score      nll: [float] a segment; greedy: whether every scored token is the likeliest
            generate   tokens: [int], without the stop token
            argmax     tokens: [int] a position
        """
        requests = asked.requests if requests is None else requests
        by_kind: dict[str, list[Request]] = {"score": [], "generate": [], "argmax": []}
        by_kind |= grouped(requests, lambda request: request.kind)
        assert len(by_kind) == 3, "a request of unknown kind"
        for batch in self.batches(by_kind["score"], chunk=self.chunk if self.recurrent else sys.maxsize):
            yield from self._timed(self._score, asked, batch)
        for batch in self.batches(by_kind["argmax"]):
            yield from self._timed(self._argmax, asked, batch)
        groups = grouped(by_kind["generate"], lambda r: (0 if self.pads else r.length, r.max_new, r.min_new, r.stop))
        for how in sorted(groups, reverse=True):  # the longest first: what does not fit fails at once
            for batch in self.batches(groups[how], extra=how[1], times=GENERATED):
                yield from self._timed(self._generate, asked, batch)

    def batches(
        self, requests: Sequence[Request], extra: int = 0, times: int = 1, chunk: int = sys.maxsize
    ) -> Iterator[list[Request]]:
        """Longest first, so many as `batch_size` or so many times `batch_tokens` allows; `chunk` where requests are run
        in pieces of so many tokens: of a long one no more than a piece counts."""
        waiting = sorted(requests, key=lambda request: (-request.length, request.begin))
        while waiting:
            fit = self.batch_size or times * self.batch_tokens // max(1, min(waiting[0].length + extra, chunk))
            size = min(max(1, fit), len(waiting))
            if self.few_sizes:  # the largest power of two that fits
                size = 1 << (size.bit_length() - 1)
            yield waiting[:size]
            waiting = waiting[size:]

    def _timed(self, answer, asked: RequestSet, batch: list) -> Iterator[tuple[Request, dict]]:
        begin = time.perf_counter()
        answered = self._halving(answer, asked, batch)
        seconds = (time.perf_counter() - begin) / max(1, len(answered))
        for request, row in answered:
            row["seconds"] = seconds
            yield request, row

    def _halving(self, answer, asked: RequestSet, batch: list) -> list[tuple[Request, dict]]:
        """`answer` in halves where the GPU's memory does not take the batch whole."""
        try:
            with torch.inference_mode():
                return answer(asked, batch)
        except torch.cuda.OutOfMemoryError:
            if len(batch) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(batch) // 2
        return self._halving(answer, asked, batch[:half]) + self._halving(answer, asked, batch[half:])

    def _score(self, asked: RequestSet, batch: list[Request]) -> list[tuple[Request, dict]]:
        """Whole sequences, right-padded; in pieces of `chunk` tokens with a recurrent cache, so memory is flat in T."""
        tokens = [ids_of(asked, request) for request in batch]
        inputs, targets = self.padded([x[:-1] for x in tokens]), self.padded([x[1:] for x in tokens])  # [B, T]
        length = inputs.shape[1]
        first, last = torch.tensor([(r.context - 1, r.length - 1) for r in batch]).T[..., None]
        wanted = (first <= torch.arange(length)) & (torch.arange(length) < last)
        nll, right = torch.zeros(wanted.shape), torch.ones(wanted.shape, dtype=torch.bool)  # [B, T], on the CPU
        step = self.chunk if self.recurrent else length
        cache = None
        for begin in range(0, length, step):
            piece = slice(begin, begin + step)
            states, cache = self.states(inputs[:, piece], cache, keep=length > step)
            rows, columns = wanted[:, piece].nonzero(as_tuple=True)
            for logits, at in self.logits(states, rows, columns):
                where = rows[at], begin + columns[at]
                target = targets[where].to(self.device)
                nll[where] = cross_entropy(logits, target, reduction="none").cpu()
                right[where] = (logits.argmax(-1) == target).cpu()
        each = zip(batch, nll, right, wanted, strict=True)
        return [(r, {"nll": segments(losses[mine], r), "greedy": bool(hits.all())}) for r, losses, hits, mine in each]

    def states(self, inputs: Tensor, cache: Any = None, keep: bool = False) -> tuple[Tensor, Any]:
        """The body's states [B, T, D] (logits where model and head do not part), and the cache if `keep`."""
        keywords = {"past_key_values": cache} if cache is not None else {}
        out = self.body(inputs.to(self.device), use_cache=keep or cache is not None, **keywords)
        states = out.last_hidden_state if self.head is not None else out.logits
        return states, getattr(out, "past_key_values", None)

    def padded(self, sequences: list[Tensor]) -> Tensor:
        """[B, T], padded on the right; on a GPU to a multiple of 64, since kernels tune and compile for lengths."""
        inputs = pad_sequence(sequences, batch_first=True)
        length = inputs.shape[1]
        limit = getattr(self.model.config, "max_position_embeddings", None) or length
        more = -length % 64 if self.device.type == "cuda" and length + 64 <= limit else 0
        return pad(inputs, (0, more))

    def logits(self, states: Tensor, rows: Tensor, columns: Tensor) -> Iterable[tuple[Tensor, slice]]:
        """fp32 logits [n, V] of states[rows, columns], some rows at a time."""
        vocabulary = self.head.weight.shape[0] if self.head is not None else states.shape[-1]
        step = max(1, LOGITS // vocabulary)
        for begin in range(0, len(rows), step):
            at = slice(begin, begin + step)
            picked = states[rows[at].to(states.device), columns[at].to(states.device)]
            yield picked.float() if self.head is None else exact_logits(self.head, picked).float(), at

    def _argmax(self, asked: RequestSet, batch: list[Request]) -> list[tuple[Request, dict]]:
        states, _ = self.states(self.padded([ids_of(asked, request) for request in batch]))
        counts = [len(request.positions) for request in batch]
        rows = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(counts))
        columns = torch.tensor([position for request in batch for position in request.positions])
        best = torch.cat([logits.argmax(-1).cpu() for logits, _ in self.logits(states, rows, columns)])
        return [(r, {"tokens": part.tolist()}) for r, part in zip(batch, best.split(counts), strict=True)]

    def _generate(self, asked: RequestSet, batch: list[Request]) -> list[tuple[Request, dict]]:
        """Greedy, by the model's own `generate`: it knows the model's cache. Prompts that are shorter than the longest
        of the batch are padded on the left; there are such only where `pads` holds."""
        from transformers import GenerationConfig

        one, ids = batch[0], [ids_of(asked, request) for request in batch]
        both = (ids, [torch.ones_like(x) for x in ids])
        prompts, mask = (pad_sequence(x, batch_first=True, padding_side="left").to(self.device) for x in both)
        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=one.max_new,
            min_new_tokens=one.min_new or None,
            eos_token_id=list(one.stop) or None,
            pad_token_id=one.stop[0] if one.stop else 0,
        )
        own = self.model.generation_config  # it may add penalties, and tokens that must not be said
        self.model.generation_config = GenerationConfig()
        try:
            out = self.model.generate(prompts, attention_mask=mask, generation_config=how)
        finally:
            self.model.generation_config = own
        answers = out[:, prompts.shape[1] :].tolist()
        ends = [next((at for at, token in enumerate(answer) if token in one.stop), None) for answer in answers]
        return [(r, {"tokens": answer[:end]}) for r, answer, end in zip(batch, answers, ends, strict=True)]


def ids_of(asked: RequestSet, request: Request) -> Tensor:
    return torch.from_numpy(asked.of(request).astype(np.int64))


def output(out: Any) -> Tensor:
    """What a body, or a model without one, puts out at each position."""
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out.logits


def segments(losses: Tensor, request: Request) -> list[float]:
    """Sums over the parts of tokens[context:], cut at `cuts`, in fp64."""
    assert len(losses) == request.length - max(1, request.context), "not one loss a scored token"
    first = max(1, request.context)
    edges = [0, *(cut - first for cut in request.cuts), len(losses)]
    exact = losses.double()
    return [exact[a:b].sum().item() for a, b in itertools.pairwise(edges)]


@torch.inference_mode()
def parts(model: Any, device: torch.device) -> tuple[Any, Any]:
    """(body, head) with head(body's states) = logits; (model, None) where that does not hold (capped logits)."""
    body, head = getattr(model, "base_model", model), None
    with suppress(NotImplementedError, AttributeError):
        head = model.get_output_embeddings()
    if body is model or not isinstance(head, torch.nn.Linear):
        return model, None
    ids = torch.arange(7, device=device)[None] % head.weight.shape[0]
    with suppress(TypeError, AttributeError):
        mine = head(body(ids, use_cache=False).last_hidden_state).float()
        truth = model(ids, use_cache=False).logits.float()
        if mine.shape == truth.shape and (mine - truth).abs().max() <= 1e-3 * truth.abs().max():
            return body, head
    return model, None


@torch.inference_mode()
def cache_properties(body: torch.nn.Module, device: torch.device) -> tuple[bool, bool]:
    """(whether more than one token may follow from the cache and it keeps its size; whether padding on the left, which
    the mask names, is nothing to such a model).

    Measured on 24 tokens and 8 more from the cache, with 12 of padding for the second: these must come out as in one go
    without padding, at least ten times nearer than they do without the cache, or if the padding counts.
    """
    ids = torch.arange(32, device=device)[None] % 97
    short = pad(ids[:, 12:], (12, 0))
    both, mask = torch.cat([ids, short]), torch.ones(2, 32, dtype=torch.long, device=device)
    mask[1, :12] = 0

    def near(ours: Tensor, truth: Tensor, otherwise: Tensor) -> bool:
        return bool((ours - truth).float().norm() <= 0.1 * (otherwise - truth).float().norm())

    recurrent = False
    with suppress(Exception):  # no such cache, one for single tokens, no masks: then nothing is cut, or padded
        first = body(ids[:, :24], use_cache=True).past_key_values
        size = cache_bytes(first)
        then = body(ids[:, 24:], past_key_values=first, use_cache=True)
        whole, apart = (output(body(x, use_cache=False)) for x in (ids, ids[:, 24:]))
        goes_on = near(output(then), whole[:, 24:], apart)
        recurrent = goes_on and cache_bytes(then.past_key_values) == size
        out = body(both[:, :24], attention_mask=mask[:, :24], use_cache=True)
        more = body(both[:, 24:], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True)
        ours = torch.cat([output(out)[1, 12:], output(more)[1]])
        alone, counted = (output(body(x, use_cache=False)) for x in (ids[:, 12:], short))
        return recurrent, recurrent and near(ours, alone[0], counted[0, 12:])
    return recurrent, False


def cache_bytes(thing, seen: set | None = None) -> int:
    """Bytes of the tensors of more than a token counter's size that a cache holds, wherever it keeps them."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.numel() * thing.element_size() if thing.dim() > 1 else 0
    if not isinstance(thing, (dict, list, tuple)):
        thing = getattr(thing, "__dict__", {})
    return sum(cache_bytes(x, seen) for x in (thing.values() if isinstance(thing, dict) else thing))
