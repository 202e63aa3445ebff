"""fla's own layers with cleaning attached. Its kernels need a GPU: here its naive functions stand in for them."""

from __future__ import annotations

import copy
import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from tiny_models import clean_by_hand, closed, opened
from torch import nn

import ccq
from ccq.adapter import attached
from ccq.ops.precision import unit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no GPU
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention is not installed")

KINDS = {
    "gla": ("GatedLinearAttention", "gla", {"num_heads": 2, "expand_k": 0.5, "expand_v": 1}),
    "gated_deltanet": (
        "GatedDeltaNet",
        "gated_delta_rule",
        {"num_heads": 2, "num_v_heads": 2, "head_dim": 8, "expand_v": 2, "use_short_conv": False},
    ),
    "kda": ("KimiDeltaAttention", "kda", {"num_heads": 2, "head_dim": 8, "use_short_conv": False}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Norm(nn.Module):
    """RMSNorm and gate in plain PyTorch, where fla has a kernel."""

    def forward(self, x, g=None):
        x = F.rms_norm(x, x.shape[-1:])
        return x if g is None else x * F.silu(g)


def stand_in(rule, cleaning=None):
    """The function that a layer calls, token by token; `cleaning`: with W and b of a gate, by hand."""
    naive = getattr(importlib.import_module(f"fla.ops.{rule}.naive"), f"naive_recurrent_{rule}")

    def function(*, q, k, v, g=None, gk=None, beta=None, initial_state=None, output_final_state=False, **options):
        g, raw = gk if g is None else g, q
        if options.get("use_qk_l2norm_in_kernel"):
            q, k = unit(q), unit(k)
        if cleaning is not None:
            q = clean_by_hand(raw, q, k, *cleaning)
        if options.get("use_gate_in_kernel"):
            decay = options["A_log"].exp().view(-1, *[1] * (g.ndim - 3))
            g = -decay * F.softplus(g + options["dt_bias"].view(g.shape[2:]))
        named = {"gk": g} if rule == "gla" else {"g": g, "beta": beta.sigmoid()}
        borders = [0, q.shape[1]] if options.get("cu_seqlens") is None else options["cu_seqlens"].tolist()
        outputs, states = [], []
        for n, (begin, end) in enumerate(zip(borders, borders[1:])):  # noqa: B905, RUF007
            start = initial_state if initial_state is None or len(borders) == 2 else initial_state[n : n + 1]
            rows = {name: x[:, begin:end] for name, x in {"q": q, "k": k, "v": v, **named}.items()}
            o, state = naive(**rows, initial_state=start, output_final_state=True)
            outputs.append(o)
            states.append(state)
        return torch.cat(outputs, 1), torch.cat(states) if output_final_state else None

    return function


class Model(nn.Module):
    def __init__(self, kind, monkeypatch):
        super().__init__()
        name, self.rule, options = KINDS[kind]
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it should have a convolution, which would be a kernel too
            self.layer = getattr(layers, name)(hidden_size=32, layer_idx=0, **options).eval()
        for norm in ("o_norm", "g_norm_swish_gate"):
            if hasattr(self.layer, norm):
                setattr(self.layer, norm, Norm())
        self.substitute(monkeypatch)

    def substitute(self, monkeypatch, cleaning=None):
        module = importlib.import_module(type(self.layer).__module__)
        for way in ("chunk", "fused_recurrent"):
            monkeypatch.setattr(module, f"{way}_{self.rule}", stand_in(self.rule, cleaning))

    def forward(self, x, **options):
        return self.layer(x, **options)[0]


def inputs(batch, length):
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(0))


@every_kind
@torch.no_grad()
def test_lambda_zero_is_the_layer(kind, monkeypatch):
    model = Model(kind, monkeypatch)
    x = inputs(2, 20)
    expected = model(x)
    ccq.attach(model)
    assert torch.equal(closed(model)(x), expected)
    assert not torch.equal(opened(model)(x), expected)
    assert torch.equal(ccq.detach(model)(x), expected)


@every_kind
def test_it_is_the_definition(kind, monkeypatch):
    model = Model(kind, monkeypatch)
    cleaned = opened(ccq.attach(copy.deepcopy(model)))
    x = inputs(2, 20)
    got = cleaned(x)
    got.square().sum().backward()
    cleaner = attached(cleaned)[0].cleaner
    gate = [p.detach().clone().requires_grad_() for p in (cleaner.gate_weight, cleaner.gate_bias)]
    model.substitute(monkeypatch, gate)
    expected = model(x)
    expected.square().sum().backward()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cleaner.gate_weight.grad, gate[0].grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(cleaner.gate_bias.grad, gate[1].grad, rtol=1e-3, atol=1e-5)


@every_kind
@torch.no_grad()
@pytest.mark.parametrize("decay", ["none", "backbone"])
def test_steps_padding_and_packing(kind, decay, monkeypatch):
    from fla.models.utils import Cache

    model = opened(ccq.attach(Model(kind, monkeypatch), covariance_decay=decay))
    x = inputs(1, 20)
    whole = model(x)
    cache = Cache()
    pieces = [model(part, past_key_values=cache, use_cache=True) for part in x.split([12, 5, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=2e-6)
    mask = torch.ones(2, 25, dtype=torch.long)
    mask[0, :5] = 0
    batch = torch.cat([torch.cat([inputs(1, 5), x], 1), inputs(1, 25)])
    torch.testing.assert_close(model(batch, attention_mask=mask)[0, 5:], whole[0], rtol=0, atol=2e-6)
    separate = torch.cat([model(part) for part in x.split([8, 12], 1)], 1)
    packed = model(x, cu_seqlens=torch.tensor([0, 8, 20]))
    torch.testing.assert_close(packed, separate, rtol=0, atol=2e-6)
    torch.testing.assert_close(model(x, seq_idx=(torch.arange(20) >= 8).int()[None]), separate, rtol=0, atol=2e-6)


# fla's whole models

WHOLE = {
    "gla": ("GLA", {"num_heads": 2}),
    "gated_deltanet": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 64, "expand_v": 1.0}),
    "kda": ("KDA", {"num_heads": 2, "head_dim": 64}),
}


def whole(kind):
    """A tiny model of fla's, the same at every call."""
    from fla import models

    name, options = WHOLE[kind]
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    config = getattr(models, f"{name}Config")(**sizes, **options, initializer_range=0.1, fuse_cross_entropy=False)
    return getattr(models, f"{name}ForCausalLM")(config).eval()


@every_kind
def test_an_adapter_of_a_whole_model_is_saved_and_loaded(kind, tmp_path):
    model = opened(ccq.attach(whole(kind)))
    gates = {name: x for name, x in model.state_dict().items() if "cleaner" in name}
    assert len(gates) == 4
    ccq.save_adapter(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("adapter", "whole"):
        again = ccq.load_adapter(whole(kind), tmp_path / folder).state_dict()
        assert all(torch.equal(again[name], x) for name, x in gates.items())
    names = set(whole(kind).state_dict())
    assert set(ccq.detach(model).state_dict()) == names


@pytest.mark.gpu
@every_kind
def test_whole_models_through_flas_kernels(kind):
    """The model as it was with lam = 0; with gates steps continue a prefill, padding and packing change nothing."""
    model = whole(kind).bfloat16().cuda()
    ids = torch.randint(3, 64, (1, 200), generator=torch.Generator().manual_seed(0)).cuda()

    def close(got, expected):
        assert (got.float() - expected.float()).abs().mean() < 0.02 * expected.float().abs().mean()

    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        ccq.attach(model)
        close(closed(model)(ids, use_cache=False).logits, expected)
        cleaned = opened(model)(ids, use_cache=False).logits
        assert (cleaned - expected).abs().mean() > 0.03 * expected.abs().mean()  # more than `close` allows
        first = model(ids[:, :150], use_cache=True)
        cache, steps = first.past_key_values, []
        for t in range(150, 200):
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
        close(torch.cat(steps, 1), cleaned[:, 150:])
        padded = torch.cat([ids[:, :13], ids], 1)
        mask = torch.ones_like(padded)
        mask[:, :13] = 0
        close(model(padded, attention_mask=mask, use_cache=False).logits[:, 13:], cleaned)
        separate = torch.cat([model(part, use_cache=False).logits for part in ids.split([80, 120], 1)], 1)
        borders = torch.tensor([0, 80, 200], device="cuda", dtype=torch.int32)
        close(model(ids, cu_seqlens=borders, use_cache=False).logits, separate)
    model.train()(ids, labels=ids, use_cache=False).loss.backward()
    for layer in attached(model).values():
        assert layer.cleaner.gate_weight.grad.abs().max() > 0
