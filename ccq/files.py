"""Files, wherever the package reads or writes them: whole or not at all, one process at a time, packed by zstd or not,
and damaged ones named."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import socket
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

# what from_pretrained reads in a folder
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors*", "pytorch_model*.bin*", "modeling_ccq.py",
               *TOKENIZER_FILES)  # fmt: skip
ADAPTER_FILES = ("adapter_*", "ccq_adapter.*")  # of PEFT and of ccq.save_adapter: with one, a folder is another model


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """An OSError from inside names the file: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when all of it is on the disk, also when the machine goes down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with naming(path), open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, f"{json.dumps(content, indent=1)}\n".encode())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite(thing: Any) -> Any:
    """Infinite and undefined numbers as null: JSON has none."""
    if isinstance(thing, dict):
        return {key: finite(x) for key, x in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [finite(x) for x in thing]
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing


def check_free(folder: Path, force: bool | None, ours: bool = False, older: str = "") -> None:
    """FileExistsError unless a command may write into the folder: none is there, it is empty, what lies there is `ours`
    (`older` says what that would be), or the user says `force` (None: cannot). The folder of a run never is free."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: expected a folder to write, or none")
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    inside = sorted(there - {"lock", ".lock", ".partial"})
    if "config.json" in inside and {"checkpoints", "data.json", "log.jsonl"} & set(inside):
        raise FileExistsError(f"{folder} is a run of `ccq train`, which is not overwritten: choose another folder")
    if inside and not ours and not force:
        found = ", ".join(inside[:4]) + (f" and {len(inside) - 4} more" if len(inside) > 4 else "")
        raise FileExistsError(
            f"{folder} is not empty, it holds {found}: expected a new or an empty folder{older and f', or {older}'}. "
            f"Choose another{'' if force is None else ', or give --force to write there'}"
        )


def replaceable(path: Path, **like: Any) -> Path:
    """The path; FileExistsError unless nothing is there, or JSON with these values: an older result of the same."""
    with suppress(FileNotFoundError):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict) or any(found.get(name) != value for name, value in like.items()):
            raise FileExistsError(f"{path} holds something else, which stays: choose another --out, or remove it")
    return path


@contextmanager
def whole_folder(folder: Path, last: str, instead_of: Sequence[str] = ()) -> Iterator[Path]:
    """Where to write what `folder` is to hold: it gets its name when all of it is there.

    In a folder that exists already, files of the same name are replaced and those that match one of `instead_of`
    removed; others stay. The file `last` is gone before the first of them changes and comes back after all others.
    """
    folder = folder.resolve()  # renaming takes one file system, and `.` has no name
    partial = folder / ".partial" if folder.is_dir() else folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if not folder.exists():
            os.rename(partial, folder)
            return
        (folder / last).unlink(missing_ok=True)
        for old in {path for pattern in instead_of for path in folder.glob(pattern) if not path.is_dir()}:
            old.unlink()
        for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def locked(path: Path, error: type[Exception]) -> Iterator[None]:
    """Hold the lock file at `path`; `error` where another process does. The system lets go when a process dies."""
    if path.parent.is_file():
        raise error(f"{path.parent} is a file: expected a folder, or none")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        if not _try_lock(file):
            file.seek(0)
            raise error(f"{path.parent} is in use by another process: {file.read().strip() or 'unknown'}")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _try_lock(file: IO) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class DamagedError(ValueError):
    """Not packed as its name says, or cut off."""


def read_json(path: Path, error: type[Exception], expected: str) -> Any:
    """What the JSON file holds; `error` where it is missing or damaged, naming it and what was expected."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} is missing: expected {expected}") from None
    except ValueError as damage:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(f"{path} is damaged ({damage}): expected {expected}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """What the TOML file holds; its texts "None" are None, which TOML has not."""

    def meant(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: meant(value) for name, value in x.items()}
        return [meant(value) for value in x] if isinstance(x, list) else None if x == "None" else x

    return meant(tomllib.loads(path.read_text(encoding="utf-8")))


def stored(path: Path) -> Path | None:
    """Where the content of `path` lies: there, or packed beside it as `path`.zst; None: nowhere."""
    return next((found for found in (path, path.with_name(path.name + ".zst")) if found.exists()), None)


def open_text(path: Path, errors: str = "strict") -> TextIO:
    """The text of a file, packed by zstd or not."""
    found = stored(path) or path
    raw = found.open("rb")
    return io.TextIOWrapper(unpacked(raw) if found.suffix == ".zst" else raw, encoding="utf-8", errors=errors)


def read_text(path: Path, errors: str = "strict") -> str:
    with open_text(path, errors) as file:
        return file.read()


def unpacked(raw: BinaryIO, packed: str = "zstd") -> io.BufferedReader:
    """The content of a file packed by zstd or gzip, of one frame or several; DamagedError where it is cut off."""
    return io.BufferedReader(_Unpacked(raw, packed), 2**16)


class _Unpacked(io.RawIOBase):
    def __init__(self, raw: BinaryIO, packed: str) -> None:
        import pyarrow

        self.stream = pyarrow.CompressedInputStream(raw, packed)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.stream.close()
        super().close()

    def readinto(self, out: Any) -> int:
        try:
            return self.stream.readinto(out)
        except OSError as error:  # Arrow's word for damage too
            raise DamagedError(f"{error}: was it cut off?") from None
