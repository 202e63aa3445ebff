"""What happens to q and k before they meet the state, and the knobs of analysis."""

from __future__ import annotations

import pytest
import torch
from helpers import LAYERS, TOLERANCE, assert_close, checked, unit_vector

from ccq import clean_query
from ccq.mixers import QueryCleaner, Sequences
from ccq.mixers.key_value import Hedgehog, make_feature_map
from ccq.mixers.norms import GatedRMSNorm, RMSNorm, unit
from ccq.model.config import CCQConfig

H, K = 2, 8
CLOSE = 10 * TOLERANCE[torch.float64]


def make(**options) -> QueryCleaner:
    return QueryCleaner(CCQConfig(**options), H, K).double()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(cleaner: QueryCleaner, q, k):
    return checked(cleaner.forward)(q, q, k, Sequences(q.shape[0]), None, True)


def test_off_is_nothing():
    cleaner, q, k = make(), draw(2, 5, H, K), draw(2, 5, H, K, seed=1)
    q_read, k_write, state = run(cleaner, q, k)
    assert q_read is q
    assert k_write is k
    assert state is None
    assert not list(cleaner.parameters())
    assert cleaner.new_state(2, None, torch.float32) == {}
    assert cleaner.flops() == 0


def test_unit_is_the_length_of_the_contract():
    q, k = draw(2, 5, H, K), draw(2, 5, H, K, seed=1)
    q_read, k_write, _ = run(make(unit_qk=True), q, k)
    assert_close("q", unit_vector(q), q_read, CLOSE)
    assert_close("k", unit_vector(k), k_write, CLOSE)
    assert not unit(torch.zeros(1, 3)).any()


def test_the_current_key_is_taken_from_a_unit_query():
    cleaner, q, k = make(unit_qk=True, current_key_read=True, current_key_init=0.25), draw(2, 5, H, K), draw(2, 5, H, K)
    q_read, k_write, _ = run(cleaner, q, k)
    assert_close("q", unit_vector(q) - 0.25 * unit_vector(k), q_read, CLOSE)
    assert_close("k", unit_vector(k), k_write, CLOSE)
    with torch.no_grad():
        cleaner.current_key.copy_(torch.tensor([1.0, -2.0]))
    q_read, _, _ = run(cleaner, q, k)
    d = torch.tensor([1.0, -2.0], dtype=torch.float64)[:, None]
    assert_close("q", unit_vector(q) - d * unit_vector(k), q_read, CLOSE)


@pytest.mark.parametrize("options", [{}, {"centred": False}, {"normalize": "stats"}, {"fixed_lam": 0.25}], ids=str)
def test_cleaning_is_the_operator(options):
    cleaner, q, k = make(clean=True, **options), draw(2, 70, H, K), draw(2, 70, H, K, seed=1)
    for p in cleaner.parameters():
        torch.nn.init.normal_(p)
    if "fixed_lam" in options:
        lam = torch.full((2, 70, H), options.pop("fixed_lam"), dtype=torch.float64)
    else:
        lam = torch.sigmoid(q.flatten(2) @ cleaner.gate_weight.T + cleaner.gate_bias)
    ref = clean_query(q, k, lam, output_final_state=True, backend="reference", **options)
    q_read, k_write, state = run(cleaner, q, k)
    assert_close("q", ref[0], q_read, CLOSE)
    assert_close("k", ref[1], k_write, CLOSE)
    assert_close("C", ref[2].second_moment, state.second_moment, CLOSE)


def test_the_gate_starts_where_it_is_told():
    for start in (0.01, 0.3):
        cleaner = make(clean=True, gate_init=start)
        lam = cleaner.gate(draw(2, 5, H, K))
        assert_close("lam", torch.full_like(lam, start), lam, 1e-6)  # the bias starts in fp32
        assert not cleaner.gate_weight.any()


def test_lam_can_be_watched_and_changed():
    cleaner, q, k = make(clean=True), draw(2, 5, H, K), draw(2, 5, H, K)
    run(cleaner, q, k)
    assert cleaner.lam is None
    cleaner.record = True
    run(cleaner, q, k)
    assert cleaner.lam.shape == (2, 5, H)
    assert not cleaner.lam.requires_grad
    cleaner.intervention = lambda lam: 50 * lam
    q_read, _, _ = run(cleaner, q, k)
    assert_close("lam", torch.full((2, 5, H), 0.5), cleaner.lam, 1e-6)
    fixed, _, _ = run(make(clean=True, fixed_lam=0.5), q, k)
    assert_close("q", fixed, q_read, 1e-6)
    cleaner.intervention = lambda lam: 500 * lam
    with pytest.raises(ValueError, match="lam: expected values from 0 to 1"):
        run(cleaner, q, k)


