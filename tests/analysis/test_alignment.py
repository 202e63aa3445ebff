"""Alignment and gap against closed forms, on keys whose covariance is known.

K = 8 directions e_0..e_7; a key and its negative always come together, so that the mean is zero and Sigma diagonal.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ccq.analysis import AnalysisError
from ccq.analysis.alignment import TOP, Observer, Point, covariance, gaps, measure, shares, summary, tops, untrained
from ccq.analysis.capture import Read, watch
from ccq.analysis.prompts import GROUPS, Tokens, make_prompts, tokenize
from ccq.mixers import QueryCleaner
from ccq.model import CCQConfig, CCQForCausalLM

K = 64
EYE = torch.eye(K, dtype=torch.float64)
COUNTS = [200 - 3 * i for i in range(16)] + [2] * 48  # pairs of keys along each direction: 16 are strong


def keys_with_needle(angle: float, strong: int = 0, weak: int = 40) -> tuple[torch.Tensor, np.ndarray]:
    """[T, 2, K] unit keys and which are needles: cos(angle) of a needle lies along a strong direction, the rest off.

    All four signs of a needle's two parts are there, so that Sigma stays diagonal.
    """
    distractors = torch.cat([sign * EYE[i].expand(n, K) for i, n in enumerate(COUNTS) for sign in (1, -1)])
    a, b = math.cos(angle) * EYE[strong], math.sin(angle) * EYE[weak]
    needles = torch.stack([a + b, a - b, -a + b, -a - b])
    one = torch.cat([distractors, needles])
    mask = np.arange(len(one)) >= len(distractors)
    return torch.stack([one, one], 1), mask


def tokens_of(mask: np.ndarray) -> Tokens:
    groups = dict.fromkeys(GROUPS, mask) | {"distractor": ~mask}
    return Tokens(np.arange(len(mask)), groups, np.zeros_like(mask))


def gap_of(k: torch.Tensor, mask: np.ndarray, top: str = "16") -> float:
    point = Point()
    point.add(0, k, tokens_of(mask))
    return summary(point)["top"][top]["unique"]["mean"]


SHARE = sum(COUNTS[:16]) / sum(COUNTS)  # of the distractors that lie along a strong direction


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.0, math.pi / 2])
def test_gap_is_the_needles_share_minus_that_of_the_distractors(angle):
    k, mask = keys_with_needle(angle)
    assert gap_of(k, mask) == pytest.approx(math.cos(angle) ** 2 - SHARE, abs=1e-6)


def test_the_sign_flips_when_the_needle_is_planted_inside_the_top_directions():
    off, mask = keys_with_needle(math.pi / 2)
    inside, _ = keys_with_needle(0.0)
    assert gap_of(off, mask) == pytest.approx(-SHARE, abs=1e-6)
    assert gap_of(inside, mask) == pytest.approx(1 - SHARE, abs=1e-6)


def test_an_eighth_of_the_head_is_counted_by_itself():
    """Eight directions: a needle along the tenth strongest is inside 16 and outside 8."""
    k, mask = keys_with_needle(0.0, strong=9)
    eighth = sum(COUNTS[:8]) / sum(COUNTS)
    assert gap_of(k, mask, "16") == pytest.approx(1 - SHARE, abs=1e-6)
    assert gap_of(k, mask, "eighth") == pytest.approx(-eighth, abs=1e-6)
    assert tops(64) == {"16": 16, "eighth": 8}
    assert tops(256) == {"16": 16, "eighth": 32}
    assert tops(8) == {"16": 8, "eighth": 1}


def test_a_common_part_of_all_keys_changes_nothing():
    """What is measured is centred: keys that lie around a mean have the alignment of their deviations."""
    k, _ = keys_with_needle(0.7)
    mean = torch.randn(1, 2, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = k + mean
    a, _ = shares(k, *covariance(k))
    b, _ = shares(moved, *covariance(moved))
    assert torch.allclose(a[..., TOP - 1], b[..., TOP - 1], atol=1e-9)


def test_rotating_all_keys_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(300, 2, K, dtype=torch.float64, generator=generator) * torch.linspace(2, 0.1, K)
    turn = torch.linalg.qr(torch.randn(2, K, K, dtype=torch.float64, generator=generator)).Q
    turned = torch.einsum("thk,hkl->thl", k, turn)
    a, spectrum = shares(k, *covariance(k))
    b, turned_spectrum = shares(turned, *covariance(turned))
    assert torch.allclose(a, b, atol=1e-9)
    assert torch.allclose(spectrum, turned_spectrum, atol=1e-9)
    assert not torch.allclose(a[:100], a[100:200], atol=0.1)  # keys do differ in it


def test_all_directions_together_hold_all_energy():
    k = torch.randn(50, 3, 16, dtype=torch.float64)
    a, _ = shares(k, *covariance(k))
    assert torch.allclose(a[..., -1], torch.ones(50, 3, dtype=torch.float64), atol=1e-12)
    point = Point()
    mask = np.arange(50) < 5
    point.add(0, k, tokens_of(mask))  # 16 of 16: no gap is possible
    part = summary(point)["top"]["16"]
    assert part["of_isotropic_keys"] == 1.0
    assert part["unique"]["mean"] == pytest.approx(0, abs=1e-9)


def test_shares_are_those_of_a_loop_over_tokens():
    k = torch.randn(40, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    got, _ = shares(k, *covariance(k))
    for head in range(2):
        x = k[:, head].numpy()
        vectors = np.linalg.eigh(np.cov(x.T))[1][:, ::-1]
        for token in range(40):
            centred = x[token] - x.mean(0)
            for top in (1, 5, 12):
                share = np.sum((vectors[:, :top].T @ centred) ** 2) / np.sum(centred**2)
                assert got[token, head, top - 1].item() == pytest.approx(share, abs=1e-9)


def test_a_key_that_is_the_mean_is_left_out_and_an_empty_group_is_null():
    k = torch.zeros(7, 1, 4, dtype=torch.float64)
    k[:6, 0, :3] = torch.cat([torch.eye(3), -torch.eye(3)]).double()  # mean zero, which the last key is
    tokens = tokens_of(np.arange(7) >= 5)
    tokens.groups["planted"] = np.zeros(7, bool)
    point = Point()
    point.add(0, k, tokens)
    part = summary(point)["top"]["16"]
    assert part["unique"]["mean"] == pytest.approx(0)
    assert part["planted"]["mean"] is None
    assert part["histogram"]["unique"] == [0] * 39 + [1]


def test_gaps_are_pooled_by_layer_head_and_prompt():
    group = {0: [np.array([0.1, 0.2]), np.array([0.3, 0.4])], 1: [np.array([0.5, 0.6]), np.array([0.5, 0.6])]}
    other = {0: [np.array([0.4, 0.2]), np.array([0.4, 0.2])], 1: [np.array([0.4, 0.4]), np.array([0.4, 0.4])]}
    found = gaps(group, other)
    assert found["by_head"] == [pytest.approx([-0.2, 0.1]), pytest.approx([0.1, 0.2])]
    assert found["by_layer"] == pytest.approx([-0.05, 0.15])
    assert found["deviation_by_layer"] == pytest.approx([0.1 * math.sqrt(2), 0.0], abs=1e-6)
    assert found["mean"] == pytest.approx(0.05)
    assert (found["negative_cells"], found["cells"]) == (1, 4)
    assert (found["negative_layers"], found["clearly_negative_layers"], found["clearly_positive_layers"]) == (1, 0, 1)
    assert found["thirds"] == [pytest.approx(-0.05), pytest.approx(0.15), None]


@pytest.mark.parametrize("system", ["ccq-gla", "ccq-gated-deltanet", "ccq-mamba2", "ccq-gla-hedgehog"])
def test_the_operators_sigma_is_the_covariance_of_what_it_reads(system, tokenizer):
    """Two ways to one number: statistics that the operator carries along, and keys that were caught."""
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", vocab_size=len(tokenizer), initializer_range=0.2))
    found = measure(model.double().eval(), tokenizer, make_prompts(3, 12)[:2])
    read, operator = (found["points"][name] for name in ("read", "operator"))
    for top in ("16", "eighth"):
        for group in ("unique", "needle", "planted"):
            assert operator["top"][top][group]["by_head"] == [
                pytest.approx(row, abs=1e-5) for row in read["top"][top][group]["by_head"]
            ]
    assert operator["spectrum"]["by_layer"] == [pytest.approx(row, abs=1e-5) for row in read["spectrum"]["by_layer"]]


@pytest.mark.parametrize("where", ["projection", "read"])
def test_the_length_of_a_key_changes_nothing(where):
    """Keys are unit vectors wherever they are caught: the closed form holds for keys of any lengths."""
    k, mask = keys_with_needle(math.pi / 3)
    k = k * torch.linspace(0.5, 20, len(k), dtype=torch.float64)[:, None, None]
    observer = Observer()
    observer.tokens = tokens_of(mask)
    if where == "projection":
        observer.project(SimpleNamespace(layer=0, layout="separate"), k)
    else:
        observer.read(Read(0, k, k, None, None))
    gap = summary(observer.points[where])["top"]["16"]["unique"]["mean"]
    assert gap == pytest.approx(math.cos(math.pi / 3) ** 2 - SHARE, abs=1e-5)


def test_an_uncentred_operator_is_measured_with_its_own_sigma():
    config = CCQConfig.preset("ccq-gla-tiny", centred=False)
    cleaner = QueryCleaner(config, 2, 16)
    k = torch.randn(60, 2, 16, generator=torch.Generator().manual_seed(3)) + 1.0
    observer = Observer()
    observer.tokens = tokens_of(np.arange(60) < 6)
    observer.read(Read(0, k, k, torch.zeros(60, 2), cleaner))
    unit = torch.nn.functional.normalize(k.double(), dim=-1)
    second_moment = torch.einsum("thk,thl->hkl", unit, unit) / 60
    values = torch.linalg.eigvalsh(second_moment).flip(-1)
    got = summary(observer.points["operator"])["spectrum"]["by_layer"][0]
    assert got == pytest.approx((values / values.sum(-1, keepdim=True)).mean(0).tolist(), abs=1e-5)
    assert got[0] > 1.5 * summary(observer.points["read"])["spectrum"]["by_layer"][0][0]  # the mean is in it


@pytest.mark.parametrize("system", ["gla-projected-decay", "gla-projected-learned-decay", "ccq-gla-free-scale"])
def test_a_covariance_that_forgets_is_measured_as_the_operator_has_it(system, monkeypatch):
    """And lam may be above 1: the control with a learned scale takes it there."""
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(f"{system}-tiny")).double().eval()
    for name, x in model.named_parameters():
        if name.endswith("lam_scale"):
            torch.nn.init.constant_(x, 150.0)
    given: list = []
    monkeypatch.setattr(Point, "add", lambda self, layer, k, tokens, sigma=None, centre=None: given.append(sigma))
    observer = Observer()
    observer.tokens = tokens_of(np.arange(60) < 6)
    ids = torch.randint(256, (1, 60))
    with torch.no_grad():
        with watch(model, observer.project, observer.read):
            model(ids, use_cache=False)
        states = model(ids, use_cache=True).past_key_values.states
    for found, state in zip([x for x in given if x is not None], states, strict=True):
        torch.testing.assert_close(found, state["covariance"].covariance()[0])


def test_fresh_weights_already_have_a_gap_and_so_does_the_control(tokenizer):
    """Rarity alone makes one: tokens that come once have keys of their own. Without a control it proves nothing."""
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset("gla-tiny", vocab_size=len(tokenizer), key_size=32)).eval()
    found = measure(untrained(model), tokenizer, make_prompts(3))["points"]["projection"]["top"]["eighth"]
    assert found["unique"]["clearly_negative_layers"] == 2
    assert found["planted"]["clearly_negative_layers"] == 2
    assert found["rare"]["clearly_negative_layers"] == 2
    assert abs(found["novel minus planted"]["mean"]) < 0.1 * abs(found["planted"]["mean"])


def test_groups_without_tokens_are_null_not_nan(tokenizer):
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset("gla-tiny", vocab_size=len(tokenizer))).eval()
    prompt = make_prompts(3, 12)[0]
    twice = prompt.__class__(**{**vars(prompt), "planted": ()})
    assert not tokenize(twice, tokenizer).groups["planted"].any()
    found = measure(model, tokenizer, [twice])["points"]["read"]["top"]["16"]
    assert found["planted"]["mean"] is None
    assert found["unique"]["error_of_mean"] is None  # one prompt has no deviation


def test_a_tokenizer_that_leaves_nothing_is_refused(tokenizer):
    prompt = make_prompts(3, 12)[0]
    empty = prompt.__class__(**{**vars(prompt), "needle": (0, 0)})
    with pytest.raises(AnalysisError, match="makes no token of the needle"):
        tokenize(empty, tokenizer)
