"""The gates of the delta rule in one launch, against plain PyTorch in fp64."""

from __future__ import annotations

import torch
from helpers import assert_close

from ccq.mixers import fused_gates
from ccq.mixers.gated_deltanet import log_decay


def test_gates_are_those_of_plain_pytorch(nan_in_fresh_memory):
    rng = torch.Generator().manual_seed(0)
    a = torch.cat([torch.linspace(-40, 40, 91), torch.randn(209, generator=rng)]).view(50, 6)
    b, A_log, dt_bias = (torch.randn(n, generator=rng) for n in ((50, 6), (6,), (6,)))
    g, beta = fused_gates.gates(a, b, A_log, dt_bias)
    expected = log_decay(a.double(), A_log.double(), dt_bias.double())[0]
    # each by itself: a rate of 1e-12 must keep its digits beside one of 40
    assert_close("g", torch.ones_like(expected), g / expected, 1e-5)
    assert_close("beta", b.double().sigmoid(), beta, 1e-6)
