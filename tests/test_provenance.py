"""Every result and every run says where it comes from."""

import subprocess
from pathlib import Path

import pytest

from ccq.provenance import command_of, provenance


def test_the_commit_is_gits_or_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("CCQ_COMMIT", "a" * 40 + "-dirty")
    told = provenance("ccq x")
    assert (told["command"], told["commit"], told["dirty"]) == ("ccq x", "a" * 40, True)
    monkeypatch.delenv("CCQ_COMMIT")
    here = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(here, capture_output=True, text=True)
    assert provenance()["commit"] == (done.stdout.strip() if done.returncode == 0 else None)
    assert {"python", "torch", "ccq"} <= provenance()["versions"].keys()
    assert provenance().get("gpu") or provenance()["cpu"]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/x/bin/ccq", "eval", "/a/b/model", "--data", "../lm", "--out", "/r"], "ccq eval model --data lm"),
        (["/x/ccq/__main__.py", "train", "gla_tiny", "--data.path=~/shards/"], "ccq train gla_tiny --data.path=shards"),
        (["sweep.py", "--rate", "1e-3", "runs/a/b"], "python sweep.py --rate 1e-3 runs/a/b"),
        (["ccq", "generate", "--prompt", "either/or"], "ccq generate --prompt either/or"),
    ],
)
def test_a_command_is_told_without_the_folders_of_this_machine(argv, command):
    assert command_of(argv) == command
