"""SwiGLU and the norms in one pass each way, alone and before a Linear, against PyTorch's autograd in fp64."""

import pytest
import torch
import torch.nn.functional as F
from helpers import TOLERANCE, assert_close
from torch import nn

from ccq.mixers import norms
from ccq.mixers.norms import GatedRMSNorm, RMSNorm
from ccq.mixers.passes import add_norm, gated_norm, swiglu
from ccq.model import CCQConfig, CCQModel, decoder

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape, seed, dtype, device):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype).requires_grad_()


def compare(ours, truth, inputs, d_out, autocast=False):
    """Output and gradients of `ours` against those of `truth` on the same numbers in fp64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=autocast):
        out = ours(*inputs)
    ref = truth(*exact)
    assert out.dtype == inputs[0].dtype
    got = torch.autograd.grad(out, inputs, d_out.to(out.dtype))
    expected = torch.autograd.grad(ref, exact, d_out.to(out.dtype).double())
    allowed = 3 * TOLERANCE[out.dtype]  # what is stored between is rounded too
    for name, a, b in zip(
        ["out", *(f"gradient {i}" for i in range(len(got)))], [ref, *expected], [out, *got], strict=True
    ):
        assert_close(name, a, b, allowed)


def check_swiglu(shape, linear, dtype, device="cpu", autocast=False):
    inputs = [draw(*shape, seed=seed, dtype=dtype, device=device) for seed in (0, 1)]
    width = shape[-1]
    if linear:
        weight = draw(24, shape[-1], seed=2, dtype=torch.float32 if autocast else dtype, device=device)
        inputs.append((weight.detach() * shape[-1] ** -0.5).requires_grad_())
        width = 24
    d_out = torch.randn(*shape[:-1], width, generator=torch.Generator().manual_seed(3)).to(device)

    def truth(gate, up, weight=None):
        z = F.silu(gate) * up
        return z if weight is None else F.linear(z, weight)

    compare(swiglu, truth, inputs, d_out, autocast)


def check_norm(shape, linear, sigmoid, dtype, device="cpu", autocast=False):
    inputs = [draw(*shape, seed=seed, dtype=dtype, device=device) for seed in (0, 1)]
    weights = torch.float32 if autocast else dtype
    inputs.append(draw(shape[-1], seed=2, dtype=weights, device=device))
    width = shape[-2] * shape[-1]
    if linear:
        weight = draw(24, width, seed=3, dtype=weights, device=device)
        inputs.append((weight.detach() * width**-0.5).requires_grad_())
    out_shape = (*shape[:-2], 24) if linear else shape
    d_out = torch.randn(*out_shape, generator=torch.Generator().manual_seed(4)).to(device)

    def ours(x, gate, weight, linear=None):
        return gated_norm(x, gate, weight, 1e-5, sigmoid, linear)

    def truth(x, gate, weight, linear=None):
        y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        y = y * (gate.sigmoid() if sigmoid else F.silu(gate))
        return y if linear is None else F.linear(y.flatten(-2), linear)

    compare(ours, truth, inputs, d_out, autocast)


def check_add_norm(shape, add, used, dtype, device="cpu", autocast=False, of_y=None):
    """`used`: the outputs that have a gradient. The sum is rounded before it is normed, and so is the truth's."""
    x, y = (draw(*shape, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
    y = y.detach().to(of_y or dtype).requires_grad_()
    weight = draw(shape[-1], seed=2, dtype=torch.float32 if autocast else dtype, device=device)
    d_total, d_normed = (torch.randn(shape, generator=torch.Generator().manual_seed(s)).to(device) for s in (3, 4))
    given = {"total": d_total, "normed": d_normed}
    inputs = [x, *([y] if add else []), *([weight] if "normed" in used else [])]
    exact = [t.detach().double().requires_grad_() for t in (x, y, weight)]

    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        total, normed = add_norm(x, y if add else None, weight, 0.1)
    assert total.dtype == normed.dtype == dtype
    ref = exact[0] + exact[1] if add else exact[0]
    if device != "cpu" or dtype != torch.bfloat16:  # Triton's interpreter cuts bf16 off
        assert torch.equal(total, (x.detach() + y.detach()).to(dtype) if add else x)
    assert_close("total", ref, total, 3 * TOLERANCE[dtype])
    ref = ref + (total.double() - ref).detach()  # the rounding, which has no gradient
    truth = {"total": ref, "normed": ref / (ref.square().mean(-1, keepdim=True) + 0.1).sqrt() * exact[2]}
    ours = {"total": total, "normed": normed}
    cotangents = [given[name].to(dtype) for name in used]
    got = torch.autograd.grad([ours[name] for name in used], inputs, cotangents)
    wanted = [t for t, mine in zip(exact, (x, y, weight), strict=True) if any(mine is one for one in inputs)]
    expected = torch.autograd.grad([truth[name] for name in used], wanted, [c.double() for c in cotangents])
    assert_close("normed", truth["normed"], normed, 3 * TOLERANCE[dtype])
    for one, mine, theirs in zip(inputs, got, expected, strict=True):
        assert mine.dtype == one.dtype
        assert_close(f"gradient {tuple(one.shape)}", theirs, mine, 3 * max(TOLERANCE[dtype], TOLERANCE[one.dtype]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 20), (1, 1, 1), (4, 16, 64), (3, 700)], ids=str)
def test_swiglu(shape, linear, dtype):
    check_swiglu(shape, linear, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 3, 20), (0, 5, 3, 20), (1, 1, 1, 7), (3, 40, 2, 64), (2, 2, 600)], ids=str)
