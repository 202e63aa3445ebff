"""`ccq eval`: a model on the paper's four axes and on MQAR; any Hugging Face causal LM, offline or from the Hub."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ccq.doctor import check_cpu_bf16
from ccq.evaluate.errors import EvaluationError
from ccq.evaluate.requests import RequestSet
from ccq.evaluate.results import (
    Progress,
    Responses,
    lam_changed,
    model_hash,
    read_result,
    tokenizer_hash,
    write_json,
    write_rows,
)
from ccq.names import nearest
from ccq.provenance import provenance
from ccq.shipped import ModelError, locate, names

# name: (module, what it is). A module has build(options, tokenizer) -> RequestSet, and
# metrics(asked, answers, options, tokenizer) -> (sample rows, scores).
SUITES = {
    "lm": ("harness", "lm-evaluation-harness: seven zero-shot tasks, LAMBADA, WikiText"),
    "niah": ("niah", "RULER's single needles: niah_single_1, 2 and 3"),
    "length": ("length", "perplexity past the training length, on long documents"),
    "longbench": ("longbench", "LongBench, the 14 English tasks"),
    "mqar": ("mqar", "multi-query associative recall, zoology's test slices"),
}
STAGES = ("requests", "score", "metrics")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ContextWarning(UserWarning):
    """The model is asked about more tokens than its config names."""


@dataclass
class Options:
    """What decides an evaluation beside the model. `None` takes the suite's own."""

    out: Path
    data: Path | None = None
    lengths: tuple[int, ...] | None = None
    max_lengths: tuple[int, ...] | None = None
    limit: int | None = None
    tokens: int | None = None
    answer_tokens: int | None = None
    tasks: tuple[str, ...] | None = None
    seed: int = 42
    sizing: str = "largest"
    keys: str = "all"
    slices: tuple[tuple[int, int, int], ...] | None = None
    recall_vocab_size: int | None = None
    batch_size: int | None = None
    prefill: str = "auto"
    stage: str = "all"
    again: bool = False


def suite_module(name: str):
    return importlib.import_module(f"ccq.evaluate.{SUITES[name][0]}")


