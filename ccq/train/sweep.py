"""`ccq sweep mqar --tier rows|seeds --out DIR`: every row of the recall comparison, treated alike, on one device.

    rows     every row at four learning rates, one seed; the rate is chosen on validation samples
    seeds    the six rows that matter, three other seeds, five times the steps, at the rate chosen before

A run is a recipe of size `mqar` and its learning rate, seed and steps; runs of one row train side by side, each on its
own stream, and rows are shared by worker processes. What a run found is a file of its own as soon as it has finished:
stopped at any moment, the same command goes on with the runs that are missing. DIR/mqar_TIER.json has all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import multiprocessing
import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from ccq.files import check_free, read_json, write_atomically
from ccq.names import first_line, nearest
from ccq.systems import SYSTEMS
from ccq.train import RunError

MAIN = ("gla", "gla_unit", "ccq_gla", "ccq_gla_open", "gated_deltanet", "ccq_gated_deltanet")
ROWS = (
    *MAIN, "transformer", "mamba2", "deltanet", "gla_unit_equal_state", "gla_current_key", "ccq_gated_deltanet_open",
    "ccq_gla_no_decay", "ccq_gla_stats", "ccq_gla_uncentred", "ccq_gla_fixed_lam",
)  # fmt: skip
KNOWN = tuple(name.replace("-", "_") for name in SYSTEMS)  # what --rows takes
RATES = tuple(float(f"{rate:.3g}") for rate in np.logspace(-3, -1.5, 4))  # zoology's
REPEATED = ("ccq_gla", RATES[1], 2)  # row, rate, how often it is run again with its own seed
TIERS = {"rows": (2_000, (0,)), "seeds": (10_000, (1, 2, 3))}  # steps, seeds
OPTIONS = {"optimizer.lr": "--rates", "seed": "--seeds", "steps": "--steps"}  # fields that name a run
TEST_SEED = 0  # the test samples are the same for all runs


@dataclass(frozen=True)
class Spec:
    """One run."""

    row: str  # a system, with _ for -
    size: str
    lr: float
    seed: int
    steps: int
    repeat: int = 0  # the same run once more
    changes: tuple[tuple[str, Any], ...] = ()  # fields of the recipe, by dotted name

    @property
    def name(self) -> str:
        changed = hashlib.sha256(repr(self.changes).encode()).hexdigest()[:8] if self.changes else ""
        where = f"-{changed}" * bool(changed)
        rate = short if float(short := f"{self.lr:.2e}") == self.lr else repr(self.lr)  # two rates, two names
        return f"{self.row}-{self.size}-lr{rate}-seed{self.seed}-steps{self.steps}-r{self.repeat}{where}"

    @staticmethod
    def row_of(name: str) -> str:
        return name.partition("-")[0]

    @staticmethod
    def is_repeat(name: str) -> bool:
        return "-r0" not in name

    @staticmethod
    def changed(name: str) -> str:
        """The hash of its changes; "" where it has none."""
        return re.split(r"-r\d+", name)[-1].lstrip("-")

    def config(self) -> Any:
        from ccq.recipes import recipe
        from ccq.train.config import identified

        config = recipe(f"{self.row}_{self.size}")
        config.identity = dataclasses.replace(config.identity, repeat=self.repeat)
        config.optimizer.lr, config.seed, config.steps = self.lr, self.seed, self.steps
        config.runtime.validate_every = max(1, self.steps // 10 if self.steps <= 2_000 else self.steps // 20)
        for name, value in self.changes:
            *path, last = name.split(".")
            part = functools.reduce(getattr, path, config)
            if not hasattr(part, last):
                raise RunError(f"--set {name}: a recipe has no such field")
            setattr(part, last, value)
        config.check()
        return identified(config)


# -- runs of one row, side by side -------------------------------------------------------------------------------------


@functools.cache
def shared_data(spec: Spec, device: Any) -> Any:
    """Of a seed, kept for the rows to come; `spec` has the row left out."""
    from ccq.train.recall import RecallData

    return RecallData.of(dataclasses.replace(spec, row="gla", lr=RATES[0], repeat=0).config(), device)


@functools.cache
def test_data(slices: tuple, samples: int, vocab_size: int, device: Any) -> list:
    from ccq.data.mqar import MQAR
    from ccq.train.recall import samples_of

    source = MQAR(1, [(s[0], s[1], samples) for s in slices], seed=TEST_SEED, split="test", vocab_size=vocab_size)
    return [x.to(device) for x in samples_of(source)]


def train_together(specs: Sequence[Spec], out: Path, options: dict[str, Any]) -> None:
    """Train the runs in lockstep, each on its own stream, and write what each found."""
    from ccq.train.data import recall_vocabulary
    from ccq.train.recall import RecallRun
    from ccq.train.recall_result import result
    from ccq.train.world import pick_device

    device = pick_device(options["device"], 0)
    begin = time.perf_counter()
    say(f"{specs[0].row}: {len(specs)} runs; on a GPU its kernels are compiled and tuned now")
    runs = []
    for spec in specs:
        data = shared_data(dataclasses.replace(spec, row="", lr=0.0, repeat=0), device)
        run = RecallRun(spec.config(), device, data)
        try:
            run.start(capture=options["capture"])
        except RuntimeError as error:
            if run.stream is None or "captur" not in str(error).lower():
                raise
            say(f"{spec.name}: the step cannot be captured, so it runs launch by launch: {first_line(error)}")
            run = RecallRun(spec.config(), device, data).start(capture=False)
        runs.append(run)
    ready = time.perf_counter()
    say(f"{specs[0].row}: {len(runs)} runs ready after {ready - begin:.0f} s")

    steps, every = specs[0].steps, runs[0].config.runtime.validate_every
    looks: list[list[tuple[int, list[int]]]] = [[] for _ in runs]
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            for run in runs:
                run.look()
            for run, seen in zip(runs, looks, strict=True):
                run.wait()
                seen.append((step, run.valid_right.tolist()))
        if step < steps:
            for run in runs:
                run.advance(step)
    seconds = time.perf_counter() - ready
    vocabulary = recall_vocabulary(runs[0].config)
    for spec, run, seen in zip(specs, runs, looks, strict=True):
        with run.on_stream():
            tests = test_data(run.config.data.valid_slices, options["test_samples"], vocabulary, device)
        found = {"name": spec.name, "row": spec.row, "size": spec.size, **result(run, seen, tests)}
        found |= {"seconds": round(seconds, 2), "side_by_side": len(runs), "captured": run.captured}
        write_atomically(out / "runs" / f"{spec.name}.json", f"{json.dumps(found)}\n".encode())
        say(
            f"{spec.name}: valid {found['valid']['accuracy']:.4f}, test {found['test']['accuracy']:.4f}, "
            f"loss {found['curve']['loss'][-1]:.3f}, {seconds / steps * 1e3:.2f} ms a step of {len(runs)}"
        )


# -- workers -----------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def work(connection: Any, out: Path, options: dict[str, Any]) -> None:
    """A worker process: rows come through the connection until there are no more; after an error it leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while (specs := connection.recv()) is not None:
            try:
                train_together(specs, out, options)
                gc.collect()  # graphs of finished runs hold memory
                connection.send(None)
            except Exception as error:
                traceback.print_exc()
                connection.send(f"{type(error).__name__}: {first_line(error)}")
                return


