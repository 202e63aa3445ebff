"""The tests' own instruments: each must be able to fail."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKENDS,
    DISTRIBUTIONS,
    TOLERANCE,
    assert_close,
    clean_query,
    correction,
    make_case,
    results,
    uncancelled,
    unit_vector,
)
from jaxtyping import TypeCheckError

import ccq.ops


@pytest.mark.parametrize("keys", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_kernel_that_cleans_nothing_fails(keys, dtype):
    case = make_case(B=1, T=65, K=16, dtype=dtype, keys=keys)
    ref, scale = results(case.double(), "reference")["y"], uncancelled(case)["y"]
    with pytest.raises(AssertionError, match="y: relative RMS error"):
        assert_close("y", ref, torch.zeros_like(ref), TOLERANCE[torch.float32], scale)


@pytest.mark.parametrize("keys", DISTRIBUTIONS)
def test_keys_have_the_spectrum_that_is_asked_for(keys):
    strong, mean_energy = DISTRIBUTIONS[keys]
    k = make_case(B=1, T=4000, Hq=1, Hk=1, K=16, keys=keys).k[0, :, 0]
    mean = k.mean(0)
    assert (mean.square().sum() / k.square().sum(-1).mean()).item() == pytest.approx(mean_energy, abs=0.05)
    eigenvalues = torch.linalg.eigvalsh((k - mean).mT @ (k - mean) / len(k)).flip(0)
    assert (eigenvalues > 5 * eigenvalues[-1]).sum() == strong


@pytest.mark.parametrize(
    ("got", "complaint"),
    [
        (torch.tensor([1.0, float("nan")]), "1 of 2 elements are NaN or infinite"),
        (torch.tensor([1.0, float("inf")]), "1 of 2 elements are NaN or infinite"),
        (torch.tensor([[1.0, 2.0]]), r"expected shape \(2,\), got \(1, 2\)"),
        (torch.empty(0), r"expected shape \(2,\), got \(0,\)"),
        (torch.tensor([1.0, 2.1]), r"relative RMS error 4.47e-02 of magnitude 1.58e\+00, allowed 1.00e-02"),
    ],
)
def test_assert_close_fails_on(got, complaint):
    with pytest.raises(AssertionError, match=f"^x: {complaint}"):
        assert_close("x", torch.tensor([1.0, 2.0]), got, 1e-2)


def test_assert_close_measures_on_the_scale_it_is_given():
    ref, got = torch.tensor([1.0]), torch.tensor([1.1])
    assert_close("x", ref, got, 2e-2, scale=torch.tensor([10.0]))
    with pytest.raises(AssertionError, match="x: relative"):
        assert_close("x", torch.zeros(1), got, 1e9)


def test_wrong_shapes_of_arguments_are_caught():
    case = make_case(B=2, T=3)
    with pytest.raises(TypeCheckError, match="lam"):
        clean_query(case.q, case.k, case.lam[:1])
    with pytest.raises(TypeCheckError, match="'k'"):
        correction(case.q, case.k[..., :3])


def test_wrong_shapes_of_results_are_caught(monkeypatch):
    case = make_case(B=2, T=3, Hq=4, Hk=2)
    monkeypatch.setattr(ccq.ops.clean, "_reference", lambda q, k, *_: (k, k, None))
    assert ccq.clean_query(*case.args, backend="reference")[0] is case.k
    with pytest.raises(TypeCheckError, match="return value"):
        clean_query(*case.args, backend="reference")
    with pytest.raises(TypeCheckError, match="return value"):
        correction(case.q, case.k, backend="reference")


@pytest.mark.parametrize("backend", BACKENDS)
def test_unit_vector_of_the_tests_is_that_of_the_operator(backend):
    case = make_case(scale=1e-3)  # so small that the 1e-6 under the root counts
    q_clean, k_bar, _ = clean_query(case.q, case.k, torch.zeros_like(case.lam), backend=backend)
    assert_close("q_clean", unit_vector(case.q), q_clean, TOLERANCE[torch.float64])
    assert_close("k_bar", unit_vector(case.k), k_bar, TOLERANCE[torch.float64])
