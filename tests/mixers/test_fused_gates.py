"""The gates of the delta rule and of gated linear attention in one launch, against plain PyTorch in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import TOLERANCE, assert_close

from ccq.mixers import kernels
from ccq.mixers.linear_attention import log_decay


def test_gates_are_those_of_plain_pytorch(nan_in_fresh_memory):
    rng = torch.Generator().manual_seed(0)
    a = torch.cat([torch.linspace(-40, 40, 91), torch.randn(209, generator=rng)]).view(50, 6)
    b, A_log, dt_bias = (torch.randn(n, generator=rng) for n in ((50, 6), (6,), (6,)))
    g, beta = kernels.gates(a, b, A_log, dt_bias)
    expected = log_decay(a.double(), A_log.double(), dt_bias.double())[0]
    # each by itself: a rate of 1e-12 must keep its digits beside one of 40
    assert_close("g", torch.ones_like(expected), g / expected, 1e-5)
    assert_close("beta", b.double().sigmoid(), beta, 1e-6)


def check_low_rank(rows, rank, channels, dtype, device="cpu"):
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*n, generator=rng).to(device, dtype) for n in ((rows, rank), (channels, rank), (channels,))
    )
    bias[:40] = torch.linspace(-60, 60, 40)  # where the exponential vanishes, and where it is all
    z = x.double() @ weight.double().T + bias.double()
    expected = F.logsigmoid(z.to(dtype).double()) / 16
    got = kernels.low_rank_decay(x, weight, bias, 16)
    assert got.dtype == dtype
    # each by itself: a rate of 1e-12 must keep its digits beside one of 4
    allowed = 1e-5 if dtype == torch.float32 else 8 * TOLERANCE[dtype]
    ratio = got.double() / expected
    assert_close("g", torch.ones_like(ratio), ratio, allowed)


@pytest.mark.parametrize(("rows", "rank", "channels"), [(1, 16, 300), (3, 5, 64)])
def test_low_rank_decays_are_those_of_plain_pytorch(rows, rank, channels, nan_in_fresh_memory):
    check_low_rank(rows, rank, channels, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_rank_decays_on_a_gpu(dtype):
    check_low_rank(8, 16, 1536, dtype, "cuda")
