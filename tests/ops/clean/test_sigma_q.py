"""y = Sigma_t q as an operator: its values and gradients, and a read built of it, against the fp64 token loop."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers import (
    BACKENDS,
    NORMALIZE,
    TOLERANCE,
    assert_close,
    checked,
    clean_query,
    make_case,
    sigma_q,
    to_gpu,
    unit_vector,
)

import ccq
from ccq import CovarianceState

sigma_q_step = checked(ccq.sigma_q_step)
has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
SHAPES = {
    "begun": {"B": 2, "T": 70},
    "continued": {"B": 2, "T": 33, "state": True},
    "packed": {"lengths": [0, 40, 3, 0, 17]},
    "packed, continued": {"lengths": [3, 0, 50], "state": True},
}
every_mode = pytest.mark.parametrize(("normalize", "centred"), [(n, c) for n in NORMALIZE for c in (True, False)])


def by_loop(case, normalize, centred):
    """y, k_bar, C and s, from the matrix Sigma_t of each token: none of the package's code but the state's fields."""
    q, k = case.q, case.k
    heads, size = k.shape[2:]
    group = q.shape[2] // heads
    borders = [[0, q.shape[1]]] * q.shape[0]
    if case.cu_seqlens is not None:
        borders = list(zip(case.cu_seqlens[:-1].tolist(), case.cu_seqlens[1:].tolist(), strict=True))
    ys, moments, sums = [], [], []
    for n, (begin, end) in enumerate(borders):
        row = 0 if case.cu_seqlens is not None else n
        state = case.initial_state
        C = torch.zeros(heads, size, size, dtype=q.dtype) if state is None else state.second_moment[n]
        s = torch.zeros(heads, size, dtype=q.dtype) if state is None else state.key_sum[n]
        seen = 0 if state is None else int(state.count[n])
        C = (C + C.mT) / 2
        for t in range(begin, end):
            key = k[row, t] if normalize == "none" else unit_vector(k[row, t])
            query = unit_vector(q[row, t]) if normalize == "unit" else q[row, t]
            C, s, seen = C + key[:, :, None] * key[:, None, :], s + key, seen + 1
            sigma = C / seen - (s[:, :, None] * s[:, None, :] / seen**2 if centred else 0)
            ys.append((sigma.repeat_interleave(group, 0) @ query[..., None]).squeeze(-1))
        moments.append(C)
        sums.append(s)
    k_bar = unit_vector(k) if normalize == "unit" else k
    return torch.stack(ys).view(q.shape), k_bar, torch.stack(moments), torch.stack(sums)


def with_gradients(case, function) -> dict[str, torch.Tensor]:
    """What `function` makes of a case, and the gradients of all that has one."""
    leaves = case.leaves()
    inputs = {name: x for name, x in leaves.inputs.items() if name != "lam"}
    outputs = dict(zip(("y", "k_bar", "C", "s"), function(leaves), strict=True))
    cotangents = [leaves.cotangents["q_clean" if n == "y" else n].to(x.dtype) for n, x in outputs.items()]
    grads = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents)
    return outputs | {f"gradient of {name}": g for name, g in zip(inputs, grads, strict=True)}


def by(backend, normalize, centred):
    def function(case):
        options = {**case.where, "normalize": normalize, "centred": centred, "backend": backend}
        y, k_bar, state = sigma_q(case.q, case.k, output_final_state=True, **options)
        return y, k_bar, state.second_moment, state.key_sum

    return function


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@every_mode
def test_values_and_gradients_are_those_of_the_loop(backend, shape, normalize, centred):
    case = make_case(Hq=4, Hk=2, K=7, unit=normalize == "none", **SHAPES[shape])
    ref = with_gradients(case, lambda leaves: by_loop(leaves, normalize, centred))
    got = with_gradients(case, by(backend, normalize, centred))
    for name, x in ref.items():
        assert_close(name, x, got[name], 10 * TOLERANCE[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@every_mode
def test_gradcheck(backend, shape, normalize, centred, monkeypatch):
    monkeypatch.setattr("ccq.ops.clean.chunk.CHUNK", 4)
    shape = {**SHAPES[shape], "T": 6} if "T" in SHAPES[shape] else {**SHAPES[shape], "lengths": [3, 0, 5]}
    case = make_case(Hq=2, Hk=1, K=3, unit=normalize == "none", **shape)
    count = None if case.initial_state is None else case.initial_state.count

    def function(q, k, *moments):
        state = CovarianceState(*moments, count) if moments else None
        options = {"normalize": normalize, "centred": centred, "backend": backend, "cu_seqlens": case.cu_seqlens}
        y, k_bar, final = sigma_q(q, k, initial_state=state, output_final_state=True, **options)
        return y, k_bar.clone(), final.second_moment, final.key_sum  # gradcheck shifts its inputs in place

    inputs = [x for name, x in case.leaves().inputs.items() if name != "lam"]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


MODES = [("unit", True), ("stats", True), ("none", False), ("unit", False)]


@has_triton
@on_cpu
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_interpreted_kernels_give_the_loops_values_and_gradients(shape):
    normalize, centred = MODES[shape]
    case = make_case(Hq=2, Hk=1, K=16, dtype=torch.float32, unit=normalize == "none", **list(SHAPES.values())[shape])
    ref = with_gradients(case.double(), lambda leaves: by_loop(leaves, normalize, centred))
    uncancelled = with_gradients(case.double(), lambda leaves: by_loop(leaves, normalize, False))  # by the mean
    got = with_gradients(case, by("triton", normalize, centred))
    assert got["y"].dtype == torch.float32
    for name, x in ref.items():
        assert_close(name, x, got[name], 2 * TOLERANCE[torch.float32], uncancelled[name])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [{"T": 1000, "B": 2, "Hk": 2}, {"lengths": [0, 700, 3, 129], "Hk": 1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_give_the_values_and_gradients_of_fp64_on_a_gpu(dtype, shape, mode):
    """As test_triton.py has it for q_clean: roundings of the products in the dtype."""
    case = to_gpu(make_case(Hq=2, K=128, dtype=dtype, state=True, unit=mode[0] == "none", **shape))
    ref = with_gradients(case.double(), by("chunk", *mode))
    uncancelled = with_gradients(case.double(), by("chunk", mode[0], False))
    got = with_gradients(case, by("triton", *mode))
    for name, x in ref.items():
        allowed = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 5e-6}[dtype]
        assert_close(name, x, got[name], allowed, uncancelled[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_cleaning_takes_away(backend, dtype):
    case = make_case(T=50, dtype=dtype, state=True)
    y, k_bar, state = sigma_q(case.q, case.k, **case.where, output_final_state=True, backend=backend)
    q_clean, k_same, same = clean_query(*case.args, **case.where, output_final_state=True, backend=backend)
    assert y.dtype == torch.float32
    ref = (unit_vector(case.q.float()) - case.lam[..., None] * y).to(dtype)
    assert_close("q_clean", ref, q_clean, TOLERANCE[dtype])
    assert torch.equal(k_bar, k_same)
    assert torch.equal(state.second_moment, same.second_moment)


def test_without_a_final_state_there_is_none_and_k_stays_k():
    case = make_case(T=5)
    _, k_bar, state = sigma_q(case.q, case.k, normalize="stats")
    assert k_bar is case.k
    assert state is None


def test_no_tokens_give_nothing_and_keep_the_state():
    case = make_case(T=0, state=True).leaves()
    y, _, state = sigma_q(case.q, case.k, **case.where, output_final_state=True)
    assert y.shape == case.q.shape
    assert_close("C", case.initial_state.second_moment, state.second_moment, TOLERANCE[torch.float64])
    grads = torch.autograd.grad(state.second_moment.sum() + y.sum(), [case.q, case.initial_state.second_moment])
    assert torch.equal(grads[1], torch.ones_like(grads[1]))


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_steps_continue_a_prefill(normalize):
    case = make_case(T=9, state=True, unit=normalize == "none")
    ref, k_ref, final = sigma_q(case.q, case.k, **case.where, normalize=normalize, output_final_state=True)
    kept, state = case.initial_state.clone(), case.initial_state.clone()
    for t in range(9):
        y, k_bar, state = sigma_q_step(case.q[:, t], case.k[:, t], state, normalize=normalize)
        inplace, _, same = sigma_q_step(case.q[:, t], case.k[:, t], kept, normalize=normalize, inplace=True)
        assert same is kept
        for name, x in (("y", y), ("in place", inplace)):
            assert_close(name, ref[:, t], x, TOLERANCE[torch.float64])
        assert_close("k_bar", k_ref[:, t], k_bar, TOLERANCE[torch.float64])
    assert_close("C", final.second_moment, state.second_moment, TOLERANCE[torch.float64])
    assert torch.equal(state.count, kept.count)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_equals_eager():
    case = make_case(T=20, dtype=torch.float32).leaves()

    def loss(q, k):
        return ccq.sigma_q(q, k)[0].square().sum()

    grads = torch.autograd.grad(loss(case.q, case.k), [case.q, case.k])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ref, got in zip(grads, torch.autograd.grad(compiled(case.q, case.k), [case.q, case.k]), strict=True):
        assert_close("gradient", ref, got, TOLERANCE[torch.float32])


@pytest.mark.parametrize("shape", SHAPES)
def test_op_without_lam_passes_opcheck(shape):
    case = make_case(Hq=2, Hk=1, K=3, **SHAPES[shape]).leaves()
    state = case.initial_state
    tensors = (None, None, None) if state is None else (state.second_moment, state.key_sum, state.count)
    how = (True, "unit", "scaled", "chunk", True, False)
    arguments = (case.q, case.k, None, None, None, None, *tensors, case.cu_seqlens, *how)
    torch.library.opcheck(torch.ops.ccq.clean_query.default, arguments)


# A read that takes y away otherwise: five lines of PyTorch


def projected(q, y, lam, eps=1e-3):
    """q without the share lam of its component along y."""
    along = (q * y).sum(-1, keepdim=True) / (y.square().sum(-1, keepdim=True) + eps)
    return q - lam[..., None] * along * y


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("triton", marks=[has_triton, on_cpu])])
@pytest.mark.parametrize("shape", ["continued", "packed"])
def test_a_read_built_of_it_has_the_loops_values_and_gradients(backend, shape):
    dtype = torch.float32 if backend == "triton" else torch.float64
    case = make_case(Hq=4, Hk=2, K=8, dtype=dtype, keys="half mean", **SHAPES[shape])
    assert case.q.device.type == "cpu"

    def read(leaves, y):
        q_clean = projected(unit_vector(leaves.q), y, leaves.lam)
        grads = torch.autograd.grad(q_clean, list(leaves.inputs.values()), leaves.cotangents["q_clean"])
        return {"q_clean": q_clean, **{f"gradient of {n}": g for n, g in zip(leaves.inputs, grads, strict=True)}}

    exact, leaves = case.double().leaves(), case.leaves()
    ref = read(exact, by_loop(exact, "unit", True)[0])
    got = read(leaves, sigma_q(leaves.q, leaves.k, **leaves.where, backend=backend)[0])
    for name, x in ref.items():  # it divides by |y|^2: what y errs by, relative to itself, comes back
        assert_close(name, x, got[name], 100 * TOLERANCE[dtype])
    assert_close("q", unit_vector(case.q), got["q_clean"], 1.0)  # it is a part of the query
    with pytest.raises(AssertionError):  # and not all of it
        assert_close("q", unit_vector(case.q), got["q_clean"], 1e-2)
