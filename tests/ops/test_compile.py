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
    found = compile_kernels(tmp_path)
    missing = set(found["kernels"]) - {launch["kernel"] for launch in found["launches"]}
    assert not missing, f"{sorted(missing)}: no case in {SCRIPT.name} launches them"


@pytest.mark.slow
def test_every_variant_of_the_hopper_kernels(tmp_path):
    launches = compile_kernels(tmp_path, "--hopper")["launches"]
    assert {"ccq.ops.clean.triton.hopper.clean_hopper_kernel", "ccq.ops.clean.triton.hopper.dk_hopper_kernel"} <= {
        x["kernel"] for x in launches
    }


@pytest.mark.slow
def test_rare_sizes_and_dtypes(tmp_path):
    assert compile_kernels(tmp_path, "--rare")["launches"]


def compile_kernels(cache: Path, *options: str) -> dict:
    """What the script says, once nothing in it is wrong."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),  # else what was compiled once is not compiled again
        "CUDA_VISIBLE_DEVICES": "",  # the same test with and without a GPU
        "PYTHONPATH": os.pathsep.join(sys.path),  # the same package as here
    }
    done = subprocess.run([sys.executable, str(SCRIPT), *options], env=env, capture_output=True, text=True)
    print(done.stderr)  # which kernel came last, where the compiler died; what its passes say, where they refuse one
    assert done.returncode == 0
    found = json.loads(done.stdout)

    errors: dict[str, str] = {}  # the first of each kernel
    for launch in found["launches"]:
        if "error" in launch:
            errors.setdefault(launch["kernel"], f"{launch['kernel']} in {launch['case']}\n{launch['error']}")
    assert not errors, "\n".join(errors.values())

    # an assembler that takes what a product adds to for dead leaves the product out, and says nothing; one that unrolls
    # a loop has more of them
    dropped = [x for x in found["launches"] if x["products"] > x.get("machine_products", 0)]
    assert not dropped, f"products that are in the PTX and not in the machine code: {dropped}"

    large = [launch for launch in found["launches"] if launch["shared"] > SHARED]
    assert not large, f"more than {SHARED} bytes of shared memory: {large}"
    return found
