"""`import ccq` is light: what is optional is imported where it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys, time
import torch  # its time and its modules are not ours
before, begin = set(sys.modules), time.perf_counter()
import ccq
print(json.dumps({"seconds": time.perf_counter() - begin, "modules": sorted(set(sys.modules) - before)}))
"""


@pytest.fixture(scope="module")
def imported() -> dict:
    """What `import ccq` loads in a fresh interpreter beyond torch, and the seconds it takes."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["triton", "fla", "transformers", "matplotlib", "rich", "tyro"])
def test_import_leaves_optional_packages_alone(imported, module):
    assert module not in imported["modules"]


def test_import_imports(imported):
    assert "ccq.ops.clean.chunk" in imported["modules"]


def test_import_is_quick(imported):
    # 0.1 s on an idle machine; ten seconds, so that only something heavy fails, not a machine that is busy
    assert imported["seconds"] < 10
