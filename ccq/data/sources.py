"""Documents out of files, folders and Hub datasets, in a fixed order, a piece at a time.

A document is a text file, a line of JSONL, a row of Parquet or of a dataset. Long ones come in pieces, so that memory
does not grow with them.
"""

from __future__ import annotations

import fnmatch
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ccq.data import DataError
from ccq.files import DamagedError, unpacked
from ccq.names import first_line, nearest

TEXT, LINES, PARQUET = (".txt", ".md"), (".jsonl", ".ndjson", ".json"), (".parquet",)
PACKED = ("", ".gz", ".zst")
SUFFIXES = tuple(kind + packed for kind in TEXT + LINES for packed in PACKED) + PARQUET

PIECE = 2**18  # characters: what a tokenizer is given at once; its memory is a hundred times that


class Position(NamedTuple):
    """Where reading goes on: the number of the file (0 for a dataset), and of the document in it."""

    file: int = 0
    record: int = 0


BEGINNING = Position()


class Piece(NamedTuple):
    """A part of a document, in order; `last` ends it."""

    id: str
    text: str
    last: bool
    next: Position  # where to read on after this document
    read: int  # how much of `Inputs.size` is behind us
    needle: bool = False  # made by ccq.data.needles


class File(NamedTuple):
    name: str  # as asked for: below the folder that was given, or the file's own name
    path: Path
    bytes: int


