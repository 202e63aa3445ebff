"""`ccq sweep mqar|mad --tier rows|seeds --out DIR`: train all rows of a recall comparison on one device.

    rows     every row at each learning rate (mad: and weight decay), one seed; chosen on validation samples
    seeds    the rows that matter, three other seeds, at the rate chosen before; mqar: five times the steps

A run is a recipe and its learning rate, seed and steps; runs of one row train side by side, each on its own stream, and
rows are shared by worker processes. What a run found is a file of its own as soon as it has finished: stopped at any
moment, the same command resumes with the missing runs. DIR/TASK_TIER.json has all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ccq.files import check_free, read_json, write_atomically
from ccq.names import grouped, nearest, plural
from ccq.systems import SWEEPS, SYSTEMS
from ccq.train import RunError
from ccq.train.sweep_runs import TEST_SEED, Spec, run_all, say

KNOWN = tuple(name.replace("-", "_") for name in SYSTEMS)  # what --rows takes
REPEATED = ("ccq_gla", 3.16e-3, 2)  # row, rate, how often it is run again with its own seed
SEEDS = {"rows": (0,), "seeds": (1, 2, 3)}
OPTIONS = {"optimizer.lr": "--rates", "seed": "--seeds", "steps": "--steps"}  # fields that name a run


@dataclass(frozen=True)
class Task:
    sizes: list[str]
    rows: dict[str, list[str]]
    steps: dict[str, int]
    rates: list[float]
    decays: Sequence[float | None] = (None,)  # the recipe's


TASKS = {name: Task(**told) for name, told in SWEEPS.items()}
Choice = tuple[float, float | None]  # a rate and a decay


def groups_of(options: argparse.Namespace, chosen: dict[str, Choice]) -> list[list[Spec]]:
    """Runs that are trained together: a row at all rates and decays, or at those chosen with all seeds."""
    make = functools.partial(Spec, size=options.size, steps=options.steps, changes=options.changes)
    grid: list[Choice] = list(itertools.product(options.rates, options.decays))
    groups = []
    for row in options.rows:
        of_row = itertools.product(options.seeds, [chosen[row]] if row in chosen else grid)
        groups.append([make(row=row, lr=lr, decay=decay, seed=seed) for seed, (lr, decay) in of_row])
    row, rate, times = REPEATED
    if row in options.rows and row not in chosen and (rate, None) in grid:
        groups.append([make(row=row, lr=rate, seed=options.seeds[0], repeat=1 + n) for n in range(times)])
    return groups


def finished(specs: Sequence[Spec], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name, what the runs found of which a file is there; RunError where one was tested on another number of
    samples: one file must not mix them."""
    paths = {spec.name: options.out / "runs" / f"{spec.name}.json" for spec in specs}
    expected = "what a run of `ccq sweep` found: remove it, and the run is made again"
    found = {name: read_json(path, RunError, expected) for name, path in paths.items() if path.exists()}
    for name, run in found.items():
        for before in {part["samples"] for part in run["test"]["slices"]} - {options.test_samples}:
            told = f"{paths[name]} was tested on {before} of each slice, asked for {options.test_samples}"
            raise RunError(f"--test-samples: {told}. Give --test-samples {before}, or take another --out")
    return found


def choice_of(run: dict[str, Any]) -> Choice:
    return run["lr"], run.get("decay")


def best_of(runs: Sequence[dict[str, Any]]) -> dict[str, Choice]:
    """Of each row, the rate and decay with the best mean accuracy over seeds and validation slices; of equal ones the
    smaller."""

    def rank(same: list[dict[str, Any]]) -> tuple:
        lr, decay = choice_of(same[0])
        return np.mean([run["valid"]["accuracy"] for run in same]), -lr, -(decay or 0.0)

    rows = grouped([run for run in runs if run["repeat"] == 0], itemgetter("row"))
    return {row: choice_of(max(grouped(tried, choice_of).values(), key=rank)[0]) for row, tried in rows.items()}


