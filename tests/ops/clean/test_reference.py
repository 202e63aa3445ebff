"""The reference is the definition: a covariance from numpy, head by head, and derivatives by differences."""

from __future__ import annotations

import numpy
import pytest
import torch
from helpers import (
    NORMALIZE,
    TOLERANCE,
    assert_close,
    assert_same_state,
    clean_query,
    clean_query_step,
    make_case,
    results,
    unit_vector,
)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("centred", [True, False])
def test_reference_is_the_definition(normalize, centred):
    case = make_case(B=2, T=9, Hq=4, Hk=2, K=5, unit=normalize == "none")
    got = results(case, "reference", centred=centred, normalize=normalize)
    k_unit = unit_vector(case.k) if normalize != "none" else case.k
    q_read = unit_vector(case.q) if normalize == "unit" else case.q
    y = torch.empty_like(case.q)
    for b, t, h in numpy.ndindex(2, 9, 4):
        keys = k_unit[b, : t + 1, h // 2].numpy()
        sigma = numpy.cov(keys.T, bias=True) if centred else keys.T @ keys / (t + 1)
        y[b, t, h] = torch.from_numpy(sigma @ q_read[b, t, h].numpy())
    expected = {
        "y": y,
        "q_clean": q_read - case.lam[..., None] * y,
        "k_bar": k_unit if normalize == "unit" else case.k,
        "C": torch.einsum("bthk,bthl->bhkl", k_unit, k_unit),
        "s": k_unit.sum(1),
    }
    for name, ref in expected.items():
        assert_close(name, ref, got[name], TOLERANCE[torch.float64])
    assert got["count"].tolist() == [9, 9]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_step_and_reference_are_one(dtype):
    case = make_case(T=5, dtype=dtype, state=True)
    whole = clean_query(*case.args, initial_state=case.initial_state, output_final_state=True, backend="reference")
    state, tokens = case.initial_state, []
    for t in range(5):
        *out, state = clean_query_step(case.q[:, t], case.k[:, t], case.lam[:, t], state)
        tokens.append(out)
    for ref, got in zip(whole, (torch.stack(x, 1) for x in zip(*tokens, strict=True)), strict=False):
        assert torch.equal(ref, got)
    assert_same_state(whole[2], state)
