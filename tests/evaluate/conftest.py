"""Tiny models, a tiny tokenizer and tiny data in the original fields, all made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toys import make_model

PROSE = (
    "the a old small green garden river stone light paper house door winter summer bread water morning bird song "
    "walks sings opens closes finds keeps carries under over near between slowly quickly always never because while"
)
WORDS = PROSE.split(" ")


def sentences(count: int, seed: int = 0) -> str:
    """Made-up prose, the same everywhere."""
    made = []
    for number in range(count):
        at = [(seed * 7919 + number * 31 + k * k * 17 + k * (number % 13)) % len(WORDS) for k in range(6 + number % 5)]
        made.append(" ".join(WORDS[i] for i in at).capitalize() + ".")
    return " ".join(made)


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (
        sentences(400) + " A special magic number is hidden within the following text. Make sure to memorize it. I will"
    )
    text += (
        " quiz you about the number afterwards. What is the special magic number for mentioned in the provided text?"
    )
    text += (
        " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. Question: Answer:"
    )
    raw.train_from_iterator([text] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", model_max_length=10**9)


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def model(request):
    return make_model(request.param)


@pytest.fixture(scope="session")
def llama():
    return make_model("llama")


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_punkt(folder: Path) -> None:
    """The four tables of a Punkt splitter that has learned nothing but an abbreviation."""
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\nmr\n")
    (folder / "collocations.tab").write_text("a\tb\n")
    (folder / "ortho_context.tab").write_text("the\t46\n")
    (folder / "sent_starters.txt").write_text("the\n")


def make_data(folder: Path) -> Path:
    pick = lambda number, k: sentences(1, number * 10 + k)  # noqa: E731
    n = 8
    write(folder / "piqa_val.jsonl", [
        {"goal": pick(i, 0), "sol1": pick(i, 1), "sol2": pick(i, 2), "label": i % 2} for i in range(n)])  # fmt: skip
    write(folder / "hellaswag_val.jsonl", [
        {"activity_label": "Garden work", "ctx_a": sentences(3, i), "ctx_b": "the bird", "label": str(i % 4),
         "endings": [pick(i, k) for k in range(4)]} for i in range(n)])  # fmt: skip
    write(folder / "winogrande_xl_val.jsonl", [
        {"sentence": f"The stone near the river _ {pick(i, 3)}", "option1": "bird", "option2": "door",
         "answer": str(1 + i % 2)} for i in range(n)])  # fmt: skip
    arc = [{"id": str(i), "question": pick(i, 4), "answerKey": "ABCD"[i % 4],
            "choices": {"text": [pick(i, k) for k in range(4)], "label": list("ABCD")}} for i in range(n)]  # fmt: skip
    write(folder / "arc_easy_test.jsonl", arc)
    write(folder / "arc_challenge_test.jsonl", arc[::-1])
    write(folder / "social_iqa_val.jsonl", [
        {"context": pick(i, 5), "question": pick(i, 6), "answerA": "bread", "answerB": "the old house",
         "answerC": "water", "label": str(1 + i % 3)} for i in range(n)])  # fmt: skip
    passages = [
        {"passage": sentences(4, i), "question": "is the river near the house", "label": i % 2} for i in range(n)
    ]
    write(folder / "boolq_val.jsonl", passages)
    write(folder / "lambada_openai_test.jsonl", [{"text": sentences(2, i).rstrip(".")} for i in range(n)])
    write(
        folder / "wikitext2_raw_test_pages.jsonl",
        [{"page": f" = Page {i} = \n \n {sentences(30, i)} \n"} for i in range(3)],
    )
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": sentences(700, 3)}))
    write_punkt(folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english")
    from ccq.evaluate.length import CORPORA
    from ccq.evaluate.longbench import TASKS

    for number, name in enumerate(CORPORA.values()):
        write(folder / f"{name}.jsonl", [{"id": str(i), "text": sentences(20 + 7 * i, i + number)} for i in range(4)])
    rows = []
    for task in TASKS:
        for i in range(2):
            rows.append({"input": pick(i, 7), "context": sentences(60 + 20 * i, i), "answers": [pick(i, 8), "the bird"],
                         "all_classes": ["Bird", "Bird song", "Door"] if task == "trec" else None, "length": 100,
                         "dataset": task, "language": "en", "_id": f"{task}-{i}"})  # fmt: skip
    write(folder / "minilongbench_en14.jsonl", rows)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))
