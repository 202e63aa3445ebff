"""The folder of a run says what trained it, also where that changed on the way."""

import dataclasses
import json

import pytest
from train_helpers import small

from ccq.report.collect import collect
from ccq.train import folder, loop
from ccq.train.loop import train


def parts(run):
    return json.loads((run / folder.PROVENANCE).read_text())


def test_a_run_says_where_it_began_and_where_it_went_on(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for cpu, entries in (("CPU one", [(0, "CPU one")]), ("CPU that died", [(0, "CPU one"), (5, "CPU that died")])):
        monkeypatch.setattr(folder, "provenance", told(cpu))
        with monkeypatch.context() as death:
            death.setattr(loop.Run, "one_step", dies_after(7, loop.Run.one_step))
            with pytest.raises(KeyboardInterrupt):
                train(small(steps=10), run)
        assert [(part["step"], part["cpu"]) for part in parts(run)] == entries
    monkeypatch.setattr(folder, "provenance", told("CPU two", commit="b" * 40))
    assert train(small(steps=10), run) == 0
    assert [(part["step"], part["cpu"]) for part in parts(run)] == [(0, "CPU one"), (5, "CPU two")]  # steps 6, 7 again
    before = (run / folder.PROVENANCE).read_bytes()
    assert train(small(steps=10), run) == 0  # finished: nothing trains
    assert (run / folder.PROVENANCE).read_bytes() == before

    [source] = collect([run]).sources
    assert source.hardware == "CPU one, 2 cores, then CPU two, 2 cores"
    assert source.commit == "aaaaaaa, then bbbbbbb"
    assert source.origin["command"] == "ccq train"


def told(cpu, commit="a" * 40):
    return lambda: {"command": "ccq train", "commit": commit, "dirty": False, "date": "2026-11-15", "versions": {},
                    "cpu": cpu, "cores": 2}  # fmt: skip


def dies_after(step, method):
    def one_step(self, batches):
        method(self, batches)
        if self.trainer.progress["step"] == step:
            self.checkpoints.wait()
            raise KeyboardInterrupt

    return one_step


def test_a_repeat_is_another_run(tmp_path):
    config = small("gla", steps=1)
    assert train(config, tmp_path / "first") == 0
    first = folder.mark(tmp_path / "first")
    config.runtime.log_every = 7
    assert train(config, tmp_path / "first") == 0  # gone on with, otherwise logged
    assert folder.mark(tmp_path / "first") == first
    config.identity = dataclasses.replace(config.identity, repeat=1)
    assert train(config, tmp_path / "second") == 0
    assert folder.mark(tmp_path / "second") != first
