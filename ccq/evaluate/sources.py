"""Evaluation data: files of `--data DIR` in their original fields, or the same from the Hub. What is missing or damaged
is named, with what it should be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ccq.evaluate.requests import EvaluationError
from ccq.files import open_text
from ccq.names import first_line
from ccq.pretrained import hub_or_cache

ENDINGS = (".jsonl.zst", ".jsonl", ".json.zst", ".json")


def find(folder: Path, name: str) -> Path | None:
    """The file `name` with one of ENDINGS."""
    return next((path for ending in ENDINGS if (path := folder / (name + ending)).is_file()), None)


def read(folder: Path, name: str, fields: Sequence[str]) -> list[dict]:
    """The rows of the file `name`, which must be there."""
    path = find(folder, name)
    if path is None:
        raise EvaluationError(f"{folder / name}.jsonl.zst is missing: expected JSON lines with {', '.join(fields)}")
    return rows(path, fields)


def rows(path: Path, fields: Sequence[str]) -> list[dict]:
    """The objects of a JSON lines file (or the one of a .json), each with at least `fields`."""
    wanted = f"expected JSON lines with the fields {', '.join(fields)}"
    found, number = [], 0
    try:
        with open_text(path) as file:
            lines = [file.read()] if path.name.removesuffix(".zst").endswith(".json") else file
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or not set(fields) <= row.keys():
                    got = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                    raise EvaluationError(f"{path}, line {number}: {wanted}, got {got}")
                found.append(row)
    except (OSError, ModuleNotFoundError, EvaluationError):
        raise
    except Exception as error:  # zstandard.ZstdError, UnicodeDecodeError, json.JSONDecodeError
        raise EvaluationError(f"{path} is damaged after line {max(0, number - 1)} ({error}): {wanted}") from error
    if not found:
        raise EvaluationError(f"{path} is empty: {wanted}")
    return found


@contextmanager
def from_hub(what: str, caught: type[Exception] = Exception, ships: str | None = None) -> Iterator[None]:
    """Loading inside, with a message that says what to do without a network; `ships` is a task that needs none."""
    reason = None
    try:
        with hub_or_cache() as reason:
            yield
    except (EvaluationError, ModuleNotFoundError):
        raise
    except caught as error:
        reason = reason or f"{type(error).__name__}: {first_line(error)}"
        instead = f", or use what ships with the package: --tasks {ships}" if ships else ""
        raise EvaluationError(
            f"{what} could not be loaded from the Hub or its cache ({reason}). "
            f"Without a network, give the data with --data DIR{instead}"
        ) from error


def longbench_archive(task: str) -> list[dict]:
    """The rows of a LongBench task from the archive on the Hub: its loading script no longer runs in `datasets`."""
    import zipfile

    from huggingface_hub import hf_hub_download

    with zipfile.ZipFile(hf_hub_download("THUDM/LongBench", "data.zip", repo_type="dataset")) as archive:
        name = next(x for x in archive.namelist() if x.endswith(f"/{task}.jsonl") or x == f"{task}.jsonl")
        # lines of bytes: those of a str also end at U+2028 and its like, which JSON may hold as they are
        return [json.loads(line) for line in archive.read(name).splitlines() if line.strip()]
