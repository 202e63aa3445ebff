"""RULER's single-needle tasks, niah_single_1/2/3 (S-NIAH-1/2/3), at any length.

Template, needle, keys, values, depths, haystack, answer prefix and score are RULER's (NVIDIA/RULER, niah.py in
scripts/data/synthetic, and scripts/eval); two things need not be:

- How large the haystack is, where it is not sized as "ruler" does since June 2025: one size by bisection over drawn
  samples, and a sample that does not fit is drawn again with 500 words (25 or 5 noise units) less, so that many prompts
  of 1K are half as long. "full": for each sample the largest that fits with the 128 tokens of the answer (or more,
  where more are asked for). "lm-eval": what lm-evaluation-harness 0.4.13 builds, in the same steps.
- Samples are drawn by our counter-based generator: sample i of (seed, task, length) is the same whatever ran before and
  on every machine. What they are made of is in the result, and a hash of them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ccq.data.counter import bits, key_of
from ccq.data.needles import FORMS, is_training_key, is_training_value, words
from ccq.evaluate import sources
from ccq.evaluate.requests import Builder, EvaluationError, RequestSet
from ccq.evaluate.statistics import by_group, summary
from ccq.evaluate.suite import SEED, Option, Suite, lengths_option
from ccq.files import read_toml
from ccq.names import grouped, positive
from ccq.shipped import book

_TOLD = read_toml(Path(__file__).with_suffix(".toml"))
KNOWN, SIZINGS, KEYS = _TOLD["tasks"], _TOLD["sizings"], _TOLD["keys"]
TASKS = tuple(task for task in KNOWN if task != "niah_book")  # RULER's
LENGTHS = (1024, 2048, 4096, 8192)
SAMPLES = 500
ANSWER = 128  # tokens generated
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [int(x) for x in np.round(np.linspace(0, 100, num=40))]
TRIES = 100  # of RULER's to draw a needle that fits where the haystack can shrink no more: it has no end to them
GENERATOR = 1  # raise it with any change to what is drawn


def draws(*key: object) -> Iterator[int]:
    """Draws of 64 bits that are a function of a key alone."""
    number = key_of("niah", GENERATOR, *key)
    return (int(bits(number, np.array([count]), 1)[0, 0]) for count in itertools.count(1))


def below(n: int, drawn: Iterator[int]) -> int:
    """Uniform over range(n): what lies past the last multiple of n is drawn again."""
    return next(x % n for x in drawn if x < 2**64 - 2**64 % n)


@dataclass(frozen=True)
class Needle:
    """What is hidden, and where: `place` is a draw from DEPTHS, or of 64 bits for a place among the noise."""

    key: str
    value: str
    place: int


def draw(
    task: str, length: int, index: int | str, seed: int, keys: str, word_lists: tuple[Sequence[str], Sequence[str]]
) -> Needle:
    """RULER's draw: an adjective-noun pair, a number of 7 digits or a random UUID, one of 40 depths."""
    haystack, values = KNOWN[task]["haystack"], KNOWN[task]["values"]
    drawn = draws(seed, task, length, index)
    key = value = ""
    while not key or (keys == "odd" and is_training_key(key)):
        key = "-".join(part[below(len(part), drawn)] for part in word_lists)
    while not value or (keys == "odd" and is_training_value(value)):
        if values == "numbers":
            value = str(10**6 + below(9 * 10**6, drawn))
        else:
            value = str(uuid.UUID(int=next(drawn) << 64 | next(drawn), version=4))
    return Needle(key, value, next(drawn) if haystack == "noise" else DEPTHS[below(len(DEPTHS), drawn)])


