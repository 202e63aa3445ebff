"""What stands before transformers' server: the key, the checks, errors in OpenAI's form.

transformers' routes that load other models, or that nobody has tried with ours, are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import time
from collections.abc import Callable
from typing import Any

import jinja2
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import JSONResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

from ccq.pretrained import load_model, load_tokenizer, most_tokens
from ccq.serve import is_loopback
from ccq.serve.batches import Batches, OneManager

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health")
MOST_BYTES = 4 << 20  # of a request


def refusal(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    kind = {401: "authentication_error"}.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, {"WWW-Authenticate": "Bearer"} if status == 401 else None)


class Refused(Exception):
    """A request that gets no further; its arguments are those of `refusal`."""


def _number(x: Any, kind: Any = int | float) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)


def _text(x: Any) -> bool:
    return isinstance(x, str)


def listed(x: Any) -> list:
    return x if isinstance(x, list) else [x]


def _message(x: Any) -> bool:
    if not isinstance(x, dict) or not _text(x.get("role")):
        return False
    content = x.get("content")
    if isinstance(content, list):
        return all(isinstance(p, dict) and p.get("type") == "text" and _text(p.get("text")) for p in content)
    return _text(content) or (content is None and "tool_calls" in x)


# of a request: whether a value will do, and what was expected
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_text, "a name"),
    "prompt": (_text, "a text"),
    "messages": (lambda x: isinstance(x, list) and bool(x) and all(map(_message, x)), "messages with role and text"),
    "tools": (lambda x: isinstance(x, list), "a list"),
    "stream": (lambda x: isinstance(x, bool), "true or false"),
    "max_tokens": (lambda x: _number(x, int) and x > 0, "a positive whole number"),
    "temperature": (lambda x: _number(x) and 0 <= x <= 2, "a number from 0 to 2"),
    "top_p": (lambda x: _number(x) and 0 < x <= 1, "a number above 0 and up to 1"),
    "seed": (lambda x: _number(x, int) and 0 <= x < 2**63, "a whole number that is not negative"),
    "stop": (lambda x: all(map(_text, listed(x))) and all(listed(x)) and 0 < len(listed(x)) <= 4,
             "a text, or up to four of them"),
}  # fmt: skip
# what changes nothing in the answer, and what does unless it has this value
IGNORED = ("user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key")
NEUTRAL = {"n": 1, "best_of": 1, "echo": False, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0,
           "suffix": "", "logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "auto"}  # fmt: skip


def checked(body: Any, chat: bool, name: str, templated: bool) -> dict[str, Any]:
    """The fields of a request that transformers is asked; Refused where one cannot be honoured."""
    if not isinstance(body, dict):
        raise Refused(400, f"expected a JSON object, got {type(body).__name__}")
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    asked, other = ("messages", "prompt") if chat else ("prompt", "messages")
    kept = {}
    for field, value in body.items():
        if value is None or field in IGNORED or (field in NEUTRAL and value == NEUTRAL[field]):
            continue
        if field not in FIELDS or field == other:
            raise Refused(400, f"{field}: not supported by this server, got {value!r:.100}", field)
        right, what = FIELDS[field]
        if not right(value):
            raise Refused(400, f"{field}: expected {what}, got {value!r:.100}", field)
        kept[field] = value
    if asked not in kept:
        raise Refused(400, f"{asked}: expected {FIELDS[asked][1]}, got none", asked)
    if kept.setdefault("model", name) != name:
        raise Refused(404, f"model: this server has {name!r}, got {kept['model']!r}", "model", "model_not_found")
    if chat and not templated:
        raise Refused(400, "messages: the model's tokenizer has no chat template; ask /v1/completions", "messages")
    return kept


class Guard:
    """Around the whole app: reads a request, checks it, and ends its answer when the client has gone."""

    def __init__(self, app: Any, key: str | None, name: str, templated: bool, batches: Batches | None = None) -> None:
        self.app, self.key, self.name, self.templated, self.batches = app, key, name, templated, batches

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self.body(scope, receive)
        except Refused as refused:
            await refusal(*refused.args)(scope, receive, send)
            return
        except ConnectionResetError:
            return
        gone, given, streams = asyncio.Event(), False, False

        async def replay() -> dict:
            nonlocal given
            if given:
                await gone.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def tell(message: Any) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                streams = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            elif streams and not message.get("more_body"):
                message = {**message, "body": message.get("body", b"") + b"data: [DONE]\n\n"}
            await send(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        answering, watching = (asyncio.ensure_future(x) for x in (self.app(scope, replay, tell), watch()))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answering.done():
                answering.cancel()
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def body(self, scope: Any, receive: Any) -> bytes:
        headers = dict(scope["headers"])
        host = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin1")).strip("[]")
        if self.key is None and not is_loopback(host):  # a page in a browser may call itself what leads here
            raise Refused(403, f"host: expected the loopback address, got {host!r}")
        shown, expected = headers.get(b"authorization", b""), f"Bearer {self.key}".encode()
        if self.key is not None and scope["path"] != "/health" and not hmac.compare_digest(shown, expected):
            raise Refused(401, "expected the server's key: Authorization: Bearer KEY", None, "invalid_api_key")
        read, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            read, more = read + message.get("body", b""), message.get("more_body", False)
            if len(read) > MOST_BYTES:
                raise Refused(413, f"expected a request of at most {MOST_BYTES} bytes")
        if scope["method"] != "POST" or scope["path"] not in ROUTES:
            return read
        try:
            asked = json.loads(read)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"expected JSON ({error})") from error
        kept = checked(asked, "chat" in scope["path"], self.name, self.templated)
        read = json.dumps(kept).encode()
        lengths = [(b"content-type", b"application/json"), (b"content-length", str(len(read)).encode())]
        scope["headers"] = [*(x for x in scope["headers"] if x[0] not in dict(lengths)), *lengths]
        return read


class Sampling:
    """How a request is sampled: greedily unless it says otherwise, and by its own seed."""

    def _build_generation_config(self, body: dict, base: Any, use_cb: bool = False) -> Any:
        seed, temperature, stop = (body.pop(name, None) for name in ("seed", "temperature", "stop"))
        config = super()._build_generation_config(body, base, use_cb=use_cb)  # type: ignore[misc]
        config._seed, config._stops = seed, [] if stop is None else listed(stop)
        if temperature is not None or seed is not None or "top_p" in body:
            config.do_sample, config.top_k = temperature != 0, 0
            config.temperature = temperature or 1.0
        if not config.do_sample:
            config.temperature, config.top_p, config.top_k = 1.0, 1.0, 50
        return config


class Chat(Sampling, ChatCompletionHandler): ...


class Text(Sampling, CompletionHandler): ...


class OneModel(ModelManager):
    """The model that was asked for, by whatever name `ccq.load` knows it, and no other."""

    def __init__(self, name: str, device: str, dtype: str) -> None:
        self.how = (name, device, dtype)
        super().__init__(force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def _load_processor(self, *_: Any, **__: Any) -> Any:
        return load_tokenizer(self.how[0])

    def _load_model(self, *_: Any, **__: Any) -> Any:
        return load_model(*self.how)

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # type: ignore[override]
        return [{"id": self.how[0], "object": "model", "created": int(time.time()), "owned_by": "ccq"}]


def build(
    name: str, device: str, dtype: str, key: str | None = None, batch: int = 16, context: int | None = None,
    waiting: int = 512,
) -> Any:  # fmt: skip
    """The ASGI app that serves a model; `context`: most tokens of prompt and answer together."""
    models = OneModel(name, device, dtype)
    model, tokenizer = models.load_model_and_processor(name)
    longest = most_tokens(model) or context or getattr(model.config, "max_position_embeddings", None) or 4096
    batches = Batches(batch, min(longest, context or longest), waiting)
    state = OneManager(batches)
    app = build_server(models, Chat(models, state), Text(models, state), None, None, None, state)  # type: ignore[arg-type]
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]

    @app.exception_handler(AnyHTTPException)
    async def named(_: Request, error: HTTPException) -> JSONResponse:
        code = "context_length_exceeded" if "expected fewer than" in str(error.detail) else None
        return refusal(error.status_code, str(error.detail), code=code)

    async def wrong(_: Request, error: Exception) -> JSONResponse:
        return refusal(400, f"{type(error).__name__}: {error}")

    # of a chat template, mostly: what goes wrong in the model, a row says itself
    for kind in (RequestValidationError, jinja2.TemplateError, KeyError, TypeError, ValueError):
        app.add_exception_handler(kind, wrong)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return refusal(500, f"{type(error).__name__}: {error}")

    return Guard(app, key, name, bool(getattr(tokenizer, "chat_template", None)), batches)
