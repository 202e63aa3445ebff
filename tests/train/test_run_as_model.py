"""Where a model is expected, the folder of a run is one, as of its newest checkpoint."""

import json
import shutil

import pytest
import torch
from train_helpers import small, write_shards

from ccq import cli
from ccq.pretrained import load_config, load_model, load_tokenizer
from ccq.report.collect import collect
from ccq.shipped import ModelError
from ccq.train import RunError
from ccq.train.config import recall
from ccq.train.export import export
from ccq.train.folder import fingerprint
from ccq.train.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    config = small(steps=4, dtype="fp32", checkpoint_every=2)
    assert train(config, out) == 0
    return out


def test_it_is_the_model_that_an_export_would_be(run, tmp_path, capsys):
    export(run, tmp_path / "model")
    ours, theirs = load_model(str(run)), load_model(str(tmp_path / "model"))
    assert "is a run: its model after step 4" in capsys.readouterr().err
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(x, theirs.state_dict()[name]) for name, x in ours.state_dict().items())
    assert (ours.config.identity, ours.config.recall) == (theirs.config.identity, theirs.config.recall)
    assert load_model(str(run), dtype="bfloat16").dtype == torch.bfloat16
    assert load_config(str(run)).recall == ours.config.recall
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(str(run))


def test_it_can_be_evaluated_and_described(run, tmp_path, capsys):
    assert cli.main(["eval", str(run), "--suite", "mqar", "--slices", "16x2x4", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "mqar.json").read_text())
    assert found["settings"]["vocabulary"] == 64  # what it was trained on, not zoology's
    assert found["identity"]["system"] == "ccq-gla"
    assert cli.main(["info", str(run), "ccq_gla_tiny"]) == 0
    assert "ccq_gla_tiny" in capsys.readouterr().out


def test_a_checkpoint_with_changed_bytes_is_passed_over(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    load_model(str(tmp_path / "run"))
    said = capsys.readouterr().err
    assert "step-00000004 is damaged (__0_0.distcp is not what was written" in said
    assert "its model after step 2" in said
    assert export(tmp_path / "run", tmp_path / "model") == 2
    with pytest.raises(RunError, match=r"step-00000004 is damaged: __0_0.distcp"):
        export(tmp_path / "run", tmp_path / "other", step=4)


def test_the_report_and_the_export_agree_on_how_far_a_run_is(run, tmp_path):
    """Nothing was logged before it was stopped, and a checkpoint was saved."""
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    (tmp_path / "run" / "log.jsonl").write_text("")
    assert export(tmp_path / "run", tmp_path / "model") == 2
    assert collect([tmp_path / "run"]).unfinished == ["run is not finished: step 2 of 4."]


def test_a_run_without_a_checkpoint_says_so(run, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(RunError, match="holds no complete checkpoint"):
        load_model(str(tmp_path))


def test_a_recall_model_is_asked_what_it_was_validated_on_else_trained_on():
    asked = [recall(small(valid_slices=valid))["slices"] for valid in (((32, 4, 8),), ())]
    assert asked == [[[32, 4]], [[16, 2], [24, 3]]]


def test_the_same_ids_of_another_tokenizer_are_other_data(tmp_path):
    for name, hash_ in (("one", "1" * 64), ("two", "2" * 64), ("again", "1" * 64)):
        write_shards(tmp_path / name, [[[1, 2, 3]]], hash_=hash_)
    one, two, again = (fingerprint(str(tmp_path / name)) for name in ("one", "two", "again"))
    assert one == again != two