def evaluate(model, tokenizer, suite: str, options: Options, name: str = "model") -> dict | None:
    """Run one suite and return its result (the content of OUT/SUITE.json); None after stages that have none.

    Args:
        model: a causal LM on its device; None for the stages that need none.
        tokenizer: its tokenizer; None for mqar.
        name: what the result calls the model.
    """
    if suite not in SUITES:
        raise EvaluationError(f"unknown suite {suite!r}.{nearest(suite, tuple(SUITES))}")
    module = suite_module(suite)
    check_tasks(module, suite, options)
    if tokenizer is None and suite != "mqar" and options.stage != "score":
        raise EvaluationError(f"the suite {suite} needs a tokenizer, and {name} has none: give one with --tokenizer")
    out, requests = options.out, options.out / "requests" / f"{suite}.npz"
    answers_path = out / "responses" / f"{suite}.jsonl"
    asked = None
    if options.stage in ("all", "requests"):
        asked = module.build(options, tokenizer)
        asked.settings |= {"tokenizer_hash": tokenizer_hash(tokenizer), "limit": options.limit}
        asked.origin = provenance() if options.stage == "requests" else None
        if options.stage == "requests":
            asked.save(requests)
        print(f"{suite}: {len(asked.requests)} requests, {sum(r.length for r in asked.requests):,} tokens")
        if options.stage == "requests":
            print(f"Wrote {requests}")
            return None
    asked = asked or RequestSet.load(requests)
    if tokenizer is not None and asked.settings["tokenizer_hash"] != tokenizer_hash(tokenizer):
        raise EvaluationError(f"{requests} was made with another tokenizer than that of {name}: make it again")
    if options.stage == "metrics":
        if not answers_path.exists():
            raise EvaluationError(f"{answers_path} is not there: make it with --stage score")
        responses = Responses(answers_path, {})
    else:
        check_vocabulary(model, asked)
        check_positions(model, asked)
        if options.again:  # only now: what is finished stays where the new run cannot begin
            answers_path.unlink(missing_ok=True)
            (out / f"{suite}.json").unlink(missing_ok=True)
        identity: dict[str, Any] = {
            "model_hash": model_hash(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "lam": lam_changed(model),
        }
        done = read_result(out, suite)
        if (
            done
            and done["finished"]
            and done["samples"]["hash"] == asked.hash()
            and done["limit"] == asked.settings["limit"]
            and done["model"]["hash"] == identity["model_hash"]
            and done["model"].get("lam", identity["lam"]) == identity["lam"]
        ):
            print(f"{suite}: finished already, {out / (suite + '.json')}; --again runs it again")
            return done
        size = sum(p.numel() for p in model.parameters())
        identity |= {"model": name, "class": type(model).__name__, "parameters": size}
        if options.stage == "score":
            identity["origin"] = provenance()
        responses = Responses(answers_path, identity)
        if options.stage == "all":
            asked.save(requests)
        ask(model, asked, responses, options, suite)
        if options.stage == "score":
            print(f"Wrote {answers_path}")
            return None
    return finish(module, suite, asked, responses, options, tokenizer, name)


def check_tasks(module, suite: str, options: Options) -> None:
    known = tuple(getattr(module, {"niah": "KNOWN", "length": "KNOWN", "longbench": "PROMPTS"}.get(suite, "TASKS"), ()))
    if options.tasks and not known:
        raise EvaluationError(f"--tasks: {suite} has none to choose among, got {', '.join(options.tasks)}")
    for task in options.tasks or ():
        if task not in known:
            raise EvaluationError(f"--tasks: {suite} has no {task!r}.{nearest(task, known)} It has: {', '.join(known)}")


def ask(model, asked: RequestSet, responses: Responses, options: Options, suite: str) -> None:
    """Have the model answer what it has not answered yet."""
    from ccq.evaluate.engine import Engine

    keys = {id(request): asked.key(request) for request in asked.requests}
    fresh: dict[str, object] = {}
    for request in asked.requests:
        if keys[id(request)] not in responses.answers:
            fresh.setdefault(keys[id(request)], request)
    if not fresh:
        return
    if len(fresh) < len(set(keys.values())):
        print(f"{suite}: resumed, {len(set(keys.values())) - len(fresh)} of {len(set(keys.values()))} answered before")
    engine = Engine(model, batch_size=options.batch_size, prefill=options.prefill)
    check_length(model, asked, engine.recurrent)
    todo = list(fresh.values())
    progress = Progress(suite, len(todo), sum(work(request) for request in todo))
    waiting: list[dict] = []
    saved = time.perf_counter()
    try:
        for request, answer in engine.run(asked, todo):  # type: ignore[arg-type]
            waiting.append({"key": keys[id(request)], "id": request.id, **answer})
            progress.step(work(request))
            if time.perf_counter() - saved > 1 or len(waiting) >= 1000:
                responses.add(waiting)
                waiting, saved = [], time.perf_counter()
    finally:  # interrupted or failed: what was answered stays
        if waiting:
            responses.add(waiting)
    if engine.shared.contexts or engine.shared.used:
        responses.add([{"key": "shared_prefill", **engine.shared.to_json()}])


def work(request) -> float:
    """What a request costs, in tokens, roughly: a generated one counts for 16 that are only read."""
    return request.length + 16 * request.max_new


def position_limit(config) -> int | None:
    """The tokens past which a model with learned positions cannot go."""
    if getattr(config, "model_type", "") in ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "openai-gpt", "xglm", "biogpt"):
        return config.max_position_embeddings
    return None


def check_positions(model, asked: RequestSet) -> None:
    longest, limit = asked.longest() - 1, position_limit(model.config)  # the last token is predicted, never read
    if limit is not None and longest > limit:
        raise EvaluationError(
            f"the longest request has {longest} tokens, and {type(model).__name__} has learned positions "
            f"for {limit}: it cannot take more. Give --lengths or --max-length up to {limit}"
        )


