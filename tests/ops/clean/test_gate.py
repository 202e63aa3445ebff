"""The gate against sigmoid(linear(q)) in fp64, value and gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from beartype import beartype
from helpers import TOLERANCE, Case, assert_close, clean_query, make_case, make_gate, to_gpu
from jaxtyping import jaxtyped

import ccq.ops

gate = jaxtyped(typechecker=beartype)(ccq.ops.gate)
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BACKENDS = ["chunk", pytest.param("triton", marks=triton)]


def case(shape, dtype, device="cpu"):
    rng = torch.Generator().manual_seed(0)
    heads, size = shape[-2:]
    high = torch.float64 if dtype == torch.float64 else torch.float32
    q = torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
    weight = (torch.randn(heads, heads * size, generator=rng, dtype=torch.float64) * (heads * size) ** -0.5).to(high)
    bias = torch.linspace(-4.6, 1, heads, dtype=torch.float64).to(high)
    cotangent = torch.randn(shape[:-1], generator=rng, dtype=torch.float64).to(high)
    return [x.to(device) for x in (q, weight, bias, cotangent)]


def check(shape, dtype, backend, device="cpu", fp32_tolerance=TOLERANCE[torch.float32]):
    q, weight, bias, cotangent = case(shape, dtype, device)
    leaves = [x.clone().requires_grad_() for x in (q, weight, bias)]
    lam = gate(*leaves, backend=backend)
    assert lam.dtype == weight.dtype
    truth = [x.double().detach().requires_grad_() for x in leaves]
    expected = torch.sigmoid(torch.nn.functional.linear(truth[0].flatten(-2), truth[1], truth[2]))
    got = [lam, *torch.autograd.grad(lam, leaves, cotangent)]
    ref = [expected, *torch.autograd.grad(expected, truth, cotangent.double())]
    for name, x, y in zip(("lam", "gradient of q", "gradient of W", "gradient of b"), ref, got, strict=True):
        assert_close(name, x, y, fp32_tolerance if y.dtype == torch.float32 else TOLERANCE[y.dtype])


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 70, 3, 16), (5, 2, 7), (1, 1, 1, 1), (1, 33, 20, 8)], ids=str)
def test_gate_matches_sigmoid_of_linear(backend, shape):
    check(shape, torch.float32, backend)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gate_takes_every_dtype(dtype):
    check((2, 40, 4, 16), dtype, "chunk")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gate_on_a_gpu_keeps_the_bits_of_its_weights(dtype):
    check((2, 1000, 6, 256), dtype, "triton", "cuda", 1e-5)  # lam and the gradients of W and b are fp32 for all


# A gate given to clean_query in the place of lam

SHAPES = {
    "batch": {"T": 50, "B": 2, "Hq": 2, "Hk": 1, "K": 16},
    "few": {"T": 3, "B": 1, "Hq": 1, "Hk": 1, "K": 7},
    "packed": {"lengths": [0, 40, 3, 0, 0, 17, 0], "Hq": 2, "Hk": 1, "K": 9},
    "many heads": {"T": 3, "B": 1, "Hq": 20, "Hk": 20, "K": 8},
}
MODES = [("unit", True), ("stats", True), ("none", False)]


def gated_results(case: Case, backend: str, **options) -> dict[str, torch.Tensor]:
    """Everything that comes out of clean_query with a gate, and the gradients of all that goes in."""
    leaves, by = case.leaves(), make_gate(case)
    q_clean, k_bar, state = clean_query(
        leaves.q, leaves.k, by, **leaves.where, output_final_state=True, backend=backend, **options
    )
    outputs = {"q_clean": q_clean, "C": state.second_moment, "s": state.key_sum}
    if options["normalize"] == "unit":
        outputs["k_bar"] = k_bar
    inputs = {"q": leaves.q, "k": leaves.k, "W": by.weight, "b": by.bias}
    if leaves.initial_state is not None:
        inputs |= {"initial C": leaves.initial_state.second_moment, "initial s": leaves.initial_state.key_sum}
    cotangents = [case.cotangents[name].to(x) for name, x in outputs.items()]
    grads = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents)
    return {**outputs, **{f"gradient of {name}": g for name, g in zip(inputs, grads, strict=True)}}


CASES = [("chunk", shape, mode) for shape in SHAPES for mode in range(len(MODES))]
# interpreted, every mode with every shape would take minutes
CASES += [
    pytest.param("triton", shape, mode, marks=triton)
    for at, shape in enumerate(SHAPES)
    for mode in range(len(MODES))
    if shape == "few" or mode == at % len(MODES)
]


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize(("backend", "shape", "mode"), CASES)
def test_gate_in_the_place_of_lam(backend, shape, mode):
    """Against the reference, which gates in plain PyTorch and differentiates token by token, in fp64."""
    normalize, centred = MODES[mode]
    options = {"normalize": normalize, "centred": centred}
    case = make_case(**SHAPES[shape], state=mode > 0, dtype=torch.float32, unit=normalize == "none")
    ref, got = gated_results(case.double(), "reference", **options), gated_results(case, backend, **options)
    for name, x in ref.items():
        assert_close(name, x, got[name], 10 * TOLERANCE[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{"T": 1000, "B": 2}, {"lengths": [0, 700, 1, 0, 299]}], ids=str)
@pytest.mark.parametrize("heads", [6, 40], ids=["fused", "two passes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gate_in_the_place_of_lam_on_a_gpu(shape, heads, dtype):
    case = to_gpu(make_case(**shape, Hq=heads, Hk=heads, K=256 if heads == 6 else 128, dtype=dtype))
    options = {"normalize": "unit", "centred": True}
    ref, got = gated_results(case.double(), "chunk", **options), gated_results(case, "triton", **options)
    for name, x in ref.items():
        assert_close(name, x, got[name], {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype])


def test_a_gate_that_does_not_fit_is_named():
    case = make_case(T=3, B=1, Hq=2, Hk=1, K=4, dtype=torch.float32)
    weight, bias = make_gate(case)
    with pytest.raises(ValueError, match=r"^weight: expected shape \(2, 8\)"):
        ccq.clean_query(case.q, case.k, ccq.ops.Gate(weight[:, 1:], bias))
    with pytest.raises(TypeError, match=r"^bias: expected torch\.float32"):
        ccq.clean_query(case.q, case.k, ccq.ops.Gate(weight, bias.double()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_an_empty_gate(backend):
    q, weight, bias, _ = case((2, 0, 3, 4), torch.float32)
    q.requires_grad_()
    lam = gate(q, weight, bias, backend=backend)
    assert lam.shape == (2, 0, 3)
    assert torch.autograd.grad(lam.sum(), q)[0].shape == q.shape
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    q_clean, _, _ = ccq.clean_query(q, q.detach(), ccq.ops.Gate(weight, bias), backend=backend)
    grads = torch.autograd.grad(q_clean.sum(), (q, weight, bias))
    assert grads[0].shape == q.shape
    assert not grads[1].any()
    assert not grads[2].any()


def test_autocast_does_not_reach_the_gate():
    q, weight, bias, _ = case((2, 10, 3, 16), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(q, weight, bias), gate(q, weight, bias, backend="chunk"))
        assert gate(q, weight, bias).dtype == torch.float32


def test_opcheck():
    q, weight, bias, _ = case((1, 5, 2, 3), torch.float32)
    arguments = [x.requires_grad_() for x in (q, weight, bias)]
    torch.library.opcheck(torch.ops.ccq.gate.default, (*arguments, "chunk"))


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"q": torch.ones(2, 3, 4, dtype=torch.int64)}, TypeError, "^q: expected float64"),
        ({"weight": torch.ones(3, 13)}, ValueError, r"^weight: expected shape \(3, 12\).*got \(3, 13\)"),
        ({"bias": torch.ones(4)}, ValueError, r"^bias: expected shape \(3,\).*got \(4,\)"),
        ({"weight": torch.ones(3, 12).bfloat16()}, TypeError, "^weight: expected torch.float32 for torch.float32"),
        ({"bias": torch.ones(3, device="meta")}, ValueError, "^bias: expected q's device cpu, got meta"),
        ({"q": torch.ones(4)}, ValueError, r"^q: expected shape \[..., H, K\]"),
    ],
    ids=str,
)
def test_bad_input_is_named(changed, kind, message):
    good = {"q": torch.ones(2, 3, 4), "weight": torch.ones(3, 12), "bias": torch.ones(3)}
    with pytest.raises(kind, match=message):
        ccq.ops.gate(**good | changed)


def test_gate_of_a_single_token():
    check((3, 8), torch.float64, "chunk")


def test_an_unknown_backend_is_named():
    q, weight, bias, _ = case((2, 5, 3, 16), torch.float32)
    with pytest.raises(ValueError, match=r"got 'tritn'\. Did you mean 'triton'"):
        gate(q, weight, bias, backend="tritn")
