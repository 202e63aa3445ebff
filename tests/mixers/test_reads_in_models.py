"""A read beside the paper's is a function in STEPS: with it a model prefills, decodes and learns."""

from __future__ import annotations

import pytest
import torch
from helpers import TOLERANCE, assert_close, clean_query, unit_vector

from ccq.mixers import QueryCleaner, Sequences
from ccq.model import CCQConfig, CCQForCausalLM
from ccq.ops.clean.reference import STEPS

H, K = 2, 8
BACKBONES = ["ccq-gla", "ccq-gated-deltanet", "ccq-mamba2"]


def paper(q, y, lam):
    return q - lam * y


def softened(q, y, lam):
    """q without the share lam of its component along y."""
    return q - lam * (q * y).sum(-1, keepdim=True) / (y.square().sum(-1, keepdim=True) + 1e-3) * y


@pytest.fixture(autouse=True)
def reads(monkeypatch):
    monkeypatch.setitem(STEPS, "softened", softened)
    monkeypatch.setitem(STEPS, "paper, by a function", paper)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("normalize", ["unit", "stats"])
def test_the_papers_read_by_a_function_is_the_papers_read(normalize):
    cleaners = [
        QueryCleaner(CCQConfig(clean=True, normalize=normalize, step=step), H, K).double()
        for step in ("scaled", "paper, by a function")
    ]
    for p in cleaners[0].parameters():
        torch.nn.init.normal_(p)
    cleaners[1].load_state_dict(cleaners[0].state_dict())
    q, k = draw(2, 30, H, K), draw(2, 30, H, K, seed=1)
    ref, got = (cleaner(q, q, k, Sequences(2), None, True) for cleaner in cleaners)
    for name, a, b in zip(("q", "k"), ref, got, strict=False):
        assert_close(name, a, b, 10 * TOLERANCE[torch.float64])
    assert torch.equal(ref[2].second_moment, got[2].second_moment)


def test_a_read_is_what_the_function_makes_of_q_and_y():
    cleaner = QueryCleaner(CCQConfig(clean=True, fixed_lam=0.5, step="softened"), H, K).double()
    q, k = draw(1, 30, H, K), draw(1, 30, H, K, seed=1)
    y = 2 * (unit_vector(q) - clean_query(q, k, torch.full((1, 30, H), 0.5).double(), backend="reference")[0])
    ref = softened(unit_vector(q), y, 0.5)
    assert_close("q", ref, cleaner(q, q, k, Sequences(1))[0], 1e-12)


@pytest.mark.parametrize("system", BACKBONES)
def test_steps_continue_a_prefill(system):
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", step="softened", fixed_lam=0.5)).double().eval()
    plain = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", fixed_lam=0.5)).double().eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 256, (2, 20))
    with torch.no_grad():
        ref = model(ids).logits
        out = model(ids[:, :12], use_cache=True)
        for t in range(12, 20):
            out = model(ids[:, t : t + 1], past_key_values=out.past_key_values)
            assert_close("logits", ref[:, t], out.logits[:, -1], 1e-10)
        other = plain(ids).logits
    with pytest.raises(AssertionError, match="relative"):  # it is not the paper's
        assert_close("logits", other, ref, 1e-4)


@pytest.mark.parametrize("system", BACKBONES)
def test_a_model_learns_with_it(system):
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", step="softened"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 16, (4, 24))
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    gates = [p for name, p in model.named_parameters() if "gate_bias" in name]
    assert gates
    assert all(p.grad.abs().max() > 0 for p in gates)


@pytest.mark.parametrize("decay", ["none", "backbone", "learned"])
def test_a_decayed_covariance_reaches_the_read_and_its_parameters(decay):
    torch.manual_seed(0)
    config = CCQConfig.preset("gla-projected-tiny", covariance_decay=decay, steps=2)
    model = CCQForCausalLM(config).double()
    ids = torch.randint(0, 256, (2, 24))
    model(ids, labels=ids).loss.backward()
    own = {name.rpartition(".")[2]: p for name, p in model.named_parameters() if "cleaner" in name}
    assert ("decay_logit" in own) == (decay == "learned")
    assert all(p.grad.abs().max() > 0 for p in own.values())
    others = CCQForCausalLM(CCQConfig.preset("gla-projected-tiny", steps=2)).double()
    others.load_state_dict(model.state_dict(), strict=False)
    same = torch.equal(model(ids).logits, others(ids).logits)
    assert same == (decay == "none")


