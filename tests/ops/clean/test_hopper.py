"""The Hopper kernels on a CPU, their source run with PyTorch in the place of Gluon, against fp64."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
from gluon_interpreter import interpreted
from scripts import script
from test_triton import MODES, compare_with_fp64

import ccq.ops.clean.triton
from ccq.ops.clean.triton import launch

SHAPES = [
    {"T": 300, "B": 1, "Hq": 2, "Hk": 1, "K": 64},
    {"T": 197, "B": 2, "Hq": 1, "Hk": 1, "K": 128},  # the last tile ends in its first half
]


@pytest.fixture
def by_hopper(monkeypatch):
    """Calls go through the Hopper kernels; of 3 programs, so that each takes several tiles."""
    module = interpreted()
    monkeypatch.setitem(sys.modules, "ccq.ops.clean.triton.hopper", module)
    monkeypatch.setattr(ccq.ops.clean.triton, "hopper", module, raising=False)
    monkeypatch.setattr(launch, "choose", lambda *_: "hopper")
    monkeypatch.setattr(launch, "processors", lambda _: 3)
    plain = launch.pick

    def pick(name, dtype, block_k, work, interpreted, hopper=False):
        if hopper:
            return script("benchmarks/tune.py").candidates(name, torch.bfloat16, 128, True)[1]
        # S: what one kernel leaves at the borders of chunks the other reads; the rest: fewer and larger tiles of the
        # kernels that are not looked at here take less time
        config = plain(name, dtype, block_k, work, True)
        return replace(config, BT=64, S=128, BN=64, BS=min(block_k, 64), BLK=min(block_k, 64), BR=64)

    monkeypatch.setattr(launch, "pick", pick)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize(
    ("shape", "mode", "state"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 2, True), (0, 3, False)]
)
def test_source_of_the_hopper_kernels_matches_fp64(by_hopper, shape, mode, state):
    compare_with_fp64(SHAPES[shape], MODES[mode], state, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize(
    ("step", "decay", "shape", "mode", "state"),
    [
        ("projected", "given", 1, 0, True),
        ("projected", "learned", 0, 1, False),
        ("scaled", "given", 0, 3, True),
        ("scaled", "sudden", 0, 0, True),
    ],
)
def test_source_of_the_hopper_kernels_matches_fp64_in_every_read(by_hopper, step, decay, shape, mode, state):
    compare_with_fp64(SHAPES[shape], {**MODES[mode], "step": step}, state, torch.float32, decay)