class Haystack:
    """Text of `size` units with a needle in it: noise sentences, a line each, or words of the essays or of a book."""

    def __init__(self, kind: str, data: Path | None) -> None:
        self.kind = kind
        self.versions: dict[str, str] = {}
        if kind == "essay":
            text = essays(data)
            self.split, self.versions = splitter(data)
            self.versions["essays"] = sha256(text)
        elif kind == "book":
            text = "\n\n".join(book()["stories"])
            self.split = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][”’])) (?=[“‘A-Z])").split
            self.versions["book"] = sha256(text)
        if kind != "noise":
            self.words = re.sub(r"\s+", " ", text).split(" ")
            self.sentences = functools.lru_cache(maxsize=1024)(self._sentences)

    def _sentences(self, size: int) -> list[str]:
        repeats = -(-size // len(self.words))
        return self.split(" ".join((self.words * repeats)[:size]).strip())

    def context(self, size: int, needle: str, place: int) -> tuple[str, float]:
        """The text, and the depth of the needle in per cent."""
        if self.kind == "noise":
            at = size * place >> 64
            return "\n".join([*[NOISE] * at, needle, *[NOISE] * (size - at)]), 100 * at / size if size else 0.0
        sentences = self.sentences(size)
        at = int(len(sentences) * (place / 100))
        return " ".join([" ".join(sentences[:at]), needle, " ".join(sentences[at:])]), float(place)


haystack_of = functools.cache(Haystack)  # one for all evaluations of a process: `samples` knows it again


def essays(data: Path | None) -> str:
    if data is not None:
        return " ".join(row["text"] for row in sources.read(data, "PaulGrahamEssays", ["text"]))
    with sources.from_hub("Paul Graham's essays (baber/paul_graham_essays)", ships="niah_book"):
        import datasets

        return " ".join(datasets.load_dataset("baber/paul_graham_essays", split="train")["text"])


def splitter(data: Path | None) -> tuple[Callable[[str], list[str]], dict[str, str]]:
    """nltk's English Punkt, as `sent_tokenize` runs it, from DIR/nltk_data or nltk's own folders; and its versions."""
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    own, name = list(nltk.data.path), "tokenizers/punkt_tab/english/"
    if data is not None:
        nltk.data.path.insert(0, str(data / "nltk_data"))
    try:
        try:
            folder = nltk.data.find(name)
        except LookupError:
            if data is not None or not nltk.download("punkt_tab", quiet=True):
                raise
            folder = nltk.data.find(name)
        punkt = PunktTokenizer()
    except LookupError:
        where = f"{data / 'nltk_data'} lacks it" if data is not None else "it is not installed"
        raise EvaluationError(f"nltk's punkt_tab: {where}: get it by python -m nltk.downloader punkt_tab") from None
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{folder} is damaged ({error}): expected the four tables of nltk's punkt_tab") from error
    finally:
        nltk.data.path[:] = own
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(folder).iterdir())))
    return punkt.tokenize, {"nltk": importlib.metadata.version("nltk"), "punkt_tab": digest.hexdigest()}


def render(task: str, haystack: Haystack, size: int, needle: Needle) -> tuple[str, float]:
    """(prompt, depth of the needle)."""
    form, kind = FORMS["ruler"], KNOWN[task]["values"].removesuffix("s")
    text = form["needle"].format(kind=kind, key=needle.key, value=needle.value)
    context, depth = haystack.context(size, text, needle.place)
    question = form["question"].removesuffix(" {value}.").format(kind=kind, key=needle.key)
    return form["preface"].format(kind=kind) + context + question, depth


def largest(count: Callable[[int], int], room: int, guess: int) -> int:
    """The size whose prompt has at most `room` tokens while the next one's has more, nearest to `guess`; -1: none."""
    if count(guess) <= room:
        low, step = guess, 1
        while count(low + step) <= room:
            low, step = low + step, 2 * step
        high = low + step
    else:
        high, step = guess, 1
        while high > 0 and count(max(0, high - step)) > room:
            high, step = max(0, high - step), 2 * step
        if high == 0:
            return -1
        low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= room else (low, middle)
    return low


