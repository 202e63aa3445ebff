"""Recall on a CPU with many seeds: does a read recall more than its control? The rules are in docs/recall.md.

    python benchmarks/recall_seeds.py first       # a quarter of an hour on two cores; writes study/recall_first.json
    python benchmarks/recall_seeds.py controls    # an hour and a quarter; writes study/recall_controls.json
    python benchmarks/recall_seeds.py rates       # half an hour; writes study/recall_rates.json
    python benchmarks/recall_seeds.py long        # an hour and a quarter; writes study/recall_long.json
    python benchmarks/recall_seeds.py noise       # an hour and a quarter; writes study/recall_noise.json
    python benchmarks/recall_seeds.py same        # half an hour; writes study/recall_same.json
    python benchmarks/recall_seeds.py first --quick    # two steps of one seed, writes nothing: does the script work?

The models and the tasks of MQAR are those of `make run`. A run is a folder of runs/recall_seeds; stopped, the same
command resumes with what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ccq import cli
from ccq.files import finite, write_json
from ccq.provenance import provenance
from ccq.systems import recipe_name

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "benchmarks" / "study"


@dataclass(frozen=True)
class Task:
    rows: tuple[str, ...]
    updates: int  # keys that are overwritten
    asked: str  # after training: tokens x pairs x samples
    rates: tuple[str, ...]
    steps: int = 500
    noise: str = ""  # the share of noise, of MAD's recall; none: MQAR

    @property
    def name(self) -> str:
        return f"noise{self.noise}" if self.noise else f"{self.updates}"

    @property
    def training(self) -> dict[str, str]:
        """Options of `ccq train`."""
        if not self.noise:
            return {"updates": f"{self.updates}"}
        kind = " ".join(self.asked.split("x")[:2])
        slices = {"slices": f"{kind} 20000", "valid-slices": f"{kind} 256"}
        return {"source": "mad", "noise": self.noise, "recall-vocab-size": "32", **slices}


@dataclass(frozen=True)
class Round:
    tasks: dict[str, Task]
    seeds: range
    searched: range = range(1000, 1003)  # seeds that choose the rate


READS = ("gla-unit", "ccq-gla", "gla-projected", "gla-projected-decay")
RIVALS = (
    "gla-unit", "gla-unit-equal-state", "ccq-gla-open", "ccq-gla-free-scale", "gla-other-head", "gla-mean-key",
    "gla-current-key", "gla-projected", "gla-projected-decay", "gla-projected-twice", "gated-deltanet",
    "ccq-gated-deltanet", "gated-deltanet-projected-decay", "mesa-2", "mesa-30",
)  # fmt: skip
LONG = ("gla-unit", "gla-other-head", "gla-projected-decay", "gated-deltanet", "gated-deltanet-projected-decay")
OPEN = ("gla-unit", "ccq-gla-open", "gla-projected", "gla-projected-decay")
LAST = (
    "gla-unit", "gla-unit-equal-state", "ccq-gla-free-scale", "gla-other-head", "gla-current-key", "gla-projected",
    "gla-projected-decay",
)  # fmt: skip
SAME = ("gla-unit", "gla-unit-equal-state", "gla-projected", "gla-projected-decay")
FIRST, SECOND, THIRD = ("3e-3", "1e-2", "3e-2"), ("1e-3", "3e-3", "1e-2"), ("3e-4", "1e-3", "3e-3")
FOURTH = ("5e-4", "1e-3", "2e-3")
NOISY = (
    "gla-unit", "gla-unit-equal-state", "ccq-gla-free-scale", "gla-other-head", "gla-mean-key", "gla-projected",
    "gla-projected-decay",
)  # fmt: skip
ROUNDS = {
    "first": Round(
        {"recall": Task(READS, 0, "32x8x1000", FIRST), "overwritten": Task(READS, 2, "32x6x1000", FIRST)},
        seeds=range(200, 220),
    ),
    "controls": Round(
        {
            "500 steps": Task(RIVALS, 2, "32x6x1000", SECOND),
            "2000 steps": Task(LONG, 2, "32x6x1000", SECOND, 2000),
        },
        seeds=range(300, 320),
    ),
    "rates": Round(
        {
            "own rate": Task(OPEN, 2, "32x6x1000", THIRD, 1000),
            "rate 1e-3": Task(OPEN, 2, "32x6x1000", ("1e-3",), 1000),
            "rate 3e-3": Task(OPEN, 2, "32x6x1000", ("3e-3",), 1000),
        },
        seeds=range(400, 420),
        searched=range(1000, 1010),
    ),
    "long": Round(
        {"2000 steps": Task(LAST, 2, "32x6x1000", FOURTH, 2000)},
        seeds=range(500, 520),
        searched=range(1000, 1005),
    ),
    "noise": Round(
        {"noise": Task(NOISY, 0, "64x1x1000", FOURTH, 1000, noise="0.8")},
        seeds=range(600, 620),
        searched=range(1000, 1005),
    ),
    "same": Round({"rate 5e-4": Task(SAME, 0, "64x1x1000", ("5e-4",), 1000, noise="0.8")}, seeds=range(700, 720)),
}


@dataclass(frozen=True)
class Job:
    task: Task
    row: str
    rate: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder: tasks that train alike share their runs."""
        return f"{self.row}-{self.task.name}-{self.task.steps}-{self.rate}-seed{self.seed}"


