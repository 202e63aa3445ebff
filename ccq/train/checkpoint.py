"""Checkpoints that a run can always go on from.

    RUN/checkpoints/step-00000500/     what PyTorch's distributed checkpoint writes, and complete.json
    RUN/checkpoints/*.partial          one that is being written, or whose writer died

A folder gets its name when all of it lies on disk, by a rename, and complete.json says what that is, so that a file
that was cut off later shows. Weights and moments are saved by name, with their place in the whole tensor: any number of
ranks can load what any other number saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ccq.files import write_json
from ccq.train import RunError
from ccq.train.world import World

COMPLETE = "complete.json"
PARTIAL = ".partial"
FAILURES = (Exception, CheckpointException)  # torch makes the second a BaseException


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """Steps of the checkpoints in a folder, damaged ones counted, newest first."""
    found = []
    for path in root.glob("step-*"):
        with contextlib.suppress(ValueError):
            found.append(int(path.name.removeprefix("step-")))
    return sorted(found, reverse=True)


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, as far as names and sizes tell."""
    try:
        files = json.loads((folder / COMPLETE).read_text())["files"]
    except FileNotFoundError:
        return f"{COMPLETE} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{COMPLETE} is damaged"
    for name, size in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes of {size:,}"
    return None


def newest(root: Path) -> int | None:
    """Step of the newest checkpoint that looks whole."""
    return next((step for step in steps_in(root) if problem(folder_of(root, step)) is None), None)


class Checkpoints:
    """Saves in the background, one at a time, and keeps the last few."""

    def __init__(self, root: Path, world: World, keep: int) -> None:
        self.root, self.world, self.keep = root, world, keep
        self.pending: Future | None = None
        self.step: int | None = None  # of the one that is being written
        if world.main:
            root.mkdir(parents=True, exist_ok=True)
            for path in root.glob(f"*{PARTIAL}"):
                shutil.rmtree(path)

    def save(self, step: int, state: dict[str, Any], wait: bool = False) -> None:
        """Copy the state, then write it while training goes on; first wait for the one before."""
        self.wait()
        partial = self.root / (folder_of(self.root, step).name + PARTIAL)
        self.step, self.pending = step, Future()
        sealed = self.pending

        def seal(written: Future) -> None:  # in the thread that wrote
            try:
                written.result()  # of rank 0: all ranks have written, and the metadata is there
                if self.world.main:
                    self._seal(partial, step)
                sealed.set_result(None)
            except BaseException as error:
                sealed.set_exception(error)

        try:
            future = async_save(state, checkpoint_id=partial, process_group=self.world.background)
        except FAILURES as error:
            self.pending = None
            raise self._failed(error) from error
        assert isinstance(future, Future)
        future.add_done_callback(seal)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until what is being written lies on disk."""
        pending, self.pending = self.pending, None
        if pending is not None:
            try:
                pending.result()
            except FAILURES as error:
                raise self._failed(error) from error

    def _seal(self, partial: Path, step: int) -> None:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        content = {"step": step, "world": self.world.size, "files": files}
        write_json(partial / COMPLETE, content)
        folder = folder_of(self.root, step)
        if folder.exists():  # damaged: else the run would have gone on from it
            self._remove(folder)
        os.rename(partial, folder)
        _sync(self.root)
        for old in [s for s in steps_in(self.root) if s < step][self.keep - 1 :]:
            self._remove(folder_of(self.root, old))

    def _remove(self, folder: Path) -> None:
        """Never half: what is being removed has no name that counts."""
        away = folder.with_name(folder.name + ".old" + PARTIAL)
        os.rename(folder, away)
        shutil.rmtree(away)

    def _failed(self, error: BaseException) -> RunError:
        if self.world.main:
            for path in self.root.glob(f"*{PARTIAL}"):
                shutil.rmtree(path, ignore_errors=True)
        return RunError(
            f"the checkpoint of step {self.step} could not be written to {self.root}: {reason(error)}. {self.left()}"
        )

    def left(self) -> str:
        """What a run that stops now can go on from; what is being written may still become that."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with contextlib.suppress(*FAILURES):
                pending.result(timeout=60)
        step = newest(self.root)
        if step is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {folder_of(self.root, step)}."

    def load(self, state: dict[str, Any], say: Callable[[str], None]) -> bool:
        """Fill `state` in place from the newest checkpoint that can be read; False where there is none."""
        found = [(s, problem(folder_of(self.root, s))) for s in steps_in(self.root)] if self.world.main else []
        found = self.world.from_main(found)
        for step, wrong in found:
            folder = folder_of(self.root, step)
            if wrong is None:
                try:
                    load(state, checkpoint_id=folder, process_group=self.world.background)
                    return True
                except FAILURES as error:  # on all ranks, where it is one on any
                    wrong = reason(error)
            say(f"{folder} is damaged ({wrong}): taking the one before")
        if found:
            raise RunError(f"every checkpoint in {self.root} is damaged; to start over, remove that folder")
        return False


def reason(error: BaseException) -> str:
    """One line of what a failure of a distributed checkpoint comes down to."""
    failures = getattr(error, "failures", None)  # CheckpointException: {rank: (error, trace)}
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {reason(inner)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _sync(folder: Path) -> None:
    """The names in a folder, onto the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
