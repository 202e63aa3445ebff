"""Which parameters decay, the learning rate of each step, and where decay alone takes the gate."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from train_helpers import small

from ccq.model import CCQForCausalLM
from ccq.recipes import recipe
from ccq.train.config import model_config
from ccq.train.optimizer import decaying, learning_rate, make_optimizer, pure_decay


def parameters_of(system, **changes):
    model = CCQForCausalLM(model_config(small(system, **changes).model)).double()
    return model, dict(model.named_parameters())


EXEMPT = {  # last part of the name: what must not decay, whatever its shape
    "gla": {"mixer_norm.weight", "mlp_norm.weight", "norm.weight", "o_norm.weight", "gk_proj.1.bias"},
    "ccq-gated-deltanet": {"mixer_norm.weight", "mlp_norm.weight", "norm.weight", "o_norm.weight", "A_log", "dt_bias"},
    "ccq-mamba2": {"mixer_norm.weight", "norm.weight", "A_log", "dt_bias", "D", "conv1d.bias"},
    "gla-current-key": {"mixer_norm.weight", "mlp_norm.weight", "norm.weight", "o_norm.weight", "gk_proj.1.bias",
                        "current_key"},
}  # fmt: skip


@pytest.mark.parametrize("system", EXEMPT)
def test_norms_biases_and_decay_rates_do_not_decay(system):
    model, parameters = parameters_of(system)
    decay = decaying(model)
    for name in parameters:
        assert (name not in decay) == any(name.endswith(end) for end in EXEMPT[system]), name


@pytest.mark.parametrize("decays", [True, False])
def test_the_bias_of_the_gate_decays_as_the_config_says(decays):
    model, parameters = parameters_of("ccq-gla", decay_gate_bias=decays)
    biases = {name for name in parameters if name.endswith("gate_bias")}
    assert len(biases) == 2
    assert (biases <= decaying(model)) == decays
    assert biases & decaying(model) == (biases if decays else set())


def test_the_optimizer_takes_every_parameter_once_with_its_decay():
    config = small("ccq-gated-deltanet", weight_decay=0.25)
    model, parameters = parameters_of("ccq-gated-deltanet")
    before = {name: x.detach().clone() for name, x in parameters.items()}
    optimizer = make_optimizer(parameters, decaying(model), config.optimizer)
    in_groups = {id(x): group["weight_decay"] for group in optimizer.param_groups for x in group["params"]}
    assert len(in_groups) == len(parameters) == sum(len(g["params"]) for g in optimizer.param_groups)
    for name, x in parameters.items():
        assert in_groups[id(x)] == (0.25 if name in decaying(model) else 0.0)
        assert torch.equal(x, before[name])  # making it moves nothing
        assert x.grad is None
        assert all((moment == 0).all() for moment in optimizer.state[x].values())


def test_the_first_step_is_adamws(monkeypatch):
    """x (1 - lr wd) - lr g / (|g| + eps): the moments are as if none had been taken."""
    config = small("gla", weight_decay=0.1, eps=1e-3, betas=(0.8, 0.7))
    model, parameters = parameters_of("gla")
    decay = decaying(model)
    optimizer = make_optimizer(parameters, decay, config.optimizer)
    before = {name: x.detach().clone() for name, x in parameters.items()}
    for x in parameters.values():
        x.grad = torch.randn_like(x)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    optimizer.step()
    for name, x in parameters.items():
        kept = before[name] * (1 - 1e-2 * (0.1 if name in decay else 0.0))
        torch.testing.assert_close(x.detach(), kept - 1e-2 * x.grad / (x.grad.abs() + 1e-3), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(optimizer.state[x]["exp_avg"], 0.2 * x.grad)
        torch.testing.assert_close(optimizer.state[x]["exp_avg_sq"], 0.3 * x.grad**2)


def test_warm_up_and_cosine():
    config = small(steps=100, lr=1.0, warmup=10, schedule="cosine")
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-3
    constant = small(steps=100, lr=1.0, warmup=10, schedule="constant")
    assert [learning_rate(step, constant) for step in range(10, 100)] == [1.0] * 90


def test_pure_decay_is_what_adamw_does_without_a_gradient():
    config = small("ccq-gla", steps=50, lr=0.2, warmup=10, schedule="cosine", weight_decay=0.3)
    bias = torch.nn.Parameter(torch.full((1,), math.log(0.01 / 0.99), dtype=torch.float64))
    optimizer = make_optimizer({"cleaner.gate_bias": bias}, {"cleaner.gate_bias"}, config.optimizer)
    curve = [bias.sigmoid().item()]
    for step in range(config.steps):
        bias.grad = torch.zeros_like(bias)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        curve.append(bias.sigmoid().item())
    np.testing.assert_allclose(pure_decay(config), curve, rtol=1e-12)
    faster = small("ccq-gla", steps=50, lr=0.1, warmup=10, schedule="cosine", weight_decay=0.3, rates=("gate=0.2",))
    np.testing.assert_allclose(pure_decay(faster), curve, rtol=1e-12)
    for train, moves in (("q_proj", False), ("cleaner", True)):
        assert (np.ptp(pure_decay(dataclasses.replace(config, train=train))) > 0) == moves
    assert curve[-1] > 0.05


@pytest.mark.parametrize("name", ["ccq_gla_500m", "ccq_gated_deltanet_1.3b"])
def test_decay_alone_opens_the_gate_as_far_as_the_paper_reports(name):
    """The paper: from 0.01 to 0.35-0.45, which it reads as learned."""
    curve = pure_decay(recipe(name))
    assert curve[0] == pytest.approx(0.01)
    assert 0.43 < curve[-1] < 0.48
    assert (pure_decay(recipe("ccq_gla_no_decay_500m")) == curve[0]).all()
