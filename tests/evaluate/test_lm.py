"""Through our engine, models score as through the harness's own `hf` model; its known errors are not ours."""

import importlib.util
import json
import logging
import shutil
import sys
import types

import pytest

from ccq.evaluate import EvaluationError, Options, evaluate, harness
from ccq.evaluate.requests import RequestSet
from ccq.evaluate.results import tokenizer_hash


def own_model():
    """The harness's `hf` model. It imports accelerate for launching on several GPUs, which nothing here does."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("accelerate") is None:
            stand_in, utils = types.ModuleType("accelerate"), types.ModuleType("accelerate.utils")
            for name in ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size"):
                setattr(stand_in, name, None)
            utils.get_max_memory = None
            patch.setitem(sys.modules, "accelerate", stand_in)
            patch.setitem(sys.modules, "accelerate.utils", utils)
        from lm_eval.models.huggingface import HFLM
    return HFLM


def options_of(out, data, **more):
    return Options(out=out, data=data, max_lengths=more.pop("max_lengths", (96,)), **more)


@pytest.fixture(scope="module")
def both(model, tokenizer, data, tmp_path_factory):
    """(our result, our rows by group, what the harness says with its own `hf` model)."""
    out = tmp_path_factory.mktemp("lm")
    options = options_of(out, data)
    ours = evaluate(model, tokenizer, "lm", options)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    theirs = own_model()(pretrained=model, tokenizer=tokenizer, max_length=96, batch_size=3, device="cpu")
    told = harness.evaluate(theirs, options, list(harness.TASKS), [96])
    rows: dict[str, list[dict]] = {}
    for line in (out / "lm.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["group"], []).append(row)
    return ours, rows, told


def test_log_likelihoods_equal_those_of_the_harness(both):
    _, rows, told = both
    compared = 0
    for task, samples in told["samples"].items():
        group = {"wikitext_96": "wikitext/96/word_perplexity"}.get(task, task)
        for row, sample in zip(rows[group], samples, strict=True):
            if task == "wikitext_96":
                expected = sample["filtered_resps"]
            else:
                expected = [response[0] for response in sample["filtered_resps"]]
            # the harness adds up a page of some 4,000 nats in fp32, whose steps there are 2.4e-4
            assert row["output"] == pytest.approx(expected, abs=1e-4, rel=1e-7 if len(expected) == 1 else 0)
            compared += len(expected)
    assert compared > 150


def test_scores_equal_those_of_the_harness(both):
    ours, _, told = both
    for name, how in harness.TASKS.items():
        for metric in how["metrics"]:
            is_mean = metric in ("acc", "acc_norm")
            suffix = "" if is_mean else f"/{metric}"
            task, group = ("wikitext_96", f"wikitext/96{suffix}") if name == "wikitext" else (name, name + suffix)
            value = told["results"][task][f"{metric},none"]
            expected = 100 * value if is_mean else value
            assert ours["scores"][group]["value"] == pytest.approx(expected, rel=1e-4)
    seven = [ours["scores"][name]["value"] for name in harness.AVERAGE]
    assert ours["scores"]["average"]["value"] == pytest.approx(sum(seven) / 7)


def test_metrics_are_the_papers(both):
    metrics = {name: score.get("metric") for name, score in both[0]["scores"].items()}
    assert metrics["hellaswag"] == metrics["arc_easy"] == metrics["arc_challenge"] == "acc_norm"
    assert metrics["piqa"] == metrics["winogrande"] == metrics["social_iqa"] == metrics["boolq"] == "acc"
    assert metrics["wikitext/96/word_perplexity"] == "word_perplexity"
    assert (metrics["lambada_openai"], metrics["lambada_openai/perplexity"]) == ("acc", "perplexity")


def test_the_boolq_column_is_marked(both):
    assert "Title --" in both[0]["scores"]["boolq"]["note"]


def test_our_summary_is_the_harness_aggregate(both):
    """The value comes from the harness; the rows beside it give the same."""
    from ccq.evaluate.statistics import summary

    ours, rows, _ = both
    for group, mine in rows.items():
        score = ours["scores"][group]
        assert summary(mine, score["aggregate"])["value"] == pytest.approx(score["value"], rel=1e-6)


def test_texts_longer_than_max_length_lose_their_beginning(llama, tokenizer, data, tmp_path):
    """32 tokens cut BoolQ's passages; still as the harness's own model."""
    options = options_of(tmp_path, data, max_lengths=(32,), tasks=("boolq", "wikitext"))
    evaluate(llama, tokenizer, "lm", options)
    asked = RequestSet.load(tmp_path / "requests" / "lm.npz")
    assert max(request.length for request in asked.requests) == 33
    theirs = own_model()(pretrained=llama, tokenizer=tokenizer, max_length=32, batch_size=1, device="cpu")
    told = harness.evaluate(theirs, options, ["boolq", "wikitext"], [32])
    rows = [json.loads(line) for line in (tmp_path / "lm.jsonl").read_text().splitlines()]
    for task, group in (("boolq", "boolq"), ("wikitext_32", "wikitext/32/word_perplexity")):
        mine = [row["output"] for row in rows if row["group"] == group]
        for output, sample in zip(mine, told["samples"][task], strict=True):
            expected = [x[0] if isinstance(x, (list, tuple)) else x for x in sample["filtered_resps"]]
            assert output == pytest.approx(expected, abs=1e-4, rel=1e-7)


def test_a_tokenizer_with_a_bos_of_its_own_asks_as_the_harness_does(llama, tokenizer, data, tmp_path):
    """Texts then begin with it once, a context that is empty is it alone, and no continuation gains one."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    raw = tokenizer.backend_tokenizer.__class__.from_str(tokenizer.backend_tokenizer.to_str())
    bos = raw.token_to_id("!")
    raw.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", bos)])
    mine = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="!", eos_token="<|end|>", model_max_length=10**9)
    assert mine("the bird").input_ids[0] == bos
    tasks = ("piqa", "hellaswag", "lambada_openai", "wikitext")
    options = options_of(tmp_path, data, tasks=tasks)
    ours = evaluate(llama, mine, "lm", options)
    asked = RequestSet.load(tmp_path / "requests" / "lm.npz")
    assert {asked.of(request)[0] for request in asked.requests if request.length < 97} == {bos}
    assert all(bos not in asked.of(request)[max(request.context, 2) :] for request in asked.requests)
    theirs = own_model()(pretrained=llama, tokenizer=mine, max_length=96, batch_size=3, device="cpu")
    told = harness.evaluate(theirs, options, list(tasks), [96])
    rows = [json.loads(line) for line in (tmp_path / "lm.jsonl").read_text().splitlines()]
    for task, samples in told["samples"].items():
        group = {"wikitext_96": "wikitext/96/word_perplexity"}.get(task, task)
        outputs = [row["output"] for row in rows if row["group"] == group]
        for output, sample in zip(outputs, samples, strict=True):
            expected = [x[0] if isinstance(x, (list, tuple)) else x for x in sample["filtered_resps"]]
            assert output == pytest.approx(expected, abs=1e-4, rel=1e-7)
    assert ours["tokenizer"]["hash"] != tokenizer_hash(tokenizer)
    # what no task here asks: an empty context, and a text that brings the token itself
    seen = []
    lm = harness.adapter(mine, [96], lambda asked: seen.extend(asked) or [(0.0, False)] * len(asked))
    lm.loglikelihood([types.SimpleNamespace(args=pair) for pair in (("", " the bird"), ("! the", " bird"))])
    plain = tokenizer(" the bird").input_ids
    assert seen == [([bos, *plain], 1), ([bos, *plain], 1 + len(tokenizer(" the").input_ids))]


