"""Checkpoints that a run can always go on from.

    RUN/checkpoints/step-00000500/     what PyTorch's distributed checkpoint writes, and complete.json
    RUN/checkpoints/*.partial          one that is being written, or whose writer died

A folder gets its name when all of it lies on disk, by a rename. complete.json has the size and sha256 of each file,
taken as it was written: one that was cut off or changed later is not loaded. Weights and moments are saved by name,
with their place in the whole tensor: any number of ranks can load what any other number saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from ccq.files import naming, sha256, write_json
from ccq.names import first_line
from ccq.train import RunError
from ccq.train.world import World

COMPLETE = "complete.json"
PARTIAL = ".partial"
FAILURES = (Exception, CheckpointException)  # torch makes the second a BaseException


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """Steps of the checkpoints in a folder, damaged ones counted, newest first."""
    numbers = (path.name.removeprefix("step-") for path in root.glob("step-*"))
    return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)


def problem(folder: Path, checksums: bool = False, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint, by names and sizes; with `checksums` by every byte of a rank's share of files.

    Versions before 0.2 wrote no checksums.
    """
    try:
        said = json.loads((folder / COMPLETE).read_text())
        files, sums = said["files"], said.get("sha256", {})
        for name, size in files.items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes of {size:,}"
        for name in sorted(sums)[rank::ranks] if checksums else ():
            if sha256(folder / name) != sums[name]:
                return f"{name} is not what was written: its sha256 is another"
    except FileNotFoundError:
        return f"{COMPLETE} is missing"
    except OSError as error:
        return str(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{COMPLETE} is damaged"
    return None


def newest(root: Path) -> int | None:
    """Step of the newest checkpoint that looks whole."""
    return next((step for step in steps_in(root) if problem(folder_of(root, step)) is None), None)


def load(
    root: Path, state: dict[str, Any], world: World, say: Callable[[str], None], only: int | None = None
) -> int | None:
    """Fill `state` in place from the newest checkpoint that is whole, or from that of step `only`.

    Returns its step, None where there is no checkpoint; RunError where all are damaged.
    """
    steps = world.from_main(steps_in(root) if only is None else [only])
    for step in steps:
        folder = folder_of(root, step)
        wrong = next(filter(None, world.gathered(problem(folder, True, world.rank, world.size))), None)
        if wrong is None:
            try:
                state_dict_loader.load(state, checkpoint_id=folder, process_group=world.background)
                return step
            except FAILURES as error:  # on all ranks, where it is one on any
                wrong = reason(error)
        if only is not None:
            raise RunError(f"{folder} is damaged: {wrong}")
        say(f"{folder} is damaged ({wrong}): taking the one before")
    if steps:
        raise RunError(f"every checkpoint in {root} is damaged; to start over, remove that folder")
    return None


class Summed(FileSystem):
    """Takes the sha256 of each file as it is written, before the disk can change a byte of it."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with naming(path), super().create_stream(path, mode) as stream:
            taken, write = hashlib.sha256(), stream.write

            def write_summed(content: Any) -> int:
                taken.update(content)
                return write(content)

            self.sums[Path(path).name], stream.write = taken, write_summed
            yield stream

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class Checkpoints:
    """Saves in the background, one at a time, and keeps the last few."""

    def __init__(self, root: Path, world: World, keep: int) -> None:
        self.root, self.world, self.keep = root, world, keep
        self.pending: Future | None = None
        self.thread = ThreadPoolExecutor(1)
        self.step: int | None = None  # of the one that is being written
        if world.main:
            root.mkdir(parents=True, exist_ok=True)
            for path in root.glob(f"*{PARTIAL}"):
                shutil.rmtree(path)

    def save(self, step: int, state: dict[str, Any], wait: bool = False) -> None:
        """Copy the state, then write it while training goes on; first wait for the one before."""
        self.wait()
        self.step, partial = step, self.root / (folder_of(self.root, step).name + PARTIAL)
        writer = FileSystemWriter(partial)
        writer.fs = summed = Summed()
        try:
            written: Any = async_save(state, storage_writer=writer, process_group=self.world.background)
        except FAILURES as error:
            raise self._failed(error) from error

        def seal() -> None:
            written.result()  # of rank 0: all ranks have written, and the metadata is there
            sums = self.world.gathered({name: taken.hexdigest() for name, taken in summed.sums.items()})
            if self.world.main:
                self._seal(partial, step, sums)

        self.pending = self.thread.submit(seal)
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

    def _seal(self, partial: Path, step: int, sums: list[dict[str, str]]) -> None:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        sha256 = {name: taken for each in sums for name, taken in each.items()}
        write_json(partial / COMPLETE, {"step": step, "world": self.world.size, "files": files, "sha256": sha256})
        folder = folder_of(self.root, step)
        if folder.exists():  # damaged: else the run would have gone on from it
            self._remove(folder)
        os.rename(partial, folder)
        if os.name == "posix":  # its name too is to lie on the disk
            handle = os.open(self.root, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
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
        return RunError(f"{self.root}: step {self.step} could not be written: {reason(error)}. {self.left()}")

    def left(self) -> str:
        """What a run that stops now can go on from; what is being written may still become that."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with contextlib.suppress(*FAILURES):
                pending.result(timeout=60)
        step = newest(self.root)
        return f"The last good checkpoint is {folder_of(self.root, step)}." if step else "There is no checkpoint yet."


def reason(error: BaseException) -> str:
    """One line of what a failure of a distributed checkpoint comes down to."""
    failures = getattr(error, "failures", None)  # CheckpointException: {rank: (error, trace)}
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {reason(inner)}"
    return f"{type(error).__name__}: {first_line(error)}"
