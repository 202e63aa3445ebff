"""The short convolution against PyTorch's, in every way a mixer calls it.

B sequences (or N packed ones), T tokens, C channels, W width.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import LAYERS, TOLERANCE, assert_close, checked
from torch import Tensor

from ccq.mixers.base import Sequences
from ccq.mixers.conv import ShortConv, final_state, step_together

C = 5
CLOSE = 10 * TOLERANCE[torch.float64]
pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")


def make(width: int = 4, bias: bool = False, dtype: torch.dtype = torch.float64, silu: bool = True) -> ShortConv:
    torch.manual_seed(width)
    conv = ShortConv(C, width, bias=bias, std=0.5, silu=silu).to(dtype)
    if bias:
        torch.nn.init.normal_(conv.bias)
    return conv


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def truth(conv: ShortConv, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """silu of F.conv1d over the earlier inputs and x; and the last W - 1 of both."""
    past = conv.weight.shape[-1] - 1
    before = x.new_zeros(x.shape[0], C, past) if state is None else state
    inputs = torch.cat([before, x.mT], -1)
    y = F.conv1d(inputs, conv.weight, conv.bias, groups=C).mT
    return F.silu(y) if conv.silu else y, inputs[..., inputs.shape[-1] - past :]


@pytest.mark.parametrize("T", [1, 2, 3, 4, 20])
@pytest.mark.parametrize(
    ("width", "bias", "silu"),
    [(4, False, True), (4, True, True), (2, False, True), (1, True, True), (3, True, True), (3, True, False)],
)
def test_same_as_conv1d(T, width, bias, silu):
    conv, seqs = make(width, bias, silu=silu), Sequences(2)
    forward, final = checked(conv.forward), checked(final_state)
    for state in (None, draw(2, C, width - 1, seed=1).requires_grad_()):
        x = draw(2, T, C).requires_grad_()
        leaves = [x, *conv.parameters()] + ([] if state is None else [state])
        ref, got = truth(conv, x, state), (forward(x, seqs, state), final(x, seqs, width, state))
        assert got[1].is_contiguous()
        weights = [draw(*y.shape, seed=2) for y in ref]
        grads = [
            torch.autograd.grad(sum((y * w).sum() for y, w in zip(ys, weights, strict=True)), leaves)
            for ys in (ref, got)
        ]
        for name, a, b in zip(["y", "state", *map(str, range(9))], (*ref, *grads[0]), (*got, *grads[1]), strict=False):
            assert_close(name, a, b, CLOSE)


@pytest.mark.parametrize("lengths", [[3, 0, 1, 7], [0, 2], [1, 1, 1], [5]], ids=str)
@pytest.mark.parametrize("started", [False, True])
def test_packed_sequences_do_not_see_each_other(lengths, started):
    conv, x = make(bias=True), draw(1, sum(lengths), C).requires_grad_()
    cu_seqlens = torch.tensor([0, *accumulate(lengths)])
    seqs = Sequences(len(lengths), cu_seqlens)
    state = draw(len(lengths), C, 3, seed=1) if started else None
    got, got_state = conv(x, seqs, state), final_state(x, seqs, 4, state)
    parts = []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        own = None if state is None else state[n : n + 1]
        y, final = truth(conv, x[:, begin:end], own) if end > begin else (x[:, :0], torch.zeros(1, C, 3))
        parts.append(y)
        expected = own if end == begin and started else final
        assert_close(f"state {n}", expected, got_state[n : n + 1], CLOSE)
    ref = torch.cat(parts, 1)
    assert_close("y", ref, got, CLOSE)
    weight = draw(*ref.shape, seed=2)
    for a, b in zip(
        *(torch.autograd.grad((y * weight).sum(), [x, *conv.parameters()]) for y in (ref, got)), strict=True
    ):
        assert_close("gradient", a, b, CLOSE)


@pytest.mark.parametrize(("width", "silu"), [(1, True), (2, True), (4, True), (3, False)])
@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_steps_are_the_convolution(width, silu, backend):
    """The kernel runs in Triton's interpreter here."""
    dtype = torch.float64 if backend == "chunk" else torch.float32
    conv, x = make(width, bias=True, dtype=dtype, silu=silu), draw(3, 7, C).to(dtype)
    ref, final = truth(conv, x)
    # channels of a larger state, as q, k and v have them
    every = torch.full((3, C + 4, width - 1), 7.0, dtype=dtype)
    state = every[:, 2 : C + 2]
    state.zero_()
    with torch.no_grad():
        steps = [step_together([conv], [token], state, backend)[0] for token in x.unbind(1)]
    assert_close("y", ref, torch.stack(steps, 1), 10 * TOLERANCE[dtype])
    assert_close("state", final, state, 10 * TOLERANCE[dtype])
    assert (every[:, :2] == 7).all()
    assert (every[:, C + 2 :] == 7).all()