def test_gated_norm(shape, linear, sigmoid, dtype):
    check_norm(shape, linear, sigmoid, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("used", [("total", "normed"), ("normed",), ("total",)], ids=" ".join)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 20), (0, 20), (1, 7), (3, 40, 64), (3, 2048), (2, 2, 2500)], ids=str)
def test_add_norm(shape, add, used, dtype):
    check_add_norm(shape, add, used, dtype)


@pytest.mark.parametrize(("of_x", "of_y"), [DTYPES, DTYPES[::-1]], ids=str)
def test_the_stream_keeps_its_dtype_whatever_is_added(of_x, of_y):
    check_add_norm((3, 5, 20), True, ("total", "normed"), of_x, of_y=of_y)


def test_what_is_normed_is_the_sum_as_it_is_stored():
    """Bit for bit: that of a sum which is not rounded yet differs in every third element."""
    x, y = (draw(64, 32, seed=s, dtype=torch.float16, device="cpu").detach() for s in (0, 1))
    total, normed = add_norm(x, y, torch.ones(32), 1e-6)
    exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (normed == exact.half()).double().mean() > 0.99


def test_programs_that_share_many_rows(monkeypatch):
    """More rows than programs take in one go, and a last program whose rows end in the middle of it."""
    monkeypatch.setattr("ccq.mixers.passes.PROGRAMS", 6)
    monkeypatch.setattr("ccq.mixers.passes.BLOCK", 64)
    check_norm((1, 37, 2, 16), True, False, torch.float32)
    check_add_norm((37, 16), True, ("total", "normed"), torch.float32)


@pytest.mark.parametrize("kind", ["nobody", "hook", "another forward", "another norm"])
def test_the_norm_is_called_where_somebody_looks(kind, monkeypatch):
    class Twice(RMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    norm = Twice(6) if kind == "another norm" else RMSNorm(6)
    x, y = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    monkeypatch.setattr(decoder, "one_pass", lambda *_: True)
    if kind == "hook":
        norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif kind == "another forward":
        forward = norm.forward
        norm.forward = lambda x: 2 * forward(x)
    total, normed = decoder.add_norm(x, y, norm)
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(normed, F.rms_norm(x + y, (6,), None, 1e-6) * (1 if kind == "nobody" else 2))


@pytest.mark.parametrize("mlp", [24, None])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_has_the_gradients_that_it_has_without_passes(mlp, checkpointing, monkeypatch):
    model = CCQModel(CCQConfig.preset("gla-tiny", intermediate_size=mlp, num_hidden_layers=2)).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids, results = torch.arange(14).view(2, 7), []
    cotangent = torch.randn(2, 7, model.config.hidden_size)  # not a function of the output: that of a norm's vanishes
    for ours in (False, True):
        monkeypatch.setattr(decoder, "one_pass", lambda *_, ours=ours: ours)
        hidden = model(ids).last_hidden_state
        results.append((hidden, *torch.autograd.grad(hidden, list(model.parameters()), cotangent)))
    for plain, got in zip(*results, strict=True):
        assert_close("model", plain, got, 1e-5)


def test_a_frozen_linear_gets_no_gradient():
    for ours, inputs, weight in (
        (swiglu, [draw(2, 3, 8, seed=s, dtype=torch.float32, device="cpu") for s in (0, 1)], torch.randn(4, 8)),
        (
            lambda x, gate, linear: gated_norm(x, gate, torch.ones(8), 1e-6, linear=linear),
            [draw(2, 3, 8, seed=s, dtype=torch.float32, device="cpu") for s in (0, 1)],
            torch.randn(4, 24),
        ),
    ):
        alone = torch.autograd.grad(ours(*inputs, weight).sum(), inputs)
        beside = torch.autograd.grad(ours(*inputs, weight.requires_grad_()).sum(), [*inputs, weight])
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=False))


