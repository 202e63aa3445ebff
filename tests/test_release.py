"""What a release needs: notes on its version, and a source archive that holds the repository."""

import re
import subprocess
from pathlib import Path

import pytest

import ccq

ROOT = Path(__file__).parent.parent


def test_the_changelog_has_the_version():
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert sections[1].rstrip(",") == ccq.__version__


def test_the_source_archive_holds_the_repository():
    """All that is committed but what only the repository itself needs: tests and scripts run from it."""
    sdist = pytest.importorskip("hatchling.builders.sdist")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository here")
    names = {file.relative_path for file in sdist.SdistBuilder(str(ROOT)).recurse_included_files()}
    names |= {"LICENSE", "pyproject.toml"}  # which the backend adds by itself
    committed = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert {name for name in committed - names if not name.startswith(".")} == set()
