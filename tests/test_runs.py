"""runs/*.sh: every `ccq` command that they would run is one that `ccq` takes.

The scripts run with stubs on their PATH that write down what they are called with; then the real parsers read it.
"""

import argparse
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ccq import cli

RUNS = Path(__file__).parent.parent / "runs"
SCRIPTS = sorted(RUNS.glob("*.sh"))
STUBS = ("ccq", "torchrun", "python", "python3", "cp", "make", "git")
ARGUMENTS = {"nano_row.sh": ["ccq_gla_conv", "0", "data/needles", "out"]}  # else DATA OUT
STUB = """#!{python}
import json, os, sys
with open({log!r}, "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if "python" in sys.argv[0]:
    print("2e-3")  # the learning rate that a script asks for
"""
BASH = shutil.which("bash")


def commands_of(script, folder, **environment):
    """What a script calls, in order, as lists of words."""
    import sys

    log = folder / "calls.jsonl"
    stubs = folder / "bin"
    stubs.mkdir()
    for name in STUBS:
        (stubs / name).write_text(STUB.format(python=sys.executable, log=str(log)))
        (stubs / name).chmod(0o755)
    (folder / "runs").mkdir()
    for each in SCRIPTS:  # they call each other
        shutil.copy(each, folder / "runs" / each.name)
    path = os.pathsep.join([str(stubs), os.defpath])
    done = subprocess.run(
        [BASH, f"runs/{script.name}", *ARGUMENTS.get(script.name, ["DATA", "OUT"])], cwd=folder,
        env={"PATH": path, "DATA": "DATA", **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return [words_of_ccq(call) for call in calls if words_of_ccq(call) is not None]


def words_of_ccq(call):
    """The arguments of `ccq`, also behind torchrun or python -m; None for another program."""
    if call[0] == "ccq":
        return call[1:]
    if "-m" in call and call[call.index("-m") + 1] == "ccq":
        return call[call.index("-m") + 2 :]
    return None


class ParsedError(Exception):
    """The arguments were taken: nothing more is to happen."""


def check(words, monkeypatch):
    """Raise SystemExit where `ccq` would not take the words."""
    from ccq.evaluate import SUITES
    from ccq.train import command

    whole = argparse.ArgumentParser.parse_args
    fields = command.parse

    def parse_args(self, args=None, namespace=None):
        found = whole(self, args, namespace)
        if args is not None and len(args) >= len(words) - 2 and list(args) != words[:1]:
            assert set((getattr(found, "suite", None) or "lm").split(",")) <= SUITES.keys(), words
            raise ParsedError
        return found

    def parse(parser, argv):
        _, config = fields(parser, argv)
        if config is None:
            raise SystemExit(1)
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(command, "parse", parse)
        patch.setattr("ccq.train.plan.parse", parse)
        patch.setattr("torch.cuda.is_available", lambda: True)  # `ccq bench` asks before it parses
        with pytest.raises(ParsedError):
            cli.main(words)


needs_bash = pytest.mark.skipif(BASH is None, reason="no bash found")


@needs_bash
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_command_of_a_script_is_one_that_ccq_takes(script, tmp_path, monkeypatch):
    commands = commands_of(script, tmp_path)
    assert commands
    for words in commands:
        check(words, monkeypatch)


@needs_bash
def test_the_paper_is_reproduced_with_its_systems_and_scales(tmp_path):
    commands = commands_of(RUNS / "reproduce_paper.sh", tmp_path)
    trained = [words[1] for words in commands if words[0] == "train"]
    systems = ("transformer", "mamba2", "gla", "gla_hedgehog", "gated_deltanet", "ccq_gla", "ccq_gated_deltanet")
    for size in ("500m", "1.3b"):
        assert {f"{system}_{size}" for system in (*systems, "gla_unit")} <= set(trained)
    assert len(trained) == len(set(trained)) == 18
    planned = [words[1] for words in commands if words[0] == "plan"]
    assert planned == trained
    assert [words[0] for words in commands][:18] == ["plan"] * 18, "the plan comes first"
    evaluated = [words for words in commands if words[0] == "eval"]
    assert len(evaluated) == 18
    assert all("lm,niah,length,longbench" in words for words in evaluated)
    assert commands[-1][0] == "report"


@needs_bash
def test_the_plan_alone_trains_nothing(tmp_path):
    commands = commands_of(RUNS / "reproduce_paper.sh", tmp_path, PLAN_ONLY="1", SIZES="500m")
    assert [words[0] for words in commands] == ["plan"] * 8


@pytest.mark.parametrize(
    "words",
    [
        ["train", "ccq_gla_1.4b", "--run-dir", "x"],
        ["train", "ccq_gla_1.3b", "--data.paht", "x"],
        ["eval", "model", "--suit", "niah", "--ot", "x"],
        ["report", "x", "--output", "y"],
        ["data", "prepare", "TEXT", "--out", "y"],
        ["nothing"],
    ],
)
def test_a_command_that_ccq_does_not_take_is_noticed(words, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        check(words, monkeypatch)