def test_wikitext_at_two_lengths_side_by_side(llama, tokenizer, data, tmp_path):
    result = evaluate(llama, tokenizer, "lm", options_of(tmp_path, data, max_lengths=(64, 128), tasks=("wikitext",)))
    assert set(result["scores"]) == {"wikitext/64/word_perplexity", "wikitext/128/word_perplexity"}
    assert result["settings"]["max_lengths"] == [64, 128]
    requests = RequestSet.load(tmp_path / "requests" / "lm.npz").requests
    assert {request.length for request in requests} >= {65, 129}


def test_other_labels_and_other_lengths_are_not_finished_already(llama, tokenizer, data, tmp_path):
    """Where the questions are the same and only what they are scored with is not."""
    mine = tmp_path / "data"
    shutil.copytree(data, mine)
    options = options_of(tmp_path / "out", mine, tasks=("piqa", "wikitext"), max_lengths=(512,))
    first = evaluate(llama, tokenizer, "lm", options)["scores"]
    rows = [json.loads(line) for line in (mine / "piqa_val.jsonl").read_text().splitlines()]
    (mine / "piqa_val.jsonl").write_text("".join(json.dumps(row | {"label": 1 - row["label"]}) + "\n" for row in rows))
    options.stage = "metrics"
    with pytest.raises(EvaluationError, match="made from other data"):
        evaluate(None, tokenizer, "lm", options)
    options.stage = "all"
    second = evaluate(llama, tokenizer, "lm", options)["scores"]
    assert second["piqa"]["value"] == pytest.approx(100 - first["piqa"]["value"])
    options.max_lengths = (1024,)
    assert "wikitext/1024/word_perplexity" in evaluate(llama, tokenizer, "lm", options)["scores"]


