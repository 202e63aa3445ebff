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
