"""What must hold for any sequence, however it is cut, packed, repeated or reordered."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers import (
    BACKENDS,
    DISTRIBUTIONS,
    NORMALIZE,
    TOLERANCE,
    assert_close,
    assert_same_state,
    clean_query,
    clean_query_step,
    correction,
    make_case,
    unit_vector,
)
from hypothesis import given
from hypothesis import strategies as st

from ccq import CovarianceState

LENGTHS = st.sampled_from([1, 2, 3, 7, 63, 64, 65, 130])
BATCHES = st.integers(1, 3)
SEEDS = st.integers(0, 2**16)
KEYS = st.sampled_from(list(DISTRIBUTIONS))
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)])
MODES = st.fixed_dictionaries({"centred": st.booleans(), "normalize": st.sampled_from(NORMALIZE)})
FP64 = TOLERANCE[torch.float64]

every_backend = pytest.mark.parametrize("backend", BACKENDS)


@st.composite
def cases(draw, lengths=LENGTHS, batch=BATCHES, **fixed):
    """A case that is not packed, of any shape."""
    Hq, Hk = draw(HEADS)
    sizes = {"B": draw(batch), "T": draw(lengths), "Hq": Hq, "Hk": Hk, "K": draw(st.integers(1, 9))}
    return make_case(**sizes, keys=draw(KEYS), seed=draw(SEEDS), **fixed)


@st.composite
def cuts(draw, length: int) -> list[int]:
    """Borders 0, ..., length; pieces may be empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, length), max_size=4))), length]


def assert_same(ref, got, dtype=torch.float64):
    """Compare q_clean, k_bar and the state."""
    assert_close("q_clean", ref[0], got[0], TOLERANCE[dtype])
    assert_close("k_bar", ref[1], got[1], TOLERANCE[dtype])
    assert_same_state(ref[2], got[2])


@every_backend
@given(data=st.data(), mode=MODES)
def test_pieces_chained_by_states_are_the_whole(backend, data, mode):
    case = data.draw(cases(state=data.draw(st.booleans())))
    options = {**mode, "backend": backend, "output_final_state": True}
    whole = clean_query(*case.args, **options, initial_state=case.initial_state)
    state, pieces = case.initial_state, []
    for begin, end in pairwise(data.draw(cuts(case.q.shape[1]))):
        q_clean, k_bar, state = clean_query(*case.tokens(begin, end).args, **options, initial_state=state)
        pieces.append((q_clean, k_bar))
    q_clean, k_bar = (torch.cat(x, 1) for x in zip(*pieces, strict=True))
    assert_same(whole, (q_clean, k_bar, state))


@given(data=st.data(), mode=MODES)
def test_gradients_flow_through_the_states_between_pieces(data, mode):
    case = data.draw(cases())
    borders = data.draw(cuts(case.q.shape[1]))
    grads = []
    for cut in ([0, case.q.shape[1]], borders):
        leaves = case.leaves()
        state, loss = None, 0.0
        for begin, end in pairwise(cut):
            piece = leaves.tokens(begin, end)
            q_clean, k_bar, state = clean_query(
                *piece.args, **mode, initial_state=state, output_final_state=True, backend="chunk"
            )
            loss = loss + (q_clean * piece.cotangents["q_clean"]).sum() + (k_bar * piece.cotangents["k_bar"]).sum()
        loss = loss + (state.second_moment * case.cotangents["C"]).sum()
        grads.append(torch.autograd.grad(loss, leaves.args))
    scale = case.cotangents["q_clean"].norm()  # the gradient of lam can cancel to nothing
    for name, ref, got in zip(("q", "k", "lam"), *grads, strict=True):
        assert_close(name, ref, got, FP64, torch.cat([ref.flatten(), scale[None]]))


