"""Token shards on disk: one stream of tokens in files that are memory-mapped, and an index that says what they are.

    DIR/index.json         format, version, tokenizer, counts, settings, and of each shard its counts and checksum
    DIR/shard-00000.bin    tokens (little-endian uint16 or uint32), padding to 8 bytes, where each document ends in
                           this shard (int64, exclusive), 512 bytes of JSON that say the same as the index
    DIR/tokenizer/         the tokenizer that made them

A document ends with its end-of-text token. Shards hold whole documents; the stream is the shards one after another.
`sha256sum` of a shard is its checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ccq.data import DataError
from ccq.files import naming, read_json, sha256

FORMAT, VERSION = "ccq tokens", 1
FOOTER = 512
INDEX = "index.json"
ALIGN = 8


class ShardError(DataError):
    """A shard or an index that is missing, damaged or foreign; the message names the file."""


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where the vocabulary is below 65,536, else uint32; little-endian on every machine."""
    return np.dtype("<u2") if vocab_size < 2**16 else np.dtype("<u4")


def padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def footer(tokenizer: str, dtype: np.dtype, tokens: int, documents: int) -> bytes:
    fields = {"format": FORMAT, "version": VERSION, "tokenizer": tokenizer, "dtype": dtype.name}
    fields |= {"tokens": tokens, "documents": documents}
    return json.dumps(fields).encode().ljust(FOOTER - 1) + b"\n"