@dataclass
class Sizer:
    """How large the haystack of each sample of a (task, length) is."""

    task: str
    length: int
    sizing: str
    haystack: Haystack
    count: Callable[[str], int]  # tokens of a text
    drawn: Callable[[int | str], Needle]  # the needle of a sample, by its number or name
    answer: int = ANSWER  # tokens that are kept for it

    def __post_init__(self) -> None:
        model = Needle("model-needle", "0" * 7 if KNOWN[self.task]["values"] == "numbers" else "0" * 36, 0)
        empty, self.room = self.tokens(model, 0), self.length - self.answer
        noise = 25 if self.length >= 4096 else 5
        self.step = noise if self.haystack.kind == "noise" else 500
        if empty > self.room:
            raise EvaluationError(
                f"--lengths: {self.length} is too short for {self.task}: its prompt without a haystack has {empty} "
                f"tokens and the answer {self.answer}, {empty + self.answer} in all"
            )
        if self.sizing == "full":
            self.start = max(1, largest(functools.partial(self.tokens, model), self.room, 1))
        else:
            self.start = self._start_of_ruler() if self.sizing == "ruler" else self._start_of_lm_eval(model)

    def tokens(self, needle: Needle, size: int) -> int:
        return self.count(render(self.task, self.haystack, size, needle)[0])

    def sample(self, index: int) -> tuple[Needle, int]:
        """The needle of a sample, and the size of its haystack."""
        needle = self.drawn(index)
        if self.sizing == "full":
            size = largest(functools.partial(self.tokens, needle), self.room, self.start)
        elif self.sizing == "ruler":
            size, again, least = self.start, 0, 0
            while self.tokens(needle, size) > self.room and least < TRIES:  # RULER draws the whole sample again
                size, least = (size - self.step, 0) if size > self.step else (size, least + 1)
                again += 1
                needle = self.drawn(f"{index}, again {again}")
            size = -1 if least == TRIES else size
        else:
            sizes = range(self.start, 0, -self.step)
            size = next((size for size in sizes if self._question(size, needle) <= self.room), -1)
        if size < 0:
            raise EvaluationError(f"--lengths: {self.length} is too short for {self.task} by RULER: take --sizing full")
        return needle, size

    def _question(self, size: int, needle: Needle, more: str = "") -> int:
        """lm-evaluation-harness counts without the answer prefix."""
        prompt = render(self.task, self.haystack, size, needle)[0]
        return self.count(prompt[: prompt.rindex(" The special magic")] + more)

    def _start_of_ruler(self) -> int:
        """Bisection between one step and three times what one step's tokens suggest, each size with another needle."""
        needles = (self.drawn(f"size {number}") for number in itertools.count())
        low = start = self.step
        high = max(int(self.length / (self.tokens(next(needles), low) / low) * 3), 2 * low)
        while low <= high:
            middle = (low + high) // 2
            if self.tokens(next(needles), middle) <= self.room:
                low, start = middle + 1, middle
            else:
                high = middle - 1
        return start

    def _start_of_lm_eval(self, needle: Needle) -> int:
        for size in itertools.count(self.step, self.step):
            total = self._question(size, needle, needle.value)
            if total >= self.room:
                break
        return size + self.step if total == self.room else max(1, size - self.step)


