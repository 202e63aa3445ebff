"""Products of the statistics are exact whatever the user sets TF32 to, and that setting is theirs again afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

from ccq.ops import precision
from ccq.ops.recurrence import recurrence

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_blocks_of_two_threads_that_overlap_leave_the_setting_as_it_was():
    allowed, x = MATMUL.fp32_precision, torch.zeros(1)
    assert allowed != "ieee"
    begun, ended = threading.Event(), threading.Event()

    def first():
        with precision._no_tf32(x):
            begun.set()
            assert ended.wait(10)
            seen.append(MATMUL.fp32_precision)

    seen: list[str] = []
    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(10)
    with precision._no_tf32(x):
        assert MATMUL.fp32_precision == "ieee"
        ended.set()
        thread.join(10)
        seen.append(MATMUL.fp32_precision)  # the one that came first is gone
    assert seen == ["ieee", "ieee"]
    assert MATMUL.fp32_precision == allowed
    assert torch.get_float32_matmul_precision() == "high"


def test_plain_pytorch_compiles_where_tf32_is_to_be_kept_out(monkeypatch):
    """What a CUDA tensor takes, without one: a compiler cannot trace the setting."""
    cuda = type("Cuda", (), {"is_cuda": True, "device": torch.device("cpu")})()
    for place in ("chunk", "decode", "mesa"):
        monkeypatch.setattr(f"ccq.ops.recurrence.{place}.exact_matmul", lambda x: precision.exact_matmul(cuda))
    q = torch.randn(1, 10, 2, 4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: recurrence(q, q, q)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), recurrence(q, q, q)[0])
