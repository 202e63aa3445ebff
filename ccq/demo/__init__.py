"""`ccq demo` (`make run`): train tiny models, test the shipped ones, write a report page. Minutes on a CPU, no network.

    OUT/regimes/                 one read in three constructed regimes: a table and a figure
    OUT/ccq_gla_tiny-seed0/ ...  a control and two reads, trained on recall with three seeds (runs of `ccq train`)
    OUT/ccq-gla-pico/ ...        needles, and perplexity by length, of the models that ship (results of `ccq eval`)
    OUT/alignment/               where needle keys lie in the CCQ model (result of `ccq analyze alignment`)
    OUT/report/index.html        the page
    OUT/demo.json                what is finished, with which settings; OUT/log.txt is what the parts printed

Started again it goes on: what is finished is kept, a run goes on from its checkpoint, an evaluation from its answers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ccq import shipped, tables
from ccq.cli import COMMANDS, function_at
from ccq.doctor import best_device, check_device
from ccq.files import read_toml, write_json
from ccq.names import duration, plural
from ccq.systems import SYSTEMS, compared, recipe_name

TRAINED = ("gla-unit", "ccq-gla", "gla-projected-decay")  # the control first
UPDATES, RATE = 2, "3e-3"  # those of docs/recall.md, where twenty seeds learned this task
TRIO = {f"{system}-pico": system for system in compared("ccq-gla")}  # that ship
STATE, LOG, TINY = "demo.json", "log.txt", "_tiny-seed"
LOUD = ("train", "regimes")  # commands that are seen at work
WORDS = read_toml(Path(__file__).with_name("words.toml"))


@dataclass
class Settings:
    """What is shown, and how much of it; a test takes less."""

    out: Path = Path("runs/laptop")
    seed: int = 0  # the first of
    seeds: int = 3
    device: str | None = None  # None: a GPU if there is one
    systems: tuple[str, ...] = TRAINED
    steps: int = 500  # of training
    recall: tuple[tuple[int, int, int], ...] = ((32, 4, 256), (32, 6, 256))  # test slices: tokens, pairs, samples
    needle_lengths: tuple[int, ...] = (512, 1024, 2048)
    needle_samples: int = 16
    answer_tokens: int = 24  # a number has seven digits
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    tokens: int = 16_384  # of the book
    variants: int = 3  # prompts of each of five kinds
    sentences: int | None = None  # of filler in a prompt


@dataclass(frozen=True)
class Step:
    """One part: the folder that it writes to, and the commands that make it, which with the weights of a model that
    ships decide its result."""

    folder: str
    title: str
    seconds: int  # about, on two cores
    commands: tuple[str, ...] = ()  # of `ccq`, with {out} and {device}
    weights: str | None = None

    @property
    def decides(self) -> list:
        """What OUT/demo.json says of it once it is finished."""
        return [*self.commands, self.weights]

    def finished(self, out: Path, record: dict[str, Any]) -> bool:
        there = (out / self.folder).is_dir() and damaged(out / self.folder) is None
        return there and record.get(self.folder) == self.decides


def read_record(out: Path) -> dict[str, Any]:
    """{folder: what decided it} of the steps that are finished, from OUT/demo.json."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return dict(read(out / STATE)["steps"])
    return {}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def damaged(folder: Path) -> Path | None:
    """The first JSON file of a step that cannot be read."""
    for path in sorted(folder.rglob("*.json")):
        try:
            read(path)
        except ValueError:
            return path
    return None


def label(system: str) -> str:
    """What a table calls it."""
    return SYSTEMS[system].label + (" (control)" if system == SYSTEMS["ccq-gla"].control else "")


