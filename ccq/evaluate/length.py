"""Perplexity past the training length, on long documents.

    sweep       the paper's: a corpus is one token stream, its documents joined by end-of-text, cut into windows of L
                that do not overlap; exp of the mean loss over the L - 1 predictions of every window. At each L other
                tokens stand near a window's start, where there is little context.
    position    loss by position inside windows of the greatest length
    same        the same tokens at every L: the last 2,048 of each window of the greatest length, given L - 2,048 before
                them (so a request has L tokens)

Intervals resample documents.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from ccq.evaluate import sources
from ccq.evaluate.requests import Builder, EvaluationError, Request, RequestSet
from ccq.evaluate.statistics import LEAST_UNITS, by_group, summary
from ccq.evaluate.suite import Option, Suite, lengths_option
from ccq.files import read_toml
from ccq.names import positive
from ccq.shipped import book

KNOWN = read_toml(Path(__file__).with_suffix(".toml"))
CORPORA = {name: told["file"] for name, told in KNOWN.items() if "file" in told}
NOT_ON_HUB = ("elife",)  # in this form
LENGTHS = tuple(range(4096, 20_481, 2048))
SCORED = 2048  # tokens of the "same" view
BLOCK = 512  # positions a point of the "position" view
FEW = 20  # windows below which a point is marked; documents: LEAST_UNITS


def documents(corpus: str, data: Path | None) -> list[str]:
    """Texts in their order, each once."""
    if corpus == "book":
        return book()["stories"]
    if data is not None:
        return list(dict.fromkeys(row["text"] or "" for row in sources.read(data, CORPORA[corpus], ["text"])))
    if corpus in NOT_ON_HUB:
        raise EvaluationError(f"{corpus} is not on the Hub in this form: give it with --data DIR")
    with sources.from_hub(f"the corpus {corpus}", ships="book"):
        if corpus not in ("pg19", "code"):
            task = {"govreport": "gov_report"}.get(corpus, corpus)
            return list(dict.fromkeys(row["context"] for row in sources.longbench_archive(task)))
        import datasets

        if corpus == "pg19":
            return list(dict.fromkeys(datasets.load_dataset("emozilla/pg19-test", split="test")["text"]))
        stream = datasets.load_dataset("codeparrot/codeparrot-clean-valid", split="train", streaming=True)
        return list(dict.fromkeys(row["content"] for row in stream.take(2000)))


def stream(texts: list[str], tokenizer, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, document of each token), the first `most` of them; documents are joined by end-of-text, which counts to
    the one it ends."""
    if tokenizer.eos_token_id is None:
        raise EvaluationError("the tokenizer has no end-of-text token (eos_token) to join documents with")
    tokens: list[int] = []
    owner: list[int] = []
    for number, text in enumerate(texts):
        if most is not None and len(tokens) >= most:
            break
        tokens += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        tokens += [tokenizer.eos_token_id] * (number < len(texts) - 1)
        owner += [number] * (len(tokens) - len(owner))
    return np.array(tokens[:most], dtype=np.int32), np.array(owner[:most], dtype=np.int32)


