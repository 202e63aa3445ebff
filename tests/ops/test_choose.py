"""Which backend runs is chosen in one place and said aloud."""

from __future__ import annotations

import warnings

import pytest
import torch

from ccq import backends
from ccq.ops import BackendFallbackWarning
from ccq.ops.choose import NAMES, resolve


@pytest.fixture
def gpu(monkeypatch, no_triton):
    """A GPU whose calls the Triton kernels refuse, as far as `resolve` can see."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Test GPU")
    return torch.device("cuda")


def test_one_backend_is_chosen_and_it_runs(no_triton):
    statuses = backends("cpu")
    assert tuple(statuses) == NAMES
    (chosen,) = (status for status in statuses.values() if status.chosen)
    assert chosen.runs
    assert resolve("auto", torch.device("cpu"), torch.float32, 128) == chosen.name == "chunk"


def test_status_reads_as_a_line(no_triton):
    status = backends("cpu")
    assert str(status["chunk"]).startswith("-> chunk")
    assert str(status["triton"]).endswith("cannot run: the test says so")


def test_fallback_on_a_gpu_warns_once_and_says_why(gpu):
    with pytest.warns(BackendFallbackWarning, match=r"Test GPU through backend='chunk'.*the test says so"):
        assert resolve("auto", gpu, torch.bfloat16, 128) == "chunk"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve("auto", gpu, torch.bfloat16, 128) == "chunk"


@pytest.mark.parametrize("name", ["reference", "chunk"])
def test_a_backend_asked_for_by_name_does_not_warn(gpu, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(name, gpu, torch.bfloat16, 128) == name
