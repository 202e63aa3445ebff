"""`ccq serve`: a server is started, asked by HTTP, and stopped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import http.client
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from tiny_tokenizer import BOS, EOS, PAD, VOCABULARY, byte_tokenizer
from transformers import GenerationConfig

from ccq.model import CCQConfig, CCQForCausalLM
from ccq.model.cache import CCQCache
from ccq.serve import main

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
psutil = pytest.importorskip("psutil", reason="psutil is not installed")
utils = pytest.importorskip("transformers.cli.serving.utils", reason="transformers' server is not installed")
_GenerationCancelled, _StreamError = utils._GenerationCancelled, utils._StreamError

pytestmark = pytest.mark.xdist_group("serve")  # one worker, so that one server is started
CONTEXT = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = CCQConfig.preset("ccq-gla-tiny", vocab_size=VOCABULARY, initializer_range=0.2, **special)
    path = tmp_path_factory.mktemp("served") / "tiny"
    CCQForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def served(folder):
    """(process, port) of `ccq serve` on the loopback address."""
    command = [sys.executable, "-m", "ccq", "serve", str(folder), "--port", "0", "--context", str(CONTEXT)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CCQ_API_KEY": ""}
    with subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            said = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", said)
            assert found, said
            yield process, int(found[1])
            process.terminate()
            assert process.wait(30) in (0, -15)
        finally:
            process.kill()  # what has ended stays as it ended


def ask(port, path, body=None, method=None, **headers):
    """(status, answer) of a request; `body`: JSON, or bytes as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.headers["content-type"] == "application/json" else text