def choices_in(content: dict[str, Any]) -> dict[str, Choice]:
    decays = content.get("chosen_decay", {})
    return {row: (float(lr), decays.get(row)) for row, lr in content["chosen"].items()}


def read_chosen(path: Path, rows: Sequence[str], size: str) -> dict[str, Choice]:
    """What `--tier rows` chose; RunError unless all runs that a choice is made among are there, of `size`."""
    expected = "what `ccq sweep --tier rows` writes: the rates are chosen there"
    content = read_json(path, RunError, expected)
    try:
        unfinished = {Spec.row_of(name) for name in content["missing"] if "-r0" in name}
        chosen = {row: choice for row, choice in choices_in(content).items() if row in rows}
        theirs = content.get("size", size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is damaged ({error!r}): expected {expected}") from None
    if theirs != size:
        raise RunError(f"{path} has rates chosen at {theirs}, not at {size}: run `--tier rows --size {size}` first")
    for row in rows:
        if row not in chosen or row in unfinished:
            raise RunError(f"{path} lacks runs of {row} to choose its rate among: finish `--tier rows` first")
    return chosen


def protocol(specs: Sequence[Spec], test_samples: int) -> dict[str, Any]:
    """What the runs of one file share; as JSON gives it back."""
    from ccq.train.data import recall_vocabulary

    config = specs[0].config()
    data, optimizer = config.data, dataclasses.asdict(config.optimizer)
    del optimizer["lr"]
    if any(spec.decay is not None for spec in specs):
        del optimizer["weight_decay"]
    told = {
        "steps": specs[0].steps,
        "batch": data.batch,
        "dtype": config.dtype,
        "vocab_size": recall_vocabulary(config),
        "schedule": "cosine to 0 over the steps, no warm-up" if not config.optimizer.warmup else "warm-up, cosine",
        "optimizer": optimizer,
        "train_slices": data.slices,
        "valid_slices": data.valid_slices,
        "test_slices": [(s[0], s[1], test_samples) for s in data.valid_slices],
        "test_seed": TEST_SEED,
        **{name: getattr(data, name) for name in ("updates", "noise") if getattr(data, name)},
        "chosen_by": "mean accuracy over seeds and validation slices after the last step",
    }
    return json.loads(json.dumps(told))


def earlier_calls(path: Path, specs: Sequence[Spec], now: dict[str, Any]) -> dict[str, Any]:
    """What calls before wrote into a tier's file; RunError where they trained otherwise: one file must not mix them."""
    expected = "what an earlier `ccq sweep` wrote; --force writes it anew"
    found = read_json(path, RunError, expected)
    try:
        told = {
            "chosen": choices_in(found),
            "failed": {x["name"]: x for x in found["failed"]},
            "missing": list(found["missing"]),
            "runs": {run["name"]: run for run in found["runs"]},
        }
        pairs = [("size", found.get("size", specs[0].size), specs[0].size)]
        pairs += [(name, found["protocol"].get(name), now[name]) for name in now]
        changed = {Spec.changed(name) for name in (*told["runs"], *told["missing"])}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error!r}): expected {expected}") from None
    different = [f"{name}: {before!r} there, {asked!r} now" for name, before, asked in pairs if before != asked]
    if not different and not changed <= {Spec.changed(specs[0].name)}:
        different = ["another --set"]
    if different:
        raise RunError(
            f"{path} has runs with other settings ({'; '.join(different)}): one file must not mix them. "
            "Choose another --out, or write the file anew with --force"
        )
    return told


