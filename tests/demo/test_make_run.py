"""`ccq demo` from end to end, small: it goes on after an interruption, works twice, and asks for no network."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ccq import demo
from ccq.cli import main
from ccq.train.loop import Trainer

SMALL = demo.Settings(
    systems=("gla", "ccq-gla"),
    seeds=1,
    device="cpu",
    steps=4,
    recall=((16, 2, 8), (32, 4, 8)),
    needle_lengths=(384,),
    needle_samples=2,
    answer_tokens=3,
    lengths=(64, 128),
    tokens=300,
    sentences=8,
)


def small(out: Path, **changes) -> demo.Settings:
    return replace(SMALL, out=out, **changes)


def told(settings: demo.Settings, **options) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert demo.run(settings, **options) == 0
    return text.getvalue()


def times(out: Path) -> dict[str, int]:
    """When each result was written."""
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("*.json")}


def scores(out: Path, folder: str, file: str) -> dict:
    return json.loads((out / folder / file).read_text())["scores"]


@pytest.fixture(scope="module")
def first(trio, tmp_path_factory):
    """One whole demo without a network: its folder and what it said."""
    import socket

    out = tmp_path_factory.mktemp("demo") / "laptop"

    def refuse(*_, **__):
        raise AssertionError("something asks for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CCQ_SHIPPED", str(trio))
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        text = told(small(out))
    return out, text


@pytest.fixture
def empty_page(monkeypatch):
    """A page of nothing, which takes no time; `first` has made a real one."""

    def write(settings, steps):
        page = settings.out / "report/index.html"
        page.parent.mkdir(exist_ok=True)
        page.write_text("")
        return page

    monkeypatch.setattr(demo, "write_report", write)


def test_all_of_it_is_there_without_a_network(first):
    out, text = first
    for path in (
        "regimes/scores.png",
        "gla_tiny-seed0/log.jsonl",
        "ccq_gla_tiny-seed0/eval/mqar.json",
        "gla-unit-pico/niah.json",
        "ccq-gla-pico/length.json",
        "alignment/alignment_ccq_gla_pico_depth.png",
        "report/index.html",
    ):
        assert (out / path).stat().st_size > 0, path
    assert "Using the CPU" in text
    assert re.search(r"The page: .*/laptop/report/index.html", text)
    assert "CCQ-GLA minus control, 4 pairs in 32 tokens: " in " ".join(text.split())


def test_three_seeds_of_each_row_are_trained_in_turn():
    runs = [step.folder for step in demo.plan(demo.Settings(seed=4)) if demo.TINY in step.folder]
    assert len(runs) == len(set(runs)) == 9
    assert runs[:3] == ["gla_unit_tiny-seed4", "ccq_gla_tiny-seed4", "gla_projected_decay_tiny-seed4"]
    assert demo.TRAINED[0] == demo.SYSTEMS["ccq-gla"].control == demo.SYSTEMS["gla-projected-decay"].control


def test_seeds_that_do_not_agree_show_nothing():
    found = {"gla-unit": [{"s": 50.0}, {"s": 60.0}], "ccq-gla": [{"s": 52.0}, {"s": 60.0}]}
    assert demo.agreement(found, "s", "x") == ["CCQ-GLA minus control, x: +2.0, +0.0 by seed. They do not agree."]


def test_tables_hold_what_the_files_hold(first):
    out, text = first
    recall = json.loads((out / "ccq_gla_tiny-seed0/eval/mqar.json").read_text())
    assert recall["settings"]["vocabulary"] == 48
    row = next(line for line in text.splitlines() if line.strip().startswith("CCQ-GLA"))
    values = [recall["scores"][name]["value"] for name in ("16-2", "32-4")]
    assert row.split()[1:] == [word for x in values for word in (f"{x:.1f}", f"({x:.0f}–{x:.0f})")]
    length = json.loads((out / "gla-pico/length.json").read_text())
    assert length["settings"]["corpora"]["book"]["tokens"] == 300
    rows = [line for line in text.splitlines() if line.strip().startswith("GLA ")]
    assert rows[-1].split()[1:] == [f"{length['scores'][f'book/{n}']['value']:.1f}" for n in (64, 128)]


def test_needles_are_drawn_from_what_training_never_held_and_the_haystack_is_named(first):
    result = json.loads((first[0] / "ccq-gla-pico/niah.json").read_text())
    assert result["settings"]["keys"] == "odd"
    assert result["settings"]["max_new_tokens"] == 3
    assert any("Dubliners by James Joyce, not RULER's essays" in note for note in result["notes"])
    assert result["scores"].keys() == {"niah_single_1/384", "niah_book/384"}


def test_page_shows_both_kinds_of_model(first):
    page = (first[0] / "report/index.html").read_text()
    for word in ("Recall (MQAR)", "CCQ-GLA", "Unit-norm GLA", "alignment"):
        assert word in page
    lines = (first[0] / "report/report.md").read_text().splitlines()
    for run, label in (("gla_tiny-seed0", "GLA"), ("ccq_gla_tiny-seed0", "CCQ-GLA")):
        values = [f"{x['value']:.2f}" for x in scores(first[0], run, "eval/mqar.json").values()]
        rows = [line for line in lines if line.startswith(f"| {label}, 1 layer, convolution of 4")]  # not the recipe's
        assert any(all(value in line for value in values) for line in rows), values
    assert "The models trained here have one layer and a convolution over 4 tokens" in page
    assert "is incomplete" not in page
    assert "is not finished" not in page


def test_second_time_nothing_is_made_again(first, ships, empty_page):
    out, _ = first
    before = times(out)
    text = told(small(out))
    assert times(out) == before
    assert text.count("finished before") == 7


def test_other_settings_make_only_what_they_change(first, ships, empty_page, tmp_path):
    out = tmp_path / "laptop"
    shutil.copytree(first[0], out)
    before = times(out)
    text = told(small(out, steps=5, systems=("gla",)))
    assert text.count("finished before") == 5
    after = times(out)
    for name in ("ccq-gla-pico/niah.json", "alignment/alignment_ccq_gla_pico.json"):
        assert after[name] == before[name]
    assert json.loads((out / "gla_tiny-seed0/config.json").read_text())["steps"] == 5
    assert json.loads((out / "gla_tiny-seed0/log.jsonl").read_text().splitlines()[-1])["step"] == 5


def test_fresh_removes_what_the_demo_wrote_alone_and_without_shipped_models_it_goes_on(
    first, empty_page, tmp_path, monkeypatch
):
    monkeypatch.setenv("CCQ_SHIPPED", str(tmp_path / "none"))
    out = tmp_path / "laptop"
    shutil.copytree(first[0], out)
    (out / "mine").mkdir()
    (out / "mine" / "notes.txt").write_text("keep")
    (out / "gla_tiny-seed0" / "marker").write_text("old")
    text = told(small(out, systems=("gla",)), fresh=True)
    assert (out / "mine" / "notes.txt").read_text() == "keep"
    assert not (out / "gla_tiny-seed0" / "marker").exists()
    assert not (out / "ccq_gla_tiny-seed0").exists()
    assert not (out / "ccq-gla-pico").exists()
    assert "shipped models are missing" in text
    assert "Needles found" not in text
    assert (out / "report/index.html").exists()


def test_a_damaged_model_is_named_before_anything_is_trained(trio, tmp_path, monkeypatch, capsys):
    shutil.copytree(trio, tmp_path / "shipped")
    monkeypatch.setenv("CCQ_SHIPPED", str(tmp_path / "shipped"))
    path = tmp_path / "shipped" / "gla-unit-pico" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["demo", "--out", str(tmp_path / "laptop")]) == 1
    assert "gla-unit-pico/model.safetensors is damaged" in capsys.readouterr().err
    assert not (tmp_path / "laptop" / "gla_tiny-seed0").exists()


@pytest.mark.parametrize("file", ["gla_tiny-seed0/eval/mqar.json", "gla_tiny-seed0/config.json"])
def test_what_is_damaged_is_made_anew(first, ships, empty_page, tmp_path, file):
    out = tmp_path / "laptop"
    shutil.copytree(first[0], out)
    whole = (out / file).read_bytes()
    (out / file).write_bytes(whole[: len(whole) // 2])
    before = times(out)
    text = told(small(out))
    assert f"{out / file} is damaged: making this part again" in text
    assert text.count("finished before") == 6
    again = {name for name, when in times(out).items() if when != before.get(name)} - {demo.STATE}
    assert file in again
    assert {Path(name).parts[0] for name in again} == {Path(file).parts[0]}
    # trained as the first time
    assert scores(out, "gla_tiny-seed0", "eval/mqar.json") == scores(first[0], "gla_tiny-seed0", "eval/mqar.json")


def test_evaluation_goes_on_from_its_answers(first, ships, empty_page, tmp_path, monkeypatch):
    """Interrupted among the needles: what was answered before is not asked again."""
    from ccq.evaluate.engine import Engine

    out = tmp_path / "laptop"
    shutil.copytree(first[0], out)
    demo.remove(out / "ccq-gla-pico")
    record = demo.read_record(out)
    del record["ccq-gla-pico"]
    (out / demo.STATE).write_text(json.dumps({"steps": record}))
    answer, asked = Engine.run, []

    def interrupted(self, questions, requests=None):
        for number, each in enumerate(answer(self, questions, requests)):
            if number == 1:
                raise KeyboardInterrupt
            yield each

    def counted(self, questions, requests=None):
        asked.append((questions.suite, len(requests)))
        return answer(self, questions, requests)

    monkeypatch.setattr(Engine, "run", interrupted)
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(KeyboardInterrupt):
        demo.run(small(out))
    monkeypatch.setattr(Engine, "run", counted)
    told(small(out))
    assert asked[0] == ("niah", 3)  # of four, one was answered
    theirs, ours = (json.loads((x / "ccq-gla-pico/niah.json").read_text())["scores"] for x in (first[0], out))
    assert theirs == ours


def test_control_c_in_training_is_gone_on_from(tmp_path, empty_page, monkeypatch, capsys):
    """A real signal while it trains: the demo stops with its code, and the same command resumes at that step."""
    monkeypatch.setenv("CCQ_SHIPPED", str(tmp_path / "none"))
    out, step = tmp_path / "laptop", Trainer.step
    monkeypatch.setattr(demo, "Settings", lambda **given: small(**{"out": out, "systems": ("gla",), **given}))

    def interrupted(self, batches):
        done = step(self, batches)
        if self.progress["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return done

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert demo.main(["--out", str(out), "--device", "cpu"]) == 130
    said = capsys.readouterr()
    assert "stopped by SIGINT at step 2" in said.out
    assert "The same command resumes" in said.err
    assert not (out / "report").exists()
    monkeypatch.setattr(Trainer, "step", step)
    assert demo.main(["--out", str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "resumed at step 2" in said
    assert "a needle among distractors: finished before" in said
    assert (out / "report/index.html").exists()


def test_an_interruption_that_a_library_swallows_stops_it_after_the_step(tmp_path, monkeypatch, empty_page):
    monkeypatch.setenv("CCQ_SHIPPED", str(tmp_path / "none"))
    handler = signal.getsignal(signal.SIGINT)

    def swallow(step, out, device):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)  # the signal is handled here
        (out / step.folder).mkdir()

    monkeypatch.setattr(demo, "make", swallow)
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(KeyboardInterrupt):
        demo.run(small(tmp_path / "laptop", systems=("gla",)))
    assert not (tmp_path / "laptop/gla_tiny-seed0").exists()
    assert signal.getsignal(signal.SIGINT) is handler


def test_stopped_before_a_step_of_other_settings_begins_it_goes_on(first, ships, empty_page, tmp_path, monkeypatch):
    """Whatever the moment: what lies there of other settings is gone before the record says that it is this step's."""
    out = tmp_path / "laptop"
    shutil.copytree(first[0], out)
    with monkeypatch.context() as patch:
        patch.setattr(demo, "make", interrupt)
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(KeyboardInterrupt):
            demo.run(small(out, steps=5, systems=("gla",)))
    told(small(out, steps=5, systems=("gla",)))
    assert json.loads((out / "gla_tiny-seed0/config.json").read_text())["steps"] == 5


def interrupt(*_):
    raise KeyboardInterrupt