def together(width, backend, dtype, device="cpu", sizes=(C, 300, 2)):
    """Steps of three convolutions whose channels follow each other in one state, as q, k and v have them."""
    torch.manual_seed(width)
    convs = [ShortConv(size, width, std=0.5).to(device, dtype) for size in sizes]
    xs = [draw(2, 6, size, seed=size).to(device, dtype) for size in sizes]
    every = draw(2, sum(sizes) + 3, width - 1, seed=9).to(device, dtype)
    before, state = every.clone(), every[:, 1:-2]
    pasts = state.clone().split(sizes, 1)
    with torch.no_grad():
        steps = [
            step_together(convs, tokens, state, backend) for tokens in zip(*(x.unbind(1) for x in xs), strict=True)
        ]
    for conv, x, past, end, got in zip(convs, xs, pasts, state.split(sizes, 1), zip(*steps, strict=True), strict=True):
        inputs = torch.cat([past, x.mT], -1)
        ref = F.silu(F.conv1d(inputs.double(), conv.weight.double(), groups=x.shape[-1])).mT
        assert_close("y", ref, torch.stack(got, 1), 10 * TOLERANCE[dtype])
        assert torch.equal(end, inputs[..., inputs.shape[-1] - width + 1 :])
    assert torch.equal(every[:, :1], before[:, :1])
    assert torch.equal(every[:, -2:], before[:, -2:])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_three_convolutions_step_in_one_launch(width, backend):
    together(width, backend, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_three_convolutions_step_in_one_launch_on_a_gpu(dtype):
    together(4, "auto", dtype, "cuda", (1536, 1536, 3072))


def test_half_precision_is_fp32_inside():
    conv = make(dtype=torch.bfloat16)
    x = draw(2, 9, C).bfloat16()
    y = conv(x, Sequences(2))
    assert y.dtype == torch.bfloat16
    ref = truth(conv.double(), x.double())[0]
    assert_close("y", ref, y, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 70])
@pytest.mark.parametrize("started", [False, True])
def test_fla_on_a_gpu_is_the_same(monkeypatch, T, started):
    """fla's kernel, dense and packed, with and without earlier inputs: output and gradients."""
    conv = make(bias=True, dtype=torch.float32).cuda()
    for seqs, batch in ((Sequences(2), 2), (Sequences(3, torch.tensor([0, 1, 1, T]).cuda()), 1)):
        x = draw(batch, T, C).float().cuda().requires_grad_()
        state = draw(seqs.count, C, 3, seed=1).float().cuda() if started else None
        results = []
        for fused in (True, False):
            monkeypatch.setattr("ccq.ops.choose.PLAIN", frozenset() if fused else LAYERS)
            y = conv(x, seqs, state)
            results.append((y, *torch.autograd.grad(y.square().sum(), [x, *conv.parameters()])))
        for got, ref in zip(*results, strict=True):
            assert_close("y or gradient", ref, got, 1e-5)