def check_length(model, asked: RequestSet, recurrent: bool) -> None:
    longest, config = asked.longest() - 1, model.config
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and longest > context and not recurrent:
        warnings.warn(
            f"{asked.suite}: the longest request has {longest} tokens, and the config of {type(model).__name__} names "
            f"{context}: it runs past its context, as the paper's Transformer did",
            ContextWarning,
            stacklevel=2,
        )


def check_vocabulary(model, asked: RequestSet) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    largest = int(asked.tokens.max(initial=0))
    if largest >= size:
        vocabulary = asked.settings.get("vocabulary")  # of a suite that makes its own tokens
        why = f"its vocabulary is {vocabulary:,} tokens" if vocabulary else "is the tokenizer its own?"
        raise EvaluationError(f"{asked.suite}: token {largest} is asked of a model with {size} embeddings: {why}")


def finish(module, suite, asked: RequestSet, responses: Responses, options: Options, tokenizer, name) -> dict:
    """Score the answers, and write OUT/SUITE.json and OUT/SUITE.jsonl."""
    keys = [asked.key(request) for request in asked.requests]
    missing = sum(key not in responses.answers for key in keys)
    if missing:
        raise EvaluationError(f"{responses.path} lacks {missing} of {len(keys)} answers: run --stage score again")
    answers = [responses.answers[key] for key in keys]
    rows, scores = module.metrics(asked, answers, options, tokenizer)
    by_id = dict(zip((request.id for request in asked.requests), keys, strict=True))
    for row in rows:
        if "prompt_hash" not in row:
            row["prompt_hash"] = by_id.get(row["id"]) or by_id[row["id"].rpartition("/")[0]]
    identity = responses.identity
    seconds = sum(responses.answers[key]["seconds"] for key in dict.fromkeys(keys))
    model_row = {
        "name": identity.get("model", name),
        "hash": identity.get("model_hash"),
        "dtype": identity.get("dtype"),
        "class": identity.get("class"),
        "parameters": identity.get("parameters"),
        "lam": identity.get("lam"),
    }
    result = {
        "suite": suite,
        "finished": True,
        "limit": asked.settings["limit"],
        "quick_look": asked.settings["limit"] is not None,
        "scores": clean(scores),
        "samples": {"hash": asked.hash(), "count": len(rows), "requests": len(keys)},
        "settings": asked.settings | {"max_length": asked.longest()},
        "notes": asked.notes,
        "model": model_row,
        "tokenizer": {"hash": asked.settings["tokenizer_hash"]},
        "seconds": seconds,
        "samples_per_second": len(set(keys)) / seconds if seconds else None,
        **provenance(),
    }
    if options.stage == "metrics":  # the origin above is that of the last stage: these say what was asked, and of whom
        stages = {"requests": asked.origin, "score": identity.get("origin")}
        result["stages"] = {stage: origin for stage, origin in stages.items() if origin}
    if shared := responses.answers.get("shared_prefill"):
        result["shared_prefill"] = {k: v for k, v in shared.items() if k != "key"}
    write_rows(options.out / f"{suite}.jsonl", rows)
    write_json(options.out / f"{suite}.json", result)
    print(table(result))
    print(f"Wrote {options.out / (suite + '.json')}")
    return result


