"""Every result and every run says where it comes from."""

import shutil
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


@pytest.mark.skipif(shutil.which("git") is None, reason="no git found")
def test_the_repository_around_an_installed_package_is_not_ours(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    installed = tmp_path / ".venv" / "ccq" / "provenance.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("1")
    monkeypatch.delenv("CCQ_COMMIT", raising=False)
    monkeypatch.setattr("ccq.provenance.__file__", str(installed))
    if subprocess.run(["git", "-C", str(tmp_path), "rev-parse"], capture_output=True).returncode:
        assert (provenance()["commit"], provenance()["dirty"]) == (None, None)  # no repository at all
    git("init", "-q")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git("add", ".gitignore")
    git("commit", "-qm", "theirs")
    (tmp_path / ".gitignore").write_text(".venv\n*.o\n")
    assert (provenance()["commit"], provenance()["dirty"]) == (None, None)
    git("add", "-f", "-A", ".")
    git("add", "-f", ".venv")
    git("commit", "-qm", "ours")
    assert (provenance()["commit"], provenance()["dirty"]) == (git("rev-parse", "HEAD"), False)
    installed.write_text("2")
    assert provenance()["dirty"] is True


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
