"""Requests that wait are generated together. transformers' server generates one after the other.

When the model is free, the request that has waited longest is taken, and with it those that ask for the same kind of
sampling, up to a number: one padded batch, whose rows end by themselves. The states of a batch go when it ends: when
the last row has ended or its client has gone. A request with a seed is alone, so that it can be repeated.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from typing import Any

import torch
from fastapi import HTTPException
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, _GenerationCancelled, _StreamError


class Row(DirectStreamer):
    """A request in a batch: it takes its tokens and sends on what they say, up to a stop word of its own."""

    def __init__(self, tokenizer: Any, parser: Any, prompt: Tensor, config: Any) -> None:
        self.queue: asyncio.Queue = asyncio.Queue()
        self.prompt, self.config = prompt, config
        self.ids: list[int] = []
        self.over, self.held = False, ""
        super().__init__(tokenizer._tokenizer, asyncio.get_running_loop(), self.queue, response_parser=parser)
        self._first = False  # the prompt does not come this way
        told = {k: v for k, v in config.to_dict().items() if k != "max_new_tokens" and not k.startswith("_")}
        self.kind = json.dumps(told, sort_keys=True, default=str)

    @property
    def gone(self) -> bool:
        return self._cancelled.is_set()

    def take(self, token: int, ends: set[int]) -> None:
        if self.over or self.gone:
            return
        self.ids.append(token)
        try:
            self.put(torch.tensor([token]))
        except _GenerationCancelled:  # the client went just now
            return
        except Exception as error:  # of a parser, which met a malformed call of a tool: of this row alone
            self._parser = None
            self.finish(f"{type(error).__name__}: {error}")
        if token in ends or len(self.ids) >= self.config.max_new_tokens:
            self.finish()

    def _enqueue(self, item: Any) -> None:
        """Hold back what may become a stop word, and drop what follows one."""
        if self.over or type(item) is not str or not self.config._stops:
            return super()._enqueue(item)
        text = self.held + item
        whole = cut(text, self.config._stops)
        ends = [n for stop in self.config._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        keep = 0 if whole != text else max(ends, default=0)
        self.held = text[len(text) - keep :]
        super()._enqueue(whole[: len(whole) - keep])
        if whole != text:
            self.finish()
        return None

    def finish(self, error: str | None = None) -> None:
        if self.over:
            return
        self.over = True
        if self.held:
            super()._enqueue(self.held)
        if error is not None:  # transformers writes it between quotes
            super()._enqueue(_StreamError(json.dumps(error)[1:-1]))
        self.end()


def cut(text: str, stops: list[str]) -> str:
    """The text before the first stop word."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


class Rows:
    """The streamer of a batch."""

    def __init__(self, rows: list[Row], ends: set[int]) -> None:
        self.rows, self.ends, self.started = rows, ends, False

    def put(self, tokens: Tensor) -> None:
        if self.started:
            for row, token in zip(self.rows, tokens.tolist(), strict=True):
                row.take(token, self.ends)
        self.started = True  # the prompts come first
        if all(row.over or row.gone for row in self.rows):
            raise _GenerationCancelled

    def end(self) -> None:
        pass


class Batches(GenerateManager):
    def __init__(self, size: int, context: int, most: int) -> None:
        super().__init__()
        self.size, self.context, self.most = size, context, most
        self.waiting: list[Row] = []
        self.lock = threading.Lock()  # the server adds to them, the thread that generates takes

    def row(self, model: Any, processor: Any, inputs: Any, config: Any, parser: Any = None) -> Row:
        prompt = inputs["input_ids"][0].cpu()
        room = self.context - len(prompt)
        if not len(prompt):
            raise HTTPException(400, "the prompt is empty: expected at least one token")
        if room < 1:
            raise HTTPException(400, f"the prompt has {len(prompt)} tokens; expected fewer than {self.context}")
        config.max_new_tokens = min(config.max_new_tokens, room)
        row = Row(processor, parser, prompt, config)
        with self.lock:
            if sum(not other.gone for other in self.waiting) >= self.most:
                raise HTTPException(503, f"{self.most} requests are waiting already: try again later")
            self.waiting.append(row)
        self.submit(self.generate, model, processor)
        return row

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue, Row]:
        row = self.row(model, processor, inputs, gen_config, response_parser)
        return row.queue, row

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        row = self.row(model, processor, inputs, gen_config)
        try:
            while (said := await row.queue.get()) is not None:
                if isinstance(said, _StreamError):
                    raise HTTPException(500, said.msg)
        except asyncio.CancelledError:
            row.cancel()
            raise
        text, whole, ids = processor.decode(row.ids, skip_special_tokens=True), processor.decode(row.ids), row.ids
        if (kept := cut(whole, gen_config._stops)) != whole:  # where a template parses answers, it reads the tokens
            ids = processor.encode(kept, add_special_tokens=False)
        return cut(text, gen_config._stops), len(row.prompt), ids

    def taken(self) -> list[Row]:
        """The rows of the next batch; what came with an earlier one leaves none to the call that was meant for it."""
        rows: list[Row] = []
        with self.lock:
            for row in [row for row in self.waiting if not row.gone]:
                first = rows[0] if rows else row
                alone = row is not first and (row.config._seed, first.config._seed) != (None, None)
                if row.kind == first.kind and not alone and len(rows) < self.size:
                    rows.append(row)
            self.waiting = [row for row in self.waiting if row not in rows and not row.gone]
        return rows

    def generate(self, model: Any, processor: Any) -> None:
        rows = self.taken()
        if not rows:
            return
        try:
            config = copy.deepcopy(rows[0].config)
            config.max_new_tokens = max(row.config.max_new_tokens for row in rows)
            ends = config.eos_token_id if config.eos_token_id is not None else processor.eos_token_id
            ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
            padding = next(x for x in (config.pad_token_id, processor.pad_token_id, *ends, 0) if x is not None)
            config.eos_token_id, config.pad_token_id = ends or None, padding
            if config._seed is not None:
                torch.manual_seed(config._seed)
            prompts, ones = [row.prompt for row in rows], [torch.ones_like(row.prompt) for row in rows]
            ids = pad_sequence(prompts, batch_first=True, padding_value=padding, padding_side="left")
            mask = pad_sequence(ones, batch_first=True, padding_side="left")
            model.generate(
                input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config,
                tokenizer=processor, streamer=Rows(rows, set(ends)),
            )  # fmt: skip
        except _GenerationCancelled:
            pass
        except Exception as error:  # of the model: the server goes on
            for row in rows:
                row.finish(f"{type(error).__name__}: {error}")
        finally:
            for row in rows:
                row.finish()
