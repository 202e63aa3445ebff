"""Mesa's layer is the one that fla has, and it is a system like any other."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, unit_vector
from mixer_helpers import build, tokens

from ccq.mixers import Sequences
from ccq.model import CCQConfig, CCQForCausalLM


def test_mesa_is_its_equations():
    """fla's layer written out around its exact solution: SiLU in the convolutions of q and k, none for v, no scale."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.ops.mesa_net.naive import naive_mesa_net_exact

    mixer, x = build({"mixer": "mesa", "conv_size": 4, "unit_qk": True, "value_size": 8}).float(), tokens(2, 70).float()

    def convolved(name: str) -> torch.Tensor:
        y = F.linear(x, getattr(mixer, f"{name}_proj").weight).mT
        y = F.conv1d(y, getattr(mixer, f"{name}_conv1d").weight, padding=3, groups=16)[..., :70].mT
        return unit_vector(F.silu(y).view(2, 70, 2, 8))

    v = F.linear(x, mixer.v_proj.weight).view(2, 70, 2, 8)
    a, b = (F.linear(x, p.weight, p.bias) for p in (mixer.a_proj, mixer.b_proj))
    lamb = 0.25 + F.softplus(mixer.lambda_params).view(2, 8)
    o, _, _ = naive_mesa_net_exact(convolved("q"), convolved("k"), v, F.logsigmoid(a), lamb, b.sigmoid())
    o = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * mixer.o_norm.weight
    o = o * F.silu(F.linear(x, mixer.g_proj.weight).view(2, 70, 2, 8))
    assert_close("y", F.linear(o.reshape(2, 70, 16), mixer.o_proj.weight), mixer(x, Sequences(2))[0], 1e-4)


def test_lambda_starts_at_one_and_does_not_decay():
    mixer = CCQForCausalLM(CCQConfig.preset("mesa-2-tiny")).model.layers[0].mixer
    torch.testing.assert_close(mixer.ridge, torch.ones(4, 16))
    assert mixer.lambda_params._no_weight_decay
    with torch.no_grad():
        mixer.lambda_params.fill_(-100.0)
    torch.testing.assert_close(mixer.ridge, torch.full((4, 16), 0.25))


def test_a_preset_has_short_heads_and_counts_both_states():
    for size, heads, head in (("1.3b", 16, 128), ("nano", 4, 128), ("pico", 4, 64)):
        config = CCQConfig.preset(f"mesa-30-{size}")
        assert (config.num_heads, config.key_size, config.value_size) == (heads, head, head)
    with torch.device("meta"):
        mixer = CCQForCausalLM(CCQConfig.preset("mesa-30-nano")).model.layers[0].mixer
    conv = 2 * 512 * 3 * 4
    assert mixer.state_bytes() == conv + 4 * 128 * 256 * 4


@pytest.mark.parametrize("option", ["clean", "current_key_read"])
def test_mesa_is_not_cleaned(option):
    with pytest.raises(ValueError, match=f"{option}: cannot be used with mesa"):
        CCQConfig.preset("mesa-2-tiny", **{option: True})


@pytest.mark.parametrize("steps", [2, 30])
def test_a_model_learns_with_it(steps):
    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(f"mesa-{steps}-tiny"))
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