def build(options, tokenizer) -> RequestSet:
    """Draw the samples, and ask for the needle."""
    tasks, lengths = list(options.tasks or TASKS), list(options.lengths or LENGTHS)
    count, new = min(SAMPLES, options.limit or SAMPLES), options.answer_tokens or ANSWER
    answer = max(ANSWER, new)  # a shorter one leaves the prompts as RULER's are
    builder, fill = Builder(), {}
    made_of = {"generator": str(GENERATOR), "words": sha256("\n".join(itertools.chain(*words())))}
    stop = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    for task in tasks:
        haystack = haystack_of(KNOWN[task]["haystack"], options.data)
        made_of |= haystack.versions
        for length in lengths:
            group = f"{task}/{length}"
            how = (options.seed, options.sizing, options.keys, answer)
            drawn = samples(haystack, task, length, count, *how, tokenizer)
            fill[group] = min(len(tokens) + new for tokens, _, _ in drawn) / length
            for index, (tokens, value, depth) in enumerate(drawn):
                meta = {"answer": value, "depth": depth, "group": group}
                builder.add(f"{group}/{index}", "generate", tokens, max_new=new, stop=stop, meta=meta)
    settings = {
        "tasks": tasks,
        "lengths": lengths,
        "samples": count,
        **{name: getattr(options, name) for name in ("seed", "sizing", "keys")},
        "max_new_tokens": new,
        "made_of": made_of,
        "least_filled": fill,
    }
    least = f"{100 * min(fill.values()):.1f}%"
    notes = [f"{SIZINGS[options.sizing]}; the shortest prompt with its answer fills {least} of its length"]
    if new != ANSWER:
        notes.append(f"{new} tokens of answer instead of RULER's {ANSWER}")
    if "niah_book" in tasks:
        told = book()
        notes.append(f"niah_book: the haystack is {told['title']} by {told['author']}, not RULER's essays")
    notes.append(f"keys and values: {KEYS[options.keys]}")
    return builder.done("niah", settings, notes)


@functools.lru_cache(maxsize=16)  # `ccq analyze intervene` asks the same of one model again and again
def samples(
    haystack: Haystack, task: str, length: int, count: int, seed: int, sizing: str, keys: str, answer: int, tokenizer
) -> list[tuple[np.ndarray, str, float]]:
    """Tokens of the prompt, answer and depth of each sample of (task, length)."""
    counted = functools.lru_cache(maxsize=4096)(lambda text: len(tokenizer(text).input_ids))
    drawn = functools.partial(draw, task, length, seed=seed, keys=keys, word_lists=words())
    sizer = Sizer(task, length, sizing, haystack, counted, drawn, answer)
    made = []
    for needle, size in map(sizer.sample, range(count)):
        prompt, depth = render(task, haystack, size, needle)
        made.append((np.asarray(tokenizer(prompt).input_ids, np.int32), needle.value, depth))
    return made


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def match(output: str, answer: str) -> float:
    """RULER's string_match_all for one answer: 1 if it stands in the output, whatever the case.

    Control characters become newlines first, and blanks at the ends are dropped.
    """
    clean = re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip()
    return 1.0 if answer.lower() in clean.lower() else 0.0


def metrics(asked: RequestSet, answers: list[dict], options, tokenizer) -> tuple[list[dict], dict]:
    """Accuracy of each task and length, and by depth in tenths."""
    rows = []
    for request, answer in zip(asked.requests, answers, strict=True):
        output = tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        group, depth = request.meta["group"], request.meta["depth"]
        score = match(output, request.meta["answer"])
        rows.append({"id": request.id, "group": group, "output": output, "score": score, "depth": depth})
    scores = {}
    for group, mine in by_group(rows).items():
        tenths = sorted(grouped(mine, lambda row: min(9, int(row["depth"] // 10))).items())
        by_depth = {f"{10 * at}-{10 * at + 10}%": summary(some) for at, some in tenths}
        scores[group] = {**summary(mine), "by_depth": by_depth}
    return rows, scores


SUITE = Suite(
    name="niah",
    help="RULER's single needles: niah_single_1, 2 and 3",
    build=build,
    metrics=metrics,
    options=(
        lengths_option(",".join(map(str, LENGTHS))),
        Option("answer_tokens", f"generate so many (default: RULER's {ANSWER})", positive),
        Option("sizing", "size of the haystack (default: ruler)", choices=tuple(SIZINGS), default="ruler"),
        Option("keys", "odd: only keys not in training text (default: all)", choices=tuple(KEYS), default="all"),
        SEED,
    ),
    tasks=tuple(KNOWN),
    data=("PaulGrahamEssays", "nltk_data"),
    axis=2,
)
