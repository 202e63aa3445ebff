"""The training loop: all that happens around the steps of trainer.py.

A batch is a function of (seed, step), weights and moments are saved by name, and generators are seeded anew each step:
so the state of a run is its weights, its moments and the step. On a CPU, and on as many ranks as before, it goes on to
the bit; on another number of them with the same data, and gradients that are added up in another order.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ccq.data import DataError
from ccq.data.batches import Batch, Steps, iterating
from ccq.doctor import check_cpu_bf16
from ccq.model.info import info
from ccq.names import duration, first_line, plural
from ccq.train import RunError, folder
from ccq.train.checkpoint import Checkpoints, folder_of, load, newest, problem
from ccq.train.config import Config, model_config
from ccq.train.data import accumulation, longest, train_source, valid_source
from ccq.train.gpus import peak_flops
from ccq.train.log import Log
from ccq.train.monitor import sample, summary, tokenizer_of, validate
from ccq.train.optimizer import pure_decay
from ccq.train.parallelize import freeze, make_model
from ccq.train.trainer import Done, Trainer
from ccq.train.world import World, join


def train(config: Config, run: Path) -> int:
    """Train, or go on training, in the folder `run`. Returns the exit code; RunError says what stops a run."""
    config.check()
    with join(config.runtime.device, config.runtime.timeout) as world, contextlib.ExitStack() as stack:
        on_main(world, lambda: stack.enter_context(folder.locked(run)))
        accumulation(config, world.size)
        root = run / folder.CHECKPOINTS
        finished = world.main and newest(root) == config.steps
        finished = world.from_main(finished and problem(folder_of(root, config.steps), checksums=True) is None)
        if not finished:
            on_main(world, lambda: check_cpu_bf16(world.device.type, config.dtype))
        # before the folder is this run's, and the one time that all data is read
        on_main(world, lambda: (train_source(config), valid_source(config)))
        if not config.foreign:  # whose names only its weights tell
            on_main(world, lambda: freeze(make_model(config, torch.device("meta")), config))
        on_main(world, lambda: folder.claim(run, config, newest(root) or 0))
        log = Log(run, config, world.main)
        if finished:
            log.say(f"{run} is finished: {plural(config.steps, 'step')}. `ccq export {run} OUT_DIR` writes its model.")
            return 0
        checkpoints = Checkpoints(root, world, config.runtime.keep)
        try:
            stack.enter_context(own_stream(world))
            return Run(config, run, world, log, checkpoints).train()
        except (DataError, OSError) as error:  # a missing shard, a full disk
            raise RunError(f"{error}. {checkpoints.left()}") from error
        except torch.cuda.OutOfMemoryError as error:
            cure = f"take a smaller runtime.micro_batch (it is {config.runtime.micro_batch}) or"
            cure = f"{cure} runtime.activation_checkpointing. {checkpoints.left()}"
            raise RunError(f"out of GPU memory: {cure}") from error
        except RuntimeError as error:
            lost = isinstance(error, dist.DistError) or re.search("gloo|connection|nccl|timed out", str(error).lower())
            if isinstance(error, RunError) or world.size == 1 or not lost:
                raise
            told = f"{checkpoints.left()} Start again, with any number of ranks."
            raise RunError(f"another rank does not answer ({first_line(error)}). {told}") from error
        finally:
            log.close()


def own_stream(world: World) -> Any:
    """One GPU works on a stream of its own: the default one cannot be captured, and weights belong to one stream."""
    if world.size > 1 or world.device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(world.device))


def on_main(world: World, action: Callable[[], Any]) -> None:
    """Do it on rank 0; where it fails, every rank raises."""
    failed = None
    if world.main:
        try:
            action()
        except (RunError, ValueError, OSError) as error:  # DataError is a ValueError
            failed = str(error)
    failed = world.from_main(failed)
    if failed is not None:
        raise RunError(failed)


class Run:
    """The loop, with all that happens between the steps."""

    def __init__(self, config: Config, run: Path, world: World, log: Log, checkpoints: Checkpoints) -> None:
        self.config, self.run, self.world, self.log, self.checkpoints = config, run, world, log, checkpoints
        self.source, self.valid = train_source(config, checksums=False), valid_source(config, checksums=False)
        self.accumulate = accumulation(config, world.size)
        self.trainer = Trainer(config, world)
        gated = any(cleaner.has_gate for cleaner in self.trainer.gates.cleaners)
        self.curve = pure_decay(config) if gated and config.init is None else None
        self.tokenizer = tokenizer_of(run) if config.runtime.sample_every else None
        self.flops: float | None = None  # of a token; nobody counts those of a foreign model
        if not config.foreign:
            self.flops = info(model_config(config.model), longest(config)).train_flops
        self.seen = self.seconds = self.timed = 0.0  # tokens, time and number of steps since the last line of the log
        self.first = True

    def train(self) -> int:
        config, trainer = self.config, self.trainer
        state = trainer.state()
        if load(self.checkpoints.root, state, self.world, self.log.say) is not None:
            trainer.loaded(state)
        elif config.init is not None:
            self.begin_from(config.init)
        start = trainer.progress["step"]
        self.log.open(start)
        if self.world.main:
            folder.note_origin(self.run, start, self.log.say, config.init)
        self.log.say(f"resumed at step {start}" if start else self.headline())
        if not start and (warmup := config.optimizer.warmup) > config.steps:
            told = f"the warm-up ({plural(warmup, 'step')}) is longer than the run: the rate never reaches its peak"
            self.log.say(f"warning: {told}; see --optimizer.warmup")
        steps = Steps(self.source, self.world.rank, self.world.size, self.accumulate, start)
        pinned = self.world.device.type == "cuda"
        with stop_signals() as stop, iterating(steps, config.runtime.workers, pinned) as batches:
            while trainer.progress["step"] < config.steps:
                self.one_step(batches)
                step = trainer.progress["step"]
                stopped = self.world.total(float(bool(stop)))[0] > 0
                if stopped or step == config.steps or step % config.runtime.checkpoint_every == 0:
                    self.checkpoints.save(step, trainer.state(), wait=stopped or step == config.steps)
                if stopped and step < config.steps:
                    name = self.world.from_main(stop[0] if stop else "a signal")
                    self.log.say(f"stopped by {name} at step {step}: checkpoint saved; the same command resumes")
                    return 128 + getattr(signal, name, 15)
        skipped = f", {trainer.progress['skipped']} skipped" if trainer.progress["skipped"] else ""
        written = folder_of(self.checkpoints.root, config.steps)
        self.log.say(f"finished: {plural(config.steps, 'step')}{skipped}; {written}")
        return 0

    def begin_from(self, name: str) -> None:
        from ccq.train.init import fill, other_tokenizer

        if self.config.foreign:  # it came with its weights
            self.log.say(f"weights of {name}")
        else:
            fill(name, self.trainer.prepared.masters, self.world, self.log.say)
            self.trainer.prepared.refresh()
        if self.world.main and (warning := other_tokenizer(name, self.config)) is not None:
            self.log.say(warning)

    def headline(self) -> str:
        config = self.config
        name = type(self.trainer.model).__name__ if config.foreign else config.model.mixer
        name += " + CCQ" if self.trainer.gates.cleaners else ""
        prepared = self.trainer.prepared
        parameters, trained = (sum(x.numel() for x in y.values()) for y in (prepared.masters, prepared.trained))
        some = "" if trained == parameters else f" ({trained:,} of them trained)"
        return (
            f"{name}: {parameters:,} parameters{some}, {config.dtype} on "
            f"{self.world.size} x {self.world.device.type}, {config.data.batch} sequences a step "
            f"({plural(self.accumulate, 'micro-batch', 'micro-batches')} a rank), {plural(config.steps, 'step')}"
        )

    def one_step(self, batches: Iterator[list[Batch]]) -> None:
        config, trainer, runtime = self.config, self.trainer, self.config.runtime
        number = trainer.progress["step"] + 1
        last = number == config.steps
        logs = last or number % runtime.log_every == 0
        trainer.gates.record(logs)
        begin = time.perf_counter()
        done = trainer.step(next(batches))
        self.seconds += time.perf_counter() - begin
        self.seen += done.tokens
        self.timed += 1
        if not done.ok:
            self.skipped(number, done)
        if logs:
            self.log_step(number, done)
        else:
            if self.first:  # a sign of life: the first line of the log may be minutes away
                left = duration(self.seconds * (config.steps - number))
                self.log.say(f"step {number}: loss {done.loss:.4f} in {self.seconds:.1f} s; {left} left at this pace")
            self.log.advance(number)
        self.first = False
        if self.valid is not None and (last or number % runtime.validate_every == 0):
            found = validate(trainer.model, config, self.world, self.valid)
            self.log.record(number, **found)
            self.log.say(f"step {number}: {summary(found)}")
        if self.tokenizer is not None and (last or number % runtime.sample_every == 0):
            text = sample(trainer.model, config, self.world, self.tokenizer, number)
            self.log.record(number, sample=text)
            self.log.say(f"step {number}, sample: {text!r}")

    def skipped(self, step: int, done: Done) -> None:
        """Say so, and stop after a few in a row."""
        row = self.trainer.progress["in_a_row"]
        what = f"loss {done.loss}, gradient norm {done.norm}"
        self.log.say(f"step {step} skipped: {what}")
        self.log.record(step, skipped=self.trainer.progress["skipped"])
        if row >= self.config.runtime.patience:
            self.checkpoints.wait()
            raise RunError(f"{row} steps in a row were not finite ({what}). {self.checkpoints.left()}")

    def log_step(self, step: int, done: Done) -> None:
        rate = self.seen / self.seconds / self.world.size  # a rank
        values: dict[str, Any] = {
            "loss": done.loss, "lr": done.lr, "grad_norm": done.norm, "scored": done.scored,
            "tokens_per_second": rate * self.world.size,
        }  # fmt: skip
        peak = peak_flops(self.world.device)
        if peak is not None:
            if self.flops is not None:
                values["mfu"] = rate * self.flops / peak
            values["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.world.device) / 2**30
        values |= self.trainer.gates.means(self.world)
        if self.curve is not None:
            values["lam_of_decay_alone"] = float(self.curve[step])
        left = self.seconds / self.timed * (self.config.steps - step)
        self.log.record(step, seconds_left=left, **values)
        self.seen = self.seconds = self.timed = 0.0


@contextlib.contextmanager
def stop_signals() -> Iterator[list[str]]:
    """A list that gets the name of a SIGTERM or SIGINT; the second one is not caught."""
    got: list[str] = []

    def note(number: int, _frame: Any) -> None:
        got.append(signal.Signals(number).name)
        signal.signal(number, before[number])

    before: dict[int, Any] = {}
    for each in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not in the main thread
            before[each] = signal.signal(each, note)
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
