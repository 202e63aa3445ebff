"""The mathematics of the paper, on the operator as it is."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers import BACKENDS, DISTRIBUTIONS, TOLERANCE, assert_close, clean_query, correction, make_case, unit_vector

FP64 = TOLERANCE[torch.float64]

every_backend = pytest.mark.parametrize("backend", BACKENDS)
all_keys = pytest.mark.parametrize("keys", DISTRIBUTIONS)


def unit_keys(T: int, K: int, keys: str, seed: int = 0) -> torch.Tensor:
    """[T, K]"""
    return unit_vector(make_case(B=1, T=T, Hq=1, Hk=1, K=K, keys=keys, seed=seed).k[0, :, 0])


def clean_last(q: torch.Tensor, keys: torch.Tensor, lam: float, backend: str, **options):
    """q_clean [K] and the state after all of `keys` [T, K], for one query [K] at their end, taken as they are."""
    T = len(keys)
    queries = torch.zeros_like(keys).index_put((torch.tensor(T - 1),), q)
    gate = torch.full((1, T, 1), lam, dtype=keys.dtype)
    q_clean, _, state = clean_query(
        queries[None, :, None], keys[None, :, None], gate,
        normalize="none", output_final_state=True, backend=backend, **options,
    )  # fmt: skip
    return q_clean[0, -1, 0], state


def log_partition(keys: torch.Tensor):
    """A_t(q) = log sum_j exp(k_j . q), what the softmax divides by."""
    return lambda q: torch.logsumexp(keys @ q, 0)


@every_backend
@all_keys
def test_covariance_is_the_hessian_of_the_log_partition_at_zero(backend, keys):
    k = unit_keys(70, 5, keys)
    zero = torch.zeros(5, dtype=k.dtype, requires_grad=True)
    value = log_partition(k)(zero)
    (gradient,) = torch.autograd.grad(value, zero)
    hessian = torch.autograd.functional.hessian(log_partition(k), zero.detach())
    _, state = clean_last(k[0], k, 0.5, backend)
    assert value.item() == pytest.approx(math.log(70), abs=1e-14)
    assert_close("mean", gradient, state.key_sum[0, 0] / state.count, FP64)
    # the Hessian is a difference too: errors on the scale of what cancels
    assert_close("Sigma", hessian, state.covariance()[0, 0], FP64, state.covariance(centred=False))


@every_backend
def test_cleaning_is_a_gradient_step_on_the_curvature(backend):
    k = unit_keys(70, 5, "isotropic")
    q = unit_keys(1, 5, "isotropic", seed=1)[0].requires_grad_()
    hessian = torch.autograd.functional.hessian(log_partition(k), torch.zeros_like(q))
    (step,) = torch.autograd.grad(q @ hessian @ q / 2, q)
    q_clean, _ = clean_last(q.detach(), k, 0.7, backend)
    assert_close("q_clean", q - 0.7 * step, q_clean, FP64)


@all_keys
def test_quadratic_model_errs_by_the_cube_of_the_query(keys):
    k = unit_keys(50, 4, keys)
    _, state = clean_last(k[0], k, 0.5, "chunk")
    mean, sigma = state.key_sum[0, 0] / state.count, state.covariance()[0, 0]
    direction = unit_keys(1, 4, keys, seed=1)[0]
    errors = []
    for size in (0.1, 0.05, 0.025, 0.0125):
        q = size * direction
        model = math.log(50) + mean @ q + q @ sigma @ q / 2
        errors.append((log_partition(k)(q) - model).abs().item())
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    assert errors[-1] > 1e-12, "above rounding, so that the order means something"
    assert orders == pytest.approx([3, 3, 3], abs=0.2)


def rank_one_memory(rho: float, u: torch.Tensor) -> torch.Tensor:
    """Unit keys [40, K] whose centred covariance is exactly rho u u^T: a common part, and +-sqrt(rho) along u."""
    common = torch.zeros_like(u)
    common[0], common[1] = u[1], -u[0]  # orthogonal to u
    common = common / common.norm() * (1 - rho) ** 0.5
    sign = torch.tensor([1.0, -1.0], dtype=u.dtype).repeat(20)
    return common + sign[:, None] * rho**0.5 * u


U = torch.nn.functional.normalize(torch.tensor([1.0, 2.0, -1.0, 0.5, 1.0], dtype=torch.float64), dim=0)
OTHER = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5], dtype=torch.float64)
ORTHOGONAL = OTHER - (OTHER @ U) * U  # to u


def margin_shift(q, target, distractor, rho, lam, backend) -> float:
    """How much further the target's score is above the distractor's with the cleaned query."""
    q_clean, state = clean_last(q, rank_one_memory(rho, U), lam, backend)
    assert_close("Sigma", rho * torch.outer(U, U), state.covariance()[0, 0], FP64)
    return ((target - distractor) @ (q_clean - q)).item()


@every_backend
@pytest.mark.parametrize("rho", [0.1, 0.6, 1.0])
@pytest.mark.parametrize(("alpha", "beta"), [(0.2, 0.9), (0.9, 0.2), (-0.3, 1.0)])
@pytest.mark.parametrize("lam", [0.25, 1.0])
def test_margin_shifts_as_the_proposition_says(backend, rho, alpha, beta, lam):
    q = 0.4 * U + 0.7 * ORTHOGONAL
    target, distractor = alpha * U + ORTHOGONAL, beta * U - 0.5 * ORTHOGONAL
    expected = lam * rho * (beta - alpha) * (U @ q).item()
    assert margin_shift(q, target, distractor, rho, lam, backend) == pytest.approx(expected, rel=1e-12)


@every_backend
def test_three_regimes_of_the_margin(backend):
    distractor = U  # a tight cluster along u
    along, off = U, 0.3 * U + ORTHOGONAL
    widened = margin_shift(off + 0.1 * U, off, distractor, 0.8, 0.5, backend)
    assert widened == pytest.approx(0.5 * 0.8 * (1 - 0.3) * (0.3 + 0.1), rel=1e-12)
    assert widened > 0
    assert margin_shift(along + 0.1 * U, along, distractor, 0.8, 0.5, backend) == pytest.approx(0, abs=1e-15)
    assert margin_shift(ORTHOGONAL, off, distractor, 0.8, 0.5, backend) == pytest.approx(0, abs=1e-15)


@every_backend
@all_keys
def test_scores_lose_their_covariance_with_the_query(backend, keys):
    k = unit_keys(70, 5, keys)
    q = unit_keys(1, 5, keys, seed=1)[0]
    q_clean, _ = clean_last(q, k, 0.7, backend)
    similarity, score = k @ k.mT, k @ q  # k_j . k_m and k_m . q, over memory m
    covariance = (similarity * score).mean(1) - similarity.mean(1) * score.mean()
    assert_close("scores", score - 0.7 * covariance, k @ q_clean, FP64)


@every_backend
@all_keys
def test_scores_uncentred_lose_the_whole_second_moment(backend, keys):
    k = unit_keys(70, 5, keys)
    q = unit_keys(1, 5, keys, seed=1)[0]
    q_clean, _ = clean_last(q, k, 0.7, backend, centred=False)
    assert_close("scores", k @ q - 0.7 * ((k @ k.mT) * (k @ q)).mean(1), k @ q_clean, FP64)


@every_backend
@all_keys
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("T", [1, 2, 70])
def test_cleaning_operator_has_its_spectrum_between_one_minus_lam_and_one(backend, keys, centred, lam, T):
    K = 5
    k = unit_keys(T, K, keys)
    # K query heads read the last position with the basis vectors: the operator itself, column by column
    q = torch.eye(K, dtype=k.dtype).expand(1, T, K, K)
    gate = torch.full((1, T, K), lam, dtype=k.dtype)
    q_clean, _, _ = clean_query(q, k[None, :, None], gate, normalize="none", centred=centred, backend=backend)
    operator = q_clean[0, -1]
    assert_close("symmetry", operator.mT, operator, FP64)
    spectrum = torch.linalg.eigvalsh(operator)
    assert spectrum.min() >= 1 - lam - 1e-14
    assert spectrum.max() <= 1 + 1e-14


@every_backend
def test_bound_on_the_spectrum_is_reached(backend):
    """One key seen again and again, uncentred: Sigma = k k^T has eigenvalue 1, and lam = 1 leaves nothing along it."""
    k = U.expand(9, 5)
    q_clean, _ = clean_last(U, k, 1.0, backend, centred=False)
    assert q_clean.norm() < 1e-15
    q_clean, _ = clean_last(U, k, 1.0, backend, centred=True)  # and centred it does not vary at all
    assert_close("q_clean", U, q_clean, FP64)


@every_backend
def test_isotropic_keys_shrink_the_query_by_their_dimension(backend):
    """E y = q / K, below the rounding of a bf16 query: why tests look at y."""
    K = 16
    case = make_case(B=1, T=4000 if backend == "chunk" else 1000, Hq=1, Hk=1, K=K, dtype=torch.float32)
    y = correction(case.q, case.k, backend=backend)[0, -200:, 0]
    along = (y * unit_vector(case.q[0, -200:, 0])).sum(-1).mean().item()
    assert along == pytest.approx(1 / K, rel=0.05)