def run_all(groups: list[list[Spec]], out: Path, options: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    """Every group by some worker; returns the runs that failed. Stops at `deadline` (time.monotonic)."""
    failed: list[dict[str, Any]] = []

    def fail(specs: Sequence[Spec], error: str) -> None:
        for spec in specs:
            say(f"{spec.name} failed: {error}")
            failed.append({"name": spec.name, "row": spec.row, "lr": spec.lr, "seed": spec.seed,
                           "repeat": spec.repeat, "error": error})  # fmt: skip

    todo = list(groups)
    if options["workers"] == 0:
        while todo and time.monotonic() < deadline:
            specs = todo.pop(0)
            try:
                train_together(specs, out, options)
            except Exception as error:
                traceback.print_exc()
                fail(specs, f"{type(error).__name__}: {first_line(error)}")
        return failed

    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    workers: list[Any] = []
    busy: dict[Any, tuple[Any, list[Spec] | None]] = {}

    def hire() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, out, options), daemon=True)
        process.start()
        theirs.close()
        workers.append(process)
        busy[ours] = (process, None)
        give(ours)

    def give(connection: Any) -> None:
        process = busy[connection][0]
        specs = todo.pop(0) if todo else None
        connection.send(specs)
        if specs is None:
            del busy[connection]
        else:
            busy[connection] = (process, specs)

    try:
        for _ in range(min(options["workers"], len(todo))):
            hire()
        while busy:
            left = deadline - time.monotonic()
            ready: list[Any] = wait(list(busy), timeout=max(0.0, min(left, 5.0)))
            if left <= 0:
                say("the time is up")
                break
            for connection in ready:
                process, given = busy[connection]
                assert given is not None
                try:
                    wrong = connection.recv()
                except (EOFError, ConnectionResetError):
                    process.join(10)
                    wrong = f"its process died (exit code {process.exitcode})"
                if wrong is None:
                    give(connection)
                else:
                    fail(given, wrong)
                    del busy[connection]
                    if todo:
                        hire()
    finally:
        for process in workers:
            process.terminate()
        for process in workers:
            process.join(10)
    return failed


