"""LongBench: its 14 English tasks and its two of code, by default the 14 of these that the paper took. Prompts
(longbench.toml), output lengths, truncation, decoding and metrics as in THUDM/LongBench (`pred.py`, `eval.py`,
`metrics.py`, `config/` at commit 2e00731), for base models (no chat template).

The metrics are written anew and kept equal to the original's, quirks included:

- rouge-l is that of the package `rouge` 1.0.1; what it raises on (an empty prediction) scores 0;
- code similarity is fuzzywuzzy's ratio as it is without python-Levenshtein: difflib's, rounded to per cent;
- trec, triviaqa and samsum keep the first line of the output, after leading newlines are dropped;
- trec removes classes from the list while it goes over it, so the one after each removed class is passed over.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ccq.evaluate import sources
from ccq.evaluate.requests import Builder, EvaluationError, RequestSet
from ccq.evaluate.statistics import average, by_group, summary
from ccq.evaluate.suite import Suite, max_lengths_option
from ccq.files import read_toml

FIELDS = ["input", "context", "answers", "all_classes", "dataset"]
MAX_LENGTHS = (8192, 4096)  # prompt and output together; the paper does not say which it took

TASKS = read_toml(Path(__file__).with_suffix(".toml"))  # {name: prompt, tokens, metric}
OWN = ("passage_count", "passage_retrieval_en")  # of LongBench's English tasks: those that the paper leaves out
PAPERS = tuple(task for task in TASKS if task not in OWN)
ENGLISH = tuple(task for task in TASKS if task not in ("lcc", "repobench-p"))
FIRST_LINE = ("trec", "triviaqa", "samsum")


def normalized(text: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and then without articles."""
    kept = "".join(ch for ch in text.lower() if ch not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def f1(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """Harmonic mean of precision and recall over the words as bags."""
    found, wanted = normalized(prediction), normalized(answer)
    same = sum((Counter(found) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = 1.0 * same / len(found), 1.0 * same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    from rouge import Rouge

    try:
        return Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except Exception:  # it refuses empty texts; the original takes any error as 0
        return 0.0


def classification(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """1 / (classes named in the prediction) if the right one is among them, else 0.

    A named class that is part of the right one does not count, except where the quirk passes over it.
    """
    named = [name for name in classes or () if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)  # from the list that is gone over: the original's result depends on it
    return 1.0 / len(named) if answer in named else 0.0


def code_similarity(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """Of the first line that has no `, # or //."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")
    if line == answer:  # fuzzywuzzy's order: equal texts first, so two empty ones are alike
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def count(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """The share of the numbers in the prediction that are the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """The same of the number in the answer's first "Paragraph N"."""
    return count(prediction, "".join(re.findall(r"Paragraph (\d+)", answer)[:1]))


METRICS: dict[str, Callable[..., float]] = {
    metric.__name__: metric for metric in (f1, rouge_l, classification, code_similarity, count, retrieval)
}


def score(task: str, prediction: str, answers: Sequence[str], classes: Sequence[str] | None) -> float:
    """The best over the answers, between 0 and 1."""
    if task in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max((METRICS[TASKS[task]["metric"]](prediction, answer, classes) for answer in answers), default=0.0)


def truncated(prompt: str, tokenizer, room: int) -> list[int]:
    """Tokens of the prompt; one longer than `room` loses its middle: halves are decoded and encoded again.

    Encoded again they may be some tokens more, and the original leaves it at that. Models with learned positions cannot
    take them: so as many are cut off besides.
    """
    tokens = cut = tokenizer(prompt, verbose=False).input_ids
    kept = room
    while len(cut) > room:
        half = kept // 2
        ends = (tokens[:half], tokens[len(tokens) - half :])
        text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)
        cut = tokenizer(text, verbose=False).input_ids
        kept -= max(2, len(cut) - room)
    return cut


def load(tasks: Sequence[str], data: Path | None) -> dict[str, list[dict]]:
    """Rows a task: of its own file (longbench_TASK or TASK) where there is one, else of MiniLongBench's."""
    found, mini = {}, None
    for task in tasks:
        if data is None:
            with sources.from_hub(f"LongBench's {task}"):
                found[task] = sources.longbench_archive(task)
        elif own := sources.find(data, f"longbench_{task}") or sources.find(data, task):
            found[task] = sources.rows(own, FIELDS)
        else:
            mini = mini or sources.read(data, "minilongbench_en14", FIELDS)
            found[task] = [row for row in mini if row["dataset"] == task]
        if not found[task]:
            expected = f"expected longbench_{task}.jsonl.zst"
            raise EvaluationError(f"{data} has no rows of the LongBench task {task}: {expected}")
    return found


def build(options, tokenizer) -> RequestSet:
    tasks = list(options.tasks or PAPERS)
    new = {task: TASKS[task]["tokens"] for task in tasks}
    limits, most = options.max_lengths or MAX_LENGTHS, max(new.values())
    if min(limits) <= most:
        raise EvaluationError(f"--max-length: {min(limits)} leaves no room for a prompt beside {most} new tokens")
    builder, counts = Builder(), {}
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
    for task, rows in load(tasks, options.data).items():
        counts[task] = len(rows[: options.limit])
        for number, row in enumerate(rows[: options.limit]):
            prompt = TASKS[task]["prompt"].format(context=row["context"], input=row["input"])
            for limit in limits:
                tokens = truncated(prompt, tokenizer, limit - new[task])
                # samsum: the original ends it at a newline, once there is one token
                how = {"stop": tuple(eos + newline), "min_new": 1} if task == "samsum" else {"stop": tuple(eos)}
                answers = row["answers"] or []
                meta = {"answers": answers, "classes": row["all_classes"], "task": task, "max_length": limit}
                builder.add(f"{task}/{limit}/{number}", "generate", tokens, max_new=new[task], meta=meta, **how)
    settings = {"tasks": tasks, "max_lengths": list(limits), "rows": counts, "new_tokens": new}
    fewest = min(counts.values())
    notes = [f"{fewest} to {max(counts.values())} rows a task"]
    if fewest < 100:
        notes[0] += ": intervals of a task are tens of points wide; this is not the whole of LongBench"
    return builder.done("longbench", settings, notes)


def metrics(asked: RequestSet, answers: list[dict], options, tokenizer) -> tuple[list[dict], dict]:
    """Mean of a task, then of the tasks, for each limit on prompt and output."""
    rows: list[dict] = []
    for request, answer in zip(asked.requests, answers, strict=True):
        output = tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        meta = request.meta
        result = score(meta["task"], output, meta["answers"], meta["classes"])
        group = f"{meta['task']}/{meta['max_length']}"
        rows.append({"id": request.id, "group": group, "output": output, "score": result})
    groups, asked_for = by_group(rows), asked.settings["tasks"]
    scores = {name: summary(mine) for name, mine in groups.items()}
    lists = {"average": PAPERS, "average of LongBench's English": ENGLISH}
    whole = {name: tasks for name, tasks in lists.items() if set(tasks) <= set(asked_for)}
    for limit in asked.settings["max_lengths"]:
        for name, tasks in (whole or {f"average of {len(asked_for)}": asked_for}).items():
            scores[f"{name}/{limit}"] = average({f"{task}/{limit}": groups[f"{task}/{limit}"] for task in tasks})
    return rows, scores


SUITE = Suite(
    name="longbench",
    help="LongBench, by default the paper's 14 tasks",
    build=build,
    metrics=metrics,
    options=(max_lengths_option(",".join(map(str, MAX_LENGTHS))),),
    tasks=tuple(TASKS),
    data=("longbench_TASK", "minilongbench_en14"),
    axis=4,
)
