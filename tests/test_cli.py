import subprocess
import sys
import types
from pathlib import Path

import pytest

import ccq
from ccq import cli


@pytest.fixture
def command(monkeypatch):
    """Register a function as the command "made-up" by the one line that a real one takes."""

    def register(function):
        module = types.ModuleType("made_up_command")
        module.run = function
        monkeypatch.setitem(sys.modules, "made_up_command", module)
        monkeypatch.setitem(cli.COMMANDS, "made-up", ("made_up_command:run", "for this test"))

    return register


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ccq {ccq.__version__}\n"


def test_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["docter"])
    assert stop.value.code == 2
    assert "unknown command 'docter'. Did you mean 'doctor'?" in capsys.readouterr().err


def test_no_command_shows_all_of_them(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2
    help_text = capsys.readouterr().err
    assert all(name in help_text for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: ccq {name} ")


def test_command_gets_its_arguments_and_sets_the_exit_code(command):
    seen = []
    command(lambda arguments: seen.extend(arguments) or 7)
    assert cli.main(["made-up", "--version", "-x", "y"]) == 7
    assert seen == ["--version", "-x", "y"]


def test_interrupt_exits_130_without_traceback(command, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    command(interrupted)
    assert cli.main(["made-up"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_missing_extra_is_named(command, capsys, monkeypatch):
    def draw(arguments):
        import matplotlib.figure  # noqa: F401

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    command(draw)
    assert cli.main(["made-up"]) == 1
    assert "pip install 'ccq[eval]'" in capsys.readouterr().err


def test_other_missing_modules_are_not_hidden(command):
    def broken(arguments):
        import no_such_module_anywhere  # noqa: F401

    command(broken)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        cli.main(["made-up"])


def test_doctor_runs_as_a_module_without_rich_or_matplotlib():
    code = (
        "import runpy, sys; sys.modules.update(rich=None, matplotlib=None, triton=None, fla=None, transformers=None); "
        "sys.argv = ['ccq', 'doctor']; runpy.run_module('ccq', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'What runs with backend="auto"' in done.stdout


def test_a_folder_that_cannot_be_written_is_named_without_a_traceback(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "below")]) == 1
    assert "file" in capsys.readouterr().err


def test_a_report_replaces_an_older_one_and_nothing_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("site").mkdir()
    Path("site", "index.html").write_text("mine")
    assert cli.main(["report", "-o", "site"]) == 1
    assert "site is not empty, it holds index.html: expected" in capsys.readouterr().err
    assert Path("site", "index.html").read_text() == "mine"
    for arguments in (["--force"], []):  # the second time the page is ours
        assert cli.main(["report", "-o", "site", *arguments]) == 1
        assert "no result" in capsys.readouterr().err


def test_a_path_to_report_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", str(tmp_path / "nowhere"), "-o", str(tmp_path)])
    assert "nowhere does not exist" in capsys.readouterr().err


def test_a_backend_that_cannot_run_here_is_said_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = ["train", "ccq_gla_tiny", "--steps", "1", "--runtime.device", "cpu"]
    assert cli.main([*arguments, "--model.backend", "triton"]) == 1
    assert "ccq train: backend='triton' cannot run" in capsys.readouterr().err


def test_a_module_of_the_users_is_imported_first(command, tmp_path, monkeypatch, capsys):
    """From the folder that one works in, where the `ccq` script does not look by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "my_mixers.py").write_text("imported = True")
    (tmp_path / "my_broken.py").write_text("import nowhere_to_be_found")
    seen = []
    command(lambda arguments: seen.append((arguments, sys.modules["my_mixers"].imported)) or 0)
    try:
        assert cli.main(["made-up", "a", "--import", "my_mixers", "--x=y", "--", "b"]) == 0
        assert cli.main(["made-up", "--import=my_mixers.py"]) == 0
        assert seen == [(["a", "--x=y", "--", "b"], True), ([], True)]
        assert cli.main(["made-up", "--import", "my_mixer"]) == 1
        assert "--import: no module 'my_mixer' in this folder or installed" in capsys.readouterr().err
        with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
            cli.main(["made-up", "--import", "my_broken"])
    finally:
        sys.modules.pop("my_mixers", None)


def test_only_training_is_said_to_resume(capsys):
    for name, resumes in (("train", True), ("plan", False)):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert ("resumes a run" in capsys.readouterr().out) == resumes
