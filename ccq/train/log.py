"""What one sees of a run: a progress bar (lines, where there is no terminal), log.jsonl and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ccq.files import finite, naming, write_atomically
from ccq.names import duration
from ccq.tables import progress
from ccq.train import folder
from ccq.train.config import Config

# columns of the bar: name in the record, heading, format
SHOWN = (
    ("loss", "loss", "{:.4f}"),
    ("lr", "lr", "{:.2e}"),
    ("tokens_per_second", "tok/s", "{:,.0f}"),
    ("mfu", "MFU", "{:.1%}"),
    ("lam", "lam", "{:.3f}"),
)


class Log:
    """Of rank 0; on the others it does nothing."""

    def __init__(self, run: Path, config: Config, main: bool) -> None:
        self.run, self.config, self.main = run, config, main
        self.file: Any = None
        self.board: Any = None
        self.bar: Any = None

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text)
        elif self.main:
            print(text, flush=True)

    def open(self, step: int) -> None:
        """Begin at `step`; what an earlier process logged after it is dropped, since it is computed again."""
        if not self.main:
            return
        path = self.run / folder.LOG
        if path.exists():
            kept = [line for line in path.read_text(errors="replace").splitlines() if _step_of(line) <= step]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())
        self.file = open(path, "a")  # noqa: SIM115 -- closed by close
        if self.config.runtime.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(self.run / "tensorboard"), purge_step=step + 1)
            except ModuleNotFoundError:
                self.say(f"tensorboard is not installed: {path} has all that is logged")
        if sys.stdout.isatty() and sys.stderr.isatty():  # else lines
            self.bar = progress("training", self.config.steps, " steps", done=step)

    def close(self) -> None:
        for part in (self.bar, self.file, self.board):
            if part is not None:
                with contextlib.suppress(OSError):  # a full disk is told with the last good checkpoint, not from here
                    part.close()
        self.bar = self.file = self.board = None

    def record(self, step: int, seconds_left: float | None = None, **values: Any) -> None:
        """Keep what is known of a step. Lists have one number a layer; text goes to TensorBoard as text."""
        if not self.main:
            return
        with naming(self.file.name):
            self.file.write(json.dumps({"step": step, **finite(values)}) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, str):
                    self.board.add_text(name, value, step)
                elif isinstance(value, list):
                    for layer, x in enumerate(value):
                        self.board.add_scalar(f"{name}/layer_{layer}", x, step)
                elif isinstance(value, int | float):
                    self.board.add_scalar(name.replace("lam_of_", "lam/"), value, step)  # beside the gates
        if "loss" not in values:
            return
        known = [(values[name], heading, form) for name, heading, form in SHOWN if values.get(name) is not None]
        shown = " ".join(f"{heading} {form.format(np.mean(value))}" for value, heading, form in known)
        if self.bar is None:
            left = "" if seconds_left is None else f" left {duration(seconds_left)}"
            print(f"step {step}/{self.config.steps} {shown}{left}", flush=True)
        else:  # which says how long it takes
            self.bar.set_postfix_str(shown, refresh=False)
        self.advance(step)

    def advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf  # cut off by the death of its process
