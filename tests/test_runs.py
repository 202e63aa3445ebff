"""runs/*.sh: every `ccq` command that they would run is one that `ccq` takes.

The scripts run with stubs on their PATH that write down what they are called with; then the real parsers read it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ccq import cli
from ccq.train.sweep import TASKS

RUNS = Path(__file__).parent.parent / "runs"
SCRIPTS = sorted(RUNS.glob("*.sh"))
STUBS = ("ccq", "torchrun", "python", "python3", "cp", "make", "git")
ARGUMENTS = {  # else DATA OUT
    "nano_row.sh": ["ccq_gla_conv", "0", "data/needles", "out"],
    "study_row.sh": ["ccq_gla", "0", "data", "out"],
    "study_continue.sh": ["gla_unit", "0", "data", "out"],
    "recall_study.sh": ["out"],
}
BASH = shutil.which("bash")
# in bash, which starts at once; a word ends with a unit separator, a call with a record separator
STUB = r"""#!{bash}
call=$(printf '%s\037' "${{0##*/}}" "$@")
printf '%s\036' "$call" >> "{log}"
case $0 in *python*) echo 2e-3 ;; esac  # the learning rate that a script asks for
[[ -z ${{FAILS+set}} || "$*" != "$FAILS"* ]]
"""


def commands_of(script, folder, **environment):
    """What a script calls of `ccq`, in order, as lists of words."""
    done, calls = run_script(script, folder, **environment)
    assert done.returncode == 0, done.stderr
    return [words_of_ccq(call) for call in calls if words_of_ccq(call) is not None]


def run_script(script, folder, stubbed=STUBS, arguments=ARGUMENTS, **environment):
    """How a script ends, and what it calls, in order; FAILS names the call that fails by how it begins."""
    log = folder / "calls"
    stubs = folder / "bin"
    stubs.mkdir()
    for name in stubbed:
        (stubs / name).write_text(STUB.format(bash=BASH, log=log))
        (stubs / name).chmod(0o755)
    if "python3" not in stubbed:
        (stubs / "python3").symlink_to(sys.executable)
    (folder / "runs").mkdir()
    for each in SCRIPTS:  # they call each other
        shutil.copy(each, folder / "runs" / each.name)
    path = os.pathsep.join([str(stubs), os.defpath])
    done = subprocess.run(
        [BASH, f"runs/{script.name}", *arguments.get(script.name, ["DATA", "OUT"])], cwd=folder,
        env={"PATH": path, "DATA": "DATA", **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    calls = log.read_text().split("\036")[:-1] if log.exists() else []
    return done, [call.split("\037")[:-1] for call in calls]


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
    from ccq.evaluate import suites
    from ccq.train import command

    whole = argparse.ArgumentParser.parse_args
    fields = command.parse

    def parse_args(self, args=None, namespace=None):
        found = whole(self, args, namespace)
        if args is not None and len(args) >= len(words) - 2 and list(args) != words[:1]:
            assert set((getattr(found, "suite", None) or "lm").split(",")) <= suites().keys(), words
            raise ParsedError
        return found

    def parse(parser, argv):
        fields(parser, argv)
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(command, "parse", parse)
        patch.setattr("ccq.train.plan.parse", parse)
        patch.setattr("ccq.train.init.begun_from", lambda name, config, run: config)  # there is no model yet
        patch.setattr("torch.cuda.is_available", lambda: True)  # `ccq bench` asks before it parses
        try:
            raise SystemExit(cli.main(words))  # it went on, or an error was said
        except ParsedError:
            pass


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
def test_the_recall_of_the_study_is_of_its_rows_and_tasks(tmp_path):
    commands = commands_of(RUNS / "recall_study.sh", tmp_path)
    told = [(words[1], words[words.index("--size") + 1] if "--size" in words else words[1]) for words in commands]
    expected = [*[("mad", "mad")] * 4, ("mad", "mad-fuzzy"), *(("mqar", size) for size in TASKS["mqar"].sizes)]
    assert sorted(told[::2]) == sorted(told[1::2]) == sorted(expected)  # each in both tiers
    for words in commands:
        assert words[words.index("--rows") + 1].split(",") == TASKS["mad"].rows["rows"]
        assert "model.conv_size=4" in words


@needs_bash
def test_the_plan_alone_trains_nothing(tmp_path):
    commands = commands_of(RUNS / "reproduce_paper.sh", tmp_path, PLAN_ONLY="1", SIZES="500m")
    assert [words[0] for words in commands] == ["plan"] * 8


@needs_bash
def test_an_evaluation_that_fails_is_told_at_the_end(tmp_path):
    script = RUNS / "reproduce_paper.sh"
    done, calls = run_script(script, tmp_path, SIZES="500m", GPUS="3", FAILS="eval DATA/gla_500m/model ")
    assert done.returncode == 1
    assert "An evaluation of part 3 failed" in done.stderr
    assert sum(call[1] == "eval" for call in calls) == 8, "the others still run"
    assert calls[-1][1] == "report"


@needs_bash
@pytest.mark.parametrize("fails", ["train gla_unit_pico ", "export runs/pico/plain/runs/ccq-gla-pico "])
def test_no_models_ship_where_one_failed(tmp_path, fails):
    done, calls = run_script(RUNS / "reproduce_nano.sh", tmp_path, FAILS=fails)
    assert done.returncode == 1
    assert "One of the models of part C failed" in done.stderr
    assert not any("runs/ship_pico.py" in call for call in calls)


@needs_bash
def test_what_was_cut_off_is_made_again_and_what_is_whole_is_not(tmp_path):
    for folder, file in (("gla_500m", "tokenizer.json"), ("mamba2_500m", "config.json")):
        (tmp_path / "DATA" / folder / "model").mkdir(parents=True)
        (tmp_path / "DATA" / folder / "model" / file).touch()
    (tmp_path / "DATA" / "tokenizer").mkdir()
    commands = commands_of(RUNS / "reproduce_paper.sh", tmp_path, SIZES="500m")
    exported = [words[1] for words in commands if words[0] == "export"]
    assert "DATA/gla_500m" in exported
    assert len(exported) == 7
    assert "DATA/mamba2_500m" not in exported
    assert ["data", "tokenizer"] in [words[:2] for words in commands]


@needs_bash
@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock found")
@pytest.mark.parametrize(
    ("last", "rate"),
    [((3.1, 3.0, 3.2), "2e-3"), ((3.1, None, 3.05), "4e-3"), ((None, None, None), None)],
    ids=["the best", "one diverged", "all diverged"],
)
def test_the_rate_of_a_row_is_that_of_the_best_last_validation(tmp_path, last, rate):
    """A run that diverged has no loss at its last step, however good it was before."""
    for lr, loss in zip(("1e-3", "2e-3", "4e-3"), last, strict=True):
        run = tmp_path / "out" / "sweep" / f"gla-{lr}"
        (run / "checkpoints" / "step-00000763").mkdir(parents=True)
        rows = [{"step": 500, "valid_loss": 2.0}, {"step": 763, "valid_loss": loss}, {"step": 763, "loss": 1.0}]
        (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stubbed = [name for name in STUBS if name != "python3"]
    arguments = {"nano_row.sh": ["gla", "0", "data/needles", "out"]}
    done, calls = run_script(RUNS / "nano_row.sh", tmp_path, stubbed, arguments)
    if rate is None:
        assert done.returncode != 0
        assert "all of 1e-3, 2e-3, 4e-3 diverged" in done.stderr
        assert not calls
    else:
        (trained,) = [call for call in calls if call[1] == "train"]
        assert trained[trained.index("--optimizer.lr") + 1] == rate


@needs_bash
def test_what_a_row_has_finished_is_not_run_again(tmp_path):
    run = tmp_path / "out" / "ccq_gla_conv-seed0"
    for name in ("model/config.json", "analysis/gate_model.json"):
        (run / name).parent.mkdir(parents=True)
        (run / name).touch()
    words = commands_of(RUNS / "nano_row.sh", tmp_path, RATE="2e-3")
    assert {call[0] for call in words} == {"eval", "analyze"}  # those that look for themselves what is left
    assert [call[1] for call in words if call[0] == "analyze"] == ["alignment", "intervene", "intervene"]


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


# Trains for a while, and writes down who takes a step; exports and evaluates what there is.
FAKE = r"""#!{bash}
run=""; out=""; model=$2
for i in $(seq $#); do
  [ "${{!i}}" != --run-dir ] || {{ j=$((i + 1)); run=${{!j}}; }}
  [ "${{!i}}" != --out ] || {{ j=$((i + 1)); out=${{!j}}; }}
done
case $1 in
  train)
    [ "$2" != broken_nano ] || exit 3
    echo "starts"; mkdir -p "$run"
    for step in 1 2 3 4 5 6; do sleep 0.15; echo "$run" >> {log}; echo "step $step: loss 1"
      [ $step != 1 ] || sleep 1; done ;; # for the queue to stop it
  export) mkdir -p "$3"; touch "$3/config.json" ;;
  eval) [ -f "$model/config.json" ] || exit 4; touch "$out/niah.json" "$out/length.json" ;;
