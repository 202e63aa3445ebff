"""Reads beside the paper's: the projected step, several steps, a covariance that decays."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close

from ccq import CovarianceState, clean_query, clean_query_step
from ccq.ops import sigma_q, sigma_q_step

STEPS = ("scaled", "projected")
F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def case(T=70, B=2, Hq=4, Hk=2, K=8, seed=0, dtype=F64, decay=1.0):
    q, k = draw(B, T, Hq, K, seed=seed, dtype=dtype), draw(B, T, Hk, K, seed=seed + 1, dtype=dtype)
    k = k + draw(1, 1, Hk, K, seed=seed + 2, dtype=dtype)  # keys with a mean
    lam = draw(B, T, Hq, seed=seed + 3).sigmoid()
    log_decay = -decay * draw(B, T, Hk, seed=seed + 4).abs()
    return q, k, lam, log_decay


def loop(q, k, lam, log_decay=None, step="scaled", steps=1, centred=True):
    """By the formulas, with weights of every pair of tokens, in fp64: no state, no recurrence."""
    B, T, Hq = q.shape[:3]
    group = Hq // k.shape[2]
    x, keys = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    out = torch.empty_like(x)
    for b in range(B):
        for h in range(Hq):
            ks = keys[b, :, h // group]
            a = torch.zeros(T, dtype=F64) if log_decay is None else log_decay[b, :, h // group]
            for t in range(T):
                w = torch.stack([a[j + 1 : t + 1].sum().exp() for j in range(t + 1)])
                w = w / w.sum()
                mean = w @ ks[: t + 1]
                sigma = torch.einsum("j,jk,jl->kl", w, ks[: t + 1], ks[: t + 1])
                if centred:
                    sigma = sigma - mean[:, None] * mean
                v = x[b, t, h]
                for _ in range(steps):
                    y = sigma @ v
                    size = lam[b, t, h]
                    if step == "projected":
                        size = size * (v @ y) / (y @ y + 1e-10)
                    v = v - size * y
                out[b, t, h] = v
    return out


@pytest.mark.parametrize("backend", ["reference", "chunk"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("centred", [True, False])
def test_every_read_is_its_formula(backend, step, steps, decayed, centred):
    q, k, lam, log_decay = case(T=12, B=1)
    decay = log_decay if decayed else None
    got = clean_query(q, k, lam, centred, step=step, steps=steps, log_decay=decay, backend=backend)[0]
    assert_close("q_clean", loop(q, k, lam, decay, step, steps, centred), got, 1e-9)


def run(backend, inputs, cu_seqlens=None, centred=True, normalize="unit", step="projected", steps=1, state=None):
    q, k, lam, log_decay = inputs
    q_clean, k_bar, final = clean_query(
        q, k, lam, centred, normalize, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
        backend=backend, step=step, steps=steps, log_decay=log_decay,
    )  # fmt: skip
    return [q_clean, k_bar, final.second_moment, final.key_sum, final.count]


@pytest.mark.parametrize("length", [1, 2, 63, 128, 129, 300])
@pytest.mark.parametrize("step", STEPS)
def test_chunk_matches_reference_with_decay(length, step):
    """Outputs, states and every gradient, those of the decay and of the state before among them."""
    inputs = case(T=length, decay=0.3)
    start = CovarianceState(draw(2, 2, 8, 8, seed=9), draw(2, 2, 8, seed=10), draw(2, 2, seed=11).abs() + 1)
    start.second_moment = start.second_moment @ start.second_moment.mT
    compare(inputs, start, step=step)


@pytest.mark.parametrize("normalize", ["unit", "none", "stats"])
@pytest.mark.parametrize("centred", [True, False])
def test_chunk_matches_reference_packed_with_decay(normalize, centred):
    inputs = case(T=300, B=1, decay=0.3)
    borders = torch.tensor([0, 1, 1, 130, 131, 300])
    compare(inputs, None, cu_seqlens=borders, centred=centred, normalize=normalize, steps=2)


def compare(inputs, start, **options):
    found = {}
    for backend in ("reference", "chunk"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        state = None
        if start is not None:
            parts = [x.clone().requires_grad_() for x in (start.second_moment, start.key_sum, start.count)]
            state = CovarianceState(*parts)
            leaves += parts
        outputs = run(backend, leaves[:4], state=state, **options)
        loss = sum((x * draw(*x.shape, seed=20 + n)).sum() for n, x in enumerate(outputs))
        found[backend] = outputs, torch.autograd.grad(loss, leaves)
    names = ["q_clean", "k_bar", "C", "s", "n", "dq", "dk", "dlam", "d log_decay", "dC_0", "ds_0", "dn_0"]
    expected, got = ([*found[b][0], *found[b][1]] for b in ("reference", "chunk"))
    for name, a, b in zip(names, expected, got, strict=False):
        assert_close(name, a, b, 1e-8)


@pytest.mark.parametrize("reset", [-1e6, -torch.inf], ids=str)
def test_a_decay_that_forgets_everything_leaves_its_neighbours_their_digits(reset):
    """As at the border of a document. In fp32, where a difference of two sums over it would have no digits."""
    inputs = case(T=150, decay=0.1)
    inputs[3][:, [6, 100]] = reset
    compare(inputs, None)
    expected = run("reference", inputs)
    for a, b in zip(expected, run("chunk", [x.float() for x in inputs]), strict=True):
        assert_close("q_clean, k_bar, C, s or n", a, b, 1e-5)


def test_gradcheck_of_every_input():
    inputs = [x.requires_grad_() for x in case(T=5, B=1, Hq=2, Hk=1, K=3)]
    for backend in ("reference", "chunk"):
        assert torch.autograd.gradcheck(lambda *x, b=backend: tuple(run(b, x)), inputs, atol=1e-6)


def test_cpu_pieces_with_decay_are_the_whole(monkeypatch):
    """Long sequences go piece by piece on a CPU: the same numbers and gradients as in one piece."""
    from ccq.ops.clean import chunk

    inputs = case(T=1100, B=1, decay=0.05)
    found = []
    for size in (2**18, 1):
        monkeypatch.setattr(chunk, "PIECE", size)
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = run("chunk", leaves)
        loss = sum((x * draw(*x.shape, seed=20 + n)).sum() for n, x in enumerate(outputs))
        found.append([*outputs, *torch.autograd.grad(loss, leaves)])
    assert len(chunk.pieces(inputs[0], None)) == 3
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        assert_close(str(number), a, b, 1e-9)


def test_gradients_of_small_keys_survive_fp16():
    """y is below what fp16 can hold: kept for the backward in fp16, it would have no direction any more."""
    q, k, lam, _ = case(T=20, dtype=torch.float16)
    found = []
    for dtype in (torch.float16, F64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, (k.to(F64) / 4096).to(torch.float16))]
        out, _, _ = clean_query(*leaves, lam.to(dtype), normalize="none", step="projected", backend="chunk")
        found.append(torch.autograd.grad((out * draw(*out.shape, seed=5).to(dtype)).sum(), leaves))
    for name, got, expected in zip(("dq", "dk"), *found, strict=True):
        assert_close(name, got.to(F64), expected, 1e-2)


def test_steps_continue_a_prefill_with_decay():
    inputs = case(T=40, decay=0.2)
    whole = run("reference", inputs, steps=2)
    _, _, state = clean_query(*(x[:, :30] for x in inputs[:3]), output_final_state=True, log_decay=inputs[3][:, :30])
    in_place = state.clone()
    for t in range(30, 40):
        q, k, lam, log_decay = (x[:, t] for x in inputs)
        got, _, state = clean_query_step(q, k, lam, state, step="projected", steps=2, log_decay=log_decay)
        again, _, _ = clean_query_step(
            q, k, lam, in_place, inplace=True, step="projected", steps=2, log_decay=log_decay
        )
        assert_close("q_clean", whole[0][:, t], got, 1e-9)
        assert_close("in place", got, again, 1e-9)
    assert_close("weight", whole[4], state.count, 1e-9)
    y, _, _ = sigma_q_step(q, k, state, log_decay=log_decay)
    assert y.shape == q.shape


def test_pieces_chained_by_states_are_the_whole_with_decay():
    inputs = case(T=200, decay=0.2)
    whole = run("chunk", inputs)
    state, parts = None, []
    for begin, end in ((0, 7), (7, 7), (7, 140), (140, 200)):
        q, k, lam, log_decay = (x[:, begin:end] for x in inputs)
        q_clean, _, state = clean_query(
            q, k, lam, initial_state=state, output_final_state=True, step="projected", log_decay=log_decay
        )
        parts.append(q_clean)
    assert_close("q_clean", whole[0], torch.cat(parts, 1), 1e-9)
    assert_close("weight", whole[4], state.count, 1e-9)


def test_two_steps_are_two_calls():
    q, k, lam, log_decay = case()
    once, k_bar, _ = clean_query(q, k, lam, step="projected", log_decay=log_decay)
    twice, _, _ = clean_query(once, k_bar, lam, normalize="none", step="projected", log_decay=log_decay)
    assert_close("steps=2", twice, clean_query(q, k, lam, step="projected", steps=2, log_decay=log_decay)[0], 1e-12)


def test_no_decay_is_decay_of_zero_and_all_decay_sees_the_last_key_alone():
    q, k, lam, log_decay = case()
    for backend in ("reference", "chunk"):
        plain = clean_query(q, k, lam, step="projected", backend=backend)[0]
        zero = clean_query(q, k, lam, step="projected", log_decay=0 * log_decay, backend=backend)[0]
        assert_close("zero", plain, zero, 1e-9)
        y, _, _ = sigma_q(q, k, centred=False, log_decay=log_decay * 0 - 1e4, backend=backend)
        kn = k / k.norm(dim=-1, keepdim=True)
        kn = kn.repeat_interleave(2, 2)
        qn = q / q.norm(dim=-1, keepdim=True)
        assert_close("last key", kn * (kn * qn).sum(-1, keepdim=True), y, 1e-5)


def test_projected_step_is_free_of_scale_and_never_lengthens():
    """Sigma of keys of half the length is a quarter of Sigma: the paper's step shrinks, the projected one does not."""
    q, k, lam, _ = case()
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    small = {step: clean_query(q, k / 2, lam, normalize="none", step=step)[0] for step in STEPS}
    large = {step: clean_query(q, k, lam, normalize="none", step=step)[0] for step in STEPS}
    assert_close("projected", large["projected"], small["projected"], 1e-5)
    assert (large["scaled"] - small["scaled"]).abs().max() > 0.01
    assert (large["projected"].norm(dim=-1) <= q.norm(dim=-1) + 1e-12).all()