def plan(settings: Settings) -> list[Step]:
    """The steps in their order. Only models that ship are asked."""
    title = "A constructed example: one read of a needle among distractors"
    steps = [Step("regimes", title, 5, (f"regimes {{out}} {settings.seed}",))]
    # The tiny recipe with one layer that has a short convolution: it binds a key to its value from the first steps, so
    # that recall is learned in half a minute.
    every, slices = max(1, settings.steps // 5), commas("x".join(map(str, part)) for part in settings.recall)
    train = (
        f"--model.conv-size 4 --model.num-hidden-layers 1 --data.updates {UPDATES} --steps {settings.steps} "
        f"--optimizer.lr {RATE} --optimizer.warmup {min(20, settings.steps)} --runtime.device {{device}} "
        f"--runtime.no-tensorboard --runtime.log-every 25 --runtime.checkpoint-every {every} "
        f"--runtime.validate-every {every}"
    )
    test = f"--suite mqar --slices {slices} --seed {settings.seed} --device {{device}} --dtype float32"
    for seed, system in itertools.product(seeds_of(settings), settings.systems):
        title = f"{label(system)} learns recall with overwritten keys, seed {seed}: {settings.steps} steps, then a test"
        learn = f"train {recipe_name(system, 'tiny')} --run-dir {{out}} --seed {seed} {train}"
        steps.append(Step(trained(system, seed), title, 14, (learn, f"eval {{out}} --out {{out}}/eval {test}")))
    weights = {}
    needles = (  # RULER's steps of 500 words exceed the shortest
        f"niah --tasks niah_single_1,niah_book --keys odd --sizing full --lengths {commas(settings.needle_lengths)} "
        f"--limit {settings.needle_samples} --answer-tokens {settings.answer_tokens}"
    )
    lengths = f"length --tasks book --lengths {commas(settings.lengths)} --tokens {settings.tokens}"
    for name in (name for name in TRIO if name in shipped.names()):
        shipped.verify(shipped.root() / name)
        files = shipped.manifest(shipped.root() / name)["files"]
        weights[name] = files.get("model.safetensors", {}).get("sha256")
        title = f"{name}, trained on text: needles, and perplexity by length"
        asked = (f"eval {{shipped}}/{name} --out {{out}} --device {{device}} --suite {x}" for x in (needles, lengths))
        steps.append(Step(name, title, 30, tuple(asked), weights[name]))
    if (name := "ccq-gla-pico") in weights:
        title = f"{name}: do needle keys lie off the directions of most variance?"
        some = "" if settings.sentences is None else f"--sentences {settings.sentences}"
        prompts = f"--variants {settings.variants} {some}"
        look = f"analyze alignment {{shipped}}/{name} --out {{out}} --device {{device}} {prompts}"
        steps.append(Step("alignment", title, 8, (look,), weights[name]))
    return steps


def seeds_of(settings: Settings) -> range:
    return range(settings.seed, settings.seed + settings.seeds)


def trained(system: str, seed: int) -> str:
    """The folder of a run."""
    return f"{recipe_name(system, 'tiny')}-seed{seed}"


def commas(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def make(step: Step, out: Path, device: str) -> None:
    """Run the commands of a step in this process. What they print goes to the log, but for LOUD; progress to stderr."""
    import torch

    paths, threads = {"out": out / step.folder, "shipped": shipped.root(), "device": device}, torch.get_num_threads()
    if device == "cpu" and TINY in step.folder:
        torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it gives
    try:
        for words in step.commands:
            name, *arguments = [word.format(**paths) for word in words.split()]
            main = function_at("ccq.demo.regimes:main" if name == "regimes" else COMMANDS[name][0])
            with contextlib.ExitStack() as quiet:
                if name not in LOUD:
                    log = quiet.enter_context((out / LOG).open("a", encoding="utf-8"))
                    quiet.enter_context(contextlib.redirect_stdout(log))
                if code := main(arguments):
                    raise Stopped(code)
    finally:
        torch.set_num_threads(threads)


class Stopped(Exception):
    """A signal ended the training, or a command failed and said why; its argument is the exit code."""


@contextlib.contextmanager
def interruptions() -> Iterator[list[int]]:
    """A list that gets every SIGINT, beside the KeyboardInterrupt it raises: libraries may swallow that."""
    got: list[int] = []

    def note(number: int, frame: Any) -> None:
        got.append(number)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield got
    finally:
        signal.signal(signal.SIGINT, before)


def run(settings: Settings, fresh: bool = False) -> int:
    """Make what is not finished, then the page and the tables."""
    from rich.console import Console

    from ccq.train import folder

    console = Console(highlight=False)
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    out, begin = settings.out, time.perf_counter()
    steps = plan(settings)
    with folder.locked(out), interruptions() as got:
        record = read_record(out)
        if fresh:
            for name in {*record, *(step.folder for step in steps), "report", STATE, LOG}:  # this wrote, no other
                remove(out / name)
            record = {}
        device = settings.device or best_device()
        say("Using the GPU." if device.startswith("cuda") else f"Using the CPU: {os.cpu_count()} cores.")
        left = sum(step.seconds for step in steps if not step.finished(out, record))
        if not any(step.folder in TRIO for step in steps):
            say("The shipped models are missing in this version: needles, lengths and alignment are left out.")
        for number, step in enumerate(steps, 1):
            head = f"[{number}/{len(steps) + 1}] {step.title}"
            if step.finished(out, record):
                say(f"{head}: finished before", style="dim")
                continue
            so_far, to_go = duration(time.perf_counter() - begin), duration(max(0, left))
            say(f"{head} ({so_far} so far, about {to_go} to go on two cores)", style="bold")
            if wrong := damaged(out / step.folder):
                say(f"{wrong} is damaged: making this part again")
            if record.pop(step.folder, step.decides) != step.decides or wrong:  # made with other settings
                remove(out / step.folder)
                write_json(out / STATE, {"steps": record})
            make(step, out, device)
            record[step.folder] = step.decides
            write_json(out / STATE, {"steps": record})
            if got:
                raise KeyboardInterrupt
            left -= step.seconds
        say(f"[{len(steps) + 1}/{len(steps) + 1}] The page", style="bold")
        page = write_report(settings, steps)
        show(settings, steps, console)
    say(f"\nThe page: {page.resolve()}")
    say(f"{duration(time.perf_counter() - begin)} in total. `ccq demo --fresh` starts over.")
    return 0


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_report(settings: Settings, steps: list[Step]) -> Path:
    from ccq.report.collect import collect
    from ccq.report.page import build

    found = collect([settings.out / step.folder for step in steps if step.folder != "regimes"])
    found.told += notes(settings, steps)
    return build(found).write(settings.out / "report")[0]


def notes(settings: Settings, steps: list[Step]) -> list[str]:
    """What to know of the models before their numbers are compared."""
    ship = [step.folder for step in steps if step.folder in TRIO]
    said = []
    if any(TINY in step.folder for step in steps):
        said.append("The models trained here have one layer and a convolution over 4 tokens; the paper's GLA has none.")
    for name in ship[:1]:  # they are trained alike
        with contextlib.suppress(FileNotFoundError):
            told = read(shipped.root() / name / "results.json")
            share = told["data"]["needle_tokens"] / told["data"]["tokens"]
            more = WORDS["convolution"] if told["conv_size"] else ""
            said.append((WORDS["shipped"] + more).format(**told, share=share))
    found = {name: read(settings.out / name / "niah.json")["scores"].values() for name in ship}
    none = [name for name in ship if not any(score["value"] for score in found[name])]
    if none and len(none) < len(ship):
        they = "it" if len(none) == 1 else "they"
        said.append(WORDS["none_found"].format(who=" and ".join(none), they=they))
    return said


def show(settings: Settings, steps: list[Step], console: Any) -> None:
    """The numbers in short, and what may be concluded from them."""

    def table(title: str, of: dict[str, str], file: str, columns: dict[str, str], digits: int = 1) -> None:
        """Rows are folders and the system in each, columns names of scores and their headings."""
        rows = []
        for folder, system in of.items():
            found = read(settings.out / folder / file)["scores"]
            rows.append((label(system), *(f"{found[name]['value']:.{digits}f}" for name in columns)))
        tables.show(("", *columns.values()), rows, title)

    columns = {f"{length}-{pairs}": f"{pairs} pairs in {length} tokens" for length, pairs, _ in settings.recall}
    found = {system: recalled(settings, system) for system in settings.systems}
    rows = [(label(system), *(spread([x[name] for x in found[system]]) for name in columns)) for system in found]
    title = f"Recall, {UPDATES} keys overwritten: keys answered, %, mean and range of {plural(settings.seeds, 'seed')}"
    tables.show(("", *columns.values()), rows, title)
    for line in (*agreement(found, *list(columns.items())[-1]), WORDS["recall"]):
        console.print(line, markup=False)
    ship = {step.folder: TRIO[step.folder] for step in steps if step.folder in TRIO}
    if ship:
        tasks = {"niah_single_1": "noise", "niah_book": "book"}
        columns = {f"{task}/{n}": f"{what}\n{n:,}" for task, what in tasks.items() for n in settings.needle_lengths}
        title = f"Needles retrieved by the shipped models, %, {settings.needle_samples} samples each, by tokens"
        table(title, ship, "niah.json", columns, digits=0)
        there, told = read(settings.out / next(iter(ship)) / "length.json")["scores"], shipped.book()
        columns = {f"book/{n}": f"{n:,}" for n in settings.lengths if f"book/{n}" in there}
        title = f"Perplexity on {told['title']} ({told['author']}, {told['year']}), by length in tokens"
        table(title, ship, "length.json", columns)
    for note in notes(settings, steps):
        console.print(note, markup=False)
    console.print("docs/study.md asks which read is better in language models.")


def recalled(settings: Settings, system: str) -> list[dict[str, float]]:
    """What the runs of a system answered, by seed and slice, in percent."""
    files = [settings.out / trained(system, seed) / "eval" / "mqar.json" for seed in seeds_of(settings)]
    return [{name: score["value"] for name, score in read(file)["scores"].items()} for file in files]


def spread(values: Sequence[float]) -> str:
    """
    >>> spread([90.0, 95.5, 100.0])
    '95.2 (90–100)'
    """
    return f"{sum(values) / len(values):.1f} ({min(values):.0f}–{max(values):.0f})"


def agreement(found: dict[str, list[dict[str, float]]], slice_: str, heading: str) -> list[str]:
    """Of each read, whether it beats the control, which is the first, with every seed.

    >>> control, read = ([{"32-8": x} for x in values] for values in ([80.0, 70.0, 75.0], [82.0, 71.0, 79.0]))
    >>> agreement({"gla-unit": control, "ccq-gla": read}, "32-8", "8 pairs")
    ['CCQ-GLA minus control, 8 pairs: +2.0, +1.0, +4.0 by seed. All agree: by chance they do in one of 4.']
    """
    control, *reads = found
    lines = []
    for system in reads:
        each = [a[slice_] - b[slice_] for a, b in zip(found[system], found[control], strict=True)]
        agree = all(x > 0 for x in each) or all(x < 0 for x in each)
        verdict = f"All agree: by chance they do in one of {2 ** (len(each) - 1)}." if agree else "They do not agree."
        told = ", ".join(f"{x:+.1f}" for x in each)
        lines.append(f"{SYSTEMS[system].label} minus control, {heading}: {told} by seed. {verdict}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="ccq demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=defaults.out, help="folder to write to (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="start over: remove the files of an earlier demo")
    told = "first of three seeds of data and training (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=defaults.seed, help=told)
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    options = parser.parse_args(argv)
    try:
        if options.device:
            check_device(options.device)
        return run(Settings(out=options.out, seed=options.seed, device=options.device), options.fresh)
    except (KeyboardInterrupt, Stopped) as stopped:
        print("\nStopped. The same command resumes.", file=sys.stderr)
        return stopped.args[0] if isinstance(stopped, Stopped) else 130
