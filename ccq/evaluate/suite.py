"""What a suite of `ccq eval` is. A file of this package that ends with `SUITE = Suite(...)` has one: the frame finds it
there, and knows no more of it than stands in that object."""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ccq.evaluate.requests import EvaluationError
from ccq.names import nearest


@dataclass(frozen=True)
class Option:
    """An option of a suite. What several suites read is the same for all of them, but for what it does there."""

    name: str
    help: str = field(compare=False)
    type: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None
    default: Any = None  # None: the suite's own
    flag: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "flag", self.flag or f"--{self.name.replace('_', '-')}")


@dataclass(frozen=True)
class Suite:
    """A suite: what it asks of a model, and what it makes of the answers."""

    name: str  # what `--suite` calls it, and its files
    help: str  # what it is, in a line
    build: Callable  # (options, tokenizer) -> RequestSet
    metrics: Callable  # (asked, answers, options, tokenizer) -> (sample rows, scores)
    options: tuple[Option, ...] = ()  # those that it reads beside what all suites read
    tasks: tuple[str, ...] = ()  # what `--tasks` may name
    data: tuple[str, ...] = ()  # the files of `--data DIR` that it reads
    text: bool = True  # whether it needs a tokenizer
    as_trained: Callable | None = None  # (options, config of the model) -> options, where training decides them
    axis: int | None = None  # of the paper: the default of `--suite`, in their order; None: run where it is asked for

    def check(self, options: Options) -> None:
        """Refuse tasks that it has not."""
        if options.tasks and not self.tasks:
            raise EvaluationError(f"--tasks: {self.name} has no tasks to choose from, got {', '.join(options.tasks)}")
        if unknown := [task for task in options.tasks or () if task not in self.tasks]:
            near, known = nearest(unknown[0], self.tasks), ", ".join(self.tasks)
            raise EvaluationError(f"--tasks: {self.name} has no {unknown[0]!r}.{near} It has: {known}")


@functools.cache
def suites() -> dict[str, Suite]:
    """All of them by name, the paper's axes first."""
    import ccq.evaluate

    modules = [f"ccq.evaluate.{found.name}" for found in pkgutil.iter_modules(ccq.evaluate.__path__)]
    every = [thing for module in map(importlib.import_module, modules) for thing in vars(module).values()]
    found = [thing for thing in every if isinstance(thing, Suite)]
    found.sort(key=lambda suite: (suite.axis is None, suite.axis, suite.name))
    return {suite.name: suite for suite in found}


def named(name: str) -> Suite:
    if name not in suites():
        known = tuple(suites())
        hint = nearest(name, known) or f" There are {', '.join(known)}."
        raise EvaluationError(f"unknown suite {name!r}.{hint}")
    return suites()[name]


def readers() -> dict[Option, list[str]]:
    """Every option of a suite, and the suites that read it."""
    found: dict[Option, list[str]] = {}
    for suite in suites().values():
        for option in suite.options:
            found.setdefault(option, []).append(suite.name)
    names = [option.name for option in found]
    assert len(names) == len(set(names)), f"suites differ in what an option of {names} is"
    return found


COMMON = {  # what every suite reads, and what decides how it is run
    "data": None, "tasks": None, "limit": None, "batch_size": None, "stage": "all", "again": False,
}  # fmt: skip


class Options(SimpleNamespace):
    """What decides an evaluation beside the model: where to write, COMMON, and the options of suites by their names."""

    def __init__(self, out: Path, **given: Any) -> None:
        known = COMMON | {option.name: option.default for option in readers()}
        for name in given:
            if name not in known:
                raise TypeError(f"Options: there is no option {name!r}.{nearest(name, tuple(known))}")
        super().__init__(out=out, **(known | given))

    def but(self, **changes: Any) -> Options:
        return Options(**(vars(self) | changes))


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers above 0, got {text!r}")
    return tuple(dict.fromkeys(values))


def lengths_option(default: str) -> Option:
    return Option("lengths", f"lengths in tokens, separated by commas (default: {default})", whole_numbers)


def max_lengths_option(default: str) -> Option:
    return Option("max_lengths", f"most tokens of a request (default: {default})", whole_numbers, flag="--max-length")


SEED = Option("seed", "seed of the samples (default: 42)", int, default=42)