def test_three_stages_equal_one_call_and_scoring_needs_only_torch_and_transformers(
    llama, tokenizer, data, tmp_path, monkeypatch
):
    options = options_of(tmp_path / "stages", data, tasks=("piqa", "hellaswag", "lambada_openai", "wikitext"))
    whole = evaluate(llama, tokenizer, "lm", options_of(tmp_path / "whole", data, tasks=options.tasks))
    options.stage = "requests"
    assert evaluate(None, tokenizer, "lm", options) is None
    with monkeypatch.context() as bare:
        for package in ("lm_eval", "datasets", "nltk", "wonderwords", "rouge", "pyarrow", "rich"):
            for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
                bare.setitem(sys.modules, name, None)
            bare.setitem(sys.modules, package, None)
        options.stage, options.data = "score", None
        assert evaluate(llama, None, "lm", options) is None
    options.stage, options.data = "metrics", data
    staged = evaluate(None, tokenizer, "lm", options)
    assert staged["scores"] == whole["scores"]
    assert staged["samples"] == whole["samples"]
    assert staged["model"] == whole["model"]
    assert (tmp_path / "stages" / "lm.jsonl").read_text() == (tmp_path / "whole" / "lm.jsonl").read_text()


def test_answers_to_other_questions_are_refused(llama, tokenizer, data, tmp_path):
    options = options_of(tmp_path, data, tasks=("piqa",))
    evaluate(llama, tokenizer, "lm", options)
    options.stage, options.max_lengths = "metrics", (12,)
    with pytest.raises(EvaluationError, match="--max-length: requests were made with 96: make them again"):
        evaluate(None, tokenizer, "lm", options)
    options.max_lengths, options.tasks = None, ("piqa", "boolq")
    with pytest.raises(EvaluationError, match="--tasks: requests were made with piqa: make them again"):
        evaluate(None, tokenizer, "lm", options)
    changed = tmp_path / "changed"
    changed.mkdir()
    row = {"goal": "the old river", "sol1": "never sings", "sol2": "always opens", "label": 0}
    (changed / "piqa_val.jsonl").write_text(json.dumps(row) + "\n")
    options.tasks, options.data = None, changed
    with pytest.raises(EvaluationError, match="made from other data than the harness has now"):
        evaluate(None, tokenizer, "lm", options)


def test_the_last_stage_scores_what_was_asked_without_being_told_again(llama, tokenizer, data, tmp_path):
    """Settings in the result are those of its scores, and a quick look is one also if the limit is not said again."""
    options = options_of(tmp_path, data, tasks=("piqa", "winogrande"), limit=3)
    whole = evaluate(llama, tokenizer, "lm", options)
    options.stage, options.tasks, options.max_lengths, options.limit = "metrics", None, None, None
    staged = evaluate(None, tokenizer, "lm", options)
    assert staged["scores"] == whole["scores"]
    assert set(staged["scores"]) == set(staged["settings"]["tasks"]) == {"piqa", "winogrande"}
    assert staged["model"] == whole["model"]
    assert staged["model"]["parameters"] == sum(p.numel() for p in llama.parameters())
