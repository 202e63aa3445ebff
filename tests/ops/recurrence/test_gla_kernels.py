"""The candidate kernels for gated linear attention (benchmarks/gla_kernels.py) against the token loop in fp64.

On a CPU Triton's interpreter runs them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from helpers import TOLERANCE, assert_close
from test_recurrence import DECAYS, PACKED, assert_same, cast, make_case, results, token_loop

import ccq
from ccq.files import read_text
from ccq.ops.recurrence import chunk

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import gla_kernels

pytestmark = [
    pytest.mark.usefixtures("nan_in_fresh_memory"),
    # of pairs that nobody asks for, in the interpreter; if one were taken, results would not be finite
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in matmul"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32 exponents of at most 60 err by 60 * 2^-24, and a difference of such sums is what q' and k' are made with
FP32 = 10 * TOLERANCE[torch.float32]


def ours(q, k, v, g, initial_state=None, cu_seqlens=None):
    return gla_kernels.gla(q, k, v, g, q.shape[-1] ** -0.5, initial_state, True, cu_seqlens)


def on_device(case):
    return {name: x.to(DEVICE) for name, x in case.items()}


def compare(case, ratio=FP32):
    ref = results(token_loop, case)
    got = {name: x.cpu() for name, x in results(ours, on_device(cast(case, torch.float32))).items()}
    # that of g is a sum of q dq - k dk, which cancel where it is small, and is as exact as they are
    parts = case["q"] * ref["gradient of q"]
    name = "gradient of g"
    assert_close(name, ref.pop(name), got.pop(name), ratio, parts)
    assert_same(ref, got, ratio)


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("T", [1, 2, 64, 65, 100, 130])
def test_kernels_are_the_token_loop(monkeypatch, T, chunk):
    monkeypatch.setattr(gla_kernels, "CHUNK", chunk)
    compare(make_case("channel", T, B=2 if T < 100 else 1, K=20, V=24, state=T % 2 == 1))


def test_several_blocks_of_keys_and_values(monkeypatch):
    """Also steep ones, of which some blocks and halves have none."""
    small = {name: {**x, **{n: 16 for n in ("BK", "BV") if n in x}} for name, x in gla_kernels.SIZES.items()}
    monkeypatch.setattr(gla_kernels, "SIZES", small)
    case = make_case("channel", 70, B=1, K=40, V=50, state=True)
    case["g"][:, :40, :, 35:] -= 6
    compare(case)


@pytest.mark.parametrize("lengths", PACKED, ids=str)
def test_packed_sequences_are_separate(lengths):
    compare(make_case("channel", lengths=lengths, H=2, K=16, V=16, state=len(lengths) % 2 == 0))


@pytest.mark.parametrize("decay", [*((d,) for d in DECAYS), (-4.3,), (-4.4,), DECAYS, (-1e9, 0.0)], ids=str)
def test_no_decay_overflows_or_drowns_its_neighbour(decay):
    """Right below and above what makes a channel steep, too; and a decay that forgets everything."""
    ratio = 20 * FP32 if len(decay) == 4 else FP32  # sums of 64 times -50 beside -1e-4, in fp32
    compare(make_case("channel", T=130, B=1, K=16, V=16, decays=decay, state=True), ratio)


def test_a_decay_that_is_infinite_forgets_everything():
    case = cast(make_case("channel", T=70, B=1, K=16, V=16, state=True), torch.float32)
    case["g"][:, 30] = -torch.inf
    o, _ = ours(**on_device(case))
    fresh = {name: x[:, 30:] for name, x in case.items() if name != "initial_state"}
    ref, _ = token_loop(**cast(fresh | {"g": fresh["g"].clamp(min=-1e4)}, torch.float64))
    assert_close("o", ref, o[:, 30:].cpu(), FP32)


def test_half_precision_rounds_a_few_times():
    """q' and k', A, h and the output, one after another, each by at most 2^-8."""
    case = cast(make_case("channel", T=130, B=1, K=32, V=32), torch.bfloat16)
    case["g"] = case["g"].float()
    ref = results(token_loop, cast(case, torch.float64))
    got = results(ours, on_device(case))
    assert got["o"].dtype == torch.bfloat16
    assert got["state"].dtype == torch.float32
    assert_same(on_device(ref), got, TOLERANCE[torch.bfloat16])


def test_nothing_of_the_size_of_a_state_is_kept():
    """From forward to backward: the arguments and A."""
    case = on_device(cast(make_case("channel", T=130, B=1, K=16, V=16), torch.float32))
    kept = []
    leaves = {name: x.requires_grad_() for name, x in case.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        ours(**leaves)
    assert sum(kept) == sum(x.numel() for x in case.values()) + case["q"][..., 0].numel() * gla_kernels.CHUNK


@pytest.mark.parametrize("name", ["gla-pico", "ccq-gla-pico"])
def test_channels_of_trained_models_are_hardly_ever_steep(monkeypatch, name):
    """Else the exact, slow kernel had work in every chunk, and a candidate that wins on new models would lose."""
    model, tokenizer = ccq.load(name)
    run, sums = chunk.run, []

    def watched(q, k, v, g, *rest):
        sums.append(g.unflatten(1, (-1, gla_kernels.CHUNK // 2)).sum(2))
        return run(q, k, v, g, *rest)

    monkeypatch.setattr(chunk, "run", watched)
    tokens = tokenizer(read_text(Path(ccq.__file__).parent / "shipped" / "book.txt"))["input_ids"][4096 : 4096 + 1024]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    assert torch.stack(sums).min() < -40  # and yet they forget: a whole chunk from one reference would overflow
    assert (torch.stack(sums) < -gla_kernels.STEEP.value).float().mean() < 1e-3
