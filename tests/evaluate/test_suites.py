"""A suite is one file: what the frame knows of it stands in its object."""

import ast
import json
import sys
from pathlib import Path

import pytest

import ccq.evaluate
from ccq import cli
from ccq.data.needles import words
from ccq.evaluate import Options, suite, suites

FRAME = ("__init__", "engine", "requests", "results", "statistics", "suite")
SOURCE = """
from ccq.evaluate.requests import Builder
from ccq.evaluate.statistics import summary
from ccq.evaluate.suite import Option, Suite
from ccq.names import positive


def build(options, tokenizer):
    builder = Builder()
    for number in range(options.times or 2):
        builder.add(f"all/{number}", "score", [1, 2, 3 + number], context=1)
    return builder.done("count", {"times": options.times})


def metrics(asked, answers, options, tokenizer):
    rows = [{"id": r.id, "group": "all", "output": a["nll"], "score": 1.0} for r, a in zip(asked.requests, answers)]
    return rows, {"all": summary(rows)}


SUITE = Suite("count", "one, two, three", build, metrics, (Option("times", "how often", positive),), text=False)
"""


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def more(tmp_path, monkeypatch):
    """A file more in ccq/evaluate, and nothing else."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "counting.py").write_text(SOURCE)
    monkeypatch.setattr(ccq.evaluate, "__path__", [*ccq.evaluate.__path__, str(folder)])
    suite.suites.cache_clear()
    yield
    monkeypatch.undo()
    suite.suites.cache_clear()


def test_a_file_more_is_a_suite_more(more, saved, tmp_path, capsys):
    assert cli.main(["eval", saved, "--suite", "count", "--times", "3", "--device", "cpu", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "count.json").read_text())
    assert (result["scores"]["all"]["value"], result["samples"]["requests"]) == (100, 3)
    with pytest.raises(SystemExit):
        cli.main(["eval", saved, "--suite", "mqar", "--times", "3", "--out", str(tmp_path)])
    assert "--times: this option is for count, and --suite is mqar" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    text = capsys.readouterr().out
    assert text.index("  count      one, two, three") < text.index("    --times N")
    assert "(default:\n                        lm,niah,length,longbench)" in text, "run where it is asked for"


def test_the_frame_names_no_suite():
    names = set(suites())
    assert len(names) == 6
    for file in FRAME:
        tree = ast.parse(Path(ccq.evaluate.__file__).with_name(f"{file}.py").read_text())
        said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not said & names, file


def test_an_option_that_no_suite_has_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"there is no option 'length'. Did you mean 'lengths'\?"):
        Options(out=tmp_path, length=(64,))


def test_a_package_that_is_missing_is_named_before_anything_is_asked(saved, tmp_path, monkeypatch, capsys):
    class Missing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "wonderwords":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "wonderwords"]:
        monkeypatch.delitem(sys.modules, name)
    words.cache_clear()
    common = ["eval", saved, "--suite", "niah", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert cli.main(common) == 1
    assert "ccq eval needs wonderwords: pip install 'ccq[train]'" in capsys.readouterr().err
    assert cli.main([*common, "--stage", "score"]) == 1, "that stage needs none"
    assert "niah.npz does not exist: make it with --stage requests" in capsys.readouterr().err
