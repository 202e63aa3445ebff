"""lam by place against the gate's equation, and the reader of a run's log."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from helpers import pack

from ccq import figures
from ccq.analysis import AnalysisError, gates
from ccq.analysis.capture import run, watch
from ccq.analysis.prompts import filler, make_prompts, tokenize
from ccq.model import CCQConfig, CCQForCausalLM


def make(tokenizer, system="ccq-gla", **changes):
    torch.manual_seed(0)
    settings = {"vocab_size": len(tokenizer), "initializer_range": 0.2, **changes}
    return CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", **settings)).eval()


def test_without_weights_lam_is_the_sigmoid_of_the_bias_everywhere(tokenizer):
    model = make(tokenizer, gate_init=0.3)
    for layer in model.model.layers:
        layer.mixer.cleaner.gate_bias.data = torch.tensor([-1.0, 0.5]) + layer.mixer.layer
    found = gates.measure(model, tokenizer, make_prompts(3, 8)[:2], " ".join(filler()[:3]))
    expected = [[1 / (1 + math.exp(1 - i)), 1 / (1 + math.exp(-0.5 - i))] for i in range(2)]
    for place in gates.PLACES:
        assert found["lam"][place] == [pytest.approx(row, abs=1e-6) for row in expected]
    assert found["of_bias"] == [pytest.approx(row, abs=1e-6) for row in expected]
    assert found["tokens"]["text"] == len(tokenizer(" ".join(filler()[:3]))["input_ids"])


@pytest.mark.parametrize("system", ["ccq-gla", "ccq-gated-deltanet", "ccq-mamba2"])
def test_lam_is_averaged_over_the_tokens_of_each_place(tokenizer, system):
    """By the gate's own record of a run over prompt and answer."""
    model = make(tokenizer, system)
    every = [layer.mixer.cleaner for layer in model.model.layers]
    for cleaner in every:
        torch.nn.init.normal_(cleaner.gate_weight)
    prompt = make_prompts(3, 8)[0]
    found = gates.measure(model, tokenizer, [prompt], "The cat")
    ids = tokenizer(prompt.text)["input_ids"]
    answer = tokenizer(" " + prompt.answer)["input_ids"]
    groups = tokenize(prompt, tokenizer).groups
    for cleaner in every:
        cleaner.record = True
    with torch.no_grad():
        model(torch.tensor([ids + answer]))
    for layer, cleaner in enumerate(every):
        lam = cleaner.lam[0].double()
        # position t predicts token t + 1: the question's last token predicts the answer's first
        retrieval = lam[len(ids) - 1 : len(ids) + len(answer) - 1].mean(0)
        assert found["lam"]["retrieval"][layer] == pytest.approx(retrieval.tolist(), abs=1e-6)
        needle = lam[: len(ids)][torch.from_numpy(groups["needle"])].mean(0)
        assert found["lam"]["needle"][layer] == pytest.approx(needle.tolist(), abs=1e-6)
    assert found["tokens"]["retrieval"] == len(answer)
    assert found["tokens"]["question"] == tokenize(prompt, tokenizer).question.sum() - 1


def constant_keys(tokenizer, **changes):
    """A model whose tokens have one embedding, so that the first layer has one query and one key of each head."""
    model = make(tokenizer, "gla-projected", **changes)
    weight = model.model.embed_tokens.weight
    weight.data = weight.data[:1].expand_as(weight).clone()
    return model


def test_where_all_keys_are_equal_nothing_is_turned(tokenizer):
    found = gates.measure(constant_keys(tokenizer), tokenizer, make_prompts(3, 8)[:1], "The cat had a bone")
    for place in gates.PLACES:
        assert found["angle"][place]["median"][0] <= found["angle"][place]["high"][0] < 0.05  # what rounding leaves


