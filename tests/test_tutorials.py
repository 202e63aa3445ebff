"""The tutorials and the notebook run as they stand, each from an empty folder; the site builds without a warning."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, blocks, execute

from ccq.cli import main
from ccq.mixers import MIXERS
from ccq.shipped import book

TUTORIALS = [page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if page.stem != "index"]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
# In a block of sh, `ccq` asks this process and waits for the exit code: nothing is imported anew. The shell's own
# input and output become 4 and 3 for that, and what other commands print goes where errors go.
CCQ = """exec 3>&1 4<&0 1>&2 </dev/null
ccq() { printf '%s\\0' "$#" "$@" >&3; read -r code <&4; return "$code"; }
set -eu
"""


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    before = set(MIXERS)
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as in a session of Python
    yield
    for name in MIXERS.keys() - before:  # what a page registered
        del MIXERS[name]
    for name in sys.modules.keys() - modules:  # what it saved and imported
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def run_sh(source: str) -> int:
    """The exit code of the first command that fails, or 0."""
    with subprocess.Popen(["sh", "-c", CCQ + source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None

        def word() -> str:
            text = b""
            while (letter := shell.stdout.read(1)) not in (b"", b"\0"):
                text += letter
            return text.decode()

        while count := word():
            code = main([word() for _ in range(int(count))])
            shell.stdin.write(f"{code}\n".encode())
            shell.stdin.flush()
    return shell.returncode


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_its_page_alone(page, empty_folder, capsys):
    assert len(page.read_text().splitlines()) <= 150
    names: dict = {"__name__": "page"}
    found = blocks(page, "python|sh")
    assert found
    text = page.read_text().splitlines()
    for line, language, source in found:
        before = "\n".join(text[max(0, line - 4) : line])
        if saved := re.search(r"Save this as `(\S+)`", before):
            Path(saved[1]).write_text(source)
        elif language == "python":
            execute(page, line, source, names)
        else:
            assert run_sh(source) == 0, f"{page.name}, line {line}: {source}{capsys.readouterr().err}"


def test_the_text_path_of_the_readme_runs(empty_folder, capsys):
    """From text to a generated sentence and a score, with fewer steps; tests/serve has the server."""
    Path("story.txt").write_text(book()["stories"][0], encoding="utf-8")
    [source] = [source for _, _, source in blocks(ROOT / "README.md", "sh") if "ccq data tokenizer" in source]
    for long, short in (
        ("TEXT...", "story.txt"),
        ("--steps 200", "--steps 2"),
        ("--lengths 512", "--lengths 512 --limit 2"),
    ):
        assert long in source
        source = source.replace(long, short)
    source = "".join(line for line in source.splitlines(keepends=True) if not line.startswith("ccq serve"))
    assert run_sh(source) == 0, capsys.readouterr().err


def test_the_other_commands_of_the_readme_run(empty_folder, capsys):
    """A shipped model stands for the Hub's; what `make` runs has tests of its own, and pip has brought us here."""
    Path("story.txt").write_text(book()["stories"][0], encoding="utf-8")
    assert run_sh("ccq data prepare story.txt --tokenizer gla-pico --out shards") == 0
    sources = [source for _, _, source in blocks(ROOT / "README.md", "sh") if "ccq data tokenizer" not in source]
    lines = [line for source in sources for line in source.splitlines() if line.startswith("ccq ")]
    assert [line.split()[1] for line in lines] == ["doctor", "generate", "convert", "train"]
    source = "\n".join(lines).replace("fla-hub/gla-1.3B-100B", "gla-pico")
    source = source.replace("--run-dir", "--steps 1 --data.length 64 --data.batch 1 --optimizer.warmup 0 --run-dir")
    assert run_sh(source) == 0, capsys.readouterr().err


def test_the_notebook_runs(empty_folder, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    assert NOTEBOOK.stat().st_size < 300_000
    names: dict = {"__name__": "notebook"}
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            execute(NOTEBOOK.with_suffix(f".cell{number}"), 0, "".join(cell["source"]), names)
            assert not any(output["output_type"] == "error" for output in cell["outputs"])
    pyplot.close("all")
    assert names["ranks"]["off"][0] > 1
    assert names["ranks"]["off"][-1] == 1
    assert names["answers"]["on"].strip().startswith(names["CODE"])


def test_the_site_builds_without_a_warning(tmp_path):
    """Strict: a link that leads nowhere, a page that is not in the navigation, a docstring that cannot be read."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]  # --quiet hides warnings
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("ccq.clean_query", "ccq.CovarianceState", "ccq.load", "ccq.attach", "ccq.model.CCQForCausalLM"):
        assert f'id="{name}"' in api