def clean(thing):
    """Infinite and undefined numbers as null: JSON has none."""
    if isinstance(thing, dict):
        return {key: clean(x) for key, x in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [clean(x) for x in thing]
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing


def table(result: dict) -> str:
    """Scores with their intervals, a line each."""
    scores = result["scores"]
    width = max(len(name) for name in scores)
    lines = [
        f"{result['suite']} of {result['model']['name']}"
        + (f", the first {result['limit']} only" if result["quick_look"] else "")
    ]
    for name, score in scores.items():
        point = "-" if score["value"] is None else f"{score['value']:.2f}"
        interval = (
            f"[{score['interval'][0]:.2f}, {score['interval'][1]:.2f}]"
            if score.get("interval") and None not in score["interval"]
            else ""
        )
        marks = [
            mark
            for mark in (
                f"n={score['n']}",
                score.get("metric", ""),
                "few windows or documents" if score.get("few") else "",
                "see note" if score.get("note") else "",
            )
            if mark
        ]
        lines.append(f"  {name:<{width}}  {point:>9}  {interval:<20} {', '.join(marks)}")
    return "\n".join([*lines, *(f"  note: {note}" for note in result["notes"])])


def load(name: str, device: str, dtype: torch.dtype, tokenizer: str | None, *, weights: bool = True, text: bool = True):
    """(model or None, tokenizer or None) of a shipped model, a folder, or a name on the Hub."""
    import contextlib

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("ccq.model")  # registers ours
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(name)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise EvaluationError(f"{name} is not there: expected a from_pretrained folder, or a name on the Hub")
    try:
        where = locate(name)
    except ModelError as error:
        raise EvaluationError(str(error)) from error
    if Path(where).is_dir() and not Path(where, "config.json").exists():
        raise EvaluationError(
            f"{name} has no config.json: expected a from_pretrained folder (ccq export RUN_DIR OUT_DIR)"
        )
    found_tokenizer = None
    found_model: Any = None
    if text:
        try:
            found_tokenizer = AutoTokenizer.from_pretrained(tokenizer or where)
        except Exception as error:
            if tokenizer is not None:
                raise EvaluationError(f"--tokenizer: {tokenizer} could not be loaded ({first_line(error)})") from error
        if found_tokenizer is not None and not found_tokenizer("a").input_ids:
            found_tokenizer = None  # transformers makes an empty one for a folder that has none
    if weights:
        check_device(device)
        try:
            check_cpu_bf16(device, str(dtype).removeprefix("torch."))
        except ValueError as error:
            raise EvaluationError(f"--dtype: {error}") from None
        try:
            found_model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
            found_model = found_model.to(device).eval()
        except Exception as error:
            missing = "" if Path(where).exists() else f"there is no folder {name}, and "
            raise EvaluationError(
                f"{missing}{name} could not be loaded as a causal LM ({first_line(error)}): expected a from_pretrained "
                f"folder, a model that ships ({', '.join(names()) or 'none does'}), or a name on the Hub and a network"
            ) from error
    return found_model, found_tokenizer


def check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EvaluationError(f"--device: expected cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EvaluationError(
            f"--device: {name!r} was asked for, and torch sees {torch.cuda.device_count()} GPUs (`ccq doctor` says why)"
        )


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:200]}"


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between, got {text!r}") from None
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers above 0, got {text!r}")
    return tuple(dict.fromkeys(values))


def recall_slices(text: str) -> tuple[tuple[int, ...], ...]:
    """
    >>> recall_slices("64x4x1000,128x8x500")
    ((64, 4, 1000), (128, 8, 500))
    """
    try:
        slices = tuple(tuple(int(number) for number in part.split("x")) for part in text.split(","))
    except ValueError:
        slices = ()
    if not slices or any(len(part) != 3 or min(part) < 1 for part in slices):
        raise argparse.ArgumentTypeError(f"expected LENGTHxPAIRSxSAMPLES with commas between, got {text!r}")
    return slices


