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
from test_triton import MODES, assert_neighbours_change_nothing, compare_with_fp64

import ccq.ops.clean.triton
from ccq.ops.clean.triton import launch

SHAPES = [
    {"T": 300, "B": 1, "Hq": 2, "Hk": 1, "K": 64},
    {"T": 197, "B": 2, "Hq": 1, "Hk": 1, "K": 128},  # the last tile ends in its first half
]


PACKED = [
    {"lengths": [1, 63, 0, 64, 65, 128, 0, 0], "Hq": 2, "Hk": 1, "K": 64},
    {"lengths": [0, 129, 2, 300], "Hq": 1, "Hk": 1, "K": 64},
    {"lengths": [300], "Hq": 2, "Hk": 2, "K": 128},
]
LONG = {"clean": 256, "dk": 256}  # tokens of a chunk, of two tiles


@pytest.fixture
def by_hopper(monkeypatch, request):
    """Calls go through the Hopper kernels; of 3 programs, so that each takes several tiles.

    Its parameter: how many tokens a chunk has in each pass, 128 if it says nothing.
    """
    chunks = getattr(request, "param", {})
    module = interpreted()
    monkeypatch.setitem(sys.modules, "ccq.ops.clean.triton.hopper", module)
    monkeypatch.setattr(ccq.ops.clean.triton, "hopper", module, raising=False)
    monkeypatch.setattr(launch, "choose", lambda *_: "hopper")
    monkeypatch.setattr(launch, "processors", lambda _: 3)
    plain = launch.pick

    def pick(name, dtype, block_k, work, interpreted, hopper=False):
        if hopper:
            first = script("benchmarks/tune.py").candidates(name, torch.bfloat16, 128, True)[0]
            return replace(first, S=chunks.get(name, 128))
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize(
    ("by_hopper", "step", "decay", "shape", "mode", "state"),
    [
        (LONG, "scaled", None, 0, 0, False),
        (LONG, "scaled", None, 1, 3, True),
        ({}, "scaled", None, 2, 2, True),
        ({}, "projected", "given", 0, 0, True),
        ({"clean": 256}, "projected", "learned", 1, 1, True),
        ({"dk": 256}, "scaled", "sudden", 1, 0, False),
    ],
    indirect=["by_hopper"],
)
def test_source_of_the_hopper_kernels_matches_fp64_on_packed_sequences(by_hopper, step, decay, shape, mode, state):
    mode = {**MODES[mode], "step": step} if step != "scaled" or decay else MODES[mode]
    compare_with_fp64(PACKED[shape], mode, state, torch.float32, decay)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("by_hopper", [LONG], indirect=True)
@pytest.mark.parametrize(("step", "decay"), [("scaled", None), ("projected", "given")])
def test_in_the_source_of_the_hopper_kernels_neighbours_change_nothing(by_hopper, step, decay):
    assert_neighbours_change_nothing([70, 1, 130, 3], 64, torch.float32, step, decay)
