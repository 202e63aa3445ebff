"""The runs of `ccq sweep`: those of a row side by side on one device, each on its own stream, rows in processes."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from ccq.files import write_atomically
from ccq.names import duration, first_line, nearest
from ccq.systems import recipe_name
from ccq.train import RunError

TEST_SEED = 0  # the test samples are the same for all runs
QUIET = 20  # seconds after which a row says how far it is


@dataclass(frozen=True)
class Spec:
    row: str  # a system, with _ for -
    size: str
    lr: float
    seed: int
    steps: int
    repeat: int = 0  # the same run once more
    decay: float | None = None  # of the weights; None: the recipe's
    changes: tuple[tuple[str, Any], ...] = ()  # fields of the recipe, by dotted name

    @property
    def name(self) -> str:
        where = "-" + hashlib.sha256(repr(self.changes).encode()).hexdigest()[:8] if self.changes else ""
        decay = "" if self.decay is None else f"-wd{self.decay:g}"
        rate = short if float(short := f"{self.lr:.2e}") == self.lr else repr(self.lr)  # two rates, two names
        return f"{self.row}-{self.size}-lr{rate}{decay}-seed{self.seed}-steps{self.steps}-r{self.repeat}{where}"

    @staticmethod
    def row_of(name: str) -> str:
        return name.partition("-")[0]

    @staticmethod
    def changed(name: str) -> str:
        """The hash of its changes; "" where it has none."""
        return re.split(r"-r\d+", name)[-1].lstrip("-")

    def config(self) -> Any:
        from ccq.recipes import recipe
        from ccq.train.config import identified

        config = recipe(recipe_name(self.row, self.size))
        config.identity = dataclasses.replace(config.identity, repeat=self.repeat)
        config.optimizer.lr, config.seed, config.steps = self.lr, self.seed, self.steps
        if self.decay is not None:
            config.optimizer.weight_decay = self.decay
        config.runtime.validate_every = max(1, self.steps // 10 if self.steps <= 2_000 else self.steps // 20)
        for name, value in self.changes:
            *path, last = name.split(".")
            part = functools.reduce(getattr, path, config)
            if not hasattr(part, last):
                raise RunError(f"--set {name}: a recipe has no such field.{nearest(last, tuple(vars(part)))}")
            setattr(part, last, value)
        config.check()
        return identified(config)


def of_data(spec: Spec) -> Spec:
    """What decides the data: the same for all rows, rates and decays."""
    return dataclasses.replace(spec, row="gla", lr=1e-3, decay=None, repeat=0)


@functools.cache
def shared_data(spec: Spec, device: Any) -> Any:
    """Of a seed, kept for the rows to come."""
    from ccq.train.recall import RecallData

    return RecallData.of(spec.config(), device)


@functools.cache
def test_data(spec: Spec, samples: int, device: Any) -> list:
    from ccq.train.data import recall_source
    from ccq.train.recall import samples_of

    config = spec.config()
    source = recall_source(config, tuple((*s[:2], samples) for s in config.data.valid_slices), "test")
    return samples_of(source, device)


def train_together(specs: Sequence[Spec], options: Namespace) -> None:
    """Train the runs in lockstep, each on its own stream, and write what each found."""
    from ccq.train.recall import RecallRun, result
    from ccq.train.world import pick_device

    device = pick_device(options.device, 0)
    begin = time.perf_counter()
    row = specs[0].row
    say(f"{row}: {len(specs)} runs; on a GPU its kernels are compiled and tuned now")
    runs = []
    for spec in specs:
        run = RecallRun(spec.config(), device, shared_data(of_data(spec), device))
        runs.append(run.start(capture=not options.no_capture))
    ready = said = time.perf_counter()
    say(f"{row}: {len(runs)} runs ready after {ready - begin:.0f} s")

    steps, every = specs[0].steps, runs[0].config.runtime.validate_every
    training = looking = 0.0  # seconds of all runs

    def passed(since: float) -> float:
        for run in runs:
            run.wait()
        return time.perf_counter() - since

    since = ready
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            training += passed(since)
            since = time.perf_counter()
            for run in runs:
                run.look(step)
            looking += passed(since)
            since = time.perf_counter()
        if step < steps:
            for run in runs:
                run.advance(step)
        if step == 0 or (time.perf_counter() - said > QUIET and step + 1 < steps):
            if step == 0:
                left = passed(since) * steps + looking * (steps // every)
            else:
                left = (time.perf_counter() - ready) / (step + 1) * (steps - step - 1)
            turns = -(-options.groups // max(1, options.workers))
            all_of_them = f"; all {options.groups} rows about {duration(left * turns)}" if turns > 1 else ""
            say(f"{row}: step {step + 1:,} of {steps:,}, about {duration(left)} to go{all_of_them * (step == 0)}")
            said = time.perf_counter()
    seconds, each = time.perf_counter() - ready, training / steps * 1e3
    for spec, run in zip(specs, runs, strict=True):
        with run.on_stream():
            tests = test_data(dataclasses.replace(of_data(spec), seed=TEST_SEED), options.test_samples, device)
        found = {"name": spec.name, "row": spec.row, "size": spec.size, **result(run, tests)}
        found |= {"seconds": round(seconds, 2), "step_ms": round(each, 3), "side_by_side": len(runs)}
        found |= {"captured": run.captured} | ({} if spec.decay is None else {"decay": spec.decay})
        write_atomically(options.out / "runs" / f"{spec.name}.json", f"{json.dumps(found)}\n".encode())
        say(
            f"{spec.name}: valid {found['valid']['accuracy']:.4f}, test {found['test']['accuracy']:.4f}, "
            f"loss {found['curve']['loss'][-1]:.3f}, {each:.2f} ms a step of {len(runs)}, without validation"
        )


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def work(specs: Sequence[Spec], options: Namespace) -> None:
    train_together(specs, options)
    gc.collect()  # graphs of finished runs hold memory


def begin() -> None:
    """In a worker process: what Ctrl-C means, its parent decides; without a parent there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def run_all(groups: list[list[Spec]], options: Namespace, deadline: float) -> list[dict[str, Any]]:
    """Every group by some worker; returns the runs that failed. Stops at `deadline` (time.monotonic)."""
    failed: list[dict[str, Any]] = []

    def fail(specs: Sequence[Spec], error: BaseException) -> None:
        traceback.print_exception(error)
        died = isinstance(error, BrokenProcessPool)
        told = "its process died: was memory short?" if died else f"{type(error).__name__}: {first_line(error)}"
        for spec in specs:
            say(f"{spec.name} failed: {told}")
            failed.append({"name": spec.name, "row": spec.row, "lr": spec.lr, "seed": spec.seed,
                           "repeat": spec.repeat, "error": told})  # fmt: skip

    def worker() -> ProcessPoolExecutor:  # of one process, which dies alone; CUDA does not survive a fork
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin)

    todo = list(groups)
    while options.workers == 0 and todo and time.monotonic() < deadline:
        specs = todo.pop(0)
        try:
            work(specs, options)
        except Exception as error:
            fail(specs, error)
    idle = [worker() for _ in range(min(options.workers, len(todo)))]
    busy: dict[Future, tuple[ProcessPoolExecutor, list[Spec]]] = {}
    try:
        while (todo or busy) and (left := deadline - time.monotonic()) > 0:
            while todo and idle:
                pool, specs = idle.pop(), todo.pop(0)
                busy[pool.submit(work, specs, options)] = pool, specs
            for future in wait(busy, min(left, 5.0), FIRST_COMPLETED).done:
                pool, specs = busy.pop(future)
                if wrong := future.exception():
                    fail(specs, wrong)
                    pool.shutdown(wait=False)
                    pool = worker()  # what the old one held of a GPU goes with it
                idle.append(pool)
        if todo or busy:
            say("the time is up")
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
    return failed
