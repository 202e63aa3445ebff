"""Needle documents for training: a sentence hidden in training text, then asked for.

What is trained on and what is tested on have nothing in common: keys (adjective-noun pairs) and values fall into two
halves by a hash, training has the even one (`is_training_key`, `is_training_value`), and tests draw from the other.
Haystacks are training text; RULER's noise sentence, and texts named as excluded (its essays), are refused.

Document `number` is a function of (seed, number, its haystack).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ccq.data import DataError
from ccq.data.counter import bits, key_of, permute, uniform
from ccq.data.sources import Inputs, Piece
from ccq.files import read_toml
from ccq.names import nearest

FORMS = read_toml(Path(__file__).with_suffix(".toml"))  # {name: its texts}
MOST = 4  # needles in a document
SMALLEST, NUMBERS = 1_000_000, 9_000_000  # seven digits
NOISE = "the grass is green. the sky is blue. the sun is yellow"  # of RULER's noise haystack
WORDS_IN_COMMON = 13  # as many in a row make a haystack part of an excluded text


def parity(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[-1] & 1


def is_training_key(key: str) -> bool:
    """Whether training may use this key; tests take those where it is false."""
    return parity(key) == 0


def is_training_value(value: str) -> bool:
    """Whether training may use this value: of the numbers 2n and 2n + 1 it is one, by a hash of n."""
    if value.isdigit():
        return parity(str(int(value) // 2)) == int(value) % 2
    return parity(value) == 0


@functools.cache
def words() -> tuple[list[str], list[str]]:
    """(adjectives, nouns) of wonderwords, which RULER's keys are made of."""
    from wonderwords.random_word import _get_words_from_text_file as read

    return sorted(set(read("adjectivelist.txt"))), sorted(set(read("nounlist.txt")))


class NeedleDocument(NamedTuple):
    text: str
    form: str
    keys: list[str]
    values: list[str]


class Mixed(NamedTuple):
    """How far the mixing went: needle documents made, characters of text and of needle documents."""

    made: int = 0
    text: int = 0
    needle: int = 0


NOTHING = Mixed()


