"""`ccq eval`: a model on the paper's four axes and on MQAR; any Hugging Face causal LM, offline or from the Hub."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ccq.doctor import best_device
from ccq.evaluate import evaluate
from ccq.evaluate.requests import EvaluationError
from ccq.evaluate.suite import COMMON, Options, Suite, named, positive, readers, suites
from ccq.pretrained import DTYPES, NoTokenizerError, load_config, load_model, load_tokenizer

STAGES = ("requests", "score", "metrics")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ccq eval",
        description=(__doc__ or "").splitlines()[0],
        epilog="suites, and the options that each reads:\n" + "\n".join(map(described, suites().values())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    axes = ",".join(suite.name for suite in suites().values() if suite.axis)
    add("model", metavar="MODEL", help="a shipped model, a from_pretrained folder (ccq export), or a name on the Hub")
    add("--suite", default=axes, help="suites, with commas between (default: %(default)s)")
    add("--out", type=Path, required=True, help="folder of the results; an unfinished one there is resumed")
    add("--data", type=Path, help="folder of the evaluation data; without it, from the Hub")
    add("--limit", type=positive, help="at most so many samples a task: a quick look, marked in the result")
    add("--tasks", type=lambda text: tuple(text.split(",")), help="only these tasks (or corpora) of the suite")
    add("--stage", choices=STAGES, default="all", help="one of requests, score, metrics; by default all three")
    add("--batch-size", type=positive, help="sequences a batch; by default as many as fit a budget of tokens")
    add("--device", default=best_device())
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 elsewhere")
    add("--tokenizer", help="where MODEL has none")
    add("--again", action="store_true", help="run what is finished once more, from the start")
    for option in readers():  # shown with their suites, below
        how: dict[str, Any] = {"type": option.type} if option.type else {"choices": option.choices}
        add(option.flag, dest=option.name, default=option.default, help=argparse.SUPPRESS, **how)
    return parser


def described(suite: Suite) -> str:
    """What `--help` says of a suite."""
    lines = [f"  {suite.name:<10} {suite.help}"]
    for option in suite.options:
        usage = f"{option.flag} {'{' + ','.join(option.choices) + '}' if option.choices else 'N'}"
        lines.append(f"    {usage:<30} {option.help}")
    for what, which in (("tasks", suite.tasks), ("files of --data", suite.data)):
        text = f"{what}: {', '.join(which) or 'none'}"
        lines.append(textwrap.fill(text, 110, initial_indent=" " * 4, subsequent_indent=" " * 6))
    return "\n".join(lines)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[Suite], Options]:
    """What was given, checked as far as it can be without the model: arguments, suites, and options of the suites."""
    arguments = parser.parse_args(argv)
    asked = list(dict.fromkeys(arguments.suite.split(",")))
    try:
        found = [named(name) for name in asked]
    except EvaluationError as error:
        parser.error(f"--suite: {error}")
    if arguments.data is not None and not arguments.data.is_dir():
        parser.error(f"--data: {arguments.data} is no folder")
    if arguments.tasks and len(found) > 1:
        parser.error("--tasks: names tasks of one suite, and --suite has several")
    for option, meant in readers().items():  # given for other suites alone it would decide nothing
        if getattr(arguments, option.name) != option.default and not set(meant) & set(asked):
            parser.error(f"{option.flag}: is for {', '.join(meant)}, and --suite has {', '.join(asked)}")
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device.startswith("cuda") else "float32")
    names = {"out", *COMMON, *(option.name for option in readers())}
    return arguments, found, Options(**{name: getattr(arguments, name) for name in names})


def load(arguments: argparse.Namespace, asked: Sequence[Suite]) -> tuple[Any, Any]:
    """(model, tokenizer), each None where the stage, or the suites, need none; a tokenizer also where there is none."""
    model = tokenizer = None
    if arguments.stage != "score" and any(suite.text for suite in asked):
        try:
            tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
        except NoTokenizerError as error:
            if arguments.tokenizer:
                raise EvaluationError(f"--tokenizer: {error}") from error
    if arguments.stage in ("all", "score"):
        model = load_model(arguments.model, arguments.device, arguments.dtype)
    return model, tokenizer


def run(asked: Sequence[Suite], model: Any, tokenizer: Any, options: Options, name: str, config: Any = None) -> dict:
    """{suite: its result, or None after a stage without}; one that fails says why, and the others still run."""
    results = {}
    for suite in asked:
        try:
            results[suite.name] = evaluate(model, tokenizer, suite.name, options, name, config)
        except (EvaluationError, OSError) as error:
            print(f"ccq eval: {suite.name}: {error}", file=sys.stderr)
    return results


def main(argv: Sequence[str]) -> int:
    """Run the suites that `argv` names."""
    arguments, asked, options = parse(make_parser(), argv)
    model, tokenizer = load(arguments, asked)
    config = load_config(arguments.model) if model is None and any(suite.as_trained for suite in asked) else None
    name = Path(arguments.model).name if Path(arguments.model).exists() else arguments.model
    return int(len(run(asked, model, tokenizer, options, name, config)) < len(asked))
