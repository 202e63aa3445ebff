"""What a model is asked. Every suite turns its samples into three kinds of request over tokens, so that one engine
answers them all and a machine with a GPU needs neither the data nor the benchmarks' own packages.

    score      log-likelihood of tokens[context:] given tokens[:context], summed over the segments that `cuts` part
    generate   greedy continuation of tokens
    argmax     the likeliest token after each of `positions`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ccq.errors import UserError
from ccq.files import whole_file

FORMAT = 1


class EvaluationError(UserError):
    """Input, data or model are missing, damaged or do not fit; the message names it and what was expected."""


@dataclass
class Request:
    """One question to the model; its tokens are `RequestSet.tokens[begin:end]`."""

    id: str
    kind: str
    begin: int
    end: int
    context: int = 0  # score: how many tokens are given
    cuts: tuple[int, ...] = ()  # score: token positions at which a new segment begins
    max_new: int = 0  # generate
    min_new: int = 0  # generate: no stop before
    stop: tuple[int, ...] = ()  # generate: tokens that end it
    positions: tuple[int, ...] = ()  # argmax
    meta: dict = field(default_factory=dict)  # what the suite scores the answer with

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass
class RequestSet:
    """All requests of a suite. Requests may overlap in `tokens`: windows of one stream do."""

    suite: str
    settings: dict  # all that decides what is asked
    tokens: np.ndarray  # int32, flat
    requests: list[Request]
    notes: list[str] = field(default_factory=list)
    origin: dict | None = None  # by what command, where and when, if in a stage of its own

    def of(self, request: Request) -> np.ndarray:
        return self.tokens[request.begin : request.end]

    def key(self, request: Request) -> str:
        """Hash of all that the answer depends on beside the model: what resuming looks answers up by."""
        what = [request.kind, request.context, request.cuts, request.max_new, request.min_new, request.stop]
        digest = hashlib.sha256(json.dumps([*what, request.positions]).encode())
        digest.update(np.ascontiguousarray(self.of(request), dtype="<i4").tobytes())
        return digest.hexdigest()[:32]

    def hash(self) -> str:
        """Hash of every question and of what its answer is scored with, in order."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(json.dumps([request.id, self.key(request), request.meta], sort_keys=True).encode())
        return digest.hexdigest()

    def longest(self) -> int:
        """The most tokens a model must hold for one of them."""
        return max((request.length + request.max_new for request in self.requests), default=0)

    def save(self, path: Path) -> None:
        header = {name: getattr(self, name) for name in ("suite", "settings", "notes", "origin")}
        header["requests"] = [  # without what is empty
            {name: x for name, x in vars(request).items() if x or name in ("id", "kind", "begin", "end")}
            for request in self.requests
        ]
        told = json.dumps({"format": FORMAT, **header}).encode()
        with whole_file(path) as file:
            np.savez_compressed(file, tokens=self.tokens, header=np.frombuffer(told, np.uint8))

    @classmethod
    def load(cls, path: Path) -> RequestSet:
        if not path.exists():
            raise EvaluationError(f"{path} does not exist: make it with --stage requests")
        try:
            with np.load(path, allow_pickle=False) as file:
                header, tokens = json.loads(file["header"].tobytes()), file["tokens"]
            requests = [
                Request(**{name: tuple(x) if isinstance(x, list) else x for name, x in row.items()})  # type: ignore
                for row in header["requests"]
            ]
        except Exception as error:
            raise EvaluationError(
                f"{path} is damaged ({error}): expected a request file of `ccq eval --stage requests`; delete it"
            ) from error
        if header["format"] != FORMAT:
            raise EvaluationError(f"{path} has format {header['format']}, this version reads {FORMAT}: make it again")
        return cls(header["suite"], header["settings"], tokens, requests, header["notes"], header.get("origin"))


class Builder:
    """Collects requests, each with tokens of its own."""

    def __init__(self) -> None:
        self.pieces: list[np.ndarray] = [np.zeros(0, np.int32)]
        self.requests: list[Request] = []
        self.size = 0

    def stream(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Add tokens that requests may point into; return where they begin."""
        begin = self.size
        self.pieces.append(np.asarray(tokens, dtype=np.int32))
        self.size += len(tokens)
        return begin

    def add(self, id: str, kind: str, tokens: Sequence[int] | np.ndarray, **fields) -> None:
        begin = self.stream(tokens)
        self.requests.append(Request(id, kind, begin, self.size, **fields))

    def done(self, suite: str, settings: dict, notes: Sequence[str] = ()) -> RequestSet:
        return RequestSet(suite, settings, np.concatenate(self.pieces), self.requests, list(notes))
