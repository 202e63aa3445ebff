"""The routes: the key, the checks, errors in OpenAI's form. What is answered, transformers' own handlers say."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import jinja2
from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

from ccq.pretrained import load_model, load_tokenizer, most_tokens
from ccq.serve import is_loopback
from ccq.serve.batches import Batches

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
    return _text(content) or (content is None and bool(x.get("tool_calls")))


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


def neutral(field: str, value: Any) -> bool:
    """Whether a field that is not supported asks for nothing; 0 is not False: logprobs 0 asks for some."""
    usual = NEUTRAL.get(field, ...)
    return value == usual and isinstance(value, bool) == isinstance(usual, bool)


def checked(body: Any, chat: bool, name: str, templated: bool) -> dict[str, Any]:
    """The fields of a request that transformers is asked; Refused where one cannot be honoured."""
    if not isinstance(body, dict):
        raise Refused(400, f"expected a JSON object, got {type(body).__name__}")
    if (most := body.pop("max_completion_tokens", None)) is not None:
        body["max_tokens"] = most
    asked, other = ("messages", "prompt") if chat else ("prompt", "messages")
    kept = {}
    for field, value in body.items():
        if value is None or field in IGNORED or neutral(field, value):
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
    if chat:  # clients send back what they got, with fields that have no value
        kept["messages"] = [{k: x for k, x in said.items() if x or k == "content"} for said in kept["messages"]]
    return kept


async def received(request: Request) -> Any:
    """What the client sends, as JSON."""
    read = b""
    async for part in request.stream():
        read += part
        if len(read) > MOST_BYTES:
            raise Refused(413, f"expected a request of at most {MOST_BYTES} bytes")
    try:
        return json.loads(read)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"expected JSON ({error})") from error


async def while_there(request: Request, answering: Awaitable[Response]) -> Response:
    """The answer, unless the client goes away before it: then nothing works on it any more."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.ensure_future(answering), asyncio.ensure_future(leaving())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=499)
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.wait({answer, gone})


async def ended(pieces: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """A stream with the end that OpenAI's clients wait for."""
    async for piece in pieces:
        yield piece
    yield "data: [DONE]\n\n"


class OneModel:
    """The model that was loaded, and no other; how a request is sampled: greedily unless it says otherwise, and by its
    own seed."""

    def __init__(self, name: str, model: Any, tokenizer: Any, batches: Batches) -> None:
        state = GenerationState()
        state.get_manager = lambda *_, **__: batches  # type: ignore[method-assign]
        super().__init__(ModelManager, state)  # type: ignore[call-arg]
        self.loaded = (name, model, tokenizer)

    def _resolve_model(self, body: dict) -> tuple[str, Any, Any]:
        return self.loaded

    def _build_generation_config(self, body: dict, base: Any, use_cb: bool = False) -> Any:
        seed, temperature, stop = (body.pop(name, None) for name in ("seed", "temperature", "stop"))
        config = super()._build_generation_config(body, base, use_cb=use_cb)  # type: ignore[misc]
        config._seed, config._stops = seed, [] if stop is None else listed(stop)
        if temperature is not None or seed is not None or "top_p" in body:
            config.do_sample, config.top_k = temperature != 0, 0
            config.temperature = float(temperature or 1)
        if not config.do_sample:
            config.temperature, config.top_p, config.top_k = 1.0, 1.0, 50
        return config


class Chat(OneModel, ChatCompletionHandler): ...


class Text(OneModel, CompletionHandler): ...


def build(
    name: str, device: str, dtype: str, key: str | None = None, batch: int = 16, context: int | None = None,
    waiting: int = 512,
) -> FastAPI:  # fmt: skip
    """The app that serves a model; `context`: most tokens of prompt and answer together."""
    tokenizer, model = load_tokenizer(name), load_model(name, device, dtype)
    longest = most_tokens(model) or context or getattr(model.config, "max_position_embeddings", None) or 4096
    batches = Batches(batch, min(longest, context or longest), waiting)
    routes: dict[str, Any] = {"completions": Text, "chat/completions": Chat}
    handlers = {route: kind(name, model, tokenizer, batches) for route, kind in routes.items()}
    templated, since = bool(getattr(tokenizer, "chat_template", None)), int(time.time())

    def check(request: Request) -> None:
        host = re.sub(r":\d+$", "", request.headers.get("host", "")).strip("[]")
        if key is None and not is_loopback(host):  # a page in a browser may call itself what leads here
            raise Refused(403, f"host: expected the loopback address, got {host!r}")
        shown, expected = request.headers.get("authorization", "").encode(), f"Bearer {key}".encode()
        if key is not None and request.url.path != "/health" and not hmac.compare_digest(shown, expected):
            raise Refused(401, "expected the server's key: Authorization: Bearer KEY", None, "invalid_api_key")

    app = FastAPI(openapi_url=None, dependencies=[Depends(check)])
    app.state.batches = batches

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": since, "owned_by": "ccq"}]}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        route = request.url.path.removeprefix("/v1/")
        body = checked(await received(request), "chat" in route, name, templated)
        number = request.headers.get("x-request-id") or str(uuid.uuid4())
        answer = await while_there(request, handlers[route].handle_request(body, number))
        answer.headers["x-request-id"] = number
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = ended(answer.body_iterator)
        return answer

    async def refused(_: Request, error: Any) -> JSONResponse:
        return refusal(*error.args)

    async def named(_: Request, error: Any) -> JSONResponse:
        code = "context_length_exceeded" if "expected fewer than" in str(error.detail) else None
        return refusal(error.status_code, str(error.detail), code=code)

    # of a chat template, mostly: what goes wrong in the model, a row says itself
    wrong = (jinja2.TemplateError, KeyError, TypeError, ValueError)

    async def failed(_: Request, error: Exception) -> JSONResponse:
        return refusal(400 if isinstance(error, wrong) else 500, f"{type(error).__name__}: {error}")

    async def left(_: Request, error: Any) -> Response:
        return Response(status_code=499)

    kinds: dict[Any, Any] = {Refused: refused, AnyHTTPException: named, ClientDisconnect: left}
    kinds |= dict.fromkeys((*wrong, Exception), failed)
    for kind, handler in kinds.items():
        app.add_exception_handler(kind, handler)
    return app