def positive(text: str) -> int:
    (value,) = whole_numbers(text)[:1]
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ccq eval",
        description=(__doc__ or "").splitlines()[0],
        epilog="suites:\n" + "\n".join(f"  {name:<10} {text}" for name, (_, text) in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a shipped model, a from_pretrained folder (ccq export), or a name on the Hub")
    add("--suite", default="lm,niah,length,longbench", help="suites, with commas between (default: %(default)s)")
    add("--out", type=Path, required=True, help="folder of the results; an unfinished one there is resumed")
    add("--data", type=Path, help="folder of the evaluation data; without it, from the Hub")
    add("--lengths", type=whole_numbers, help="niah, length, mqar: lengths in tokens, with commas between")
    add("--tokens", type=positive, help="length: of each corpus at most so many, from its start")
    add("--answer-tokens", type=positive, help="niah: generate so many (default: RULER's 128)")
    add("--slices", type=recall_slices, help="mqar: instead of zoology's, such as 32x4x256: tokens, pairs, samples")
    add("--recall-vocab-size", type=positive, help="mqar: tokens that samples are made of (default: 8192)")
    add("--max-length", type=whole_numbers, dest="max_lengths", help="lm (default 4096,8192), longbench (8192,4096)")
    add("--limit", type=positive, help="at most so many samples a task: a quick look, marked in the result")
    add("--tasks", type=lambda text: tuple(text.split(",")), help="only these tasks (or corpora) of the suite")
    add("--stage", choices=STAGES, default="all", help="one of requests, score, metrics; by default all three")
    add("--sizing", choices=("largest", "lm-eval"), default="largest", help="niah: how large the haystack is")
    add(
        "--keys",
        choices=("all", "odd"),
        default="all",
        help="niah: 'odd' takes those that training never saw",
    )
    add(
        "--prefill", choices=("auto", "plain", "shared"), default="auto", help="lm: contexts with several continuations"
    )
    add("--batch-size", type=positive, help="sequences a batch; by default as many as fit a budget of tokens")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on a GPU, float32 elsewhere")
    add("--tokenizer", help="where MODEL has none")
    add("--seed", type=int, default=42, help="of drawn samples (niah, mqar)")
    add("--again", action="store_true", help="run what is finished once more, from the start")
    return parser


# which suites an option is for, where not for all; given for others alone it would decide nothing
MEANT_FOR = {
    "lengths": ("niah", "length", "mqar"),
    "tokens": ("length",),
    "answer_tokens": ("niah",),
    "slices": ("mqar",),
    "recall_vocab_size": ("mqar",),
    "max_lengths": ("lm", "longbench"),
    "sizing": ("niah",),
    "keys": ("niah",),
    "prefill": ("lm",),
    "seed": ("niah", "mqar"),
}


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], Options]:
    """What was given, checked as far as it can be without the model: arguments, suites, and options of the suites."""
    arguments = parser.parse_args(argv)
    suites = arguments.suite.split(",")
    for suite in suites:
        if suite not in SUITES:
            parser.error(f"--suite: unknown suite {suite!r}.{nearest(suite, tuple(SUITES))}")
    if arguments.data is not None and not arguments.data.is_dir():
        parser.error(f"--data: {arguments.data} is no folder")
    if arguments.tasks and len(suites) > 1:
        parser.error("--tasks: names tasks of one suite, and --suite has several")
    for name, meant in MEANT_FOR.items():
        if getattr(arguments, name) != parser.get_default(name) and not set(meant) & set(suites):
            option = "--max-length" if name == "max_lengths" else f"--{name.replace('_', '-')}"
            parser.error(f"{option}: is for {', '.join(meant)}, and --suite has {', '.join(suites)}")
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device.startswith("cuda") else "float32")
    given = {key: value for key, value in vars(arguments).items() if key in Options.__dataclass_fields__}
    return arguments, suites, Options(**given)


def main(argv: Sequence[str]) -> int:
    """Run the suites that `argv` names; what fails is said, and the others still run."""
    arguments, suites, options = parse(make_parser(), argv)
    stage = options.stage
    try:
        model, tokenizer = load(
            arguments.model,
            arguments.device,
            DTYPES[arguments.dtype],
            arguments.tokenizer,
            weights=stage in ("all", "score"),
            text=stage != "score" and suites != ["mqar"],
        )
    except EvaluationError as error:
        print(f"ccq eval: {error}", file=sys.stderr)
        return 1
    failed = False
    name = Path(arguments.model).name if Path(arguments.model).exists() else arguments.model
    for suite in suites:
        try:
            evaluate(model, tokenizer, suite, options, name)
        except (EvaluationError, OSError) as error:
            print(f"ccq eval: {suite}: {error}", file=sys.stderr)
            failed = True
    return int(failed)