@dataclass(frozen=True)
class Needles:
    """Mix needle documents into text so that `share` of all characters is theirs."""

    share: float
    forms: tuple[str, ...] = tuple(FORMS)  # some of them; leave "ruler" out to hold RULER's own form out of training
    seed: int = 0
    # characters of a haystack, from and to (log-uniform), more where no whole sentence is so short
    length: tuple[int, int] = (1000, 10_000)
    exclude: tuple[Path, ...] = ()  # texts that no haystack may share WORDS_IN_COMMON words in a row with

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise DataError(f"needles: the share must lie between 0 and 1, got {self.share}")
        for form in self.forms:
            if form not in FORMS:
                known = f"{nearest(form, tuple(FORMS))} Known: {', '.join(FORMS)}."
                raise DataError(f"needles: unknown form {form!r}.{known}")
        if not self.forms:
            raise DataError(f"needles: at least one form is needed, of {', '.join(FORMS)}")
        if not 100 <= self.length[0] <= self.length[1]:
            raise DataError(f"needles: length must go up from at least 100 characters, got {self.length}")

    def describe(self) -> dict[str, Any]:
        """For the index: what was asked for, and the words' version."""
        version = importlib.metadata.version("wonderwords")
        return asdict(self) | {"exclude": [path.name for path in self.exclude], "wonderwords": version}

    def mix(self, pieces: Iterable[Piece], mixed: Mixed = NOTHING) -> Iterator[tuple[Piece, Mixed | None]]:
        """The pieces with needle documents between the documents, and after each how far the mixing went.

        That is None inside a document and before the needle documents that were made of it: what goes on from there
        would lack the haystack.
        """
        texts = (" ".join(piece.text for piece in Inputs((path,)).pieces()) for path in self.exclude)
        excluded = frozenset().union(*map(runs_of_words, texts))
        haystack = ""
        for piece in pieces:
            haystack = haystack or piece.text  # the beginning of the document
            mixed = mixed._replace(text=mixed.text + len(piece.text))
            if not piece.last:
                yield piece, None
                continue
            documents: list[NeedleDocument] = []
            while mixed.needle < self.share / (1 - self.share) * mixed.text:
                document = self.document(mixed.made, haystack, excluded)
                if document is None:
                    break
                documents.append(document)
                mixed = mixed._replace(made=mixed.made + 1, needle=mixed.needle + len(document.text))
            haystack = ""
            yield piece, None if documents else mixed
            for n, document in enumerate(documents, 1):
                made = piece._replace(id="needle", text=document.text, needle=True)
                yield made, mixed if n == len(documents) else None

    def document(self, number: int, text: str, excluded: frozenset[int] = frozenset()) -> NeedleDocument | None:
        """Needle document `number` with a part of `text` as its haystack, or None where the text will not do."""
        draw = iter(uniform(key_of("needle", self.seed), np.array([number]), 8 + 3 * MOST)[0])
        name = self.forms[int(next(draw) * len(self.forms))]
        form = FORMS[name]
        kind = "number" if next(draw) < 0.75 and number < NUMBERS // 2 // MOST else "uuid"  # those never run out
        count = 1 + int(next(draw) * MOST)
        size = round(np.exp(np.interp(next(draw), (0, 1), np.log(self.length))))
        where = next(draw)
        while len(haystack := part_of(text, size, where)) < self.length[0] // 2 and size < len(text):
            size *= 2  # no sentence is so short
        if len(haystack) < self.length[0] // 2 or NOISE in " ".join(haystack.lower().split()):
            return None
        if excluded and not excluded.isdisjoint(runs_of_words(haystack)):
            return None
        keys = self.keys(number, count)
        values = self.numbers(number, count) if kind == "number" else self.uuids(number, count)
        told = [form["needle"].format(kind=kind, key=k, value=v) for k, v in zip(keys, values, strict=True)]
        asked = [form["question"].format(kind=kind, key=k, value=v) for k, v in zip(keys, values, strict=True)]
        order = sorted(range(count), key=[next(draw) for _ in range(count)].__getitem__)
        context = hidden(haystack, told, [next(draw) for _ in range(count)])
        whole = form["preface"].format(kind=kind) + context + "".join(asked[i] for i in order)
        return NeedleDocument(whole, name, keys, values)

    def keys(self, number: int, count: int) -> list[str]:
        adjectives, nouns = words()
        tries = bits(key_of("needle keys", self.seed), np.array([number]), 256)[0].reshape(-1, 2)
        made = (f"{adjectives[a % len(adjectives)]}-{nouns[n % len(nouns)]}" for a, n in tries.tolist())
        return list(dict.fromkeys(filter(is_training_key, made)))[:count]  # each once; half of them are training keys

    def numbers(self, number: int, count: int) -> list[str]:
        """Seven digits; no two of all documents are the same, since a permutation deals them out."""
        at = number * MOST + np.arange(count)
        assert at[-1] < NUMBERS // 2, "numbers would repeat"
        pairs = SMALLEST // 2 + permute(at, NUMBERS // 2, key_of("needle numbers", self.seed))
        return [str(2 * pair + parity(str(pair))) for pair in pairs.tolist()]

    def uuids(self, number: int, count: int) -> list[str]:
        tries = bits(key_of("needle uuids", self.seed), np.array([number]), 256)[0].reshape(-1, 2)
        made = (str(uuid.UUID(int=(a << 64) | b, version=4)) for a, b in tries.tolist())
        return [value for value in made if is_training_value(value)][:count]


def borders(text: str) -> list[int]:
    """Where sentences begin, the end of the text among them."""
    return sorted({0, *(match.end() for match in re.finditer(r"[.!?]['\")\]]*\s+", text)), len(text)})


def part_of(text: str, size: int, where: float) -> str:
    """Whole sentences of `text`, at most `size` characters of them, from `where` (0 to 1) on."""
    offset = int(where * max(len(text) - size, 0))
    part = text[offset : offset + size]
    starts = borders(part)
    first, last = (0 if offset == 0 else 1), (-1 if offset + size >= len(text) else -2)  # drop what was cut
    return part[starts[first] : starts[last]] if len(starts) >= 2 else ""


def hidden(haystack: str, sentences: list[str], depths: list[float]) -> str:
    """The haystack with the sentences put between its own, each at its depth (0 to 1)."""
    starts = borders(haystack)
    places = sorted(zip((starts[int(depth * len(starts))] for depth in depths), sentences, strict=True))
    parts, at = [], 0
    for place, sentence in places:
        parts += [haystack[at:place].strip(), sentence]
        at = place
    return " ".join(part for part in [*parts, haystack[at:].strip()] if part)


def runs_of_words(text: str) -> set[int]:
    """Hashes of all WORDS_IN_COMMON words in a row."""
    found = re.findall(r"\w+", text.lower())
    return {hash(tuple(found[i : i + WORDS_IN_COMMON])) for i in range(len(found) - WORDS_IN_COMMON + 1)}
