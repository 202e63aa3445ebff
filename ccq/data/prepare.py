"""Text into token shards: documents are read, encoded in threads, and written in order.

The result is the same for every number of workers. A shard counts once it has its name and stands in the index; killed
at any time, the same call goes on behind the last shard that counts.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ccq
from ccq import tables
from ccq.data import DataError
from ccq.data.needles import Mixed, Needles
from ccq.data.shards import FORMAT, INDEX, VERSION, ShardWriter, check_shard, read_index, token_dtype
from ccq.data.sources import PIECE, Inputs, Piece, Position
from ccq.data.tokenizer import Encoder, load_tokenizer, tokenizer_hash, tokenizer_json, vocabulary
from ccq.files import check_free, locked, write_json
from ccq.names import plural

Marked = tuple[Piece, Mixed | None]  # a piece, and how far the mixing went after it

CHUNK = PIECE  # characters a thread gets at once: a fraction of a second's work
AHEAD = 3  # chunks a thread that are under way


@dataclass(frozen=True)
class Preparation:
    inputs: Inputs
    tokenizer: str | Path
    shard_tokens: int = 2**26  # a shard ends with the document that reaches this
    skip: int = 0  # documents to leave out at the beginning
    max_tokens: int | None = None  # stop with the document that reaches this
    needles: Needles | None = None  # needle documents to mix in


def prepare(what: Preparation, out: str | Path, workers: int | None = None, progress: bool = False) -> dict[str, Any]:
    """Write the shards of `what` into the folder `out` and return their index; on an unfinished folder, go on.

    workers: threads that encode; None for one a core.
    """
    out = Path(out)
    for name, value, least in (("shard_tokens", what.shard_tokens, 1), ("max_tokens", what.max_tokens, 1),
                               ("skip", what.skip, 0), ("workers", workers, 0)):  # fmt: skip
        if value is not None and value < least:
            raise DataError(f"{name} must be at least {least}, got {value}")
    if inside := [path for path in what.inputs.paths if Path(path).resolve() in (out / INDEX).resolve().parents]:
        raise DataError(f"{out} lies in {inside[0]}, and would be read with it: choose another folder")
    tokenizer = load_tokenizer(what.tokenizer)
    vocab_size = vocabulary(tokenizer)
    dtype = token_dtype(vocab_size)
    index: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "ccq": ccq.__version__,
        "complete": False,
        "tokenizer": {
            "hash": tokenizer_hash(tokenizer),
            "name": Path(what.tokenizer).absolute().name,
            "vocab_size": vocab_size,
            "eos_id": tokenizer.eos_token_id,
        },
        "dtype": dtype.name,
        "settings": {
            **what.inputs.describe(),
            "shard_tokens": what.shard_tokens,
            "skip": what.skip,
            "max_tokens": what.max_tokens,
            "needles": json.loads(json.dumps(what.needles.describe())) if what.needles else None,
        },
        **dict.fromkeys(("tokens", "documents", "text_bytes", "needle_tokens", "needle_documents"), 0),
        "shards": [],
        "resume": {"file": 0, "record": 0, "mixed": list(Mixed())},
    }
    with locked(out / ".lock", DataError):
        before, written = read_index(out) if (out / INDEX).exists() else None, any(out.glob("shard-*.bin"))
        if before is not None and (before["complete"] or before["shards"] or written):
            check_same(before, index, out)
            index = before
            if index["complete"]:
                return index
        else:
            check_free(out, None, ours=(out / INDEX).exists(), older="one that this command began")
            write_json(out / INDEX, index)
        tokenizer.save_pretrained(out / "tokenizer")
        write_shards(what, index, out, Encoder(tokenizer_json(tokenizer), dtype.str), workers, progress)
    return index


def check_same(found: dict[str, Any], index: dict[str, Any], out: Path) -> None:
    """DataError where the index that is there is of another preparation, or its shards are not sound."""
    pairs = [(f"tokenizer {k}", found["tokenizer"].get(k), index["tokenizer"][k]) for k in ("hash", "eos_id")]
    pairs += [("dtype", found["dtype"], index["dtype"])]
    names = sorted({*found["settings"], *index["settings"]})
    pairs += [(name, found["settings"].get(name), index["settings"].get(name)) for name in names]
    for name, before, now in pairs:
        if before != now:
            if isinstance(before, list) and isinstance(now, list):  # they may be long: what one has and the other not
                fewer = [x for x in before if x not in now], [x for x in now if x not in before]
                before, now = fewer if any(fewer) else (before, now)  # else in another order
            told = f"{name}: {shortened(before)}, now {shortened(now)}"
            raise DataError(f"{out} was started with other settings, {told}. Choose another folder, or empty this one.")
    for entry in found["shards"]:
        check_shard(out, found, entry, checksum=True)


def shortened(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."


def write_shards(
    what: Preparation, index: dict[str, Any], out: Path, encode: Encoder, workers: int | None, progress: bool
) -> None:
    """Write the shards that are missing; the index on disk says after each how far it went."""
    resume = index["resume"]
    start, mixed = Position(resume["file"], resume["record"]), Mixed(*resume["mixed"])
    pieces = what.inputs.pieces(start)
    if what.skip and start == Position():
        pieces = without_first(pieces, what.skip)
    marked = what.needles.mix(pieces, mixed) if what.needles else ((piece, mixed) for piece in pieces)
    eos = np.array([index["tokenizer"]["eos_id"]], dtype=encode.dtype)
    writer: ShardWriter | None = None

    def finish() -> None:
        nonlocal writer
        if writer is not None:
            index["shards"].append(writer.finish())
            writer = None
        write_json(out / INDEX, index)

    try:
        size, unit = what.inputs.size() if progress else None, " documents" if what.inputs.dataset else "B"
        with tables.progress("preparing", size, unit, shown=progress) as bar:
            for number, ((piece, after), ids) in enumerate(encoded(chunks(marked), encode, workers)):
                if number == 0:  # a resumed run begins in the middle; the jump there is not its speed
                    bar.initial = bar.n = bar.last_print_n = piece.read
                if writer is None:
                    path = out / f"shard-{len(index['shards']):05d}.bin"
                    writer = ShardWriter(path, index["tokenizer"]["hash"], encode.dtype)
                writer.write(ids)
                if piece.last:
                    writer.write(eos)
                    writer.end_document()
                index["text_bytes"] += len(piece.text.encode(errors="surrogatepass"))
                for what_of in ("", "needle_") if piece.needle else ("",):
                    index[f"{what_of}tokens"] += len(ids) + piece.last
                    index[f"{what_of}documents"] += piece.last
                told = f"{index['tokens'] / 1e6:,.1f}M tokens, {plural(index['documents'], 'document')}"
                bar.set_postfix_str(told, refresh=False)
                bar.update(piece.read - bar.n)
                if piece.last and after is not None:  # None: needle documents made of this one follow, in this shard
                    index["resume"] = {**piece.next._asdict(), "mixed": list(after)}
                    if what.max_tokens is not None and index["tokens"] >= what.max_tokens:
                        break
                    if writer.tokens >= what.shard_tokens:
                        finish()
        if not index["documents"]:
            raise DataError("no document is left to prepare" + (" after the filter" if what.inputs.filter else ""))
        index["complete"] = True
        del index["resume"]
        finish()
    finally:
        if writer is not None:
            writer.close()


def chunks(marked: Iterable[Marked]) -> Iterator[list[Marked]]:
    """Pieces in lists of about CHUNK characters."""
    chunk: list[Marked] = []
    size = 0
    for pair in marked:
        chunk.append(pair)
        size += len(pair[0].text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def without_first(pieces: Iterable[Piece], count: int) -> Iterator[Piece]:
    for piece in pieces:
        if count <= 0:
            yield piece
        elif piece.last:
            count -= 1


def encoded(
    chunks: Iterable[list[Marked]], encode: Encoder, workers: int | None
) -> Iterator[tuple[Marked, np.ndarray]]:
    """The pieces of the chunks, in order, each with its ids; a bounded number of chunks is under way."""
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the threads are the parallelism
    threads = ThreadPoolExecutor(max(workers, 1))  # the tokenizer lets go of the interpreter
    waiting: deque[tuple[list[Marked], Future]] = deque()

    def oldest() -> Iterator[tuple[Marked, np.ndarray]]:
        chunk, ids = waiting.popleft()
        return zip(chunk, ids.result(), strict=True)

    try:
        for chunk in chunks:
            waiting.append((chunk, threads.submit(encode, [piece.text for piece, _ in chunk])))
            if len(waiting) > AHEAD * workers:
                yield from oldest()
        while waiting:
            yield from oldest()
    finally:
        threads.shutdown(cancel_futures=True)