def ccq(*arguments: str) -> None:
    code = cli.main(arguments)
    if code:
        raise SystemExit(code)


def run(job: Job, folder: Path) -> dict[str, float]:
    """Train and test one model: validation loss after the last step, and the share of keys answered in the test."""
    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    out, task = folder / job.name, job.task
    suite = "mad" if task.noise else "mqar"
    scored = out / "eval" / f"{suite}.json"
    if not scored.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{job.name}.txt").open("a") as log, contextlib.redirect_stdout(log):
            ccq(
                "train", recipe_name(job.row, "tiny"), "--run-dir", f"{out}", "--seed", f"{job.seed}",
                "--optimizer.lr", job.rate, "--steps", f"{task.steps}", "--optimizer.warmup", f"{min(20, task.steps)}",
                "--model.conv-size", "4", "--model.num-hidden-layers", "1",
                *(x for name, value in task.training.items() for x in (f"--data.{name}", *value.split())),
                "--runtime.device", "cpu", "--runtime.no-tensorboard", "--runtime.checkpoint-every", "100000",
                "--runtime.validate-every", "100000",
            )  # fmt: skip
            ccq(
                "eval", f"{out}", "--out", f"{out}/eval", "--suite", suite, "--slices", task.asked,
                "--seed", "0", "--device", "cpu", "--dtype", "float32",
            )  # fmt: skip
    log_rows = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    loss = [row["valid_loss"] for row in log_rows if "valid_loss" in row][-1]
    scores = json.loads(scored.read_text())["scores"]
    (answered,) = (score["value"] for score in scores.values())
    return {"valid_loss": float("inf") if loss is None else loss, "answered": answered}  # None: it diverged


def study(each: Callable[[list[Job]], Iterable[dict[str, float]]], plan: Round) -> dict:
    """Search the rate of every row on seeds that are not reported, then train the seeds that are."""
    found = {}
    for name, task in plan.tasks.items():
        rates, rows = task.rates, task.rows
        searched = plan.searched if len(rates) > 1 else ()
        tried = [Job(task, row, rate, seed) for row in rows for rate in rates for seed in searched]
        losses: dict[str, dict[str, float]] = {row: dict.fromkeys(rates, 0.0) for row in rows}
        for job, result in zip(tried, each(tried), strict=True):
            losses[job.row][job.rate] += result["valid_loss"] / len(searched)
        best = {row: min(rates, key=losses[row].__getitem__) for row in rows}
        jobs = [Job(task, row, best[row], seed) for row in rows for seed in plan.seeds]
        found[name] = {row: {"search": losses[row] if searched else {}, "rate": best[row]} for row in rows}
        for job, result in zip(jobs, each(jobs), strict=True):
            found[name][job.row].setdefault("answered", {})[job.seed] = result["answered"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("round", choices=ROUNDS, help="which comparison of docs/recall.md")
    parser.add_argument("--quick", action="store_true", help="two steps of one rate and seed; writes nothing")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "recall_seeds", help="folder of the runs")
    options = parser.parse_args()
    plan, origin = ROUNDS[options.round], provenance()  # of the code that trains, not of what is there when it ends
    with contextlib.ExitStack() as stack:
        if options.quick:
            tasks = {name: replace(task, steps=2, rates=task.rates[:1]) for name, task in plan.tasks.items()}
            plan = Round(tasks, plan.seeds[:1])
            options.runs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(ProcessPoolExecutor(os.cpu_count()))

        def each(jobs: list[Job]) -> Iterable[dict[str, float]]:
            return pool.map(run, jobs, itertools.repeat(options.runs))

        found = study(each, plan)
    if not options.quick:
        write_json(STUDY / f"recall_{options.round}.json", {"tasks": finite(found), **origin})
    for task, rows in found.items():
        for row, x in rows.items():
            print(f"{task}, {row}: {sum(x['answered'].values()) / len(x['answered']):.1f}% at rate {x['rate']}")


if __name__ == "__main__":
    main()