@dataclass(frozen=True)
class Inputs:
    """What to read: files and folders, or one dataset of the Hub."""

    paths: tuple[Path, ...] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    field: str = "text"
    id_field: str = "id"
    filter: tuple[str, ...] = ()  # keep documents whose id begins with one of these
    exclude: tuple[str, ...] = ()  # leave out files with such a name (shell patterns), where a folder is given

    def __post_init__(self) -> None:
        if bool(self.paths) == bool(self.dataset):
            raise DataError("expected files or folders, or a dataset: one of them")

    def files(self) -> list[File]:
        """The files in the order they are read: as given, folders sorted by name."""
        found = []
        for path in self.paths:
            if path.is_dir():
                inside = [p for p in self._inside(path) if p.name.endswith(SUFFIXES)]
                if not inside:
                    raise DataError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}")
                found += [File(p.relative_to(path).as_posix(), p, p.stat().st_size) for p in inside]
            elif not path.exists():
                raise DataError(f"{path} does not exist")
            elif not path.name.endswith(SUFFIXES):
                raise DataError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
            else:
                found.append(File(path.name, path, path.stat().st_size))
        return found

    def skipped(self) -> list[Path]:
        """The files of folders that are of no kind we read."""
        return [p for path in self.paths for p in self._inside(path) if not p.name.endswith(SUFFIXES)]

    def _inside(self, path: Path) -> list[Path]:
        """The files of a folder, without those excluded; none of a file."""
        files = (p for p in sorted(path.rglob("*")) if p.is_file())
        return [p for p in files if not any(fnmatch.fnmatch(p.name, pattern) for pattern in self.exclude)]

    def describe(self) -> dict[str, Any]:
        """What identifies the input, for the index."""
        options = {"field": self.field, "id_field": self.id_field, "filter": list(self.filter)}
        if self.dataset:
            names = {"dataset": self.dataset, "subset": self.subset, "split": self.split, "revision": self.revision}
            return names | options
        return {"files": [{"name": f.name, "bytes": f.bytes} for f in self.files()]} | options

    def size(self) -> int | None:
        """How much there is to read: bytes of files, documents of a dataset where it says so."""
        if not self.dataset:
            return sum(f.bytes for f in self.files())
        splits = self._load().info.splits
        return splits[self.split].num_examples if splits and self.split in splits else None

    def pieces(self, start: Position = BEGINNING) -> Iterator[Piece]:
        """The documents from `start` on that pass the filter and are not empty."""
        if self.dataset:
            rows = self._load()
            for record, row in enumerate(rows.skip(start.record) if start.record else rows, start.record):
                where = f"{self.dataset}, row {record}"
                yield from self._of_row(row, self.dataset, Position(0, record + 1), record + 1, where)
            return
        behind = 0
        for number, file in enumerate(self.files()):
            if number >= start.file:
                yield from self.of_file(file, number, start.record if number == start.file else 0, behind)
            behind += file.bytes

    def of_file(self, file: File, number: int = 0, start: int = 0, behind: int = 0) -> Iterator[Piece]:
        """The documents of one file from number `start` on; `behind` bytes of files were read before."""
        if file.name.endswith(PARQUET):
            yield from self._of_parquet(file, number, start, behind)
            return
        with open(file.path, "rb") as raw, naming_damage(file.path, (DamagedError,)):
            packed = {".zst": "zstd", ".gz": "gzip"}.get(file.path.suffix)
            content = raw if packed is None else unpacked(raw, packed)
            if Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix in TEXT:
                if start == 0 and self._kept(file.name):
                    text = io.TextIOWrapper(content, "utf-8-sig", newline="")  # never held whole
                    blocks = ((block, behind + raw.tell()) for block in iter(lambda: text.read(PIECE), ""))
                    try:
                        yield from in_pieces(file.name, blocks, Position(number, 1))
                    except UnicodeDecodeError as error:
                        raise DataError(f"{file.path}: no UTF-8: {error}") from None
                return
            for record, line in enumerate(content):
                if record < start or not line.strip():
                    continue
                where = f"{file.path}, line {record + 1}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
                    raise DataError(f"{where}: no JSON: {error}") from None
                yield from self._of_row(row, file.name, Position(number, record + 1), behind + raw.tell(), where)

    def _of_parquet(self, file: File, number: int, start: int, behind: int) -> Iterator[Piece]:
        import pyarrow.parquet

        with (
            naming_damage(file.path, (pyarrow.ArrowException, OSError)),
            pyarrow.parquet.ParquetFile(file.path) as table,
        ):
            names = table.schema_arrow.names
            self._check_field(names, str(file.path))
            columns = [name for name in (self.field, self.id_field) if name in names]
            first, rows = 0, max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=64, columns=columns):
                skip = min(max(start - first, 0), len(batch))
                for record, row in enumerate(batch.slice(skip).to_pylist(), first + skip):
                    read = behind + file.bytes * (record + 1) // rows
                    where = f"{file.path}, row {record}"
                    yield from self._of_row(row, file.name, Position(number, record + 1), read, where)
                first += len(batch)

    def _of_row(self, row: Any, name: str, next: Position, read: int, where: str) -> Iterator[Piece]:
        """The document of a row in the file `name`, if it passes the filter; `where` is its place for an error."""
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object with a field {self.field!r}, got {type(row).__name__}")
        id = str(row.get(self.id_field, f"{name}#{next.record - 1}"))
        if self._kept(id):
            self._check_field(list(row), where)
            text = row[self.field]
            if text is not None and not isinstance(text, str):
                raise DataError(f"{where}: field {self.field!r} must be text, got {type(text).__name__}")
            yield from in_pieces(id, [(text or "", read)], next)

    def _kept(self, id: str) -> bool:
        return not self.filter or id.startswith(self.filter)

    def _check_field(self, names: list[str], where: str) -> None:
        if self.field not in names:
            meant = nearest(self.field, tuple(names))
            raise DataError(f"{where}: no field {self.field!r}.{meant} It has: {', '.join(names)}.")

    def _load(self) -> Any:
        import datasets

        from ccq.pretrained import hub_or_cache

        with hub_or_cache() as reason:
            try:
                return datasets.load_dataset(
                    self.dataset, self.subset, split=self.split, revision=self.revision, streaming=True
                )
            except Exception as error:
                if reason is None:
                    raise
                raise DataError(f"--dataset {self.dataset}: the Hub cannot be reached ({reason})") from error


def in_pieces(id: str, blocks: Iterable[tuple[str, int]], next: Position) -> Iterator[Piece]:
    """A document out of blocks of text, each with how much is read after it."""
    rest, read = "", 0
    for text, read in blocks:
        rest, start = rest + text, 0
        while len(rest) - start > PIECE:
            end = start + cut_before(rest[start : start + PIECE])
            yield Piece(id, rest[start:end], False, next, read)
            start = end
        rest = rest[start:]
    if rest:
        yield Piece(id, rest, True, next, read)


def cut_before(text: str) -> int:
    """Where best to end a piece: before the last white space that follows something else.

    There no token of a byte-level BPE goes across, so that the pieces have the tokens of the whole.
    """
    last = re.search(r"\s(?=\S)", text[::-1])
    return len(text) - 1 - last.start() if last else len(text)


@contextmanager
def naming_damage(path: Path, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """While the file is read: an error of its library becomes one that names it."""
    try:
        yield
    except errors as error:
        raise DataError(f"{path} is damaged: {first_line(error)}") from error
