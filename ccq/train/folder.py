"""The folder of a run: one process at a time, one config, one set of data.

config.json    the resolved config            log.jsonl      what was logged
data.json      what data it was trained on    tensorboard/   the same for TensorBoard
checkpoints/   see checkpoint.py              tokenizer/     where the data has one
lock           held while a process trains
provenance.json   where, when and by what it was trained: a list, one more whenever it goes on
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from ccq import files
from ccq.data.shards import TokenShards
from ccq.files import read_json, write_atomically, write_json
from ccq.names import first_line
from ccq.provenance import provenance
from ccq.train import RunError
from ccq.train import config as configs
from ccq.train.config import Config

CONFIG, DATA, LOG, LOCK, CHECKPOINTS, TOKENIZER, PROVENANCE = (
    "config.json", "data.json", "log.jsonl", "lock", "checkpoints", "tokenizer", "provenance.json",
)  # fmt: skip


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the folder; RunError where another process does."""
    return files.locked(folder / LOCK, RunError)


def fingerprint(path: str | None) -> str | None:
    """Of the tokens in a folder of shards, wherever it lies."""
    if path is None:
        return None
    index = TokenShards(path, checksums=False).index
    what = [index["tokenizer"]["hash"], [shard["sha256"] for shard in index["shards"]]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def claim(folder: Path, config: Config, done: int = 0) -> None:
    """Make a new run's files, or check that this is the same run, of which `done` steps are taken; RunError names the
    field that differs."""
    data = {"path": fingerprint(config.data.path), "valid_path": fingerprint(config.data.valid_path)}
    path = folder / CONFIG
    if path.exists():
        different = configs.differences(configs.read(path), config)
        if (folder / DATA).exists():
            before = read_data(folder / DATA)
            changed = [name for name in data if before[name] != data[name]]
            different += [f"data.{name}: {other_tokens(getattr(config.data, name), before[name])}" for name in changed]
        if [line for line in different if line.startswith("steps:")] == different != []:
            raise RunError(
                f"{folder}: {different[0]}. Its cosine schedule ends at its last step, so a longer run would differ "
                "from its first step on. To continue its weights, start a new run: --init "
                f"{folder} --run-dir ANOTHER. (With --optimizer.schedule constant a run can be extended.)"
            )
        if done > config.steps:
            different.append(f"steps: the run is at step {done}, asked for {config.steps}")
        if different:
            raise RunError(f"{folder} holds another run: {'; '.join(different)}. Choose another --run-dir.")
    elif held := [name for name in (LOG, CHECKPOINTS, PROVENANCE) if (folder / name).exists()]:  # it would replace them
        raise RunError(f"{folder} holds {', '.join(held)} and no {CONFIG}: choose another --run-dir")
    text: dict[str, int] = {}  # for who reads the results: how much of it is there, and of needle documents
    needles = None
    if config.data.path is not None:
        shards = TokenShards(config.data.path, checksums=False)
        text = {name: shards.index[name] for name in ("tokens", "needle_tokens") if name in shards.index}
        needles = text["needle_tokens"] / text["tokens"] if len(text) == 2 and text["tokens"] else None
        tokenizer = shards.tokenizer_folder
        if tokenizer.is_dir() and not (folder / TOKENIZER).exists():
            with files.whole_folder(folder / TOKENIZER, last="tokenizer.json") as copy:
                shutil.copytree(tokenizer, copy, dirs_exist_ok=True)
    write_json(folder / DATA, {**data, **text})
    write_atomically(path, configs.to_json(configs.identified(config, needles)).encode())


def mark(folder: Path) -> str:
    """A hash that tells the run from others, wherever it lies: of all that `claim` holds fast, and its repeat."""
    config = configs.read(folder / CONFIG)
    data = read_data(folder / DATA) if (folder / DATA).exists() else None
    what = [configs.fixed(config), config.identity.repeat, data]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def read_data(path: Path) -> dict[str, str | None]:
    """Fingerprints of what the run is trained and validated on."""
    expected = "what the run wrote of its data"
    found = read_json(path, RunError, expected)
    try:
        return {name: found[name] for name in ("path", "valid_path")}
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error!r}): expected {expected}") from None


def other_tokens(given: str | None, before: str | None) -> str:
    if given is None:
        return "the run began with tokens, got none"
    if before is None:
        return f"the run began without, got {given}"
    return f"the tokens in {given} are not those that the run began with"


def note_origin(folder: Path, step: int, say: Callable[[str], None] = print, init: str | None = None) -> None:
    """Say where the run goes on from `step`; it may be another machine, or other code, than it began with."""
    path = folder / PROVENANCE
    kept: list[dict] = []
    try:
        before = read_json(path, RunError, "a list of where the run began and went on") if path.exists() else []
        kept = [part for part in before if part["step"] < step]  # what came after is trained again
    except (RunError, TypeError, KeyError) as damage:  # weights do not hang on it
        say(f"{path} is damaged and started anew ({first_line(damage)})")
    write_json(path, [*kept, {"step": step, **provenance(), **({} if init is None else {"init": init})}])
