"""The paper's language-modelling and zero-shot tasks by lm-evaluation-harness: it writes the prompts and computes the
metrics, our engine answers. Its `evaluate` runs twice, once to collect what it asks and once to be handed the answers.

With `--data DIR` a task's definition is the harness's own; only where its documents come from is changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ccq.evaluate import sources
from ccq.evaluate.requests import Builder, EvaluationError, RequestSet
from ccq.evaluate.statistics import average, summary
from ccq.evaluate.suite import Suite, max_lengths_option
from ccq.files import read_toml

TASKS = read_toml(Path(__file__).with_suffix(".toml"))
AVERAGE = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq")
MAX_LENGTHS = (4096, 8192)
BOOLQ_NOTE = 'boolq: passages lack the "Title -- " that the SuperGLUE copy, which published scores use, puts first'

Tokens = tuple[list[int], int]  # tokens, how many of them are context


def adapter(tokenizer, max_lengths: Sequence[int], answer: Callable[[list[Tokens]], list[tuple[float, bool]]]):
    """An LM for the harness: texts become tokens as its own `hf` model makes them, `answer` gives log-likelihoods."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import has_bos_prefix

    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    prefix = tokenizer.decode(first)

    class Adapter(TemplateLM):
        eot_token_id = tokenizer.eos_token_id
        prefix_token_id = first

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            if add_special_tokens is None and has_bos_prefix(string, prefix):
                add_special_tokens = False
            how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return tokenizer.encode(string, verbose=False, **how)

        def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
            return answer([cut(context, rest, max(max_lengths)) for _, context, rest in requests])

        def loglikelihood(self, requests, disable_tqdm: bool = True):
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            """Every token once, in windows of the length that the task's name ends with."""
            counts: list[int] = []
            windows: list[Tokens] = []
            for request in requests:
                length, tokens = int(request.task_name.rpartition("_")[2]), self.tok_encode(request.args[0])
                pairs = utils.get_rolling_token_windows(tokens, first, max_seq_len=length, context_len=1)
                mine = [cut(context, rest, length) for context, rest in map(utils.make_disjoint_window, pairs)]
                counts.append(len(mine))
                windows += mine
            answers = iter(answer(windows))
            return [sum(next(answers)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError("no task of the lm suite generates text")

    return Adapter()


def cut(context: list[int], rest: list[int], max_length: int) -> Tokens:
    """The last max_length + 1 tokens (the last one is only predicted), as the harness's `hf` model truncates."""
    if len(rest) > max_length:
        raise EvaluationError(f"--max-length: {max_length} is shorter than a continuation of {len(rest)} tokens")
    tokens = (context + rest)[-(max_length + 1) :]
    return tokens, len(tokens) - len(rest)


def task_configs(names: Sequence[str], max_lengths: Sequence[int], data: Path | None, limit: int | None) -> list[dict]:
    """The harness's own task definitions, with documents from `data`; WikiText once for each maximal length."""
    import datasets
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    configs = []
    for name in names:
        task = TASKS[name]
        config = load_yaml(Path(lm_eval.tasks.__file__).parent / f"{task['file']}.yaml")
        config["num_fewshot"] = 0
        if data is not None:
            split = "validation" if task["data"].endswith("_val") else "test"
            made = datasets.Dataset.from_list(sources.read(data, task["data"], task["fields"].split())[:limit])
            # the harness would process all documents each time it asks for them
            made = config.pop("process_docs", lambda documents: documents)(made)
            config |= {key: split if key == f"{split}_split" else None for key in SPLITS if key in config}
            # called with metadata of the task, which these documents do not need
            config["custom_dataset"] = lambda documents={split: made}, **_: documents
            config |= {"dataset_path": "json", "dataset_name": None}
        if name == "wikitext":
            configs += [config | {"task": f"wikitext_{length}"} for length in max_lengths]
        else:
            configs.append(config)
    return configs


SPLITS = ("training_split", "validation_split", "test_split")


def evaluate(lm, options, names: Sequence[str], max_lengths: Sequence[int]) -> dict:
    """The harness's `simple_evaluate`, quietly."""
    import datasets
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    # it asks git about the folder that one happens to be in, and git complains aloud where that is no repository
    asks_git, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, lambda: None
    try:
        with sources.from_hub("an lm task"):
            tasks = task_configs(names, max_lengths, options.data, options.limit)
        manager = TaskManager(include_defaults=False)
        with sources.from_hub("the lm tasks", OSError):  # ConnectionError is one
            return simple_evaluate(lm, tasks=tasks, task_manager=manager, limit=options.limit, bootstrap_iters=0)
    finally:
        evaluator.get_git_commit_hash = asks_git
        if not quiet:
            datasets.enable_progress_bars()


OTHER_DATA = "the request file was made from other data than the harness has now: make it again with --stage requests"


def build(options, tokenizer) -> RequestSet:
    """Let the harness ask, and write down what it asks; equal questions once."""
    if tokenizer.eos_token_id is None:
        raise EvaluationError("the tokenizer has no end-of-text token (eos_token), which the harness puts before texts")
    names, max_lengths = list(options.tasks or TASKS), sorted(options.max_lengths or MAX_LENGTHS)
    builder, seen = Builder(), set()

    def record(asked: list[Tokens]) -> list[tuple[float, bool]]:
        for tokens, context in asked:
            if (key := (context, *tokens)) not in seen:
                seen.add(key)
                builder.add(str(len(seen)), "score", tokens, context=context)
        return [(-1.0, False)] * len(asked)

    told = evaluate(adapter(tokenizer, max_lengths, record), options, names, max_lengths)
    for request in builder.requests[:1]:  # for all: equal questions of several documents are asked once
        request.meta = {"documents": documents_of(told, max_lengths)}
    settings = {"tasks": names, "max_lengths": max_lengths, "offline": options.data is not None}
    notes = [BOOLQ_NOTE] if options.data is not None and "boolq" in names else []
    return builder.done("lm", settings, notes)


def documents_of(told: dict, max_lengths: Sequence[int]) -> str:
    """Hash of what answers are scored with: documents and their labels, and the lengths that texts are cut to."""
    tasks = [
        [task, *((sample["doc_id"], sample["doc_hash"], sample["target_hash"]) for sample in samples)]
        for task, samples in sorted(told["samples"].items())
    ]
    return hashlib.sha256(json.dumps([tasks, list(max_lengths)]).encode()).hexdigest()


def metrics(asked: RequestSet, answers: list[dict], options, tokenizer) -> tuple[list[dict], dict]:
    """Hand the answers to the harness; its scores, with our intervals and the paper's average."""
    names, max_lengths = asked.settings["tasks"], asked.settings["max_lengths"]
    for option, given, made in (("tasks", options.tasks, names), ("max-length", options.max_lengths, max_lengths)):
        if given is not None and sorted(given) != sorted(made):
            raise EvaluationError(f"--{option}: requests were made with {', '.join(map(str, made))}: make them again")
    options = options.but(limit=asked.settings["limit"])
    questions = [(request.context, *asked.of(request).tolist()) for request in asked.requests]
    known = {question: (-sum(x["nll"]), x["greedy"]) for question, x in zip(questions, answers, strict=True)}

    def look_up(asked_now: list[Tokens]) -> list[tuple[float, bool]]:
        try:
            return [known[context, *tokens] for tokens, context in asked_now]
        except KeyError:
            raise EvaluationError(OTHER_DATA) from None

    told = evaluate(adapter(tokenizer, max_lengths, look_up), options, names, max_lengths)
    made = documents_of(told, max_lengths)
    if any(request.meta.get("documents", made) != made for request in asked.requests[:1]):
        raise EvaluationError(OTHER_DATA)
    groups: dict[str, list[dict]] = {}
    scores: dict[str, dict] = {}
    for task, samples in told["samples"].items():
        name, _, length = task.rpartition("_") if task.startswith("wikitext_") else (task, "", "")
        for metric in TASKS[name]["metrics"]:
            aggregate = "perplexity" if metric.endswith("perplexity") else "mean"
            group = "/".join(filter(None, (name, length, metric if aggregate == "perplexity" else "")))
            mine = groups[group] = []
            for sample in samples:
                row = {"id": f"{group}/{sample['doc_id']}", "group": group, "prompt_hash": sample["prompt_hash"]}
                answers = sample["filtered_resps"]
                row["output"] = answers if length else [response[0] for response in answers]
                result = sample[metric]
                if isinstance(result, tuple):  # (log-likelihood, words)
                    mine.append(row | {"score": -result[0], "weight": result[1]})
                else:
                    mine.append(row | {"score": -result if aggregate == "perplexity" else result})
            harness = told["results"][task][f"{metric},none"]
            point = 100 * harness if aggregate == "mean" else harness
            scores[group] = summary(mine, aggregate) | {"metric": metric, "value": point}
    if options.data is not None and "boolq" in scores:
        scores["boolq"]["note"] = BOOLQ_NOTE
    if set(AVERAGE) <= groups.keys():
        scores["average"] = average({name: groups[name] for name in AVERAGE})
    return [row for mine in groups.values() for row in mine], scores


SUITE = Suite(
    name="lm",
    help="lm-evaluation-harness: seven zero-shot tasks, LAMBADA, WikiText",
    build=build,
    metrics=metrics,
    options=(max_lengths_option(",".join(map(str, MAX_LENGTHS))),),
    tasks=tuple(TASKS),
    data=tuple(task["data"] for task in TASKS.values()),
    axis=1,
)
