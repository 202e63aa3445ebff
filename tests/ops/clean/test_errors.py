"""Bad input is refused with the name of the argument, what was expected, and what came."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import BACKENDS, make_case

from ccq import CovarianceState, clean_query, clean_query_step
from ccq.ops import BackendUnavailableError, Gate, correction
from ccq.ops.clean.reference import STEPS

GOOD = make_case(B=2, T=3, Hq=4, Hk=2, K=5, dtype=torch.float32, state=True)
STATE = GOOD.initial_state
PACKED = make_case(Hq=4, Hk=2, K=5, dtype=torch.float32, lengths=[2, 1])  # B = 1, T = 3
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def call(case=GOOD, **changed):
    """`clean_query` on good input but for what is changed."""
    arguments = {"q": case.q, "k": case.k, "lam": case.lam, **case.where}
    return clean_query(**{**arguments, **changed})


def call_step(**changed):
    """`clean_query_step` on good input but for what is changed."""
    q, k, lam = (x[:, 0] for x in GOOD.args)
    return clean_query_step(**{"q": q, "k": k, "lam": lam, "state": STATE, **changed})


def test_the_good_input_is_good():
    for backend in BACKENDS:
        call(backend=backend)
        call(PACKED, backend=backend)
    call_step()


def test_lam_of_a_step_of_ones_own_is_checked(monkeypatch):
    monkeypatch.setitem(STEPS, "mine", STEPS["scaled"])
    call(step="mine")
    for wrong in (lambda **k: call(lam=GOOD.lam + 1, **k), lambda **k: call_step(lam=GOOD.lam[:, 0] + 1, **k)):
        with pytest.raises(ValueError, match="lam: expected values from 0 to 1"):
            wrong(step="mine")


def test_a_missing_key_beside_a_decay_is_named():
    with pytest.raises(TypeError, match="k: expected a tensor, got NoneType"):
        call_step(k=None, log_decay=-GOOD.k[:, 0, :, 0].abs())


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


# what is changed, what is raised, and how the message begins
ARGUMENTS = {
    "q no tensor": ({"q": [[1.0]]}, TypeError, "q: expected a tensor, got list"),
    "k no tensor": ({"k": None}, TypeError, "k: expected a tensor, got NoneType"),
    "lam no tensor": ({"lam": 0.5}, TypeError, "lam: expected a tensor, got float"),
    "q integer": ({"q": GOOD.q.long()}, TypeError, "q: expected float64, .* got torch.int64"),
    "k integer": ({"k": GOOD.k.int()}, TypeError, "k: expected float64, .* got torch.int32"),
    "lam integer": ({"lam": GOOD.lam.bool()}, TypeError, "lam: expected float64, .* got torch.bool"),
    "q complex": ({"q": GOOD.q.cfloat()}, TypeError, "q: expected float64, .* got torch.complex64"),
    "q ndim": ({"q": GOOD.q[0]}, ValueError, r"q: expected shape \[B, T, Hq, K\], got \(3, 4, 5\)"),
    "q without heads": ({"q": zeros(2, 3, 0, 5)}, ValueError, r"q: expected at least one head .* got .*\(2, 3, 0, 5\)"),
    "q without channels": ({"q": zeros(2, 3, 4, 0)}, ValueError, r"q: expected at least one head .*\(2, 3, 4, 0\)"),
    "k ndim": ({"k": GOOD.k[0]}, ValueError, r"k: expected shape \[B, T, Hk, K\] .* got \(3, 2, 5\)"),
    "k other B": ({"k": zeros(1, 3, 2, 5)}, ValueError, r"k: .*\(2, 3, 4, 5\), got \(1, 3, 2, 5\)"),
    "k other T": ({"k": zeros(2, 4, 2, 5)}, ValueError, r"k: .*\(2, 3, 4, 5\), got \(2, 4, 2, 5\)"),
    "k other K": ({"k": zeros(2, 3, 2, 6)}, ValueError, r"k: .*\(2, 3, 4, 5\), got \(2, 3, 2, 6\)"),
    "heads that do not divide": (
        {"k": zeros(2, 3, 3, 5)},
        ValueError,
        "k: expected .* heads that divides q's 4, got 3",
    ),
    "k without heads": ({"k": zeros(2, 3, 0, 5)}, ValueError, "k: expected .* heads that divides q's 4, got 0"),
    "lam with K": ({"lam": GOOD.q}, ValueError, r"lam: expected .*\(2, 3, 4\), got \(2, 3, 4, 5\)"),
    "lam of key heads": ({"lam": GOOD.lam[:, :, :2]}, ValueError, r"lam: expected .*\(2, 3, 4\), got \(2, 3, 2\)"),
    "mixed dtypes": ({"k": GOOD.k.bfloat16()}, TypeError, "k: expected q's dtype torch.float32, got torch.bfloat16"),
    "k elsewhere": ({"k": GOOD.k.to("meta")}, ValueError, "k: expected q's device cpu, got meta"),
    "lam elsewhere": ({"lam": GOOD.lam.to("meta")}, ValueError, "lam: expected q's device cpu, got meta"),
    "lam negative": ({"lam": GOOD.lam - 1}, ValueError, "lam: expected values from 0 to 1, got -0"),
    "lam above one": ({"lam": GOOD.lam + 1}, ValueError, "lam: expected values from 0 to 1, got 1.* to 1"),
    "centred no bool": ({"centred": "yes"}, TypeError, "centred: expected True or False, got 'yes'"),
    "normalize unknown": ({"normalize": "units"}, ValueError, "normalize: .*'units'. Did you mean 'unit'"),
    "normalize None": ({"normalize": None}, ValueError, "normalize: expected one of unit, none, stats, got None"),
}

STATES = {
    "state no state": ({"a": 1}, TypeError, ": expected a CovarianceState, got dict"),
    "state of tensors": (tuple(GOOD.args), TypeError, ": expected a CovarianceState, got tuple"),
    "state of other N": (
        CovarianceState.zeros(3, 2, 5),
        ValueError,
        r"\.second_moment: expected shape \(2, 2, 5, 5\), got \(3, 2, 5, 5\)",
    ),
    "state of query heads": (CovarianceState.zeros(2, 4, 5), ValueError, r"\.second_moment: .* got \(2, 4, 5, 5\)"),
    "state of other K": (CovarianceState.zeros(2, 2, 6), ValueError, r"\.second_moment: .* got \(2, 2, 6, 6\)"),
    "key_sum": (
        replace(STATE, key_sum=zeros(2, 2, 6)),
        ValueError,
        r"\.key_sum: expected shape \(2, 2, 5\), got \(2, 2, 6\)",
    ),
    "count": (replace(STATE, count=STATE.count[:1]), ValueError, r"\.count: expected shape \(2,\), got \(1,\)"),
    "state dtype": (
        CovarianceState.zeros(2, 2, 5, dtype=torch.float64),
        TypeError,
        r"\.second_moment: expected torch.float32 for torch.float32 keys, got torch.float64",
    ),
    "count dtype": (
        replace(STATE, count=STATE.count.int()),
        TypeError,
        r"\.count: expected torch.int64 .* got torch.int32",
    ),
    "state elsewhere": (STATE.to("meta"), ValueError, r"\.second_moment: expected q's device cpu, got meta"),
    "count elsewhere": (
        replace(STATE, count=STATE.count.to("meta")),
        ValueError,
        r"\.count: expected q's device cpu, got meta",
    ),
    "count not a tensor": (replace(STATE, count=3), TypeError, r"\.count: expected a tensor, got int"),
    "count negative": (replace(STATE, count=STATE.count - 1), ValueError, r"\.count: expected values from 0, got -1"),
}

CU_SEQLENS = {
    "list": ([0, 2, 3], TypeError, "expected an integer tensor, got list"),
    "float": (torch.tensor([0.0, 3.0]), TypeError, "expected int32 or int64, got torch.float32"),
    "bool": (torch.tensor([False, True]), TypeError, "expected int32 or int64, got torch.bool"),
    "ndim 2": (torch.tensor([[0, 3]]), ValueError, r"expected shape \[N \+ 1\], N >= 1, got \(1, 2\)"),
    "ndim 0": (torch.tensor(3), ValueError, r"expected shape \[N \+ 1\], N >= 1, got \(\)"),
    "no sequence": (torch.tensor([0]), ValueError, r"expected shape \[N \+ 1\], N >= 1, got \(1,\)"),
    "start": (torch.tensor([1, 2, 3]), ValueError, "expected to start at 0, got 1"),
    "negative": (torch.tensor([-1, 3]), ValueError, "expected to start at 0, got -1"),
    "decrease": (torch.tensor([0, 3, 2, 3]), ValueError, "expected no decrease, got 3 then 2 at index 2"),
    "short": (torch.tensor([0, 2]), ValueError, "expected to end at T = 3, got 2"),
    "long": (torch.tensor([0, 2, 4]), ValueError, "expected to end at T = 3, got 4"),
    "elsewhere": (torch.tensor([0, 3], device="meta"), ValueError, "expected q's device cpu, got meta"),
}


@every_backend
@pytest.mark.parametrize("bad", ARGUMENTS)
def test_bad_arguments(backend, bad):
    changed, exception, message = ARGUMENTS[bad]
    with pytest.raises(exception, match=f"^{message}"):
        call(**changed, backend=backend)


@every_backend
@pytest.mark.parametrize("bad", [bad for bad, (changed, *_) in ARGUMENTS.items() if "lam" not in changed])
def test_bad_arguments_of_correction(backend, bad):
    changed, exception, message = ARGUMENTS[bad]
    with pytest.raises(exception, match=f"^{message}"):
        correction(**{"q": GOOD.q, "k": GOOD.k, **changed}, backend=backend)


@every_backend
@pytest.mark.parametrize("bad", STATES)
def test_bad_states(backend, bad):
    state, exception, message = STATES[bad]
    with pytest.raises(exception, match=f"^initial_state{message}"):
        call(initial_state=state, backend=backend)
    with pytest.raises(exception, match=f"^initial_state{message}"):
        correction(GOOD.q, GOOD.k, initial_state=state, backend=backend)


@every_backend
@pytest.mark.parametrize("bad", CU_SEQLENS)
def test_bad_cu_seqlens(backend, bad):
    borders, exception, message = CU_SEQLENS[bad]
    with pytest.raises(exception, match=f"^cu_seqlens: {message}"):
        call(PACKED, cu_seqlens=borders, backend=backend)
    with pytest.raises(exception, match=f"^cu_seqlens: {message}"):
        correction(PACKED.q, PACKED.k, cu_seqlens=borders, backend=backend)


@every_backend
def test_packing_needs_batch_size_one(backend):
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected sequences packed in a batch of 1, got a batch of 2"):
        call(initial_state=None, cu_seqlens=torch.tensor([0, 2, 3]), backend=backend)


@every_backend
def test_state_counts_packed_sequences(backend):
    with pytest.raises(ValueError, match=r"^initial_state\.second_moment: expected shape \(2, .*got \(1, "):
        call(PACKED, initial_state=CovarianceState.zeros(1, 2, 5), backend=backend)


@pytest.mark.parametrize(
    ("name", "hint"), [("chunks", "Did you mean 'chunk'"), ("Triton", "Did you mean 'triton'"), ("cuda", "'cuda'")]
)
@pytest.mark.parametrize("function", [call, call_step, lambda **options: correction(GOOD.q, GOOD.k, **options)])
def test_unknown_backend_suggests_the_nearest(function, name, hint):
    with pytest.raises(ValueError, match=f"^backend: expected one of reference, chunk, triton, auto, got .*{hint}"):
        function(backend=name)


@pytest.mark.parametrize("function", [call, lambda **options: correction(GOOD.q, GOOD.k, **options)])
def test_triton_where_it_cannot_run_says_why(function, no_triton):
    message = (
        r"^backend='triton' cannot run \w+ on cpu with torch.float32, key size 5: the test says so\. backend='chunk'"
    )
    with pytest.raises(BackendUnavailableError, match=message):
        function(backend="triton")


STEP = {
    "q ndim": ({"q": GOOD.q}, ValueError, r"q: expected shape \[B, Hq, K\], got \(2, 3, 4, 5\)"),
    "k ndim": ({"k": GOOD.k}, ValueError, r"k: expected shape \[B, Hk, K\] .* got \(2, 3, 2, 5\)"),
    "k no tensor": ({"k": 1}, TypeError, "k: expected a tensor, got int"),
    "heads that do not divide": ({"k": zeros(2, 3, 5)}, ValueError, "k: expected .* heads that divides q's 4, got 3"),
    "lam shape": ({"lam": GOOD.lam}, ValueError, r"lam: expected shape \[B, Hq\] = \(2, 4\), got \(2, 3, 4\)"),
    "lam above one": ({"lam": GOOD.lam[:, 0] + 1}, ValueError, "lam: expected values from 0 to 1, got 1"),
    "mixed dtypes": ({"k": GOOD.k[:, 0].half()}, TypeError, "k: expected q's dtype torch.float32, got torch.float16"),
    "normalize unknown": ({"normalize": "stat"}, ValueError, "normalize: .*'stat'. Did you mean 'stats'"),
    "no state": ({"state": None}, TypeError, "state: expected a CovarianceState, got None; CovarianceState.zeros"),
}


@pytest.mark.parametrize("bad", STEP)
def test_bad_arguments_of_a_step(bad):
    changed, exception, message = STEP[bad]
    with pytest.raises(exception, match=f"^{message}"):
        call_step(**changed)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("bad", STATES)
def test_bad_states_of_a_step(bad, inplace):
    state, exception, message = STATES[bad]
    with pytest.raises(exception, match=f"^state{message}"):
        call_step(state=state, inplace=inplace)


@pytest.mark.parametrize("name", ["q", "k", "lam", "second_moment", "key_sum"])
def test_step_in_place_refuses_a_gradient(name):
    case = make_case(B=2, T=1, Hq=4, Hk=2, K=5, state=True)
    state = case.initial_state
    tensors = {"q": case.q[:, 0], "k": case.k[:, 0], "lam": case.lam[:, 0]}
    wanted = tensors.get(name, getattr(state, name, None)).requires_grad_()
    before = state.detach().clone()
    with pytest.raises(RuntimeError, match=f"^inplace: {name if name in tensors else 'state'} needs a gradient"):
        clean_query_step(**tensors, state=state, inplace=True)
    assert torch.equal(state.count, before.count), "refused, and still changed"
    assert torch.equal(state.key_sum, before.key_sum), "refused, and still changed"
    clean_query_step(**tensors, state=state, inplace=False)
    wanted.requires_grad_(name in tensors)
    with torch.no_grad():
        clean_query_step(**tensors, state=state, inplace=True)
    assert torch.equal(state.count, before.count + 1)


@every_backend
def test_nan_is_no_error_and_shows(backend):
    lam = GOOD.lam.clone()
    lam[0, 1, 2] = float("nan")
    q_clean = call(lam=lam, backend=backend)[0]
    assert q_clean[0, 1, 2].isnan().all()
    assert q_clean.isnan().sum() == 5


VALUES = {
    "lam": (GOOD, {"lam": GOOD.lam + 1}, "lam: expected values from 0 to 1"),
    "count": (GOOD, {"initial_state": STATES["count negative"][0]}, r"initial_state\.count: expected values from 0"),
    "cu_seqlens": (PACKED, {"cu_seqlens": torch.tensor([0, 2, 4])}, "cu_seqlens: expected to end at T = 3, got 4"),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("bad", VALUES)
def test_values_are_checked_in_compiled_code(bad):
    case, changed, message = VALUES[bad]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compiled(case)
    with pytest.raises(ValueError, match=f"^{message}"):
        compiled(case, **changed)


def test_a_gate_is_for_sequences_and_one_token_takes_its_lam():
    q = torch.randn(1, 2, 4)
    by = Gate(torch.zeros(2, 8), torch.zeros(2))
    with pytest.raises(TypeError, match=r"lam: expected a tensor \[B, Hq\] for one token, got a tuple; ccq.ops.gate"):
        clean_query_step(q, q, by, CovarianceState.zeros(1, heads=2, key_size=4))