def test_what_is_not_dense_is_read_right():
    wide = draw(4, 6, 32, seed=0, dtype=torch.float32, device="cpu")
    gate, up = wide.chunk(2, -1)
    assert_close("swiglu", F.silu(gate.double()) * up.double(), swiglu(gate, up), TOLERANCE[torch.float32])
    y = gated_norm(gate.transpose(0, 1), up.transpose(0, 1), torch.ones(16), 1e-6)
    x = gate.double().transpose(0, 1)
    truth = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * F.silu(up.double().transpose(0, 1))
    assert_close("norm", truth, y, TOLERANCE[torch.float32])
    total, normed = add_norm(gate.transpose(0, 1), up.transpose(0, 1), torch.ones(16), 1e-6)
    x = (gate.double() + up.double()).transpose(0, 1)
    assert_close("total", x, total, TOLERANCE[torch.float32])
    assert_close("add_norm", x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), normed, TOLERANCE[torch.float32])
    cotangent = torch.randn(4, 6, 16)  # not dense, once it is turned
    (d,) = torch.autograd.grad(normed, wide, cotangent.transpose(0, 1), retain_graph=True)
    (truth,) = torch.autograd.grad(F.rms_norm(gate + up, (16,), None, 1e-6), wide, cotangent)
    assert_close("gradient", truth, d, 1e-5)


def test_less_is_kept_for_the_backward():
    """What is given, and not what the Linear sees."""
    kept = []
    x, gate = (draw(2, 50, 4, 16, seed=s, dtype=torch.float32, device="cpu") for s in (0, 1))
    norm, linear = nn.Parameter(torch.ones(16)), nn.Parameter(torch.randn(8, 64))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_norm(x, gate, norm, 1e-6, linear=linear)
        swiglu(x, gate, nn.Parameter(torch.randn(8, 16)))
    given = {t.data_ptr() for t in (x, gate, norm, linear)}
    large = [t for t in kept if t.numel() >= x.numel()]
    assert len(large) == 4
    assert {t.data_ptr() for t in large} <= given


@pytest.mark.parametrize("kind", ["hook", "another forward", "bias"])
def test_the_linear_is_called_where_somebody_looks(kind, monkeypatch):
    norm, linear = GatedRMSNorm(6), nn.Linear(12, 5, bias=kind == "bias")
    x, gate = torch.randn(2, 3, 2, 6), torch.randn(2, 3, 2, 6)
    plain = linear(norm(x, gate).flatten(-2))
    monkeypatch.setattr(norms, "choose", lambda *_: "passes")
    torch.testing.assert_close(norm.then(linear, x, gate), plain)
    if kind == "hook":
        linear.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif kind == "another forward":
        forward = linear.forward
        linear.forward = lambda x: 2 * forward(x)
    torch.testing.assert_close(norm.then(linear, x, gate), plain if kind == "bias" else 2 * plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("linear", [False, True])
def test_on_a_gpu(linear, dtype):
    for shape in ((8, 512, 1408), (3, 77, 5), (2, 300, 5632)):
        check_swiglu(shape, linear, dtype, "cuda")
    for shape in ((2, 900, 6, 512), (2, 1000, 3, 256), (3, 7, 5, 100), (1, 1, 1, 64)):
        for sigmoid in (False, True):
            check_norm(shape, linear, sigmoid, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("used", [("total", "normed"), ("normed",), ("total",)], ids=" ".join)
@pytest.mark.parametrize("add", [False, True])
def test_add_norm_on_a_gpu(add, used, dtype):
    for shape in ((2, 4096, 2048), (8, 300, 768), (3, 7, 100), (1, 7), (2, 9, 5000), (40000, 64)):
        check_add_norm(shape, add, used, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("linear", [False, True])
def test_on_a_gpu_under_autocast(linear):
    """fp32 weights and bf16 products, as transformers' Trainer runs a model."""
    check_swiglu((4, 64, 96), linear, torch.bfloat16, "cuda", autocast=True)
    check_norm((4, 64, 3, 32), linear, False, torch.bfloat16, "cuda", autocast=True)
    check_add_norm((4, 64, 96), True, ("total", "normed"), torch.bfloat16, "cuda", autocast=True)
    check_add_norm((4, 64, 96), True, ("total", "normed"), torch.float32, "cuda", autocast=True, of_y=torch.bfloat16)
