"""Needle prompts as the paper describes them, with one control that it lacks.

About 120 plain sentences (filler.txt), rotated from prompt to prompt; in the middle a sentence with something new in
it, the needle; at the end a question that asks for it. The control: things of the same list stand in two plain
sentences, shortly before and after the needle, and nobody asks for them. Among the prompts of one kind each thing is
once the needle and twice planted, so that what the two differ in is neither the thing itself nor its position.

T tokens of a prompt.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ccq.analysis import AnalysisError
from ccq.files import read_toml

_TOLD = read_toml(Path(__file__).with_suffix(".toml"))
KINDS = _TOLD["kinds"]  # {name: needle and question, with which a prompt ends, and things that may be the needle}
CARRIERS = _TOLD["carriers"]  # plain sentences that hold a planted thing
PLANTED = 2  # in each prompt
APART = 3  # sentences between needle and planted things
NEAR = 100  # tokens from the needle, before and after, that count as around it
MOST_VARIANTS = min(len(kind["things"]) for kind in KINDS.values())


@dataclass(frozen=True)
class Prompt:
    """A text and where in it things stand, as (begin, end) in characters."""

    kind: str
    text: str
    answer: str  # what should follow the text
    needle: tuple[int, int]  # the sentence
    novel: tuple[int, int]  # the new thing in it
    planted: tuple[tuple[int, int], ...]
    question: tuple[int, int]


def filler() -> list[str]:
    return Path(__file__).with_name("filler.txt").read_text(encoding="utf-8").splitlines()


def make_prompts(variants: int = 4, sentences: int | None = None) -> list[Prompt]:
    """`variants` prompts of each kind, each with `sentences` of filler (None: all there are).

    >>> len(make_prompts(3)), make_prompts(3, sentences=6)[0].answer
    (15, 'HERON47')
    """
    pool = filler()
    count = len(pool) if sentences is None else sentences
    if not PLANTED < variants <= MOST_VARIANTS:
        raise AnalysisError(f"variants: expected {PLANTED + 1} to {MOST_VARIANTS} prompts of a kind, got {variants}")
    if not 2 * PLANTED <= count <= len(pool):
        raise AnalysisError(f"sentences: expected {2 * PLANTED} to {len(pool)} sentences of filler, got {sentences}")
    prompts: list[Prompt] = []
    for variant, kind in itertools.product(range(variants), KINDS):
        number = len(prompts)
        start = number * len(pool) // (variants * len(KINDS))
        rotated = (pool[start:] + pool[:start])[:count]
        prompts.append(make_prompt(kind, variant, variants, rotated, number))
    return prompts


def make_prompt(kind: str, variant: int, variants: int, sentences: list[str], number: int) -> Prompt:
    """The needle in the middle of `sentences`, planted things around it."""
    form, middle, apart = KINDS[kind], len(sentences) // 2, min(APART, len(sentences) // 4)
    holes = {middle: (form["needle"], form["things"][variant])}  # a sentence with a hole, and what stands in it
    for i, place in enumerate((middle - apart, middle + apart)):
        carrier = CARRIERS[(number * PLANTED + i) % len(CARRIERS)]
        holes[place] = (carrier, form["things"][(variant + 1 + i) % variants])
    text = ""
    told, things = {}, {}  # [place]: where the sentence stands, and the thing in it
    for place, sentence in enumerate(sentences):
        if place in holes:
            carrier, thing = holes[place]
            begin = len(text) + carrier.index("{}")
            told[place] = (len(text), len(text) + len(carrier.format(thing)))
            things[place] = (begin, begin + len(thing))
            text += f"{carrier.format(thing)} "
        text += f"{sentence} "
    question = (len(text), len(text) + len(form["question"]))
    planted = (things[middle - apart], things[middle + apart])
    answer = form["things"][variant]
    return Prompt(kind, text + form["question"], answer, told[middle], things[middle], planted, question)


RARE = 2  # a token that a prompt has at most so often counts as unique
GROUPS = _TOLD["groups"]  # {name: what it is}


@dataclass(frozen=True)
class Tokens:
    """A prompt as a model sees it, and which of its tokens belong to which group."""

    ids: np.ndarray  # [T] int64
    groups: dict[str, np.ndarray] = field(repr=False)  # [T] bool
    question: np.ndarray = field(repr=False)  # [T] bool


def with_bos(ids: list[int], tokenizer: Any, bos: bool) -> list[int]:
    """With `bos` the tokenizer's first token stands there, also where it does not put it by itself."""
    if bos and tokenizer.bos_token_id is None:
        raise AnalysisError("bos: the tokenizer has no token for the beginning of a text")
    return [tokenizer.bos_token_id, *ids] if bos and ids[:1] != [tokenizer.bos_token_id] else ids


def each(prompts: Sequence[Prompt], tokenizer: Any, bos: bool = False) -> Iterator[Tokens]:
    """The tokens of one prompt after the other; stderr says how many are done."""
    for done, prompt in enumerate(prompts, 1):
        yield tokenize(prompt, tokenizer, bos)
        end = "\r" if sys.stderr.isatty() and done < len(prompts) else "\n"
        print(f"prompt {done}/{len(prompts)}", end=end, file=sys.stderr, flush=True)


def tokenize(prompt: Prompt, tokenizer: Any, bos: bool = False) -> Tokens:
    """Tokens of a prompt, and which of them belong where."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        what = "none" if tokenizer is None else type(tokenizer).__name__
        raise AnalysisError(f"tokenizer: expected a fast tokenizer, which gives positions of its tokens; got {what}")
    encoded = tokenizer(prompt.text, return_offsets_mapping=True)
    tokens = np.array(with_bos(list(encoded["input_ids"]), tokenizer, bos), dtype=np.int64)
    offsets = [(0, 0)] * (len(tokens) - len(encoded["input_ids"])) + list(encoded["offset_mapping"])
    begin, end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    real = end > begin  # special tokens stand nowhere in the text

    def inside(span: tuple[int, int]) -> np.ndarray:
        return real & (end > span[0]) & (end <= span[1])  # by its last character: a token may begin with a space

    counts = np.bincount(tokens)[tokens]
    rare = real & (counts <= RARE)
    needle, question = inside(prompt.needle), inside(prompt.question)
    planted = np.any([inside(span) for span in prompt.planted] or [np.zeros_like(real)], axis=0)
    distractor = real & ~needle & ~planted & ~question
    place, found = np.arange(len(tokens)), np.flatnonzero(needle)
    near = (place >= found.min() - NEAR) & (place <= found.max() + NEAR) if len(found) else needle
    groups = {
        "unique": needle & rare,
        "needle": needle,
        "novel": inside(prompt.novel) & rare,
        "planted": planted & rare,
        "near": distractor & near,
        "rare": distractor & rare,
        "distractor": distractor,
    }
    if not distractor.any() or not needle.any():
        raise AnalysisError("the tokenizer makes no token of the needle or of the text around it")
    return Tokens(tokens, groups, question)
