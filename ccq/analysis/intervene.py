"""What does a trained model do with its cleaning? Evaluate it with lam changed: off, fixed, scaled, layer by layer.

off        lam = 0: the backbone with unit q and k, on weights that were trained with cleaning
fixed X    lam = X everywhere: the gate's choice is taken away
scale X    lam = X lam, at most 1: more or less of the same choice
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ccq import tables as screen
from ccq.analysis import AnalysisError
from ccq.mixers import QueryCleaner
from ccq.report.collect import Collection, Source
from ccq.report.table import NOT_RUN, Block, Table, analysis_row, needle, number, tokens_label

COLUMNS = 16  # that a table of any scores has at most


def cleaners(model: nn.Module) -> list[QueryCleaner]:
    """The modules that clean, in the order of the layers; AnalysisError where there are none."""
    found = [module for module in model.modules() if isinstance(module, QueryCleaner) and module.clean]
    if not found:
        raise AnalysisError(f"{type(model).__name__} has no cleaning: expected a model with it, such as ccq-gla-pico")
    return found


@dataclass(frozen=True)
class Intervention:
    """lam as it is used, in some layers (counted from 0 among those that clean; None: in all).

    >>> Intervention("scale", 0.5, (0, 3)).name
    'scale-0.5-layers-0-3'
    """

    kind: str = "none"  # or "off", "fixed", "scale"
    value: float = 0.0
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("none", "off", "fixed", "scale"):
            raise AnalysisError(f"kind: expected none, off, fixed or scale, got {self.kind!r}")
        most = 1.0 if self.kind == "fixed" else math.inf
        if not 0 <= self.value <= most:
            expected = "a number from 0 to 1" if self.kind == "fixed" else "a number that is not negative"
            raise AnalysisError(f"{self.kind}: expected {expected}, got {self.value}")

    @property
    def name(self) -> str:
        name = f"{self.kind}-{self.value:g}" if self.kind in ("fixed", "scale") else self.kind
        return name if self.layers is None else f"{name}-layers-{'-'.join(map(str, self.layers))}"

    def __call__(self, lam: Tensor) -> Tensor:
        if self.kind == "none":
            return lam
        if self.kind == "scale":
            return (lam * self.value).clamp(max=1)
        return torch.full_like(lam, 0.0 if self.kind == "off" else self.value)


@contextlib.contextmanager
def intervene(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The model with `change` applied to lam, in its `layers` if it has any, else in all that clean; then as it was.

    with intervene(model, Intervention("off")):
        evaluate(model, ...)
    """
    every, layers = cleaners(model), getattr(change, "layers", None)
    chosen = range(len(every)) if layers is None else layers
    for layer in chosen:
        if not 0 <= layer < len(every):
            raise AnalysisError(f"layers: expected layers from 0 to {len(every) - 1} (those that clean), got {layer}")
    before = [cleaner.intervention for cleaner in every]
    try:
        for layer in chosen:
            every[layer].intervention = change
        yield
    finally:
        for cleaner, old in zip(every, before, strict=True):
            cleaner.intervention = old


def main(argv: Sequence[str]) -> int:
    from ccq.analysis.command import describe, write
    from ccq.evaluate import load, make_parser, name_of, parse, run
    from ccq.evaluate.results import read_result
    from ccq.files import replaceable

    parser = make_parser()
    parser.prog = "ccq analyze intervene"
    parser.description = (__doc__ or "").splitlines()[0]
    add = parser.add_argument
    add("--off", action="store_true", help="evaluate with cleaning off")
    add("--fixed", type=float, nargs="+", default=[], metavar="X", help="evaluate with lam fixed at each X")
    add("--scale", type=float, nargs="+", default=[], metavar="X", help="evaluate with lam times each X, at most 1")
    add("--each-layer", action="store_true", help="also apply each of these in one layer at a time")
    arguments, suites, options = parse(parser, argv)
    asked = [Intervention("off")] if arguments.off else []
    asked += [Intervention(kind, x) for kind in ("fixed", "scale") for x in getattr(arguments, kind)]
    if not asked:
        parser.error("expected at least one intervention: --off, --fixed X or --scale X")
    if arguments.stage != "all":
        parser.error("--stage: interventions run all stages; expected no --stage")
    model, tokenizer = load(arguments, suites)
    count = len(cleaners(model))
    if arguments.each_layer:
        asked += [replace(change, layers=(layer,)) for change in asked for layer in range(count)]
    name = name_of(arguments)
    told = {"kind": "intervene", **describe(model, name), "cleaning_layers": count}
    path = replaceable(arguments.out / "intervene.json", identity=told["identity"])
    before = json.loads(path.read_text())["rows"] if path.exists() and not arguments.again else []
    rows, failed = {row["intervention"]: row for row in before}, False
    for change in [Intervention(), *asked]:  # the first changes nothing, on the code path of the others
        # a folder of its own: the weights are the same, and so would be the names of its files
        options = options.but(out=arguments.out / change.name)
        with intervene(model, change):
            found = run(suites, model, tokenizer, options, f"{name}, lam {change.name}")
        failed = failed or len(found) < len(suites)
        row = rows.setdefault(change.name, {"intervention": change.name, "suites": {}})
        for suite, result in found.items():
            row["suites"][suite] = {x: score["value"] for x, score in result["scores"].items()}
        if change == Intervention():  # a change has nothing to be compared with where the model as it is has failed
            for other, suite in itertools.product(rows.values(), found):
                theirs = read_result(arguments.out / other["intervention"], suite)
                if theirs is None or theirs["samples"]["hash"] != found[suite]["samples"]["hash"]:
                    other["suites"].pop(suite, None)  # an earlier call asked other samples
            suites = [suite for suite in suites if suite.name in found]
            if not suites:
                return 1
    write(path, {**told, "rows": list(rows.values())})
    show(list(rows.values()))
    return int(failed)