# -- tiers and what comes of them --------------------------------------------------------------------------------------


def groups_of(tier: str, options: argparse.Namespace, chosen: dict[str, float]) -> list[list[Spec]]:
    """Runs that are trained together: a row at all rates, or with all seeds."""
    steps, seeds = options.steps, options.seeds
    make = functools.partial(Spec, size=options.size, steps=steps, changes=options.changes)
    if tier == "seeds":
        return [[make(row=row, lr=chosen[row], seed=seed) for seed in seeds] for row in options.rows]
    groups = [[make(row=row, lr=lr, seed=seed) for seed in seeds for lr in options.rates] for row in options.rows]
    row, rate, times = REPEATED
    if row in options.rows and rate in options.rates:
        groups.append([make(row=row, lr=rate, seed=seeds[0], repeat=1 + n) for n in range(times)])
    return groups


def chosen_rates(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each row, the rate with the best mean accuracy over seeds and validation slices; of equal ones the smaller."""
    found: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        if run["repeat"] == 0:
            found.setdefault(run["row"], {}).setdefault(run["lr"], []).append(run["valid"]["accuracy"])
    return {row: max(rates, key=lambda lr: (np.mean(rates[lr]), -lr)) for row, rates in found.items()}


def read_chosen(path: Path, rows: Sequence[str], size: str | None = None) -> dict[str, float]:
    """The rates that `--tier rows` chose; RunError unless all runs that a choice is made among are there, of `size`."""
    expected = "what `ccq sweep --tier rows` writes: the rates are chosen there"
    content = read_json(path, RunError, expected)
    try:
        unfinished = {Spec.row_of(name) for name in content["missing"] if not Spec.is_repeat(name)}
        chosen = {row: float(content["chosen"][row]) for row in rows if row in content["chosen"]}
        theirs = content.get("size", size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is damaged ({error!r}): expected {expected}") from None
    if size not in (None, theirs):
        raise RunError(
            f"{path} has rates chosen at {theirs}, not at {size}: run `--tier rows --size {size}`, or say with "
            f"--rates-from {path} that they are to be taken"
        )
    for row in rows:
        if row not in chosen or row in unfinished:
            raise RunError(f"{path} lacks runs of {row} to choose its rate among: finish `--tier rows` first")
    return chosen


def protocol(specs: Sequence[Spec], test_samples: int) -> dict[str, Any]:
    """What the runs of one file share, and which rates and seeds they have; as JSON gives it back."""
    from ccq.train.data import recall_vocabulary

    config = specs[0].config()
    data, optimizer = config.data, dataclasses.asdict(config.optimizer)
    del optimizer["lr"]
    told = {
        "steps": specs[0].steps,
        "batch": data.batch,
        "rates": sorted({spec.lr for spec in specs}),
        "seeds": sorted({spec.seed for spec in specs}),
        "dtype": config.dtype,
        "vocab_size": recall_vocabulary(config),
        "schedule": "cosine to 0 over the steps, no warm-up" if not config.optimizer.warmup else "warm-up, cosine",
        "optimizer": optimizer,
        "train_slices": data.slices,
        "valid_slices": data.valid_slices,
        "test_slices": [(s[0], s[1], test_samples) for s in data.valid_slices],
        "test_seed": TEST_SEED,
        "chosen_by": "mean accuracy over seeds and validation slices after the last step",
    }
    return json.loads(json.dumps(told))


def earlier_calls(path: Path, specs: Sequence[Spec], now: dict[str, Any]) -> dict[str, Any]:
    """What calls before wrote into a tier's file; RunError where they trained otherwise: one file must not mix them."""
    expected = "what an earlier `ccq sweep` wrote; --force writes it anew"
    found = read_json(path, RunError, expected)
    try:
        told = {
            "chosen": dict(found["chosen"]),
            "failed": {x["name"]: x for x in found["failed"]},
            "missing": list(found["missing"]),
            "runs": {run["name"]: run for run in found["runs"]},
        }
        pairs = [("size", found.get("size", specs[0].size), specs[0].size)]
        pairs += [(name, found["protocol"].get(name), now[name]) for name in now if name not in ("rates", "seeds")]
        changed = {Spec.changed(name) for name in (*told["runs"], *told["missing"])}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error!r}): expected {expected}") from None
    different = [f"{name}: {before!r} there, {asked!r} now" for name, before, asked in pairs if before != asked]
    if not different and not changed <= {Spec.changed(specs[0].name)}:
        different = ["another --set"]
    if different:
        raise RunError(
            f"{path} has runs that were trained otherwise ({'; '.join(different)}): one file must not mix them. "
            "Take another --out, or write the file anew with --force"
        )
    return told


