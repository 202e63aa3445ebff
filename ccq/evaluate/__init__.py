"""`ccq eval`: evaluate a causal language model on the paper's four axes and on recall, offline or from the Hub."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ccq.doctor import best_device
from ccq.evaluate import results
from ccq.evaluate.requests import EvaluationError, Request, RequestSet
from ccq.evaluate.results import Responses, tokenizer_hash
from ccq.evaluate.suite import COMMON, Options, Suite, named, readers, suites
from ccq.files import finite, locked, stored, write_json
from ccq.names import plural, positive
from ccq.pretrained import DTYPES, NoTokenizerError, load_config, load_model, load_tokenizer, most_tokens
from ccq.provenance import provenance
from ccq.tables import progress

__all__ = ["ContextWarning", "EvaluationError", "Options", "Suite", "evaluate", "suites"]

STAGES = ("requests", "score", "metrics")


class ContextWarning(UserWarning):
    """The model is asked about more tokens than its config names."""


def evaluate(model, tokenizer, suite: str, options: Options, name: str = "model", config: Any = None) -> dict | None:
    """Run one suite and return its result (the content of OUT/SUITE.json); None after stages that have none.

    Args:
        model: a causal LM on its device; None for the stages that need none.
        tokenizer: its tokenizer; None for a suite without text.
        suite: its name; `suites()` has all.
        name: what the result calls the model.
        config: of the model, for a stage without it.
    """
    its, stage = named(suite), options.stage
    its.check(options)
    if its.as_trained is not None:
        options = its.as_trained(options, config or getattr(model, "config", None))
    if tokenizer is None and its.text and stage != "score":
        raise EvaluationError(f"the suite {suite} needs a tokenizer, and {name} has none: give one with --tokenizer")
    result_path, requests = options.out / f"{suite}.json", options.out / "requests" / f"{suite}.npz"
    answers_path = options.out / "responses" / f"{suite}.jsonl"
    if stage in ("all", "requests"):
        asked = its.build(options, tokenizer)
        asked.settings |= {"tokenizer_hash": tokenizer_hash(tokenizer), "limit": options.limit}
        print(f"{suite}: {plural(len(asked.requests), 'request')}, {sum(r.length for r in asked.requests):,} tokens")
    else:
        asked = RequestSet.load(requests)
    if stage == "requests":
        asked.origin = provenance()
        asked.save(requests)
        print(f"Wrote {requests}")
        return None
    if tokenizer is not None and asked.settings["tokenizer_hash"] != tokenizer_hash(tokenizer):
        raise EvaluationError(f"{requests} was made with another tokenizer than {name} has: run --stage requests again")
    found = results.read_result(options.out, suite)
    done = None if options.again else found
    if stage == "metrics":
        if not answers_path.exists():
            raise EvaluationError(f"{answers_path} does not exist: make it with --stage score")
        responses = Responses(answers_path, {})
        check_replaced(done, asked, responses, options.out)
        return finish(its, asked, responses, options, tokenizer)
    check_fits(model, asked)
    if options.again:  # only now: what is finished stays where the new run cannot begin
        answers_path.unlink(missing_ok=True)
        result_path.unlink(missing_ok=True)
    identity = results.describe(model, name)
    if (
        done
        and done["samples"]["hash"] == asked.hash()
        and done["limit"] == asked.settings["limit"]
        and stored(options.out / f"{suite}.jsonl")
        and all(done["model"][what] == identity["model"][what] for what in ("hash", "lam"))
    ):
        print(f"{suite}: already finished, {result_path}; --again evaluates it again")
        return done
    if stage == "score":
        identity["origin"] = provenance()
    responses = Responses(answers_path, identity)
    check_replaced(done, asked, responses, options.out)
    if stage == "all":
        asked.save(requests)
    ask(model, asked, responses, options)
    if stage == "score":
        print(f"Wrote {answers_path}")
        return None
    return finish(its, asked, responses, options, tokenizer)


def ask(model, asked: RequestSet, responses: Responses, options: Options) -> None:
    """Have the model answer what it has not answered yet."""
    from ccq.evaluate.engine import Engine

    each: dict[str, Request] = {}  # of equal ones the first
    for request in asked.requests:
        each.setdefault(asked.key(request), request)
    todo = {key: request for key, request in each.items() if key not in responses.answers}
    if not todo:
        return
    if len(todo) < len(each):
        print(f"{asked.suite}: resumed, {len(each) - len(todo)} of {len(each)} answered before")
    engine = Engine(model, batch_size=options.batch_size)
    longest, context = asked.longest() - 1, getattr(model.config, "max_position_embeddings", None)
    if isinstance(context, int) and longest > context and not engine.recurrent:
        told = f"the longest request has {longest} tokens, and the config of {type(model).__name__} names {context}"
        past = f"{asked.suite}: {told}: it runs past its context, as the paper's Transformer did"
        warnings.warn(past, ContextWarning, stacklevel=2)
    keys = {id(request): key for key, request in todo.items()}
    waiting: list[dict] = []
    saved = time.perf_counter()
    with progress(asked.suite, sum(map(work, todo.values())), " tokens") as bar:
        try:
            for request, answer in engine.run(asked, list(todo.values())):
                waiting.append({"key": keys[id(request)], "id": request.id, **answer})
                bar.update(work(request))
                if time.perf_counter() - saved > 1 or len(waiting) >= 1000:
                    responses.add(waiting)
                    waiting, saved = [], time.perf_counter()
        finally:  # interrupted or failed: what was answered stays
            if waiting:
                responses.add(waiting)


def check_replaced(done: dict | None, asked: RequestSet, responses: Responses, out: Path) -> None:
    """A finished result gives way to one that asks more, not to one that leaves out what it asked."""
    left = responses.answers.keys() - {asked.key(request) for request in asked.requests}
    if done and (left or not responses.answers):  # without answers nobody knows what it asked
        differ = [x for x, old in done["settings"].items() if x != "max_length" and asked.settings.get(x) != old]
        differ = differ or ["another model"]
        told = f"{out / (asked.suite + '.json')} is a finished result with other settings ({', '.join(differ)})"
        raise EvaluationError(f"{told}: choose another --out, or --again to replace it")


def work(request) -> float:
    """What a request costs, in tokens, roughly: a generated one counts for 16 that are only read."""
    return request.length + 16 * request.max_new


def check_fits(model, asked: RequestSet) -> None:
    """Refuse tokens that the model has no embedding for, and more of them than it has positions for."""
    size, largest = model.get_input_embeddings().weight.shape[0], int(asked.tokens.max(initial=0))
    if largest >= size:
        vocabulary = asked.settings.get("vocabulary")  # of a suite that makes its own tokens
        why = f"its vocabulary is {vocabulary:,} tokens" if vocabulary else "is the tokenizer its own?"
        raise EvaluationError(f"{asked.suite}: token {largest} is asked of a model with {size} embeddings: {why}")
    longest, limit = asked.longest() - 1, most_tokens(model)  # the last token is predicted, never read
    if limit is not None and longest > limit:
        raise EvaluationError(
            f"the longest request has {longest} tokens, and {type(model).__name__} has learned positions "
            f"for {limit}: it cannot take more. Give --lengths or --max-length up to {limit}"
        )


def finish(its: Suite, asked: RequestSet, responses: Responses, options: Options, tokenizer) -> dict:
    """Score the answers, and write OUT/SUITE.json and OUT/SUITE.jsonl."""
    keys = [asked.key(request) for request in asked.requests]
    missing = sum(key not in responses.answers for key in keys)
    if missing:
        raise EvaluationError(f"{responses.path} lacks {missing} of {len(keys)} answers: run --stage score again")
    answers = [responses.answers[key] for key in keys]
    rows, scores = its.metrics(asked, answers, options, tokenizer)
    by_id = dict(zip((request.id for request in asked.requests), keys, strict=True))
    for row in rows:
        if "prompt_hash" not in row:
            row["prompt_hash"] = by_id.get(row["id"]) or by_id[row["id"].rpartition("/")[0]]
    seconds = sum(responses.answers[key]["seconds"] for key in dict.fromkeys(keys))
    result = {
        "suite": its.name,
        "identity": responses.identity["of"],
        "finished": True,
        "limit": asked.settings["limit"],
        "quick_look": asked.settings["limit"] is not None,
        "scores": finite(scores),
        "samples": {"hash": asked.hash(), "count": len(rows), "requests": len(keys)},
        "settings": asked.settings | {"max_length": asked.longest()},
        "notes": asked.notes,
        "model": responses.identity["model"],
        "tokenizer": {"hash": asked.settings["tokenizer_hash"]},
        "seconds": seconds,
        "samples_per_second": len(set(keys)) / seconds if seconds else None,
        **provenance(),
    }
    if options.stage == "metrics":  # the origin above is that of the last stage: these say what was asked, and of whom
        stages = {"requests": asked.origin, "score": responses.identity.get("origin")}
        result["stages"] = {stage: origin for stage, origin in stages.items() if origin}
    results.write_rows(options.out / f"{its.name}.jsonl", rows)
    write_json(options.out / f"{its.name}.json", result)
    print(table(result))
    print(f"Wrote {options.out / (its.name + '.json')}")
    return result


def table(result: dict) -> str:
    """Scores with their intervals, a line each."""
    quick = f", the first {result['limit']} only" if result["quick_look"] else ""
    lines = [f"{result['suite']} of {result['model']['name']}{quick}"]
    width = max(map(len, result["scores"]))
    for name, score in result["scores"].items():
        point = "-" if score["value"] is None else f"{score['value']:.2f}"
        known = score.get("interval") and None not in score["interval"]
        interval = "[{:.2f}, {:.2f}]".format(*score["interval"]) if known else ""
        few, note = "few windows or documents" * bool(score.get("few")), "see note" * bool(score.get("note"))
        marks = ", ".join(filter(None, (f"n={score['n']}", score.get("metric"), few, note)))
        lines.append(f"  {name:<{width}}  {point:>9}  {interval:<20} {marks}")
    return "\n".join([*lines, *(f"  note: {note}" for note in result["notes"])])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ccq eval",
        description=(__doc__ or "").splitlines()[0],
        epilog="suites and their options:\n" + "\n".join(map(described, suites().values())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    axes = ",".join(suite.name for suite in suites().values() if suite.axis)
    add("model", metavar="MODEL", help="a shipped model, a run, a from_pretrained folder, or a name on the Hub")
    add("--suite", default=axes, help="suites, separated by commas (default: %(default)s)")
    add("--out", type=Path, required=True, help="folder for the results; the same command resumes")
    add("--data", type=Path, help="folder with the evaluation data (default: download from the Hub)")
    add("--limit", type=positive, help="at most LIMIT samples per task; the result is marked as a quick look")
    each = lambda text: tuple(dict.fromkeys(text.split(",")))  # noqa: E731
    add("--tasks", type=each, help="only these tasks or corpora, separated by commas")
    add("--stage", choices=STAGES, default="all", help="run one stage only (default: all three)")
    add("--batch-size", type=positive, help="sequences per batch (default: as many as a budget of tokens allows)")
    add("--device", default=best_device(), help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 elsewhere")
    add("--tokenizer", help="a folder or name, if MODEL has no tokenizer")
    add("--name", help="what results call the model (default: the name of its folder)")
    add("--again", action="store_true", help="evaluate again what is finished")
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
        parser.error(f"--data: {arguments.data} is not a folder")
    if arguments.tasks and len(found) > 1:
        parser.error("--tasks: expected one --suite, got several")
    for option, meant in readers().items():  # given for other suites alone it would decide nothing
        if getattr(arguments, option.name) != option.default and not set(meant) & set(asked):
            parser.error(f"{option.flag}: this option is for {', '.join(meant)}, and --suite is {', '.join(asked)}")
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device.startswith("cuda") else "float32")
    names = {"out", *COMMON, *(option.name for option in readers())}
    options = Options(**{name: getattr(arguments, name) for name in names})
    for suite in found:
        suite.check(options)
    return arguments, found, options


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


def name_of(arguments: argparse.Namespace) -> str:
    path = Path(arguments.model)
    return arguments.name or (path.absolute().name if path.exists() else arguments.model)


def run(asked: Sequence[Suite], model: Any, tokenizer: Any, options: Options, name: str, config: Any = None) -> dict:
    """{suite: its result, or None after a stage without}; one that fails says why, and the others still run."""
    found = {}
    for suite in asked:
        try:
            with locked(options.out / f".{suite.name}.lock", EvaluationError):
                found[suite.name] = evaluate(model, tokenizer, suite.name, options, name, config)
        except (EvaluationError, OSError) as error:
            print(f"ccq eval: {suite.name} of {name}: {error}", file=sys.stderr)
    return found


def main(argv: Sequence[str]) -> int:
    """Run the suites that `argv` names."""
    arguments, asked, options = parse(make_parser(), argv)
    model, tokenizer = load(arguments, asked)
    config = load_config(arguments.model) if model is None and any(suite.as_trained for suite in asked) else None
    return int(len(run(asked, model, tokenizer, options, name_of(arguments), config)) < len(asked))