@every_backend
@given(data=st.data(), mode=MODES)
def test_packed_equals_separate(backend, data, mode):
    lengths = data.draw(st.lists(st.sampled_from([0, 0, 1, 5, 64, 70]), min_size=1, max_size=4))
    case = make_case(lengths=lengths, K=5, state=data.draw(st.booleans()), seed=data.draw(SEEDS))
    options = {**mode, "backend": backend, "output_final_state": True}
    packed = clean_query(*case.args, **case.where, **options)
    for i, (begin, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
        own = torch.tensor([i])
        state = None if case.initial_state is None else case.initial_state.index_select(own)
        alone = clean_query(*case.tokens(begin, end).args, initial_state=state, **options)
        assert_same(alone, (packed[0][:, begin:end], packed[1][:, begin:end], packed[2].index_select(own)))


@every_backend
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_cu_seqlens_may_be_int32(backend, index_dtype):
    case = make_case(lengths=[3, 0, 70])
    ref = clean_query(*case.args, cu_seqlens=case.cu_seqlens, output_final_state=True, backend=backend)
    borders = case.cu_seqlens.to(index_dtype)
    got = clean_query(*case.args, cu_seqlens=borders, output_final_state=True, backend=backend)
    assert torch.equal(ref[0], got[0])
    assert got[2].count.dtype == torch.int64
    assert got[2].count.tolist() == [3, 0, 70]


@every_backend
@pytest.mark.parametrize("inplace", [False, True])
@given(data=st.data(), mode=MODES)
def test_steps_are_the_whole(backend, inplace, data, mode):
    case = data.draw(cases(lengths=st.integers(1, 12), state=True))
    before = case.initial_state.clone()
    whole = clean_query(*case.args, **mode, initial_state=case.initial_state, output_final_state=True, backend=backend)
    begin = state = case.initial_state.clone()
    tokens = []
    for t in range(case.q.shape[1]):
        q_clean, k_bar, new = clean_query_step(
            case.q[:, t], case.k[:, t], case.lam[:, t], state, **mode, inplace=inplace
        )
        assert (new is state) == inplace
        state = new
        tokens.append((q_clean, k_bar))
    q_clean, k_bar = (torch.stack(x, 1) for x in zip(*tokens, strict=True))
    assert_same(whole, (q_clean, k_bar, state))
    assert (state.count - before.count == case.q.shape[1]).all()
    if not inplace:
        assert_same_state(before, begin)


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(data=st.data(), mode=MODES)
def test_lambda_zero_is_the_backbone(backend, dtype, data, mode):
    case = data.draw(cases(lengths=st.integers(1, 5), dtype=dtype))
    lam = torch.zeros_like(case.lam)
    q_clean, k_bar, _ = clean_query(case.q, case.k, lam, **mode, backend=backend)
    if mode["normalize"] != "unit":
        assert torch.equal(q_clean, case.q)
        assert torch.equal(k_bar, case.k)
        return
    for name, x, got in (("q", case.q, q_clean), ("k", case.k, k_bar)):
        assert_close(name, unit_vector(x.double()), got, TOLERANCE[dtype])


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(data=st.data(), centred=st.booleans(), normalize=st.sampled_from(["unit", "stats"]), full=st.booleans())
def test_cleaning_never_lengthens_a_query(backend, dtype, data, centred, normalize, full):
    case = data.draw(cases(lengths=st.integers(1, 9), dtype=dtype))
    lam = torch.ones_like(case.lam) if full else case.lam
    q_clean = clean_query(case.q, case.k, lam, centred=centred, normalize=normalize, backend=backend)[0]
    q = case.q.double()
    before = (unit_vector(q) if normalize == "unit" else q).norm(dim=-1)
    # half a step for the rounding of q_clean, and a few of the precision inside
    rounding = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(case.lam.dtype).eps
    assert (q_clean.double().norm(dim=-1) <= before * (1 + rounding)).all()


@every_backend
@given(data=st.data(), normalize=st.sampled_from(NORMALIZE))
def test_centring_takes_away_the_mean_and_nothing_else(backend, data, normalize):
    case = data.draw(cases(state=True))
    options = {"initial_state": case.initial_state, "normalize": normalize, "backend": backend}
    uncentred, centred = (correction(case.q, case.k, centred=centred, **options) for centred in (False, True))
    q = unit_vector(case.q) if normalize == "unit" else case.q
    k = unit_vector(case.k) if normalize != "none" else case.k
    s = case.initial_state.key_sum[:, None] + k.cumsum(1)  # [B, T, Hk, K]
    s = s.repeat_interleave(case.q.shape[2] // case.k.shape[2], 2)
    t = case.initial_state.count[:, None] + 1 + torch.arange(case.q.shape[1])
    mean_term = s * (s * q).sum(-1, keepdim=True) / t[..., None, None] ** 2
    assert_close("mean term", mean_term, uncentred - centred, FP64, uncentred)


@every_backend
@given(data=st.data(), mode=MODES)
def test_states_of_two_pieces_add_to_that_of_the_whole(backend, data, mode):
    case = data.draw(cases())
    at = data.draw(st.integers(0, case.q.shape[1]))
    options = {**mode, "output_final_state": True, "backend": backend}
    whole = clean_query(*case.args, **options)[2]
    first, second = (
        clean_query(*case.tokens(begin, end).args, **options)[2] for begin, end in ((0, at), (at, case.q.shape[1]))
    )
    assert_same_state(whole, first + second)


@every_backend
@given(data=st.data(), mode=MODES)
def test_permuting_batches_and_heads_permutes_results(backend, data, mode):
    case = data.draw(cases(state=True, batch=st.integers(2, 4)))
    B, _, Hq, _ = case.q.shape
    Hk = case.k.shape[2]
    batch = torch.tensor(data.draw(st.permutations(range(B))))
    heads = torch.tensor(data.draw(st.permutations(range(Hk))))
    rows = (heads[:, None] * (Hq // Hk) + torch.arange(Hq // Hk)).flatten()  # query heads move with their key head
    options = {**mode, "output_final_state": True, "backend": backend}

    def permuted(state: CovarianceState) -> CovarianceState:
        return CovarianceState(state.second_moment[batch][:, heads], state.key_sum[batch][:, heads], state.count[batch])

    q_clean, k_bar, state = clean_query(*case.args, **options, initial_state=case.initial_state)
    got = clean_query(
        case.q[batch][:, :, rows],
        case.k[batch][:, :, heads],
        case.lam[batch][:, :, rows],
        **options,
        initial_state=permuted(case.initial_state),
    )
    assert_same((q_clean[batch][:, :, rows], k_bar[batch][:, :, heads], permuted(state)), got)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@given(data=st.data(), mode=MODES)
def test_later_tokens_change_nothing_earlier(backend, dtype, data, mode):
    case = data.draw(cases(dtype=dtype))
    other = make_case(*case.q.shape[:3], *case.k.shape[2:], dtype=dtype, seed=2**16 + 1)
    at = data.draw(st.integers(0, case.q.shape[1] - 1))
    mixed = [torch.cat([x[:, :at], y[:, at:]], 1) for x, y in zip(case.args, other.args, strict=True)]
    ref = clean_query(*case.args, **mode, backend=backend)
    got = clean_query(*mixed, **mode, backend=backend)
    assert torch.equal(ref[0][:, :at], got[0][:, :at])
    assert torch.equal(ref[1][:, :at], got[1][:, :at])
    if case.q.shape[3] > 1:  # a number has two directions only
        assert not torch.equal(ref[0][:, at:], got[0][:, at:])


@every_backend
@given(data=st.data(), mode=MODES)
def test_grouped_heads_equal_repeated_keys(backend, data, mode):
    case = data.draw(cases())
    groups = case.q.shape[2] // case.k.shape[2]
    repeated = case.k.repeat_interleave(groups, 2)
    grouped = clean_query(*case.args, **mode, backend=backend)[0]
    assert_close("q_clean", clean_query(case.q, repeated, case.lam, **mode, backend=backend)[0], grouped, FP64)