def merge(
    options: argparse.Namespace, specs: Sequence[Spec], chosen: dict[str, Choice], failed: list, now: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """All finished runs of a tier, those of calls before among them, as one file; returns what is in it."""
    from ccq.provenance import provenance

    names, found, rows = {spec.name for spec in specs}, finished(specs, options), {spec.row for spec in specs}
    chosen = before["chosen"] | chosen

    def kept(name: str, run: dict[str, Any]) -> bool:
        """Of seeds, a row may have another rate now."""
        same = options.tier == "rows" or choice_of(run) == chosen.get(run["row"])
        return name in found or (name not in names and same)

    runs = list(({name: run for name, run in before["runs"].items() if kept(name, run)} | found).values())
    missing = [name for name in before["missing"] if Spec.row_of(name) not in rows]
    failed = [*(before["failed"][name] for name in missing if name in before["failed"]), *failed]
    chosen = chosen if options.tier == "seeds" else best_of(runs)
    decays = {row: decay for row, (_, decay) in chosen.items() if decay is not None}
    all_runs = [*map(dataclasses.asdict, specs), *runs]
    differ = {
        told: sorted({run[name] for run in all_runs if run.get(name) is not None})
        for told, name in (("rates", "lr"), ("seeds", "seed"), ("decays", "decay"))
    }
    content = {
        "kind": f"{options.task}_sweep",
        "tier": options.tier,
        "size": options.size,
        "protocol": {**now, **{name: values for name, values in differ.items() if values}},
        "provenance": provenance(),
        "chosen": {row: lr for row, (lr, _) in chosen.items()},
        **({"chosen_decay": decays} if decays else {}),
        "failed": [x for x in failed if x["name"] not in found],
        "missing": [*missing, *(spec.name for spec in specs if spec.name not in found)],
    }
    head = json.dumps(content, indent=1)
    lines = ",\n".join(json.dumps(run) for run in runs)  # one line a run: few bytes, and a diff that says which
    path = options.out / f"{options.task}_{options.tier}.json"
    write_atomically(path, f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n'.encode())
    return {**content, "runs": runs}


def table(content: dict[str, Any]) -> str:
    """Of each row the chosen rate, or of each seed: test accuracy, over all slices and by slice."""
    lines = []
    chosen = choices_in(content)
    for run in content["runs"]:
        if chosen.get(run["row"]) == choice_of(run) and not run["repeat"]:
            by_slice = " ".join(f"{s['accuracy']:.3f}" for s in run["test"]["slices"])
            gate = "" if not run["gate"] else " lam " + " ".join(f"{x:.3f}" for x in run["gate"]["lam"][-1])
            lines.append(
                f"{run['row']:<30} lr {run['lr']:<8g} "
                + ("" if "decay" not in run else f"decay {run['decay']:<4g} ")
                + f"seed {run['seed']} valid {run['valid']['accuracy']:.3f} "
                f"test {run['test']['accuracy']:.3f} | {by_slice} | state {run['state_bytes'] / 1024:.1f} KiB{gate}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ccq sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("task", choices=tuple(TASKS))
    parser.add_argument("--tier", choices=tuple(SEEDS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    sizes = "; ".join(f"{name}: {', '.join(task.sizes)}" for name, task in TASKS.items())
    parser.add_argument("--size", help=f"size of the recipes ({sizes}; default: the first)")
    parser.add_argument("--rows", help="only these rows, separated by commas")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates (default: zoology's four, MAD's three)")
    parser.add_argument("--decays", type=float, nargs="+", help="weight decays (default: the recipe's, MAD's two)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds (default: 0 for rows, 1 2 3 for seeds)")
    parser.add_argument("--steps", type=int, help="training steps (2000 for rows, 10000 for seeds; mad: 20000)")
    parser.add_argument("--workers", type=int, default=4, help="processes (default: %(default)s; 0: this process)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many minutes and keep finished runs")
    parser.add_argument("--test-samples", type=int, default=1000, help="samples per test slice (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    parser.add_argument("--no-capture", action="store_true", help="do not use CUDA graphs")
    told = "set a field of all recipes: --set data.batch=64"
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help=told)
    parser.add_argument("--force", action="store_true", help="write into a folder that holds other files")
    return sweep(parser.parse_args(argv))


def sweep(options: argparse.Namespace) -> int:
    from ccq.doctor import best_device, check_cpu_bf16, check_device
    from ccq.train import folder
    from ccq.train.config import check_read

    task, tier, out = TASKS[options.task], options.tier, options.out
    began = time.monotonic()
    options.size = options.size or task.sizes[0]
    if options.size not in task.sizes:
        raise RunError(f"--size: expected one of {', '.join(task.sizes)}, got {options.size!r}")
    options.rows = tuple(dict.fromkeys(re.split(r"[,\s]+", options.rows))) if options.rows else task.rows[tier]
    for row in options.rows:
        if row not in KNOWN:
            raise RunError(f"--rows: there is no {row!r}.{nearest(row, KNOWN)} Rows are {', '.join(KNOWN)}.")
    if tier == "seeds" and (options.rates or options.decays):
        raise RunError("--rates, --decays: `--tier seeds` takes what `--tier rows` chose")
    options.steps = task.steps[tier] if options.steps is None else options.steps
    options.seeds = tuple(dict.fromkeys(options.seeds or SEEDS[tier]))
    options.rates = tuple(dict.fromkeys(options.rates or task.rates))
    options.decays = tuple(dict.fromkeys(options.decays or task.decays))
    for name, least in (("steps", 1), ("test_samples", 1), ("workers", 0)):
        if (value := getattr(options, name)) < least:
            raise RunError(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")
    options.changes = tuple(change(text) for text in options.set)
    if options.decays != (None,) and any(name == "optimizer.weight_decay" for name, _ in options.changes):
        raise RunError("--set optimizer.weight_decay: the runs of a sweep differ in it, give it with --decays")
    begun = any(path for name in TASKS for path in out.glob(f"{name}_*.json")) or any(out.glob("runs/*-steps*-r*.json"))
    check_free(out, options.force, ours=begun, older="one with an older sweep")
    with folder.locked(out):
        chosen = read_chosen(out / f"{options.task}_rows.json", options.rows, options.size) if tier == "seeds" else {}
        groups = groups_of(options, chosen)
        for group in groups:
            try:
                config, *_ = (spec.config() for spec in group)  # refuse now what no run can have
            except (AttributeError, TypeError) as error:
                raise RunError(f"--set: {error}") from None
            check_read(config.data)
            if not config.data.valid_slices:
                raise RunError("data.valid_slices: expected one kind of sample at least: rates are chosen on them")
        specs = list(itertools.chain(*groups))
        done = finished(specs, options)
        now, path = protocol(specs, options.test_samples), out / f"{options.task}_{tier}.json"
        before: dict[str, Any] = {"chosen": {}, "failed": {}, "missing": [], "runs": {}}
        if path.exists() and not options.force:
            before = earlier_calls(path, specs, now)
        todo = [new for group in groups if (new := [spec for spec in group if spec.name not in done])]
        if todo:
            device = options.device or best_device()
            check_device(device)
            check_cpu_bf16(device, todo[0][0].config().dtype)
        total = len(specs)
        say(f"{plural(total, 'run')} of {plural(options.steps, 'step')}, {len(done)} of them finished before")
        code, failed, options.groups = 0, [], len(todo)
        on_terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: finished runs are kept
        try:
            failed = run_all(todo, options, began + 60 * options.minutes)
        except KeyboardInterrupt:
            code = 130
        finally:
            signal.signal(signal.SIGTERM, on_terminate)
        content = merge(options, specs, chosen, failed, now, before)
    print(table(content))
    left = len({spec.name for spec in specs} & set(content["missing"]))
    say(
        f"{total - left} of {total} runs in {path}, {time.monotonic() - began:.0f} s"
        + (f"; {left} missing: the same command resumes them" if left else "")
    )
    return code or (1 if left else 0)


def change(text: str) -> tuple[str, Any]:
    """A field and its value, lists as tuples."""
    name, sign, value = text.partition("=")
    if not sign:
        raise RunError(f"--set: expected FIELD=JSON, got {text!r}")
    if name in OPTIONS:
        raise RunError(f"--set {name}: the runs of a sweep differ in it, give it with {OPTIONS[name]}")
    if name in ("init", "foreign", "data.source"):
        raise RunError(f"--set {name}: a sweep trains its task from random weights")
    try:
        from ccq.train.config import tuples

        return name, tuples(json.loads(value))
    except json.JSONDecodeError:
        return name, value