esac
"""


@needs_bash
def test_the_queue_trains_one_run_at_a_time_and_evaluates_all(tmp_path):
    """The next run starts early, and after its first step waits for the one before; one that fails stops nothing."""
    fake, log, out = tmp_path / "ccq", tmp_path / "steps", tmp_path / "out"
    fake.write_text(FAKE.format(bash=BASH, log=log))
    fake.chmod(0o755)
    (out / "requests").mkdir(parents=True)
    for suite in ("niah", "length"):
        (out / "requests" / f"{suite}.npz").touch()
    jobs = ["gla_unit:0:2e-3", "broken:0:2e-3", "ccq_gla:1:2e-3:1", "gla_unit:2:2e-3"]
    done = subprocess.run(
        [sys.executable, str(RUNS / "study_queue.py"), "data", str(out), *jobs],
        env={**os.environ, "CCQ": str(fake)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = ["gla_unit-seed0", "ccq_gla-seed1-repeat1", "gla_unit-seed2"]
    assert "broken-seed0: failed (3)" in done.stdout
    for name in names:
        assert (out / name / "eval" / "length.json").exists(), done.stdout
    steps = [Path(line).name for line in log.read_text().split()]
    assert all(steps.count(name) == 6 for name in names)
    taken = [name for at, name in enumerate(steps) if name in steps[:at]]  # without the first of each
    assert taken == [name for name in names for _ in range(5)]


@needs_bash
def test_the_queue_begins_nothing_when_its_time_is_over(tmp_path):
    queue = [sys.executable, str(RUNS / "study_queue.py"), "data", str(tmp_path), "--begin-within", "-1"]
    done = subprocess.run([*queue, "gla_unit:0:2e-3"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "no time for gla_unit-seed0\n")
    assert not (tmp_path / "queue").exists()


@needs_bash
@pytest.mark.parametrize(
    ("tier", "size", "text"), [("400m", "nano", "needles"), ("micro", "micro", "needles"), ("pico", "pico", "train")]
)
def test_a_tier_of_the_study_trains_its_size_on_its_text(tier, size, text, tmp_path, monkeypatch):
    commands = commands_of(RUNS / "study_row.sh", tmp_path, TIER=tier, RATE="2e-3")
    for words in commands:
        check(words, monkeypatch)
    (train,) = [words for words in commands if words[0] == "train"]
    assert train[1] == f"ccq_gla_{size}"
    assert train[train.index("--data.path") + 1] == f"data/{text}"
    assert train[train.index("--run-dir") + 1] == f"out/{tier}/ccq_gla-seed0"
    assert train[train.index("--optimizer.lr") + 1] == "2e-3"