def test_lam_0_is_the_unit_query_and_lam_1_is_orthogonal_to_y():
    q, k, lam, log_decay = case(decay=0.1)
    qn = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close("0", qn, clean_query(q, k, 0 * lam, step="projected", log_decay=log_decay)[0], 1e-12)
    y, _, _ = sigma_q(q, k, log_decay=log_decay)
    cleaned = clean_query(q, k, 0 * lam + 1, step="projected", log_decay=log_decay)[0]
    cosine = torch.cosine_similarity(cleaned, y, dim=-1)[:, 3:]
    assert cosine.abs().max() < 1e-5


def test_query_along_an_eigenvector_is_only_scaled():
    k = torch.eye(4, dtype=F64).repeat(5, 1)[None, :, None] * torch.tensor([1.0, 0.5, 0.25, 0.1], dtype=F64)
    q = torch.eye(4, dtype=F64)[1].expand(1, 20, 1, 4)
    out = clean_query(q, k, torch.full((1, 20, 1), 0.5, dtype=F64), centred=False, normalize="none", step="projected")[
        0
    ]
    assert_close("q / 2", q[:, 4:] / 2, out[:, 4:], 1e-6)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("equal", [False, True])
def test_without_covariance_the_query_passes_with_finite_gradients(dtype, equal):
    """The first token, and keys that are all equal: y is rounding, and no direction is taken from it."""
    q, k, lam, _ = case(T=40 if equal else 1, dtype=dtype)
    if equal:
        k = k[:, :1].expand_as(k)
    leaves = [x.clone().requires_grad_() for x in (q, k, lam)]
    out = clean_query(*leaves, step="projected")[0]
    qn = (q.to(F64) / q.to(F64).norm(dim=-1, keepdim=True)).to(dtype)
    assert_close("q", qn, out.detach(), {F64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-3}[dtype])
    for gradient in torch.autograd.grad(out.float().square().sum() + out.float().sum(), leaves):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "project"}, "step: expected one of scaled, projected, got 'project'. Did you mean 'projected'?"),
        ({"steps": 5}, "steps: expected a whole number from 1 to 4, got 5"),
        ({"log_decay": torch.zeros(2, 70, 4)}, r"log_decay: expected one a token and key head, \(2, 70, 2\)"),
        ({"log_decay": torch.full((2, 70, 2), 0.1)}, "log_decay: expected values up to 0, got 0.1"),
    ],
)
def test_reads_that_cannot_be_are_refused(options, message):
    q, k, lam, _ = case()
    with pytest.raises(ValueError, match=message):
        clean_query(q, k, lam, **options)


def test_a_count_of_keys_cannot_decay_in_place():
    q, k, lam, log_decay = (x[:, 0] for x in case(T=1))
    state = CovarianceState.zeros(2, 2, 8, dtype=F64)
    with pytest.raises(ValueError, match="expected weights"):
        clean_query_step(q, k, lam, state, inplace=True, log_decay=log_decay)
    state = CovarianceState.zeros(2, 2, 8, dtype=F64, decayed=True)
    _, _, after = clean_query_step(q, k, lam, state, inplace=True, log_decay=log_decay)
    assert after.count.tolist() == [[1.0, 1.0]] * 2
