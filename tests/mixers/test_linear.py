"""The Linears of a decode step in one launch, against PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import LAYERS, TOLERANCE, assert_close
from torch import Tensor, nn

from ccq.mixers import Sequences, kernels, linear, make_mixer
from ccq.model import CCQConfig, CCQForCausalLM
from ccq.ops import choose

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")


def draw(*shape: int, seed: int = 0, scale: float = 1.0, dtype=torch.float32, device="cpu") -> Tensor:
    x = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype)


def check(rows, inputs, outputs, dtype, device="cpu"):
    x = draw(rows, inputs, dtype=dtype, device=device)
    options = {"scale": inputs**-0.5, "dtype": dtype, "device": device}
    weights = [draw(n, inputs, seed=n + i + 1, **options) for i, n in enumerate(outputs)]
    got = kernels.project(x, weights)
    allowed = 2 * TOLERANCE[dtype]
    for y, weight in zip(got, weights, strict=True):
        assert y.dtype == dtype
        assert_close("y", x.double() @ weight.double().T, y, allowed)
    gate, up = (draw(outputs[0], inputs, seed=seed, **options) for seed in (1, 2))
    g, u = ((x.double() @ w.double().T).to(dtype).double() for w in (gate, up))  # stored between, as by two Linears
    # half precision: a product near the middle of two numbers may be rounded to either
    assert_close("swiglu", F.silu(g) * u, kernels.swiglu(x, gate, up), 2 * allowed)


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(128, [32]), (300, [32, 17, 64, 1]), (64, [40, 40, 80, 80, 16, 3])], ids=str
)
def test_as_pytorch_multiplies(rows, inputs, outputs):
    check(rows, inputs, outputs, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("outputs", [[1536, 1536, 3072, 3072, 16], [1536, 1536, 3072, 3072, 6, 6]], ids=len)
def test_as_pytorch_multiplies_on_a_gpu(dtype, outputs):
    check(8, 2048, outputs, dtype, "cuda")


def test_linears_together_are_the_linears_with_one_gradient():
    """Narrow ones share a product whose columns are filled up; the gradient of x is one sum."""
    linears = [nn.Linear(24, n, bias=False, dtype=torch.float64) for n in (96, 3, 64, 6, 7)]
    linears[2].weight.requires_grad_(False)
    x = draw(2, 5, 24, dtype=torch.float64).requires_grad_()
    expected, got = [layer(x) for layer in linears], linear.together(x, [layer.weight for layer in linears])
    leaves = [x, *(layer.weight for layer in linears if layer.weight.requires_grad)]
    d_outs = [draw(*y.shape, seed=i, dtype=torch.float64) for i, y in enumerate(expected)]
    for name, a, b in zip(
        ("x", 0, 1, 3, 4), *(torch.autograd.grad(y, leaves, d_outs) for y in (expected, got)), strict=True
    ):
        torch.testing.assert_close(b, a, msg=f"gradient of {name}")
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.gpu
@pytest.mark.parametrize("system", ["gla-unit", "gated-deltanet"])
def test_a_mixer_trains_on_a_gpu_with_one_gradient_of_x(system, monkeypatch):
    """Against the same mixer whose Linears are called one by one."""
    torch.manual_seed(0)
    mixer = make_mixer(CCQConfig.preset(f"{system}-nano", conv_size=4), 0).cuda().bfloat16()
    x = draw(2, 256, 512, dtype=torch.bfloat16, device="cuda").requires_grad_()
    seqs = Sequences(2)

    def gradients() -> list[Tensor]:
        y, _ = mixer(x, seqs)
        return list(torch.autograd.grad(y, [x, *mixer.parameters()], torch.ones_like(y)))

    together = gradients()
    monkeypatch.setattr(linear, "one_gradient", lambda *_: False)
    for a, b in zip(gradients(), together, strict=True):
        assert_close("gradient", a.double(), b.double(), 2 * TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("system", ["ccq-gla", "ccq-gated-deltanet"])
def test_steps_of_a_mixer_with_our_kernels_are_its_steps_without(system, monkeypatch):
    """All that a step fuses, in Triton's interpreter: one launch for what sees x, one for the convolutions."""
    torch.manual_seed(0)
    mixers = [make_mixer(CCQConfig.preset(f"{system}-tiny", backend=backend), 0) for backend in ("triton", "chunk")]
    for parameter in mixers[0].parameters():
        nn.init.normal_(parameter, std=0.2)
    mixers[1].load_state_dict(mixers[0].state_dict())
    calls = []
    for name in ("project", "conv_step", "low_rank_decay"):
        original = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, f=original, n=name, **k: calls.append(n) or f(*a, **k))
    states = [mixer.new_state(2, None, torch.float32) for mixer in mixers]
    for token in draw(2, 3, 64).unbind(1):
        got, ref = (mixer.step(token, state) for mixer, state in zip(mixers, states, strict=True))
        assert_close("y", ref, got, 1e-5)
    for name in states[0].keys() - {"covariance"}:
        assert_close(name, states[1][name], states[0][name], 1e-5)
    assert calls == ["project", "conv_step" if "delta" in system else "low_rank_decay"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("system", ["ccq-gla", "ccq-gated-deltanet"])
def test_steps_of_a_block_with_our_kernels_are_its_steps_without_on_a_gpu(system, dtype, monkeypatch):
    """Mixer, MLP and residuals of the size that is measured, from the same state each time."""
    torch.manual_seed(0)
    block = CCQForCausalLM(CCQConfig.preset(f"{system}-1.3b", num_hidden_layers=1)).model.layers[0].to("cuda", dtype)
    state = block.mixer.new_state(8, "cuda", dtype)
    for seed in range(4):
        before = copy.deepcopy(state)
        x, y = (draw(8, 2048, seed=2 * seed + i, dtype=dtype, device="cuda") for i in range(2))
        with torch.no_grad():
            got = block.step(x, y, state, None)
            monkeypatch.setattr(choose, "PLAIN", LAYERS)
            ref = block.step(x, y, before, None)
            monkeypatch.setattr(choose, "PLAIN", frozenset())
        for name, a, b in zip(("x", "y"), ref, got, strict=True):
            # some ten roundings in a row, those of sublayers within larger sums
            assert_close(name, a, b, 8 * TOLERANCE[dtype])
        for name in state.keys() - {"covariance"}:
            assert_close(name, before[name], state[name], 8 * TOLERANCE[dtype])


class Adapter(nn.Linear):
    """Not what it seems, as an adapter is not."""

    def forward(self, x):
        return super().forward(x) + 1


def test_only_plain_linears_are_fused(monkeypatch):
    """Whatever else stands in their place is called, and rows that a GEMM is better at go to it."""
    x = draw(2, 20)
    given = [nn.Linear(20, n, bias=False) for n in (5, 7)]
    ways = []
    original = kernels.project
    monkeypatch.setattr(kernels, "project", lambda *a: ways.append(1) or original(*a))

    def fused(x=x, linears=given, backend="triton"):
        with torch.no_grad():
            ways.clear()
            for y, module in zip(linear.project(x, linears, backend), linears, strict=True):
                torch.testing.assert_close(y, module(x))
        return bool(ways)

    assert fused()
    assert not fused(backend="chunk")
    assert not fused(draw(17, 20))
    assert not fused(draw(2, 3, 20))
    assert not fused(linears=[*given, nn.Linear(20, 3)])
    assert not fused(linears=[*given, Adapter(20, 3, bias=False)])
    handle = given[0].register_forward_hook(lambda *_: None)
    assert not fused()
    handle.remove()
    assert linear.project(x, given, "triton")[0].requires_grad
    monkeypatch.setattr(choose, "PLAIN", LAYERS)
    assert not fused()


@pytest.mark.parametrize("kind", ["hook", "another forward"])
def test_down_projection_is_called_where_somebody_looks(kind, monkeypatch):
    """On a GPU, which computes it together with SwiGLU: here in Triton's interpreter."""
    from ccq.model import decoder

    monkeypatch.setattr(decoder, "choose", lambda *_: "passes")
    mlp, x = decoder.SwiGLU(8, 16), torch.randn(2, 3, 8)
    plain = mlp(x)
    if kind == "hook":
        mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        forward = mlp.down_proj.forward
        mlp.down_proj.forward = lambda x: 2 * forward(x)
    torch.testing.assert_close(mlp(x), 2 * plain)


def test_a_linear_with_another_forward_is_called():
    given = nn.Linear(16, 8, bias=False)
    given.forward = lambda x: x.new_ones(x.shape[0], 8)
    with torch.no_grad():
        assert linear.project(torch.randn(2, 16), [given], "triton")[0].equal(torch.ones(2, 8))