def read_by_loop(cleaner, q, k, g, control):
    """The query of each token by the equations: keys so far with their weights, and the step along y."""
    q, k = unit_vector(q), unit_vector(k)
    lam = torch.sigmoid(draw(*q.shape[:2], H * K, seed=2) @ cleaner.gate_weight.T + cleaner.gate_bias)
    decay = g.mean(-1).exp() if cleaner.covariance_decay == "backbone" else torch.ones(q.shape[:3]).double()
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(H):
            of = (h - 1) % H if control == "other head" else h
            for t in range(q.shape[1]):
                weights = torch.stack([decay[b, j + 1 : t + 1, of].prod() for j in range(t + 1)])
                weights = weights / weights.sum()
                keys, query = k[b, : t + 1, of], q[b, t, h]
                mean = weights @ keys
                sigma = (keys * weights[:, None]).T @ keys - torch.outer(mean, mean)
                if control == "free scale":
                    out[b, t, h] = query - cleaner.lam_scale[h] * lam[b, t, h] * sigma @ query
                else:
                    y = torch.dot(mean, query) * mean if control == "mean" else sigma @ query
                    out[b, t, h] = query - lam[b, t, h] * (query @ y) / (y @ y + 1e-10) * y
    return out


@pytest.mark.parametrize("control", ["free scale", "other head", "mean"])
def test_controls_of_the_study_are_their_equations(control):
    """lam is that of another raw query, as behind a feature map."""
    system = {"free scale": "ccq-gla-free-scale", "other head": "gla-other-head", "mean": "gla-mean-key"}[control]
    config = CCQConfig.preset(f"{system}-tiny")
    cleaner = QueryCleaner(config, H, K).double()
    with torch.no_grad():
        for seed, p in enumerate(cleaner.parameters()):
            p.copy_(3 * draw(*p.shape, seed=seed))  # scales above 1, and below 0
    q, k, g = draw(2, 20, H, K), draw(2, 20, H, K, seed=1) + 0.5, -draw(2, 20, H, K, seed=3).square()
    raw = draw(2, 20, H, K, seed=2)
    got, k_bar, _ = cleaner(raw, q, k, Sequences(2), None, True, g)
    assert_close("q", read_by_loop(cleaner, q, k, g, control), got, 1e-12)
    assert_close("k", unit_vector(k), k_bar, 1e-12)


def test_a_free_scale_starts_as_the_papers_step_and_the_mean_needs_no_second_moment():
    free, paper = (CCQForCausalLM(CCQConfig.preset(f"ccq-gla-{x}-tiny")).double() for x in ("free-scale", "open"))
    free.load_state_dict(paper.state_dict(), strict=False)
    ids = torch.randint(0, 256, (2, 24))
    assert_close("logits", paper(ids).logits, free(ids).logits, 1e-12)
    sizes = [
        sum(layer.mixer.state_bytes() for layer in CCQForCausalLM(CCQConfig.preset(f"{x}-tiny")).model.layers)
        for x in ("gla-unit", "gla-mean-key")
    ]
    assert sizes[1] - sizes[0] == 2 * 2 * (16 + 1) * 4  # two layers of two heads: a sum of keys and its weight


def test_controls_are_refused_where_they_make_no_sense():
    for options, message in (
        ({"direction": "other head", "num_heads": 1}, "direction: expected several key heads"),
        ({"direction": "other head", "mixer": "mamba2", "conv_size": 4}, "direction: expected several key heads"),
        ({"learned_scale": True, "step": "projected"}, "learned_scale: it is of the paper's step"),
        ({"direction": "mean", "steps": 2}, "steps: expected 1 with"),
        ({"direction": "means"}, "Did you mean 'mean'"),
        ({"clean": False, "direction": "mean"}, "direction: expected clean=True with 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            CCQConfig(**{"clean": True, **options})


def test_a_read_that_is_not_there_or_without_cleaning_is_refused():
    with pytest.raises(ValueError, match=r"step: expected one of scaled, .* got 'projecte'\. Did you mean 'projected'"):
        CCQConfig(clean=True, step="projecte")
    with pytest.raises(ValueError, match="covariance_decay: expected clean=True with 'learned'"):
        CCQConfig(covariance_decay="learned")
    with pytest.raises(ValueError, match="steps: expected a number from 1 to 4, got 9"):
        CCQConfig(clean=True, steps=9)
