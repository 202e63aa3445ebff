"""Triton compiles every kernel for Hopper. Its interpreter, in which the other tests run them, takes more than it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux only", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

SCRIPT = Path(__file__).with_name("compile_kernels.py")
SHARED = 232_448  # bytes of shared memory that a block may have on Hopper: 227 KiB


def test_every_kernel_compiles_for_hopper(tmp_path):
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # else what was compiled once is not compiled again
        "CUDA_VISIBLE_DEVICES": "",  # the same test with and without a GPU
        "PYTHONPATH": os.pathsep.join(sys.path),  # the same package as here
    }
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True)
    print(done.stderr)  # which kernel came last, where the compiler died; what its passes say, where they refuse one
    assert done.returncode == 0
    found = json.loads(done.stdout)
    launches = found["launches"]

    errors: dict[str, str] = {}  # the first of each kernel
    for launch in launches:
        if "error" in launch:
            errors.setdefault(launch["kernel"], f"{launch['kernel']} in {launch['case']}\n{launch['error']}")
    assert not errors, "\n".join(errors.values())

    missing = set(found["kernels"]) - {launch["kernel"] for launch in launches}
    assert not missing, f"{sorted(missing)}: no case in {SCRIPT.name} launches them"

    large = [launch for launch in launches if launch["shared"] > SHARED]
    assert not large, f"more than {SHARED} bytes of shared memory: {large}"
