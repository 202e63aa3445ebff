"""LongBench as the original computes it, quirks included. The expected scores were computed once with its own code."""

import hashlib
import json
import warnings
from pathlib import Path

import pytest

from ccq.evaluate import Options, longbench

EXPECTED = json.loads((Path(__file__).parent / "longbench_expected.json").read_text())
NAMES = {"qa_f1_score": "f1", "rouge_score": "rouge_l", "code_sim_score": "code_similarity"}


def classes(task):
    return EXPECTED["classes"] if task == "trec" else None


def test_metrics_equal_the_originals():
    wrong = []
    for task, prediction, answers, expected in EXPECTED["rows"]:
        got = longbench.score(task, prediction, answers, classes(task))
        if got != expected:
            wrong.append((task, prediction, answers, expected, got))
    assert not wrong
    assert sum(0 < row[3] < 1 for row in EXPECTED["rows"]) > 100  # the grid says something


def test_prompts_output_lengths_and_metric_of_each_task_are_the_originals():
    assert set(EXPECTED["prompts_sha256"]) == set(longbench.TASKS)
    for task, told in longbench.TASKS.items():
        assert hashlib.sha256(told["prompt"].encode()).hexdigest() == EXPECTED["prompts_sha256"][task], task
        name = EXPECTED["metrics"][task]
        assert (told["tokens"], told["metric"]) == (
            EXPECTED["new_tokens"][task],
            NAMES.get(name, name.removesuffix("_score")),
        )


def test_the_papers_list_is_the_default_and_longbenchs_own_has_an_average_too(tokenizer, data, tmp_path):
    assert len(longbench.PAPERS) == len(longbench.ENGLISH) == 14
    papers = longbench.build(Options(out=tmp_path, data=data, max_lengths=(1024,)), tokenizer)
    assert papers.settings["tasks"] == list(longbench.PAPERS)
    every = longbench.build(
        Options(out=tmp_path, data=data, max_lengths=(1024,), tasks=tuple(longbench.TASKS)), tokenizer
    )
    for asked, own in ((papers, False), (every, True)):
        # what has a number in it is answered: the tasks that the two lists differ in
        said = ["7" if r.meta["task"] in longbench.OWN else "" for r in asked.requests]
        for request in asked.requests:
            request.meta["answers"] = ["Paragraph 7"] if "retrieval" in request.meta["task"] else ["7"]
        answers = [{"tokens": tokenizer(text).input_ids} for text in said]
        _, scores = longbench.metrics(asked, answers, Options(out=tmp_path), tokenizer)
        assert scores["average/1024"]["value"] == 0
        assert ("average of LongBench's English/1024" in scores) == own
    assert scores["average of LongBench's English/1024"]["value"] == pytest.approx(200 / 14)


def test_the_grid_tells_the_quirk_of_trec_from_its_repair():
    def repaired(prediction, answer):
        named = [name for name in EXPECTED["classes"] if name in prediction]
        named = [name for name in named if not (name in answer and name != answer)]
        return 1 / len(named) if answer in named else 0.0

    rows = [row for row in EXPECTED["rows"] if row[0] == "trec"]
    first_lines = [(row[1].lstrip("\n").split("\n")[0], row) for row in rows]
    assert any(max(repaired(line, a) for a in row[2]) != row[3] for line, row in first_lines)


def test_code_similarity_is_fuzzywuzzys_without_levenshtein():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fuzzywuzzy import fuzz
    for one in ("", "return x", "return y;", "für = '東京'", "x" * 250):
        for other in ("", "return x", "x" * 200 + "y" * 30):
            assert longbench.code_similarity(one, other) == fuzz.ratio(one, other) / 100


@pytest.mark.parametrize("room", [40, 41])
def test_a_long_prompt_loses_its_middle(tokenizer, room):
    text = " ".join(f"word{i}" for i in range(100))
    tokens = tokenizer(text).input_ids
    cut = tokenizer.decode(longbench.truncated(text, tokenizer, room))
    assert cut == tokenizer.decode(tokens[:20]) + tokenizer.decode(
        tokens[-20:]
    )  # int(41 / 2) is 20, as in the original
    assert longbench.truncated("short", tokenizer, room) == tokenizer("short").input_ids


@pytest.mark.parametrize("room", range(20, 50))
def test_a_character_cut_in_two_does_not_make_the_prompt_too_long(tokenizer, room):
    """Half a character is decoded as one of three bytes that says so."""
    text = "\u6771" * 100  # three bytes, a token each
    assert len(tokenizer(text).input_ids) == 300
    cut = longbench.truncated(text, tokenizer, room)
    assert room - 8 <= len(cut) <= room


def test_requests_follow_the_original(tokenizer, data, tmp_path):
    options = Options(out=tmp_path, data=data, max_lengths=(1024, 600))
    asked = longbench.build(options, tokenizer)
    assert len(asked.requests) == 14 * 2 * 2
    newline = tokenizer.encode("\n")[-1]
    for request in asked.requests:
        task, limit = request.meta["task"], request.meta["max_length"]
        assert request.length <= limit - request.max_new + 4  # the halves are encoded again, joined
        assert request.max_new == longbench.TASKS[task]["tokens"]
        assert request.stop == ((0, newline) if task == "samsum" else (0,))
        assert request.min_new == (task == "samsum")
        if limit == 1024 and request.length < 400:
            text = tokenizer.decode(asked.of(request))
            assert text.startswith(longbench.TASKS[task]["prompt"][:20])


def test_best_answer_then_mean_of_task_then_mean_of_tasks(tokenizer, data, tmp_path):
    options = Options(out=tmp_path, data=data, max_lengths=(1024,), tasks=("hotpotqa", "lcc"))
    asked = longbench.build(options, tokenizer)
    said = {"hotpotqa/1024/0": " The Bird.", "hotpotqa/1024/1": "stone", "lcc/1024/0": "the bird", "lcc/1024/1": "zzz"}
    answers = [{"tokens": tokenizer(said[r.id]).input_ids} for r in asked.requests]
    rows, scores = longbench.metrics(asked, answers, options, tokenizer)
    assert [row["score"] for row in rows][:3] == [1.0, 0.0, 1.0]
    assert scores["hotpotqa/1024"]["value"] == 50
    assert "average/1024" not in scores  # which the report sets beside the paper's
    assert scores["average of 2/1024"]["value"] == pytest.approx((50 + scores["lcc/1024"]["value"]) / 2)


def test_a_file_of_a_whole_task_comes_before_the_small_set(tokenizer, data, tmp_path):
    rows = [{"input": "", "context": "c", "answers": ["a"], "all_classes": None, "dataset": "multi_news"}] * 5
    (tmp_path / "longbench_multi_news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "minilongbench_en14.jsonl").write_text((data / "minilongbench_en14.jsonl").read_text())
    found = longbench.load(["multi_news", "lcc"], tmp_path)
    assert [len(found[task]) for task in found] == [5, 2]