def show(rows: list[dict]) -> None:
    """Scores with each intervention, and what it changes."""
    shown = []
    for suite, scores in rows[0]["suites"].items():
        for score, value in scores.items():
            for row in rows:
                got = row["suites"].get(suite, {}).get(score)
                known = got is not None and value is not None and row is not rows[0]
                change = f"{got - value:+.2f}" if known else ""
                shown.append((suite, score, row["intervention"], "-" if got is None else f"{got:.2f}", change))
    screen.show(("suite", "score", "lam", "value", "change"), shown, left=3)


def tables(found: Collection) -> list[Table]:
    """A row a model and change of lam, its scores from all files that ask it other things."""
    notes = []
    sources = found.of("analysis", "intervene")
    asked = list(dict.fromkeys(name for source in sources for row in source.content["rows"] for name in scores_of(row)))
    several = len({suite for suite, _ in asked}) > 1
    if not several and asked and asked[0][0] == "niah":  # models may have been asked at other lengths
        asked.sort(key=lambda name: needle(name[1]))
    names = asked[:COLUMNS]
    if len(asked) > COLUMNS:
        notes.append(f"{len(asked) - COLUMNS} more scores are in {', '.join(source.name for source in sources)}.")
    rows: list[tuple[tuple, list[Source], dict]] = []  # whose, from which files, and its scores
    for source in sources:
        whole = [row for row in source.content["rows"] if "-layers-" not in row["intervention"]]
        for row in whole:
            lam = {"none": "as trained"}.get(row["intervention"], row["intervention"])
            whose, scores = (source.identity, f"{source.title}, lam {lam}"), scores_of(row)
            same = [(mine, known) for who, mine, known in rows if who == whose and not known.keys() & scores.keys()]
            if source.seed is not None and same:  # else they need not be of one model
                mine, known = same[0]
                mine.append(source)
                known |= scores
            else:
                rows.append((whose, [source], scores))
        if some := len(source.content["rows"]) - len(whole):
            notes.append(f"{source.title}: {some} more rows, each with some layers changed, are in {source.name}.")
    if not rows:
        return []
    shown = []
    for (_, label), mine, scores in rows:
        made = analysis_row(label, mine, ["" if (x := scores.get(name)) is None else number(x) for name in names])
        made.cells = [cell if cell.text else NOT_RUN for cell in made.cells]
        shown.append(made)
    head = [f"{suite}: {score}" if several else asked_label(suite, score) for suite, score in names]
    return [Table("intervene", "Cleaning changed at inference", ["", *head], [Block("", shown)], notes)]


def scores_of(row: dict) -> dict[tuple[str, str], float | None]:
    return {(suite, name): value for suite, scores in row["suites"].items() for name, value in scores.items()}


def asked_label(suite: str, score: str) -> str:
    """A score in few words, as the paper's table of needles has them.

    >>> asked_label("niah", "niah_single_1/4096"), asked_label("length", "pg19/4096")
    ('S1 4K', 'pg19/4096')
    """
    if suite == "niah" and score.startswith("niah_single_"):
        task, length = needle(score)
        return f"S{task.removeprefix('niah_single_')} {tokens_label(length)}"
    return score
