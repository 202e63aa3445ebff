"""The margin's shift against the paper's equation: lam rho (beta - alpha) (u . q), on keys that make Sigma known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ccq.analysis import AnalysisError, margin
from ccq.analysis.capture import run, watch
from ccq.analysis.margin import margins, own_prompt, scores
from ccq.analysis.prompts import make_prompts
from ccq.model import CCQConfig, CCQForCausalLM

K = 6
U, W, V = torch.eye(K, dtype=torch.float64)[:3]
PAIRS = 50  # of distractors u and -u


def memory(alpha: float) -> tuple[torch.Tensor, float, float]:
    """Keys [T, 1, K]: distractors along u, and needles with overlap alpha with it and the rest along w.

    All signs are there, so that the mean is zero and Sigma = rho_u u u^T + rho_w w w^T.
    """
    a, b = alpha * U, math.sqrt(1 - alpha**2) * W
    needles = torch.stack([a + b, a - b, -a + b, -a - b])
    keys = torch.cat([needles, U.expand(PAIRS, K), -U.expand(PAIRS, K)])
    total = len(keys)
    return keys[:, None], (2 * PAIRS + 4 * alpha**2) / total, 4 * (1 - alpha**2) / total


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
def test_scores_and_margin_are_those_of_the_equation(alpha, lam):
    k, rho_u, rho_w = memory(alpha)
    q = (0.6 * U + 0.5 * W + 0.2 * V) / math.sqrt(0.65)
    found = scores(q.expand(len(k), 2, K), k, torch.tensor([lam, lam / 2]))
    without, cleaned, projected = (found[name] for name in ("without", "with", "projected"))
    uq, wq = float(U @ q), float(W @ q)
    gamma = math.sqrt(1 - alpha**2)
    needle, distractor = alpha * uq + gamma * wq, uq
    assert without[0, 0].item() == pytest.approx(needle, abs=1e-5)
    assert without[0, 4].item() == pytest.approx(distractor, abs=1e-5)
    for head, value in enumerate((lam, lam / 2)):  # both read one key head
        shift = value * (rho_u * (1 - alpha) * uq - rho_w * gamma * wq)
        got = (cleaned[head, 0] - cleaned[head, 4]) - (without[head, 0] - without[head, 4])
        assert got.item() == pytest.approx(shift, abs=1e-5)
        # y = rho_u (u.q) u + rho_w (w.q) w, of which the projected step takes (q.y) / (y.y)
        along = (rho_u * uq**2 + rho_w * wq**2) / (rho_u**2 * uq**2 + rho_w**2 * wq**2)
        got = (projected[head, 0] - projected[head, 4]) - (without[head, 0] - without[head, 4])
        assert got.item() == pytest.approx(along * shift, abs=1e-5)


def test_the_papers_three_regimes():
    """Off u with a query that overlaps it: wider. The needle is u itself: no change. The query is off u: no change."""
    one = torch.ones(1)

    def shift(alpha, q):
        k, *_ = memory(alpha)
        found = scores(q.expand(len(k), 1, K), k, one)
        without, cleaned = found["without"], found["with"]
        return ((cleaned[0, 0] - cleaned[0, 4]) - (without[0, 0] - without[0, 4])).item()

    assert shift(0.3, U) > 0.5
    assert shift(1.0, U) == pytest.approx(0, abs=1e-6)
    assert shift(0.3, V) == pytest.approx(0, abs=1e-6)
    k, *_ = memory(0.0)  # the roles exchanged: what lies along u is now the needle
    found = scores(U.expand(len(k), 1, K), k, one)
    without, cleaned = found["without"], found["with"]
    assert ((cleaned[0, 4] - cleaned[0, 0]) - (without[0, 4] - without[0, 0])).item() < -0.5


def test_margins_are_of_means_and_of_bests():
    s = torch.tensor([[0.5, 0.1, 0.4, 0.3, -0.9]])
    needle, distractor = np.array([0, 1, 0, 0, 0], bool), np.array([0, 0, 1, 1, 1], bool)
    found = margins(s, needle, distractor)
    assert found["mean"][0] == pytest.approx(0.1 - (-0.2 / 3))
    assert found["best"][0] == pytest.approx(-0.3)
    assert found["rank"][0] == 3


def make(tokenizer, system, **changes):
    torch.manual_seed(0)
    settings = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "gate_init": 0.6, **changes}
    return CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", **settings)).eval()


@pytest.mark.parametrize("system", ["ccq-gla", "ccq-gated-deltanet", "ccq-mamba2", "gla-projected"])
def test_what_the_model_reads_with_is_what_is_scored(tokenizer, system):
    """k_bar . q_clean of the cleaner itself."""
    model = make(tokenizer, system)
    name = "projected" if "projected" in system else "with"
    prompt = make_prompts(3, 8)[0]
    ids = tokenizer(prompt.text)["input_ids"]
    kept, seen = {}, {}
    for layer in model.model.layers:
        layer.mixer.cleaner.register_forward_hook(
            lambda cleaner, args, out, i=layer.mixer.layer: kept.update({i: (out[0][0, -1], out[1][0])})
        )
    with watch(model, read=lambda r: seen.update({r.layer: scores(r.q, r.k, r.lam[-1])[name]})):
        run(model, ids)
    for layer, (q_clean, k_bar) in kept.items():
        expected = torch.einsum("thk,hk->ht", k_bar, q_clean).double()
        torch.testing.assert_close(seen[layer], expected, rtol=0, atol=1e-5)


def test_a_model_without_cleaning_needs_a_lam(tokenizer):
    prompts = make_prompts(3, 8)[:2]
    for system, heads in (("gla", 2), ("transformer", 4)):
        model = make(tokenizer, system)
        with pytest.raises(AnalysisError, match="lam: the model has no cleaning"):
            margin.measure(model, tokenizer, prompts)
        found = margin.measure(model, tokenizer, prompts, lam=0.0)
        assert np.abs(np.concatenate(found["shift_mean"])).max() == 0
        assert np.abs(np.concatenate(found["projected_shift_best"])).max() == 0
        found = margin.measure(model, tokenizer, prompts, lam=1.0)
        for prefix in ("", "projected_"):
            shift = np.concatenate(found[f"{prefix}shift_mean"])
            assert np.abs(shift).max() > 0
            assert found[f"{prefix}wider_cells"] == (shift > 0).sum()
        assert found["cells"] == 2 * heads


def test_a_prompt_of_ones_own(tokenizer):
    prompt = own_prompt("The cat had a key. The dog had a bone. Who had a bone?", "dog")
    found = margin.measure(make(tokenizer, "ccq-gla"), tokenizer, [prompt])
    assert found["own_lam"]
    for needle in ("horse", "had", ""):
        with pytest.raises(AnalysisError, match="needle: expected a piece that occurs once in the prompt"):
            own_prompt(prompt.text, needle)
