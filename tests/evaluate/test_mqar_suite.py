"""MQAR: the keys' values at the places where they are asked for."""

import numpy as np
import pytest

from ccq.evaluate import EvaluationError, Options, mqar, suites
from ccq.model import CCQConfig


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
        EvaluationError, match=r"mqar has test slices of \[64, 128, 256, 512, 1024\] tokens, got \[99\]"
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


def test_of_mad_the_values_of_keys_that_were_there_are_asked_for(tmp_path):
    """By an oracle that knows the pairs it has read, and nothing else."""
    asked = mqar.build_mad(Options(out=tmp_path, limit=20), None)
    assert asked.settings["slices"] == [{"length": 128, "motif": 1, "samples": 20}]
    assert (asked.settings["noise"], asked.settings["vocabulary"]) == (0.2, 32)
    answers = []
    for request in asked.requests:
        tokens = asked.of(request).tolist()
        answers.append({"tokens": [dict(zip(tokens[0:t:2], tokens[1:t:2], strict=True))[tokens[t]]
                                   for t in request.positions]})  # fmt: skip
    _, scores = mqar.metrics(asked, answers, None, None)
    assert scores["128-1"]["value"] == 100
    with pytest.raises(EvaluationError, match="noise must be 0 with motifs of 3"):
        mqar.build_mad(Options(out=tmp_path, slices=((128, 3, 5),)), None)


@pytest.mark.parametrize(
    ("suite", "data"),
    [
        ("mad", {"source": "mad", "slices": ((24, 3, 64),), "recall_vocab_size": 16}),
        ("mad", {"source": "mad", "slices": ((24, 1, 64),), "recall_vocab_size": 40, "noise": 0.6}),
        ("mqar", {"slices": ((24, 3, 64),), "updates": 2}),
    ],
)
def test_an_export_is_asked_what_its_run_was_trained_on(tmp_path, suite, data):
    from ccq.recipes import recipe
    from ccq.train.data import recall_source
    from ccq.train.export import export
    from ccq.train.loop import train

    config = recipe("ccq_gla_tiny")
    for name, value in data.items():
        setattr(config.data, name, value)
    config.data.valid_slices = ()
    config.steps, config.runtime.tensorboard, config.runtime.device = 1, False, "cpu"
    assert train(config, tmp_path / "run") == 0
    export(tmp_path / "run", tmp_path / "model")
    told = CCQConfig.from_pretrained(tmp_path / "model")
    options = suites()[suite].as_trained(Options(out=tmp_path, limit=3), told)
    asked = suites()[suite].build(options, None)
    test = recall_source(config, ((*config.data.slices[0][:2], 3),), "test")
    test.seed = options.seed
    expected = test.of(0, np.arange(3))
    for request, tokens, labels in zip(asked.requests, expected.input_ids, expected.labels, strict=True):
        assert asked.of(request).tolist() == tokens.tolist()
        assert request.meta["answers"] == labels[labels >= 0].tolist()
    (other,) = {"mad", "mqar"} - {suite}
    with pytest.raises(EvaluationError, match=f"the model was trained on {suite}: ask --suite {suite}, or name"):
        suites()[other].as_trained(Options(out=tmp_path), told)