def window(
    id: str, base: int, begin: int, end: int, owner: np.ndarray, *, scored: int = 0, blocks: bool = False
) -> Request:
    """Tokens begin to end - 1 of a stream, cut where a document begins (and every BLOCK positions).

    `scored` > 0 scores only the last so many. `meta` has for each segment its document, its tokens, its block.
    """
    length, inside = end - begin, owner[begin:end]
    context = max(1, length - scored) if scored else 0
    first = max(1, context)
    begins = set((np.flatnonzero(np.diff(inside)) + 1).tolist())
    if blocks:
        begins |= set(range(BLOCK, length, BLOCK))
    cuts = tuple(sorted(cut for cut in begins if cut > first))
    parts = itertools.pairwise([first, *cuts, length])
    meta = {"segments": [[int(inside[a]), b - a, a // BLOCK] for a, b in parts]}
    return Request(id, "score", base + begin, base + end, context=context, cuts=cuts, meta=meta)


def build(options, tokenizer) -> RequestSet:
    lengths = sorted(options.lengths or LENGTHS)
    if lengths[0] < 2:
        raise EvaluationError(f"--lengths: a window has at least 2 tokens, got {lengths[0]}")
    builder, corpora, longest = Builder(), {}, lengths[-1]
    left_out = NOT_ON_HUB if options.data is None and not options.tasks else ()
    for corpus in options.tasks or [corpus for corpus in CORPORA if corpus not in left_out]:
        reach = options.limit and options.limit * longest  # no window goes further
        most = min(filter(None, (reach, options.tokens)), default=None)
        texts = documents(corpus, options.data)
        tokens, owner = stream(texts, tokenizer, most)
        base = builder.stream(tokens)
        corpora[corpus] = {"documents": len(texts), "tokens": len(tokens)}
        for length in lengths:
            for number in range(len(tokens) // length)[: options.limit]:
                name, begin = f"{corpus}/{length}/{number}", number * length
                request = window(name, base, begin, begin + length, owner, blocks=length == longest)
                builder.requests.append(request)
        for number in range(len(tokens) // longest)[: options.limit]:
            end = (number + 1) * longest
            for length in lengths:
                if length > SCORED:
                    name = f"{corpus}/same/{length}/{number}"
                    builder.requests.append(window(name, base, end - length, end, owner, scored=SCORED))
    if not builder.requests:
        raise EvaluationError(f"--lengths: no corpus has a window of {lengths[0]} tokens: {corpora}")
    settings = {"corpora": corpora, "lengths": lengths, "scored": SCORED, "block": BLOCK, "tokens": options.tokens}
    notes = [f"left out, not on the Hub (give it with --data DIR): {', '.join(left_out)}"] if left_out else []
    return builder.done("length", settings, notes)


def metrics(asked: RequestSet, answers: list[dict], options, tokenizer) -> tuple[list[dict], dict]:
    """A sample row is a document's part of a window; perplexity with intervals over documents."""
    rows: list[dict] = []
    positions: dict[str, dict[int, list]] = {}  # [group][block]: summed loss and tokens
    longest = max(asked.settings["lengths"])
    for request, answer in zip(asked.requests, answers, strict=True):
        group, _, number = request.id.rpartition("/")
        parts: dict[int, list] = {}  # [document]
        blocks = positions.setdefault(group, {})
        for (document, count, block), nll in zip(request.meta["segments"], answer["nll"], strict=True):
            for sums in (parts.setdefault(document, [0.0, 0]), blocks.setdefault(block, [0.0, 0])):
                sums[:] = sums[0] + nll, sums[1] + count
        for document, (nll, count) in parts.items():
            row: dict = {"id": f"{request.id}/{document}", "group": group, "unit": document, "window": int(number)}
            rows.append({**row, "score": nll, "weight": count, "output": nll / count})
    scores: dict[str, dict] = {}
    for group, mine in by_group(rows).items():
        score = summary(mine, "perplexity")
        score["n"] = windows = len({row["window"] for row in mine})
        few = windows < FEW or score["units"] < LEAST_UNITS
        scores[group] = {**score, "windows": windows, "documents": score["units"], "few": few}
        if group.endswith(f"/{longest}") and "/same/" not in group:
            scores[group]["loss_by_position"] = [
                {"from": block * BLOCK, "loss": total / count, "tokens": count}
                for block, (total, count) in sorted(positions[group].items())
            ]
    return rows, scores


SUITE = Suite(
    name="length",
    help="perplexity beyond the training length, on long documents",
    build=build,
    metrics=metrics,
    options=(
        lengths_option(f"{LENGTHS[0]} to {LENGTHS[-1]}"),
        Option("tokens", "read at most N tokens of each corpus", positive),
    ),
    tasks=tuple(KNOWN),
    data=tuple(CORPORA.values()),
    axis=3,
)