@pytest.mark.parametrize("lam", [1.0, 0.3])
def test_the_angle_is_that_of_the_closed_form(tokenizer, lam):
    """Uncentred, Sigma of equal keys is k k^T: the projected step takes lam of (q.k) k. Then q_clean has (1 - lam) c
    along k and sqrt(1 - c^2) across it, c = q.k; at lam = 1 the cosine of the angle is sqrt(1 - c^2)."""
    model = constant_keys(tokenizer, fixed_lam=lam, centred=False)
    seen = []
    with watch(model, read=lambda r: seen.append((r.q, r.k)) if r.layer == 0 else None):
        run(model, [1, 2])
    q, k = (torch.nn.functional.normalize(x[0].double(), dim=-1) for x in seen[0])  # [H, K]
    c = (q * k).sum(-1)
    angle = torch.rad2deg((torch.atan2((1 - c**2).sqrt(), c) - torch.atan2((1 - c**2).sqrt(), (1 - lam) * c)).abs())
    if lam == 1:
        torch.testing.assert_close(angle, torch.rad2deg(torch.acos((1 - c**2).sqrt())))
    found = gates.measure(model, tokenizer, make_prompts(3, 8)[:1], "The cat had a bone")
    for place in gates.PLACES:  # the same at every token; two heads
        got = [found["angle"][place][name][0] for name in ("median", "high")]
        every = np.repeat(angle.numpy(), found["tokens"][place])
        assert got == pytest.approx(np.quantile(every, (0.5, 0.95)).tolist(), abs=0.02)
    assert model.model.layers[0].mixer.cleaner.record_angle is False
    figure, *_ = figures.of_analysis(found | {"kind": "gate", "model": {"name": "x"}})
    assert figure.panels[-1].title == "how far q is turned"


def test_a_model_with_a_fixed_lam_has_no_bias(tokenizer):
    found = gates.measure(make(tokenizer, fixed_lam=0.25), tokenizer, make_prompts(3, 8)[:1], "The cat")
    assert found["of_bias"] == [None, None]
    assert np.allclose(found["lam"]["text"], 0.25)


def test_a_model_that_does_not_clean_is_refused(tokenizer):
    with pytest.raises(AnalysisError, match="has no cleaning"):
        gates.measure(make(tokenizer, "gla"), tokenizer, make_prompts(3, 8)[:1], "The cat")


LINES = [
    {"step": 10, "loss": 3.0, "lam": [0.01, 0.02], "lam_of_decay_alone": 0.0101},
    {"step": 10, "valid_loss": 3.1},
    {"step": 20, "loss": 2.0, "lam": [0.03, None], "lam_of_decay_alone": 0.0102},
]


def test_the_log_of_a_run_is_read_past_lines_without_lam_and_a_cut_off_end(tmp_path):
    text = "\n".join(json.dumps(line) for line in LINES) + '\n{"step": 30, "lam": [0.0'
    (tmp_path / "log.jsonl").write_text(text)
    found = gates.course(tmp_path)
    assert found["step"] == [10, 20]
    assert found["lam"] == [[0.01, 0.02], [0.03, None]]
    assert found["decay_alone"] == [0.0101, 0.0102]
    assert gates.course(tmp_path / "log.jsonl") == found
    pack(tmp_path / "log.jsonl")
    assert gates.course(tmp_path) == found


def test_a_log_without_the_curve_of_decay_takes_it_from_the_config(tmp_path):
    """b_n = b_0 prod (1 - lr_i 0.1), with the rate of each step as the config says it: here constant."""
    from ccq.train.config import Config, Optimizer, preset, to_json

    options = Optimizer(lr=0.01, warmup=0, schedule="constant")
    config = Config(preset("ccq-gla-tiny"), optimizer=options, steps=50)
    (tmp_path / "config.json").write_text(to_json(config))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": n, "lam": 0.5}) + "\n" for n in (1, 50)))
    found = gates.course(tmp_path)
    bias = math.log(0.01 / 0.99)
    assert found["decay_alone"] == pytest.approx([1 / (1 + math.exp(-bias * 0.999**n)) for n in (1, 50)])
    assert found["lam"] == [[0.5], [0.5]]
    (tmp_path / "config.json").unlink()
    assert gates.course(tmp_path)["decay_alone"] is None


def test_a_log_that_is_missing_or_has_no_lam_is_named(tmp_path):
    with pytest.raises(AnalysisError, match=r"log\.jsonl does not exist"):
        gates.course(tmp_path)
    (tmp_path / "log.jsonl").write_text(json.dumps(LINES[1]) + "\n")
    with pytest.raises(AnalysisError, match="has no lam in it"):
        gates.course(tmp_path)