def test_a_step_watches_and_changes_lam_too():
    cleaner = make(clean=True)
    cleaner.record, cleaner.intervention = True, lambda lam: lam + 0.5
    state = {"recurrent": torch.zeros(2, H, K, 3, dtype=torch.float64), **cleaner.new_state(2, None, torch.float64)}
    q = draw(2, H, K)
    cleaner.step(q, q, draw(2, H, K, seed=1), draw(2, H, 3), state)
    assert_close("lam", torch.full((2, H), 0.51), cleaner.lam, 1e-6)
    assert state["covariance"].count.tolist() == [1, 1]


# Feature maps


def test_hedgehog_is_a_softmax_of_a_learned_map():
    torch.manual_seed(0)
    hedgehog = Hedgehog(256, 256)
    w = hedgehog.weight.double()
    assert w.shape == (128, 256)
    assert_close("W W^T", torch.eye(128, dtype=torch.float64), w @ w.T, 1e-6)
    hedgehog.double()
    x = draw(2, 3, H, 256)
    y = checked(hedgehog.forward)(x)
    z = 2 * x @ w.T
    scores = torch.cat([z, -z], -1).exp()
    assert_close("features", scores / scores.sum(-1, keepdim=True), y, CLOSE)


def test_feature_maps_by_name():
    identity, size = make_feature_map("identity", 8, 3)
    assert size == 8
    assert not list(identity.parameters())
    hedgehog, size = make_feature_map("hedgehog", 8, 3)
    assert size == 6
    assert hedgehog(torch.zeros(1, H, 8)).shape == (1, H, 6)


# Norms


def test_norms_are_their_formulas():
    x, gate = draw(2, 3, 12), draw(2, 3, 12, seed=1)
    weight = draw(12, seed=2)
    silu = gate * gate.sigmoid()

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    cases = [
        (RMSNorm(12), (x,), norm(x) * weight),
        (GatedRMSNorm(12), (x, gate), norm(x) * weight * silu),
        (GatedRMSNorm(12, sigmoid=True), (x, gate), norm(x) * weight * gate.sigmoid()),
        (GatedRMSNorm(12, gate_first=True), (x, gate), norm(x * silu) * weight),
        (
            GatedRMSNorm(12, gate_first=True, groups=3),
            (x, gate),
            norm((x * silu).unflatten(-1, (3, 4))).flatten(-2) * weight,
        ),
    ]
    for module, inputs, expected in cases:
        module = module.double()
        with torch.no_grad():
            module.weight.copy_(weight)
        assert_close(type(module).__name__, expected, module(*inputs), CLOSE)


@pytest.mark.gpu
def test_fused_norms_on_a_gpu_are_the_same(monkeypatch):
    torch.manual_seed(0)
    for module in (
        RMSNorm(64),
        GatedRMSNorm(64),
        GatedRMSNorm(64, sigmoid=True),
        GatedRMSNorm(64, gate_first=True, groups=2),
        None,
    ):
        inputs = [torch.randn(2, 3, 64, device="cuda", requires_grad=True) for _ in range(2)]
        call = unit if module is None else module.cuda()
        inputs = inputs if isinstance(module, GatedRMSNorm) else inputs[:1]
        cotangent = torch.randn(2, 3, 64, device="cuda")  # not a function of y: a norm's gradient along y vanishes
        results = []
        for fused in (True, False):
            monkeypatch.setattr("ccq.ops.choose.PLAIN", frozenset() if fused else LAYERS)
            y = call(*inputs)
            results.append((y, *torch.autograd.grad(y, inputs, cotangent)))
        for got, ref in zip(*results, strict=True):
            assert_close("norm", ref, got, 1e-5)


def test_recorded_angle_is_that_between_query_and_cleaned_query():
    """Against the arccosine of what the operator gives, in fp64."""
    cleaner = make(clean=True, gate_init=0.5)
    cleaner.record = cleaner.record_angle = True
    q, k = draw(1, 20, H, K), draw(1, 20, H, K, seed=1)
    q_clean, _, _ = run(cleaner, q, k)
    expected = torch.rad2deg(torch.cosine_similarity(q, q_clean, dim=-1).clamp(max=1).arccos())
    assert cleaner.angle[:, 5:].min() > 0.1
    assert torch.allclose(cleaner.angle[:, 1:], expected[:, 1:], atol=1e-5)
    assert cleaner.angle[:, 0].max() < 1e-5  # one key has no covariance