@pytest.fixture(scope="module")
def expected(folder):
    """What the model says by itself, greedily."""
    model, tokenizer = CCQForCausalLM.from_pretrained(folder).eval(), byte_tokenizer()

    @functools.cache
    def say(prompt: str, tokens: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(made, skip_special_tokens=True)

    return say


def test_completions(served, folder, expected):
    port = served[1]
    assert ask(port, "/health") == (200, {"status": "ok"})
    status, models = ask(port, "/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, [str(folder)])
    status, answer = ask(port, "/v1/completions", {"prompt": "the quick", "max_tokens": 12, "user": "someone", "n": 1})
    assert status == 200
    assert answer["choices"][0]["text"] == expected("the quick", 12)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    assert answer["model"] == str(folder)


def test_chat_with_a_template_by_openais_client(served, folder, expected):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served[1]}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hello"}]
    ask = {"model": str(folder), "messages": messages, "max_completion_tokens": 10, "temperature": 0}
    answer = client.chat.completions.create(**ask)
    text = expected("user: hello\na: ", 10)
    assert answer.choices[0].message.content == text
    parts = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text.rstrip("\ufffd")
    assert parts[-1].choices[0].finish_reason == "length"
    assert parts[-1].usage.completion_tokens == 10
    said = answer.choices[0].message.model_dump()
    assert said["tool_calls"] is None  # as a client sends it back
    ask["messages"] = [*messages, said, *messages]
    answer = client.chat.completions.create(**ask)
    assert answer.choices[0].message.content == expected(f"user: hello\nassistant: {text}\nuser: hello\na: ", 10)
    with pytest.raises(openai.BadRequestError, match="temperature: expected a number from 0 to 2"):
        client.chat.completions.create(**ask | {"temperature": 9})
    with pytest.raises(openai.NotFoundError, match="model: this server has"):
        client.chat.completions.create(**ask | {"model": "another"})


def test_a_stream_is_the_text_in_pieces_and_ends(served, expected):
    body = {"prompt": "abc", "max_tokens": 20, "stream": True}
    status, text = ask(served[1], "/v1/completions", body)
    events = text.strip().split("\n\n")
    assert (status, events[-1]) == (200, "data: [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected("abc", 20).rstrip("\ufffd")
    assert len(chunks) > 5


def test_seeds_temperatures_and_stop_words(served, expected):
    def say(**options):
        status, answer = ask(served[1], "/v1/completions", {"prompt": "abc", "max_tokens": 20, **options})
        assert status == 200, answer
        return answer["choices"][0]["text"]

    assert say(seed=1, temperature=1.5) == say(seed=1, temperature=1.5) != say(seed=2, temperature=1.5)
    whole = expected("abc", 20)
    say(seed=1, temperature=2)  # a whole number, which transformers' sampling refuses
    assert say(temperature=0, max_completion_tokens=None) == say(temperature=0, seed=3) == whole
    stop = whole[5:7]
    assert say(stop=stop) == say(stop=["never there", stop]) == whole[: whole.index(stop)]
    _, text = ask(served[1], "/v1/completions", {"prompt": "abc", "max_tokens": 20, "stream": True, "stop": stop})
    chunks = [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (COMPLETIONS, b"{not JSON", 400, "expected JSON"),
        (COMPLETIONS, b"[" * 100_000, 400, "expected JSON"),
        (COMPLETIONS, b"", 400, "expected JSON"),
        (COMPLETIONS, ["a"], 400, "expected a JSON object, got list"),
        (COMPLETIONS, {}, 400, "prompt: expected a text, got none"),
        (COMPLETIONS, {"prompt": ["a"]}, 400, "prompt: expected a text"),
        (COMPLETIONS, {"prompt": ""}, 400, "the prompt is empty"),
        (
            COMPLETIONS,
            {"prompt": "a" * CONTEXT},
            400,
            f"the prompt has {CONTEXT} tokens; expected fewer than {CONTEXT}",
        ),
        (COMPLETIONS, {"prompt": "a" * CONTEXT, "stream": True}, 400, "the prompt has"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens: expected a positive whole number, got '9'"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, 400, "max_tokens: expected a positive whole number"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p: expected a number above 0"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream: expected true or false"),
        (COMPLETIONS, {"prompt": "a", "n": 2}, 400, "n: not supported by this server, got 2"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop: expected a text, or up to four of them"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, 400, "stop: expected a text, or up to four of them"),
        (COMPLETIONS, {"prompt": "a", "seed": -1}, 400, "seed: expected a whole number that is not negative"),
        (COMPLETIONS, {"prompt": "a", "frequency_penalty": 1}, 400, "frequency_penalty: not supported by this server"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix: not supported by this server"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0}, 400, "logprobs: not supported by this server"),
        (COMPLETIONS, {"prompt": "a", "novelty": 1}, 400, "novelty: not supported by this server"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt"}, 404, "model: this server has"),
        (COMPLETIONS, b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413, "expected a request of at most"),
        (CHAT, {"messages": []}, 400, "messages: expected messages with role and text"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages: expected"),
        (CHAT, {"messages": [{"role": "user", "content": None, "tool_calls": []}]}, 400, "messages: expected"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, 400, "messages: expected"),
        (CHAT, {"messages": [{"role": "user", "tool_calls": [{"function": {}}]}]}, 400, "KeyError: 'arguments'"),
        (CHAT, {"prompt": "a"}, 400, "prompt: not supported by this server"),
        ("/v1/embeddings", {"input": "a"}, 404, "Not Found"),
        ("/reset", {}, 404, "Not Found"),
        ("/load_model", {"model": "gpt2"}, 404, "Not Found"),
    ],
)
def test_bad_requests_get_openais_errors(served, path, body, status, words):
    found, answer = ask(served[1], path, body)
    assert found == status, answer
    assert words in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"


def test_other_methods_and_other_hosts_are_refused(served):
    assert ask(served[1], COMPLETIONS, method="GET")[0] == 405
    status, answer = ask(served[1], COMPLETIONS, {"prompt": "a"}, Host="evil.example:8000")
    assert (status, answer["error"]["message"]) == (403, "host: expected the loopback address, got 'evil.example'")


def test_fifty_clients_at_once_are_answered_and_memory_returns(served, expected):
    """Each gets what it would get alone, streamed or not, among clients that go away and others that ask nonsense."""
    process, port = served
    memory = psutil.Process(process.pid).memory_info

    def client(i):
        prompt, tokens = "word " * (i % 7) + f"number {i}", 5 + i % 20
        if i % 10 == 3:
            return ask(port, COMPLETIONS, {"prompt": 5})[0] == 400
        if i % 10 == 7:  # goes away
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", COMPLETIONS, json.dumps({"prompt": prompt, "max_tokens": 400}))
            connection.close()
            return True
        status, answer = ask(port, COMPLETIONS, {"prompt": prompt, "max_tokens": tokens, "stream": i % 2 == 0})
        if i % 2:
            return (status, answer["choices"][0]["text"]) == (200, expected(prompt, tokens))
        chunks = [json.loads(event.removeprefix("data: ")) for event in answer.strip().split("\n\n")[:-1]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return (status, text) == (200, expected(prompt, tokens).rstrip("\ufffd"))

    def load():
        with concurrent.futures.ThreadPoolExecutor(50) as clients:
            assert all(clients.map(client, range(50)))
        return memory().rss

    load()  # after which the server has all the threads and buffers that it needs
    before, after = load(), load()
    print(f"resident memory: {before / 2**20:.1f} MiB, then {after / 2**20:.1f} MiB")
    assert after - before < 16 << 20
    assert ask(port, "/health")[0] == 200


# without a socket


async def conversation(app, body, headers=(), chunks=None):
    """Ask the app itself; after so many messages of the answer the client is gone."""
    sent, left = [], asyncio.Event()
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if given:
            return given.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if chunks is not None and len(sent) >= chunks:
            left.set()

    if chunks == 0:
        asyncio.get_running_loop().call_later(0.3, left.set)
    await app(scope_of(headers), receive, send)
    return sent


def scope_of(headers=()):
    return {"type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(),
             "query_string": b"", "headers": [(b"host", b"localhost:8000"), *headers], "http_version": "1.1",
             "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 9), "root_path": ""}  # fmt: skip


def test_a_client_that_goes_away_while_it_sends_is_no_error(folder):
    from ccq.serve.app import build

    async def half_a_request():
        given = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"prompt"', "more_body": True}]
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return given.pop()

        await build(str(folder), "cpu", "float32")(scope_of(), receive, send)
        return sent

    assert asyncio.run(half_a_request())[0]["status"] == 499


def test_a_parser_that_fails_ends_its_own_row(folder):
    """transformers' parser of answers raises at a malformed call of a tool. The other rows of the batch go on."""
    from ccq.serve.batches import Row, Rows

    class Parser:
        initial_events = ()

        def feed(self, text):
            raise ValueError("could not parse")

    async def rows():
        config = GenerationConfig(max_new_tokens=3)
        config._stops, said = [], (70, 71, 72)
        tokenizer, prompt = byte_tokenizer(), torch.tensor([5])
        made = [Row(tokenizer, parser, prompt, config) for parser in (Parser(), None)]
        streamer = Rows(made, set())
        streamer.put(torch.stack([prompt, prompt]))
        with contextlib.suppress(_GenerationCancelled):  # when all are over
            for token in said:
                streamer.put(torch.tensor([token, token]))
        await asyncio.sleep(0)
        return [[row.queue.get_nowait() for _ in range(row.queue.qsize())] for row in made], tokenizer.decode(said)

    (bad, good), text = asyncio.run(rows())
    assert [type(item) for item in bad] == [_StreamError, type(None)]
    assert "ValueError: could not parse" in bad[0].msg
    assert ("".join(good[:-1]), good[-1]) == (text, None)


def test_what_a_template_parses_ends_at_a_stop_word_too(folder, expected):
    """Where a tokenizer has a template of answers, transformers reads their tokens, not their text."""
    from ccq.serve.batches import Batches

    model, tokenizer = CCQForCausalLM.from_pretrained(folder).eval(), byte_tokenizer()
    whole = expected("abc", 20)
    config = GenerationConfig(max_new_tokens=20, do_sample=False)
    config._stops, config._seed = [whole[5:7]], None

    async def answer():
        inputs = tokenizer("abc", return_tensors="pt")
        return await Batches(1, 100, 10).generate_non_streaming(model, tokenizer, inputs, config, "1")

    text, _, ids = asyncio.run(answer())
    assert tokenizer.decode(ids) == text == whole[: whole.index(whole[5:7])]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_state(stream, folder):
    from ccq.serve.app import build

    def states():
        gc.collect()
        return sum(type(x) is CCQCache for x in gc.get_objects())

    app, before = build(str(folder), "cpu", "float32", context=100_000), states()
    body = {"prompt": "abc", "max_tokens": 90_000, "stream": stream}
    begin = time.monotonic()
    sent = asyncio.run(conversation(app, body, chunks=4 if stream else 0))
    assert (len(sent) >= 4) == stream
    batches = app.state.batches
    batches.submit(lambda: None).result(60)  # after the batch: it has ended
    assert time.monotonic() - begin < 60
    assert states() == before
    assert not batches.waiting


def test_the_key_is_asked_for(folder):
    from ccq.serve.app import build

    app = build(str(folder), "cpu", "float32", key="secret")
    for shown, status in ((b"Bearer secret", 200), (b"Bearer secreT", 401), (b"secret", 401), (b"", 401)):
        headers = [(b"authorization", shown)]
        sent = asyncio.run(conversation(app, {"prompt": "a", "max_tokens": 1}, headers))
        assert sent[0]["status"] == status
    assert json.loads(sent[1]["body"])["error"]["code"] == "invalid_api_key"


def test_a_port_that_is_none_is_refused_before_the_model_is_loaded(capsys):
    with pytest.raises(SystemExit):
        main(["nowhere", "--port", "99999"])
    assert "--port: expected 0 to 65535, got 99999" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_addresses_want_a_key(host, monkeypatch, capsys):
    monkeypatch.delenv("CCQ_API_KEY", raising=False)
    with pytest.raises(SystemExit):
        main(["x", "--host", host])
    assert "set a key in CCQ_API_KEY" in capsys.readouterr().err


def test_more_than_may_wait_are_told_so(folder, monkeypatch):
    """And what the model itself cannot do is an error of the server, after which it goes on."""
    from ccq.serve.app import build

    app = build(str(folder), "cpu", "float32", batch=1, waiting=2)

    async def many():
        asked = [conversation(app, {"prompt": f"{i}", "max_tokens": 30}) for i in range(8)]
        return [sent[0]["status"] for sent in await asyncio.gather(*asked)]

    found = asyncio.run(many())
    assert set(found) == {200, 503}
    with monkeypatch.context() as broken:
        broken.setattr(CCQForCausalLM, "generate", lambda *_, **__: 1 / 0)
        status, body = asyncio.run(conversation(app, {"prompt": "a"}))[:2]
    error = json.loads(body["body"])["error"]
    assert (status["status"], error["message"]) == (500, "ZeroDivisionError: division by zero")
    assert asyncio.run(conversation(app, {"prompt": "a", "max_tokens": 2}))[0]["status"] == 200
