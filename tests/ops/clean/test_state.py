"""CovarianceState: the memory of the operator, and what one can do with it."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
import torch
from helpers import TOLERANCE, assert_close, clean_query, make_case, unit_vector
from torch.utils import _pytree as pytree

from ccq import CovarianceState, clean_query_step

FIELDS = ("second_moment", "key_sum", "count")
FP64 = TOLERANCE[torch.float64]


@pytest.fixture
def state() -> CovarianceState:
    """Of three sequences, two heads, K = 5; the first has seen nothing."""
    return make_case(B=3, T=1, K=5, state=True).initial_state


def assert_equal(a: CovarianceState, b: CovarianceState) -> None:
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        assert torch.equal(x, y), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_zeros_has_seen_nothing(dtype, device):
    state = CovarianceState.zeros(3, heads=2, key_size=5, dtype=dtype, device=device)
    assert state.second_moment.shape == (3, 2, 5, 5)
    assert state.key_sum.shape == (3, 2, 5)
    assert state.count.shape == (3,)
    assert state.second_moment.dtype == state.key_sum.dtype == dtype
    assert state.count.dtype == torch.int64
    assert all(getattr(state, name).device.type == device for name in FIELDS)
    if device == "cpu":
        assert not any(getattr(state, name).any() for name in FIELDS)


def test_zeros_is_fp32_unless_told():
    assert CovarianceState.zeros(1, 1, 1).second_moment.dtype == torch.float32


def test_to_casts_the_sums_and_leaves_the_count(state):
    cast = state.to(dtype=torch.float32)
    assert cast.second_moment.dtype == cast.key_sum.dtype == torch.float32
    assert cast.count.dtype == torch.int64
    assert_equal(cast, CovarianceState(state.second_moment.float(), state.key_sum.float(), state.count))
    assert all(getattr(state.to("meta"), name).is_meta for name in FIELDS)


@pytest.mark.parametrize("copied", [CovarianceState.clone, copy.deepcopy], ids=["clone", "deepcopy"])
def test_copies_are_independent(state, copied):
    other, before = copied(state), [getattr(state, name).tolist() for name in FIELDS]
    assert isinstance(other, CovarianceState)
    assert_equal(state, other)
    for name in FIELDS:
        getattr(other, name).add_(1)
    assert [getattr(state, name).tolist() for name in FIELDS] == before


def test_clone_keeps_the_gradient_and_detach_cuts_it(state):
    state.second_moment.requires_grad_()
    assert state.clone().second_moment.requires_grad
    cut = state.detach()
    assert not cut.second_moment.requires_grad
    assert cut.second_moment.data_ptr() == state.second_moment.data_ptr()
    assert_equal(state, cut)


def test_index_select_reorders_and_repeats_sequences(state):
    beams = torch.tensor([2, 0, 2, 1])
    got = state.index_select(beams)
    assert_equal(got, CovarianceState(state.second_moment[beams], state.key_sum[beams], state.count[beams]))
    got.count.add_(1)
    assert state.count.tolist() == [0, 3, 6]


def test_add_adds_every_field(state):
    total = state + state
    assert_equal(total, CovarianceState(2 * state.second_moment, 2 * state.key_sum, 2 * state.count))


def test_add_takes_keys_for_weights_where_the_other_has_decayed():
    counted, decayed = CovarianceState.zeros(2, 2, 3), CovarianceState.zeros(2, 2, 3, decayed=True)
    counted.count += torch.tensor([10, 20])
    decayed.count += torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for total in (counted + decayed, decayed + counted):
        assert total.count.tolist() == [[11, 12], [23, 24]]


def test_add_of_another_shape_is_refused(state):
    with pytest.raises(ValueError, match=r"other: .*\(3, 2, 5, 5\).*got \(3, 2, 4, 4\)"):
        state + CovarianceState.zeros(3, 2, 4)
    with pytest.raises(TypeError, match=r"CovarianceState.*int"):
        state + 1


def test_nbytes_counts_every_field(state):
    sums = 3 * 2 * (5 * 5 + 5)
    assert state.nbytes == sums * 8 + 3 * 8
    assert state.to(dtype=torch.float32).nbytes == sums * 4 + 3 * 8


@pytest.mark.parametrize("centred", [True, False])
def test_covariance_is_that_of_numpy(centred):
    case = make_case(B=2, T=70, K=5)
    state = clean_query(*case.args, output_final_state=True)[2]
    sigma = state.covariance(centred=centred)
    for b, h in numpy.ndindex(2, 2):
        keys = unit_vector(case.k)[b, :, h].numpy()
        ref = numpy.cov(keys.T, bias=True) if centred else keys.T @ keys / 70
        assert_close("Sigma", torch.from_numpy(ref), sigma[b, h], FP64)


def test_covariance_of_nothing_is_zero():
    assert not CovarianceState.zeros(1, 2, 5).covariance().any()


def test_covariance_is_symmetric_whatever_second_moment_is(state):
    state.second_moment[..., 0, 1] += 1
    assert torch.equal(state.covariance(), state.covariance().mT)


def test_pickle_round_trip(state):
    assert_equal(state, pickle.loads(pickle.dumps(state)))


def test_torch_load_reads_it_by_default(state, tmp_path):
    torch.save({"state": state}, tmp_path / "state.pt")
    assert_equal(state, torch.load(tmp_path / "state.pt")["state"])


def test_is_a_pytree(state):
    leaves, spec = pytree.tree_flatten({"state": state})
    assert [id(x) for x in leaves] == [id(getattr(state, name)) for name in FIELDS]
    rebuilt = pytree.tree_unflatten(leaves, spec)["state"]
    assert isinstance(rebuilt, CovarianceState)
    assert_equal(state, rebuilt)
    doubled = pytree.tree_map(lambda x: 2 * x, state)
    assert isinstance(doubled, CovarianceState)
    assert_equal(doubled, state + state)


@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_a_strided_state_goes_through_a_functional_step(backend):
    """Only an update in place asks for its own memory."""
    C = torch.eye(4).expand(2, 3, 4, 4).contiguous().mT
    state = CovarianceState(C, torch.ones(2, 3, 4), torch.ones(2, dtype=torch.int64))
    assert not state.second_moment.is_contiguous()
    q, k, lam = torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.full((2, 3), 0.5)
    _, _, after = clean_query_step(q, k, lam, state, backend=backend)
    torch.testing.assert_close(after.second_moment, C + 0.25)
    assert state.count.tolist() == [1, 1]
