"""Derivatives by finite differences in fp64, of first and second order, and the symmetry of second_moment."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers import (
    BACKENDS,
    NORMALIZE,
    TOLERANCE,
    assert_close,
    assert_same_results,
    clean_query,
    clean_query_step,
    make_case,
    results,
)

from ccq import CovarianceState

CHUNK = 4  # so that six tokens cross a border between chunks
SHAPES = {
    "begun": {"B": 2, "T": 6},
    "continued": {"B": 2, "T": 6, "state": True},
    "packed": {"lengths": [0, 5, 1, 0]},
    "packed, continued": {"lengths": [3, 0, 5], "state": True},
}


def differentiable(case, **options):
    """The operator as a function of what has a gradient, and its arguments."""
    count = None if case.initial_state is None else case.initial_state.count

    def function(q, k, lam, *moments):
        state = CovarianceState(*moments, count) if moments else None
        q_clean, k_bar, final = clean_query(
            q, k, lam, initial_state=state, cu_seqlens=case.cu_seqlens, output_final_state=True, **options
        )
        # a copy: gradcheck shifts its inputs in place, and k_bar may be k
        return q_clean, k_bar.clone(), final.second_moment, final.key_sum

    return function, tuple(case.leaves().inputs.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("centred", [True, False], ids=["centred", "uncentred"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradcheck(backend, normalize, centred, shape, monkeypatch):
    monkeypatch.setattr("ccq.ops.clean.chunk.CHUNK", CHUNK)
    case = make_case(Hq=2, Hk=1, K=3, **SHAPES[shape], unit=normalize == "none")
    function, inputs = differentiable(case, backend=backend, normalize=normalize, centred=centred)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_chunks_of_another_length_give_the_same_numbers(monkeypatch):
    case = make_case(T=70, K=7, state=True, lengths=[0, 30, 1, 39])
    ref = results(case, "chunk")
    for length in (1, 4, 7, 128):
        monkeypatch.setattr("ccq.ops.clean.chunk.CHUNK", length)
        assert_same_results(ref, results(case, "chunk"))


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_second_derivatives_of_the_reference(normalize):
    case = make_case(B=1, T=3, Hq=2, Hk=1, K=2, unit=normalize == "none")
    function, inputs = differentiable(case, backend="reference", normalize=normalize)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def step(q, k, lam, initial_state, output_final_state=True):
    """`clean_query_step` on a single token, called as `clean_query`."""
    q_clean, k_bar, state = clean_query_step(q[:, 0], k[:, 0], lam[:, 0], initial_state)
    return q_clean[:, None], k_bar[:, None], state


OPERATORS = {
    "step": step,
    **{name: lambda *args, name=name, **options: clean_query(*args, backend=name, **options) for name in BACKENDS},
}


@pytest.mark.parametrize(("operator", "T"), [("step", 1), *product(BACKENDS, [0, 1, 70])])
def test_only_the_symmetric_part_of_second_moment_counts(operator, T):
    case = make_case(T=T, K=5, state=True)
    twist = torch.randn(2, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = case.initial_state
    skewed = CovarianceState(state.second_moment + twist - twist.mT, state.key_sum, state.count)
    ref = OPERATORS[operator](*case.args, initial_state=state, output_final_state=True)
    got = OPERATORS[operator](*case.args, initial_state=skewed, output_final_state=True)
    assert_close("q_clean", ref[0], got[0], TOLERANCE[torch.float64])
    assert_close("second_moment", ref[2].second_moment, got[2].second_moment, TOLERANCE[torch.float64])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("wanted", ["q_clean", "C"])
def test_gradient_of_second_moment_is_symmetric(operator, wanted):
    case = make_case(T=1, K=5, state=True).leaves()
    q_clean, _, final = OPERATORS[operator](*case.args, initial_state=case.initial_state, output_final_state=True)
    output = {"q_clean": q_clean, "C": final.second_moment}[wanted]
    (grad,) = torch.autograd.grad(output, case.initial_state.second_moment, case.cotangents[wanted])
    assert grad.norm() > 0
    assert_close("gradient of initial C", grad.mT, grad, TOLERANCE[torch.float64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("zero", ["q", "k", "both"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_zero_vectors_give_zero_never_nan(backend, T, zero, dtype):
    case = make_case(B=1, T=T, K=7, dtype=dtype)
    if zero != "k":
        case.q.zero_()
    if zero != "q":
        case.k.zero_()
    got = results(case, backend)
    for name, x in got.items():
        assert x.isfinite().all(), name
    zeros = {"q": ["q_clean", "y"], "k": ["k_bar", "y", "C", "s"], "both": ["q_clean", "k_bar", "y", "C", "s"]}
    for name in zeros[zero]:
        assert not got[name].any(), name
