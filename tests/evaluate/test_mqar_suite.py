"""MQAR: the keys' values at the places where they are asked for."""

import pytest

from ccq.evaluate import EvaluationError, Options, mqar


def test_an_oracle_that_looks_the_pairs_up_scores_100(tmp_path):
    options = Options(out=tmp_path, lengths=(64, 128), limit=5)
    asked = mqar.build(options, None)
    answers = []
    for request in asked.requests:
        tokens, pairs = asked.of(request).tolist(), len(request.positions)
        value = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        answers.append({"tokens": [value[tokens[position]] for position in request.positions]})
    rows, scores = mqar.metrics(asked, answers, options, None)
    assert set(scores) == {"64-4", "64-8", "64-16", "128-32", "average"}
    assert {score["value"] for score in scores.values()} == {100.0}
    assert [row["weight"] for row in rows[::5]] == [4, 8, 16, 32]
    answers[0]["tokens"][0] += 1
    _, scores = mqar.metrics(asked, answers, options, None)
    assert scores["64-4"]["value"] == 95
    assert scores["average"]["value"] == 98.75


def test_the_slices_are_zoologys(tmp_path):
    asked = mqar.build(Options(out=tmp_path, limit=1), None)
    slices = [(part["length"], part["pairs"]) for part in asked.settings["slices"]]
    assert slices == [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
    with pytest.raises(
        EvaluationError, match=r"MQAR has test slices of \[64, 128, 256, 512, 1024\] tokens, got \[99\]"
    ):
        mqar.build(Options(out=tmp_path, lengths=(99,)), None)


def test_slices_and_vocabulary_of_a_tiny_model(tmp_path):
    options = Options(out=tmp_path, slices=((16, 2, 3), (32, 4, 5)), recall_vocab_size=48)
    asked = mqar.build(options, None)
    assert [request.id for request in asked.requests] == [f"16-2/{i}" for i in range(3)] + [
        f"32-4/{i}" for i in range(5)
    ]
    assert asked.tokens.max() < 48
    assert asked.settings["vocabulary"] == 48
    answers = [{"tokens": request.meta["answers"]} for request in asked.requests]
    _, scores = mqar.metrics(asked, answers, options, None)
    assert {name: score["value"] for name, score in scores.items()} == {"16-2": 100, "32-4": 100, "average": 100}


@pytest.mark.parametrize(("slices", "size"), [(((64, 20, 1),), None), (((64, 4, 1),), 48)])
def test_impossible_slices_are_named(tmp_path, slices, size):
    with pytest.raises(EvaluationError, match=r"--slices, --recall-vocab-size: (length must|vocab_size must)"):
        mqar.build(Options(out=tmp_path, slices=slices, recall_vocab_size=size), None)