class ShardWriter:
    """Writes one shard as its documents come; nothing of it counts before `finish`."""

    def __init__(self, path: Path, tokenizer: str, dtype: np.dtype) -> None:
        self.path, self.tokenizer, self.dtype = path, tokenizer, dtype
        self.partial = path.with_name(path.name + ".partial")
        self.file: BinaryIO = open(self.partial, "wb")  # noqa: SIM115 -- closed by finish or close
        self.hash = hashlib.sha256()
        self.tokens = 0
        self.ends: list[int] = []

    def write(self, tokens: np.ndarray) -> None:
        self._put(tokens.astype(self.dtype, copy=False).tobytes())
        self.tokens += len(tokens)

    def end_document(self) -> None:
        self.ends.append(self.tokens)

    def finish(self) -> dict[str, Any]:
        """Close the file, give it its name, and return its line of the index."""
        size = self.tokens * self.dtype.itemsize
        self._put(bytes(padded(size) - size))
        self._put(np.asarray(self.ends, dtype="<i8").tobytes())
        self._put(footer(self.tokenizer, self.dtype, self.tokens, len(self.ends)))
        with naming(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        os.replace(self.partial, self.path)
        return {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": len(self.ends),
            "bytes": padded(size) + 8 * len(self.ends) + FOOTER,
            "sha256": self.hash.hexdigest(),
        }

    def close(self) -> None:
        """Leave it unfinished."""
        with suppress(OSError):  # a full disk, which was reported where it happened
            self.file.close()
        self.partial.unlink(missing_ok=True)

    def _put(self, content: bytes) -> None:
        with naming(self.path):
            self.file.write(content)
        self.hash.update(content)


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of shards, finished or not; ShardError where there is none."""
    path = folder / INDEX
    index = read_json(path, ShardError, "a folder made by `ccq data prepare`")
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ShardError(f"{path} is not an index of {FORMAT!r}")
    if index.get("version") != VERSION:
        raise ShardError(f"{path} has version {index.get('version')}, this ccq reads version {VERSION}")
    return index


def check_shard(folder: Path, index: dict[str, Any], entry: dict[str, Any], checksum: bool) -> None:
    """Raise ShardError, naming the file, unless the shard is the one the index speaks of."""
    path = folder / entry["file"]
    if not path.exists():
        raise ShardError(f"shard {path} is missing")
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(size - FOOTER, 0))
        found = file.read()
    try:
        said = json.loads(found)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        said = None
    if isinstance(said, dict) and said.get("format") == FORMAT:  # by what it says, it is foreign rather than damaged
        for field, expected in (("tokenizer", index["tokenizer"]["hash"]), ("dtype", index["dtype"])):
            if (its := said.get(field)) != expected:
                raise ShardError(f"shard {path} is not of this index: its {field} is {its}, expected {expected}")
    if size != entry["bytes"]:
        raise ShardError(f"shard {path} is damaged: {size} bytes, the index says {entry['bytes']}")
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    if found != footer(index["tokenizer"]["hash"], dtype, entry["tokens"], entry["documents"]):
        raise ShardError(f"shard {path} is damaged: its last {FOOTER} bytes are not what the index says")
    if checksum and (digest := sha256(path)) != entry["sha256"]:
        raise ShardError(f"shard {path} is damaged: sha256 {digest}, the index says {entry['sha256']}")


class TokenShards:
    """The stream of tokens in a folder made by `ccq data prepare`, memory-mapped.

    `checksums` reads every byte once and compares (about a second a gigabyte); otherwise only sizes and footers are. In
    a distributed run one rank may do it for all.
    """

    def __init__(self, folder: str | Path, *, checksums: bool = True) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        if not self.index["complete"]:
            raise ShardError(f"{self.folder} is unfinished: the same `ccq data prepare` command resumes it")
        self.tokenizer_hash: str = self.index["tokenizer"]["hash"]
        entries = self.index["shards"]
        with ThreadPoolExecutor(max_workers=4) as pool:  # hashing leaves the interpreter's lock
            list(pool.map(lambda entry: check_shard(self.folder, self.index, entry, checksums), entries))
        self.dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        self.starts = np.cumsum([0] + [entry["tokens"] for entry in entries])  # of the shards in the stream
        self.tokens = int(self.starts[-1])
        self.documents = sum(entry["documents"] for entry in entries)
        self.vocab_size: int = self.index["tokenizer"]["vocab_size"]
        self.eos_id: int = self.index["tokenizer"]["eos_id"]
        self.tokenizer_folder = self.folder / "tokenizer"
        self._maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # pickled to a worker, a memory map would become its content

    def shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, document ends) of one shard, ends counted from the shard's first token."""
        if number not in self._maps:
            entry = self.index["shards"][number]
            path = self.folder / entry["file"]
            size = padded(entry["tokens"] * self.dtype.itemsize)
            tokens = np.memmap(path, dtype=self.dtype, mode="r", shape=(entry["tokens"],))
            ends = np.memmap(path, dtype="<i8", mode="r", offset=size, shape=(entry["documents"],))
            self._maps[number] = (tokens, ends)
        return self._maps[number]

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop) of the stream, as int64, and the positions in (start, stop] where a document ends.

        The positions are exclusive and counted from `start`: token `end - 1` is an end-of-text.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.tokens}")
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        tokens, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number in range(first, len(self.starts) - 1):
            origin = int(self.starts[number])
            if origin >= stop:
                break
            ids, document_ends = self.shard(number)
            low, high = max(start - origin, 0), min(stop - origin, len(ids))
            tokens.append(ids[low:high].astype(np.int64))
            near, far = np.searchsorted(document_ends, (low, high), side="right")
            ends.append(document_ends[near:far] + (origin - start))
        return np.concatenate(tokens), np.concatenate(ends)


def problems(folder: str | Path, index: dict[str, Any]) -> list[str]:
    """What is wrong with a folder of shards, every byte read; empty where nothing is."""
    folder = Path(folder)
    found = [] if index["complete"] else [f"{folder} is unfinished: the same `ccq data prepare` command resumes it"]
    for entry in index["shards"]:
        try:
            check_shard(folder, index, entry, checksum=True)
        except ShardError as error:
            found.append(str(error))
    listed = {entry["file"] for entry in index["shards"]}
    found += [f"{path} is not in the index" for path in sorted(folder.glob("shard-*.bin")) if path.name not in listed]
    for total in ("tokens", "documents"):
        if index["complete"] and sum(entry[total] for entry in index["shards"]) != index[total]:
            found.append(f"{folder / INDEX} is damaged: its shards do not add up to its {index[total]} {total}")
    return found
