"""`import ccq` and the help of commands are light: what is heavy or optional is imported where it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import contextlib, io, json, sys, time
begin = time.perf_counter()
import ccq
seconds, loaded = time.perf_counter() - begin, sorted(sys.modules)
from ccq import cli
after = {}
for command in ([], *([name] for name in sys.argv[1:])):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    assert out.getvalue().startswith("usage: ccq"), command
    after["".join(command)] = sorted(sys.modules)
print(json.dumps({"seconds": seconds, "import": loaded, **after, "load": str(ccq.load), "ops": str(ccq.ops.sigma_q)}))
"""
LIGHT = ("train", "generate", "info", "analyze", "bench", "data", "report", "sweep")  # `--help` of these


@pytest.fixture(scope="module")
def loaded() -> dict:
    """What `import ccq`, then the help of one command after the other, have loaded in a fresh interpreter."""
    command = [sys.executable, "-W", "error", "-c", PROBE, *LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["torch", "triton", "fla", "transformers", "matplotlib", "rich", "tyro", "numpy"])
def test_import_leaves_what_is_heavy_alone(loaded, module):
    assert module not in loaded["import"]


@pytest.mark.parametrize("command", ["", *LIGHT])
def test_help_needs_neither_torch_nor_transformers(loaded, command):
    assert not {"torch", "transformers"} & set(loaded[command])


def test_names_come_when_they_are_asked_for(loaded):
    assert "function load" in loaded["load"]
    assert "function sigma_q" in loaded["ops"]


def test_an_unknown_name_is_an_attribute_error():
    import ccq

    assert {"clean_query", "load", "__version__"} <= set(dir(ccq))
    with pytest.raises(AttributeError, match="module 'ccq' has no attribute 'clean_qery'"):
        ccq.clean_qery  # noqa: B018


def test_import_is_quick(loaded):
    # 0.01 s on an idle machine; two seconds, so that only something heavy fails, not a machine that is busy
    assert loaded["seconds"] < 2
