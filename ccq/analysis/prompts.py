"""Needle prompts as the paper describes them, with one control that it lacks.

About 120 plain sentences (filler.txt), rotated from prompt to prompt; in the middle a sentence with something new in
it, the needle; at the end a question that asks for it. The control: things of the same list stand in two plain
sentences, shortly before and after the needle, and nobody asks for them. Among the prompts of one kind each thing is
once the needle and twice planted, so that what the two differ in is neither the thing itself nor its position.

T tokens of a prompt.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from ccq.analysis import AnalysisError


class Kind(NamedTuple):
    """How a needle is told and asked for, and the things that it may be."""

    needle: str
    question: str  # the prompt ends with it, and the thing follows
    things: tuple[str, ...]


_TOLD = tomllib.loads(resources.files("ccq.analysis").joinpath("prompts.toml").read_text(encoding="utf-8"))
KINDS = {name: Kind(kind["needle"], kind["question"], tuple(kind["things"])) for name, kind in _TOLD["kinds"].items()}
CARRIERS = _TOLD["carriers"]  # plain sentences that hold a planted thing
PLANTED = 2  # in each prompt
APART = 3  # sentences between needle and planted things
NEAR = 100  # tokens from the needle, before and after, that count as around it
MOST_VARIANTS = min(len(kind.things) for kind in KINDS.values())


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
    return resources.files("ccq.analysis").joinpath("filler.txt").read_text().splitlines()


def make_prompts(
    variants: int = 4, sentences: int | None = None, kinds: tuple[str, ...] = tuple(KINDS)
) -> list[Prompt]:
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
    prompts = []
    for number in range(variants * len(KINDS)):
        variant, which = divmod(number, len(KINDS))
        start = number * len(pool) // (variants * len(KINDS))
        rotated = (pool[start:] + pool[:start])[:count]
        prompts.append(make_prompt(list(KINDS)[which], variant, variants, rotated, number))
    return prompts


def make_prompt(kind: str, variant: int, variants: int, sentences: list[str], number: int) -> Prompt:
    """The needle in the middle of `sentences`, planted things around it."""
    form = KINDS[kind]
    count = len(sentences)
    spans: dict[str, tuple[int, int]] = {}
    text = ""

    def add(sentence: str, name: str = "", thing: str = "") -> None:
        nonlocal text
        text += " " if text else ""
        begin = len(text)
        text += sentence.format(thing) if name else sentence
        if name:
            at = begin + sentence.index("{}")
            spans[name] = (at, at + len(thing))
            spans[name + " sentence"] = (begin, len(text))

    middle, apart = count // 2, min(APART, count // 4)
    holes = {middle: "novel", middle - apart: "planted 0", middle + apart: "planted 1"}
    for place, sentence in enumerate(sentences):
        if place in holes:
            name = holes[place]
            if name == "novel":
                add(form.needle, name, form.things[variant])
            else:
                i = int(name.split()[1])
                carrier = CARRIERS[(number * PLANTED + i) % len(CARRIERS)]
                add(carrier, name, form.things[(variant + 1 + i) % variants])
        add(sentence)
    question = (len(text) + 1, len(text) + 1 + len(form.question))
    text = f"{text} {form.question}"
    planted = tuple(spans[f"planted {i}"] for i in range(PLANTED))
    return Prompt(kind, text, form.things[variant], spans["novel sentence"], spans["novel"], planted, question)


RARE = 2  # a token that a prompt has at most so often counts as unique

# name: what it is; the gap of each is its mean alignment minus that of "distractor"
GROUPS = {
    "unique": "tokens of the needle sentence that the prompt has at most twice (the paper's gap)",
    "needle": "all tokens of the needle sentence",
    "novel": "those of the unique ones that belong to the new thing itself",
    "planted": "the same of things that stand in plain sentences and are not asked for",
    "near": "all tokens of the filler around the needle: what its position does",
    "rare": "tokens of the filler that the prompt has at most twice",
    "distractor": "all tokens of the filler",
}


@dataclass(frozen=True)
class Tokens:
    """A prompt as a model sees it, and which of its tokens belong to which group."""

    ids: np.ndarray  # [T] int64
    groups: dict[str, np.ndarray] = field(repr=False)  # [T] bool
    question: np.ndarray = field(repr=False)  # [T] bool


def tokenize(prompt: Prompt, tokenizer: Any, bos: bool = False) -> Tokens:
    """Tokens of a prompt; `bos` puts the tokenizer's first token there where it does not do so by itself."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        what = "none" if tokenizer is None else type(tokenizer).__name__
        raise AnalysisError(f"tokenizer: expected a fast one, which knows where its tokens stand in a text; got {what}")
    encoded = tokenizer(prompt.text, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), [tuple(x) for x in encoded["offset_mapping"]]
    if bos and tokenizer.bos_token_id is None:
        raise AnalysisError("bos: the tokenizer has no token for the beginning of a text")
    if bos and ids[:1] != [tokenizer.bos_token_id]:
        ids, offsets = [tokenizer.bos_token_id, *ids], [(0, 0), *offsets]
    tokens = np.array(ids, dtype=np.int64)
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
        raise AnalysisError("the tokenizer leaves nothing of the needle or of what is around it")
    return Tokens(tokens, groups, question)