def merge(
    tier: str, specs: Sequence[Spec], out: Path, chosen: dict[str, float], failed: list, now: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """All finished runs of a tier, those of calls before among them, as one file; returns what is in it."""
    from ccq.provenance import provenance

    paths = {spec.name: out / "runs" / f"{spec.name}.json" for spec in specs}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    chosen = before["chosen"] | chosen
    kept = {
        name: run
        for name, run in before["runs"].items()
        if name in found or (name not in paths and (tier == "rows" or run["lr"] == chosen.get(run["row"])))
    }  # of seeds, a row may have another rate now
    runs = list((kept | found).values())
    rows = {spec.row for spec in specs}
    missing = [name for name in before["missing"] if Spec.row_of(name) not in rows]
    failed = [*(before["failed"][name] for name in missing if name in before["failed"]), *failed]
    content = {
        "kind": "mqar_sweep",
        "tier": tier,
        "size": specs[0].size,
        "protocol": {
            **now,
            "rates": sorted({spec.lr for spec in specs} | {run["lr"] for run in runs}),
            "seeds": sorted({spec.seed for spec in specs} | {run["seed"] for run in runs}),
        },
        "provenance": provenance(),
        "chosen": chosen if tier == "seeds" else chosen_rates(runs),
        "failed": [x for x in failed if x["name"] not in found],
        "missing": [*missing, *(name for name in paths if name not in found)],
        "runs": runs,
    }
    head = json.dumps({name: value for name, value in content.items() if name != "runs"}, indent=1)
    lines = ",\n".join(json.dumps(run) for run in runs)  # one line a run: few bytes, and a diff that says which
    write_atomically(out / f"mqar_{tier}.json", f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n'.encode())
    return content


def table(content: dict[str, Any]) -> str:
    """Of each row the chosen rate, or of each seed: test accuracy, over all slices and by slice."""
    lines = []
    chosen = content["chosen"]
    for run in content["runs"]:
        if chosen.get(run["row"]) == run["lr"] and not run["repeat"]:
            by_slice = " ".join(f"{s['accuracy']:.3f}" for s in run["test"]["slices"])
            gate = "" if not run["gate"] else " lam " + " ".join(f"{x:.3f}" for x in run["gate"]["lam"][-1])
            lines.append(
                f"{run['row']:<26} lr {run['lr']:<8g} seed {run['seed']} valid {run['valid']['accuracy']:.3f} "
                f"test {run['test']['accuracy']:.3f} | {by_slice} | state {run['state_bytes'] / 1024:.1f} KiB{gate}"
            )
    return "\n".join(lines)


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM as Ctrl-C: what is finished is still gathered."""

    def stop(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ccq sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("task", choices=("mqar",))
    parser.add_argument("--tier", choices=tuple(TIERS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--size", default="mqar", choices=("mqar", "mqar64", "mqar256"), help="width 128, 64 or 256")
    parser.add_argument("--rows", help="some rows only, with commas between them")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="learning rates (default: zoology's four)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 for rows, 1 2 3 for seeds")
    parser.add_argument("--steps", type=int, help="default: 2000 for rows, 10000 for seeds")
    parser.add_argument(
        "--rates-from", type=Path, help="for seeds: where rates were chosen (default: OUT/mqar_rows.json)"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes; 0: this one (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long, with what is finished")
    parser.add_argument("--test-samples", type=int, default=1000, help="of each test slice (default: %(default)s)")
    parser.add_argument("--device", help="cuda or cpu; none: a GPU if there is one")
    parser.add_argument("--no-capture", action="store_true", help="launch each kernel, without CUDA graphs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=JSON", help="a field of all recipes: --set data.batch=64"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that holds something else")
    return sweep(parser.parse_args(argv))


def sweep(options: argparse.Namespace) -> int:
    from ccq.doctor import best_device, check_cpu_bf16, check_device
    from ccq.train import folder

    tier, out = options.tier, options.out
    began = time.monotonic()
    known = ROWS if tier == "rows" else MAIN
    options.rows = tuple(re.split(r"[,\s]+", options.rows)) if options.rows else known
    for row in options.rows:
        if row not in KNOWN:
            raise RunError(f"--rows: there is no {row!r}.{nearest(row, KNOWN)} Rows are {', '.join(KNOWN)}.")
    options.steps = TIERS[tier][0] if options.steps is None else options.steps
    options.seeds = tuple(dict.fromkeys(options.seeds or TIERS[tier][1]))
    options.rates = tuple(dict.fromkeys(options.rates))
    for name, value, least in (("steps", options.steps, 1), ("test-samples", options.test_samples, 1),
                               ("workers", options.workers, 0)):  # fmt: skip
        if value < least:
            raise RunError(f"--{name}: expected at least {least}, got {value}")
    options.changes = tuple(change(text) for text in options.set)
    begun = any(out.glob("mqar_*.json")) or any(out.glob("runs/*-steps*-r*.json"))
    check_free(out, options.force, ours=begun, older="one with an older sweep")
    with folder.locked(out):
        chosen = {}
        if tier == "seeds" and options.rates_from:
            chosen = read_chosen(options.rates_from, options.rows)
        elif tier == "seeds":
            chosen = read_chosen(out / "mqar_rows.json", options.rows, options.size)
        groups = groups_of(tier, options, chosen)
        for group in groups:
            try:
                config = group[0].config()  # refuse now what no run can have
            except (AttributeError, TypeError) as error:
                raise RunError(f"--set: {error}") from None
            if not config.data.valid_slices:
                raise RunError("data.valid_slices: expected one kind of sample at least: rates are chosen on them")
        check_test_samples(groups, out, options.test_samples)
        specs = list(itertools.chain(*groups))
        now, path = protocol(specs, options.test_samples), out / f"mqar_{tier}.json"
        before: dict[str, Any] = {"chosen": {}, "failed": {}, "missing": [], "runs": {}}
        if path.exists() and not options.force:
            before = earlier_calls(path, specs, now)
        todo = [[spec for spec in group if not (out / "runs" / f"{spec.name}.json").exists()] for group in groups]
        todo = [group for group in todo if group]
        if todo:
            device = options.device or best_device()
            check_device(device)
            check_cpu_bf16(device, todo[0][0].config().dtype)
        count, total = sum(map(len, todo)), sum(map(len, groups))
        say(f"{total} runs of {options.steps} steps, {total - count} of them finished before")
        settings = {
            "device": options.device, "capture": not options.no_capture, "workers": options.workers,
            "test_samples": options.test_samples,
        }  # fmt: skip
        code, failed = 0, []
        try:
            with stopped_by_sigterm():
                failed = run_all(todo, out, settings, began + 60 * options.minutes)
        except KeyboardInterrupt:
            code = 130
        content = merge(tier, specs, out, chosen, failed, now, before)
    print(table(content))
    left = len({spec.name for spec in specs} & set(content["missing"]))
    say(
        f"{total - left} of {total} runs in {path}, {time.monotonic() - began:.0f} s"
        + (f"; {left} missing: the same command goes on with them" if left else "")
    )
    return code or (1 if left else 0)


def check_test_samples(groups: list[list[Spec]], out: Path, samples: int) -> None:
    """RunError where a finished run was tested on another number: one file must not mix them."""
    for spec in itertools.chain(*groups):
        path = out / "runs" / f"{spec.name}.json"
        if path.exists():
            found = sorted({part["samples"] for part in json.loads(path.read_text())["test"]["slices"]})
            if found not in ([], [samples]):
                raise RunError(
                    f"--test-samples: {path} was tested on {found[0]} of each slice, asked for {samples}. "
                    f"Give --test-samples {found[0]}, or take another --out"
                )


def change(text: str) -> tuple[str, Any]:
    """A field and its value, lists as tuples."""
    from ccq.train.config import tuples

    name, sign, value = text.partition("=")
    if not sign:
        raise RunError(f"--set: expected FIELD=JSON, got {text!r}")
    if name in OPTIONS:
        raise RunError(f"--set {name}: the runs of a sweep differ in it, give it with {OPTIONS[name]}")
    try:
        from ccq.train.config import tuples

        return name, tuples(json.loads(value))
    except json.JSONDecodeError:
        return name, value
