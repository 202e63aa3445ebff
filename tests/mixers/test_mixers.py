"""Every mixer, plain and cleaned: what a decoder relies on, and equality with layers nobody here wrote.

B sequences (or N packed ones), T tokens, D hidden size.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, unit_vector
from mixer_helpers import ALL, BACKBONES, CLEANED, DELTA, SIZES, D, assert_same_state, build, clone, tokens
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ccq.mixers import MIXERS, Mixer, Sequences, make_mixer, no_weight_decay, register
from ccq.model.config import CCQConfig

every = pytest.mark.parametrize("name", ALL)


# What the decoder relies on


@every
def test_steps_continue_a_prefill(name):
    """Whatever part of the tokens was seen at once; 64 is a chunk."""
    mixer = build(ALL[name])
    for length, split in ((70, 0), (9, 1), (9, 2), (70, 64), (70, 69)):
        x = tokens(2, length)
        whole, final = mixer(x, Sequences(2), output_state=True)
        state = mixer.new_state(2, None, torch.float64)
        parts = []
        if split:
            y, state = mixer(x[:, :split], Sequences(2), output_state=True)
            parts = list(y.unbind(1))
        held = pytree.tree_leaves(state)
        state = pytree.tree_map(torch.Tensor.detach, state)
        parts += [mixer.step(token, state) for token in x[:, split:].unbind(1)]
        assert_close(f"y after {split}", whole, torch.stack(parts, 1), 1e-12)
        assert_same_state(final, state, 1e-12)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(held, pytree.tree_leaves(state), strict=True))


@every
def test_a_forward_continues_a_forward(name):
    mixer, x = build(ALL[name]), tokens(2, 70)
    whole, final = mixer(x, Sequences(2), output_state=True)
    for split in (1, 2, 64, 69):
        first, state = mixer(x[:, :split], Sequences(2), output_state=True)
        before = clone(state)
        second, state_2 = mixer(x[:, split:], Sequences(2), state, output_state=True)
        assert_close(f"y, cut at {split}", whole, torch.cat([first, second], 1), 1e-12)
        assert_same_state(final, state_2, 1e-12)
        assert_same_state(before, state, 0)  # it was read, not written
        assert mixer(x[:, split:], Sequences(2), state)[1] is None


def gradients(mixer: Mixer, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    inputs = {"x": x, **dict(mixer.named_parameters())}
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    grads = torch.autograd.grad((y * weight).sum(), list(inputs.values()))
    return {f"gradient of {name}": grad for name, grad in zip(inputs, grads, strict=True)}


@every
@pytest.mark.parametrize("started", [False, True], ids=["fresh", "continued"])
def test_packed_equals_separate(name, started):
    lengths = [3, 0, 65, 1, 20]
    mixer, x = build(ALL[name]), tokens(1, sum(lengths)).requires_grad_()
    cu_seqlens = torch.tensor([0, *accumulate(lengths)])
    start = mixer(tokens(len(lengths), 2, seed=3), Sequences(len(lengths)), output_state=True)[1] if started else None
    start = pytree.tree_map(torch.Tensor.detach, start) if started else None
    packed, state = mixer(x, Sequences(len(lengths), cu_seqlens), start, output_state=True)
    alone, finals = [], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        own = pytree.tree_map(lambda s, n=n: s[n : n + 1], start) if started else None
        if begin == end:
            finals.append(own if started else mixer.new_state(1, None, torch.float64))
            continue
        y, final = mixer(x[:, begin:end], Sequences(1), own, output_state=True)
        alone.append(y)
        finals.append(final)
    assert_close("y", torch.cat(alone, 1), packed, 1e-12)
    assert_same_state(pytree.tree_map(lambda *s: torch.cat(s), *finals), state, 1e-12)
    ref, got = gradients(mixer, torch.cat(alone, 1), x), gradients(mixer, packed, x)
    for key in ref:
        assert_close(key, ref[key], got[key], 1e-11)


@every
def test_a_later_token_changes_nothing_earlier(name):
    mixer, x = build(ALL[name]), tokens(1, 70).requires_grad_()
    y, _ = mixer(x, Sequences(1))
    for t in (1, 63, 64, 69):
        (grad,) = torch.autograd.grad(y[:, :t].square().sum(), x, retain_graph=True)
        assert not grad[:, t:].any()
        assert grad[:, t - 1].any()


@every
def test_every_parameter_learns(name):
    mixer, x = build(ALL[name]), tokens(1, 9).requires_grad_()
    for key, grad in gradients(mixer, mixer(x, Sequences(1))[0], x).items():
        assert grad.isfinite().all(), key
        assert grad.abs().max() > 1e-9, key


@every
def test_the_state_does_not_grow_and_is_what_it_says(name):
    mixer = build(ALL[name])
    for n, length in ((1, 1), (3, 40)):
        _, state = mixer(tokens(n, length), Sequences(n), output_state=True)
        new = mixer.new_state(n, None, torch.float64)
        assert state.keys() == new.keys()
        for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(new), strict=True):
            assert (a.shape, a.dtype, a.shape[0]) == (b.shape, b.dtype, n)
            assert b.is_contiguous()
            assert a.is_contiguous()
            assert not b.any()
        assert sum(x.nbytes for x in pytree.tree_leaves(state)) == n * mixer.state_bytes(length)
    assert ("covariance" in state) == mixer.config.clean


def test_state_bytes_of_the_paper():
    """63.0 MiB a sequence for GLA and Gated DeltaNet at 1.3B, 94.6 with the covariance."""
    for name, expected in (("gla-1.3b", 63.0), ("ccq-gla-1.3b", 94.6)):
        config = CCQConfig.preset(name)
        with torch.device("meta"):
            mixer = make_mixer(config, 0).bfloat16()
        assert round(mixer.state_bytes() * config.num_hidden_layers / 2**20, 1) == expected


@pytest.fixture
def plain_matmul():
    """Without oneDNN, whose bf16 products take instructions that not every CPU it takes for able has."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def test_states_are_fp32_in_half_precision(plain_matmul):
    mixer = make_mixer(CCQConfig(**SIZES, mixer="gated_deltanet", clean=True, **DELTA), 0).bfloat16()
    x = tokens(2, 5).bfloat16()
    y, state = mixer(x, Sequences(2), output_state=True)
    assert y.dtype == torch.bfloat16
    new = mixer.new_state(2, None, torch.bfloat16)
    for s in (state, new):
        assert s["recurrent"].dtype == s["covariance"].second_moment.dtype == torch.float32
        assert s["conv"].dtype == torch.bfloat16
    z = mixer.step(x[:, 0], new)
    assert z.dtype == torch.bfloat16
    assert_close("first token", y[:, 0], z, 2**-6)  # a few roundings to bf16 on the way


def test_autocast_runs_in_half_precision_with_a_full_gate(plain_matmul):
    mixer = make_mixer(CCQConfig(**SIZES, mixer="gla", feature_map="hedgehog", clean=True), 0)
    mixer.cleaner.record = True
    x = tokens(2, 5).float()
    full, _ = mixer(x, Sequences(2))
    with torch.autocast("cpu", torch.bfloat16):
        half, state = mixer(x, Sequences(2), output_state=True)
        mixer.step(x[:, 0], mixer.new_state(2, None, torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert mixer.cleaner.lam.dtype == torch.float32
    assert state["recurrent"].dtype == torch.float32
    assert_close("y", full, half.float(), 2**-5)


# lam = 0


def with_weights_of(mixer: Mixer, options: dict) -> Mixer:
    other = build(options)
    missing = other.load_state_dict(mixer.state_dict(), strict=False)
    assert not missing.missing_keys
    assert all("gate" in key for key in missing.unexpected_keys)
    return other


@pytest.mark.parametrize("name", CLEANED)
@pytest.mark.parametrize("normalize", ["unit", "stats"])
def test_lam_zero_is_the_backbone(name, normalize):
    """With unit q and k; "stats": the backbone as it is, to the last bit."""
    mixer, x = build({**CLEANED[name], "normalize": normalize}), tokens(2, 70)
    unit_qk = normalize == "unit" or CLEANED[name].get("unit_qk", False)
    backbone = with_weights_of(mixer, {**CLEANED[name], "clean": False, "unit_qk": unit_qk})
    cleaned, _ = mixer(x, Sequences(2))
    ref, final = backbone(x, Sequences(2), output_state=True)
    assert (cleaned - ref).abs().max() > 1e-4  # it does something
    mixer.cleaner.intervention = torch.zeros_like
    y, state = mixer(x, Sequences(2), output_state=True)
    state.pop("covariance")
    if normalize == "stats":
        assert torch.equal(y, ref)
        assert_same_state(final, state, 0)
    else:
        assert_close("y", ref, y, 1e-13)
        assert_same_state(final, state, 1e-13)
    state, new = (m.new_state(2, None, torch.float64) for m in (backbone, mixer))
    for token in x[:, :4].unbind(1):
        assert_close("step", backbone.step(token, state), mixer.step(token, new), 1e-13)


def test_a_fixed_lam_is_a_gate_that_does_not_move():
    x = tokens(2, 40)
    fixed = build({"mixer": "gla", "clean": True, "fixed_lam": 0.7})
    gated = build({"mixer": "gla", "clean": True})
    gated.load_state_dict(fixed.state_dict(), strict=False)
    gated.cleaner.intervention = lambda lam: torch.full_like(lam, 0.7)
    assert torch.equal(fixed(x, Sequences(2))[0], gated(x, Sequences(2))[0])


# Against layers of others


def assert_same_layer(ours: Mixer, theirs: nn.Module, pairs: dict[str, Tensor], x: Tensor) -> None:
    """Outputs and gradients; `pairs` maps our parameters to slices of the gradients of theirs."""
    x = x.requires_grad_()
    ref, got = theirs(x), ours(x, Sequences(x.shape[0]))[0]
    assert_close("y", ref, got, 1e-5)
    weight = torch.randn(ref.shape, generator=torch.Generator().manual_seed(5))
    their_parameters = dict(theirs.named_parameters())
    grads = torch.autograd.grad((ref * weight).sum(), [x, *their_parameters.values()])
    their_grads = dict(zip(["x", *their_parameters], grads, strict=True))
    our_parameters = dict(ours.named_parameters())
    grads = torch.autograd.grad((got * weight).sum(), [x, *our_parameters.values()])
    assert_close("gradient of x", their_grads["x"], grads[0], 1e-4)
    for name, grad in zip(our_parameters, grads[1:], strict=True):
        assert_close(f"gradient of {name}", pairs[name](their_grads), grad, 1e-4)


def test_same_as_transformers_mamba2(monkeypatch):
    from transformers import Mamba2Config
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=24, num_heads=4, head_dim=12, state_size=8, n_groups=1, conv_kernel=4, expand=2, chunk_size=16,
        num_hidden_layers=1, vocab_size=8, layer_norm_epsilon=1e-6,
    )  # fmt: skip
    for name in ("causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"):
        monkeypatch.setattr(theirs, name, inspect.unwrap(getattr(theirs, name)))
    block = theirs.Mamba2Mixer(config, layer_idx=0)
    with torch.no_grad():
        for p in block.parameters():
            if p.ndim > 1 or p is block.norm.weight or p is block.conv1d.bias:
                p.normal_(0, 0.3)
    mixer = make_mixer(CCQConfig(**SIZES, mixer="mamba2", conv_size=4), 0)
    mixer.load_state_dict(block.state_dict())  # the same names
    pairs = {name: (lambda grads, name=name: grads[name]) for name, _ in mixer.named_parameters()}
    assert_same_layer(mixer, block, pairs, tokens(2, 77).float())


def test_same_as_transformers_gated_deltanet(monkeypatch):
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=D, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=12, linear_conv_kernel_dim=4, num_hidden_layers=1, rms_norm_eps=1e-6, vocab_size=8,
    )  # fmt: skip
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(theirs, name, inspect.unwrap(getattr(theirs, name)))
    layer = theirs.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    with torch.no_grad():
        for p in layer.parameters():
            if p.ndim > 1 or p is layer.norm.weight:
                p.normal_(0, 0.3)
    mixer = make_mixer(CCQConfig(**SIZES, mixer="gated_deltanet", **DELTA), 0)

    def of_heads(key: str, begin: int, end: int):  # theirs: for each head its q, k, v, z (and its b, a)
        return lambda p: p[key].unflatten(0, (2, -1))[:, begin:end].flatten(0, 1)

    def of_channels(begin: int, end: int):
        return lambda p: p["conv1d.weight"][begin:end]

    pairs = {
        "q_proj.weight": of_heads("in_proj_qkvz.weight", 0, 8),
        "k_proj.weight": of_heads("in_proj_qkvz.weight", 8, 16),
        "v_proj.weight": of_heads("in_proj_qkvz.weight", 16, 28),
        "g_proj.weight": of_heads("in_proj_qkvz.weight", 28, 40),
        "b_proj.weight": of_heads("in_proj_ba.weight", 0, 1),
        "a_proj.weight": of_heads("in_proj_ba.weight", 1, 2),
        "q_conv1d.weight": of_channels(0, 16),
        "k_conv1d.weight": of_channels(16, 32),
        "v_conv1d.weight": of_channels(32, 56),
        "o_norm.weight": lambda p: p["norm.weight"],
        "o_proj.weight": lambda p: p["out_proj.weight"],
        "A_log": lambda p: p["A_log"],
        "dt_bias": lambda p: p["dt_bias"],
    }
    theirs_now = layer.state_dict()
    mixer.load_state_dict({name: take(theirs_now) for name, take in pairs.items()})
    assert_same_layer(mixer, layer, pairs, tokens(2, 77).float())


def test_gla_is_its_equations():
    """Written out around fla's naive recurrence: logsigmoid / 16, norm a head, swish gate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.ops.gla.naive import naive_recurrent_gla

    mixer, x = build({"mixer": "gla"}).float(), tokens(2, 70).float()
    q, k, v = (
        F.linear(x, p.weight).view(2, 70, 2, size)
        for p, size in ((mixer.q_proj, 8), (mixer.k_proj, 8), (mixer.v_proj, 12))
    )
    low = F.linear(x, mixer.gk_proj[0].weight)
    gk = F.logsigmoid(F.linear(low, mixer.gk_proj[1].weight, mixer.gk_proj[1].bias)).view(2, 70, 2, 8) / 16
    o, _ = naive_recurrent_gla(q, k, v, gk)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * mixer.o_norm.weight
    o = o * F.silu(F.linear(x, mixer.g_proj.weight).view(2, 70, 2, 12))
    assert_close("y", F.linear(o.reshape(2, 70, 24), mixer.o_proj.weight), mixer(x, Sequences(2))[0], 1e-5)


@pytest.mark.parametrize("name", ["linear attention", "retnet", "gla, hedgehog"])
def test_reads_are_weighted_sums_of_values(name):
    """The definition as a matrix: o_t = sum_{j<=t} (q_t . k_j decay^(t-j)) v_j / sqrt(K)."""
    mixer, x = build(BACKBONES[name]), tokens(1, 70)
    q, k, v = (p(x)[0].unflatten(-1, (2, -1)).transpose(0, 1) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    distance = (torch.arange(70)[:, None] - torch.arange(70)).clamp(min=0)
    decay = torch.ones(2, 70, 70, dtype=torch.float64)
    if name == "retnet":
        decay = torch.stack([(1 - 2.0**-5) ** distance.double(), (1 - 2.0**-6) ** distance.double()])
    if name == "gla, hedgehog":
        q, k = (
            torch.cat([2 * y, -2 * y], -1).softmax(-1)
            for y in (q @ mixer.feature_map_q.weight.T, k @ mixer.feature_map_k.weight.T)
        )
        with torch.no_grad():  # a gate this open forgets nothing
            mixer.gk_proj[1].bias.fill_(1e3)
    o = ((q @ k.mT * decay).tril() @ v / 8**0.5).transpose(0, 1)[None]
    assert_close("y", mixer.output(o, mixer.g_proj(x)), mixer(x, Sequences(1))[0], 1e-12)


def test_cleaning_is_the_operator_between_gate_and_read():
    """CCQ-GLA written out: lam from the raw query of all heads, Sigma of the unit keys, no second normalisation."""
    mixer, x = build({"mixer": "linear_attention", "clean": True}), tokens(1, 20)
    q, k, v = (p(x)[0].unflatten(-1, (2, -1)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    lam = torch.sigmoid(q.flatten(1) @ mixer.cleaner.gate_weight.T + mixer.cleaner.gate_bias)  # [T, H]
    q, k = unit_vector(q), unit_vector(k)
    o = torch.zeros(20, 2, 12, dtype=torch.float64)
    for t in range(20):
        for h in range(2):
            keys = k[: t + 1, h]
            sigma = keys.T @ keys / (t + 1) - torch.outer(keys.mean(0), keys.mean(0))
            clean = q[t, h] - lam[t, h] * sigma @ q[t, h]
            o[t, h] = 8**-0.5 * (keys @ clean) @ v[: t + 1, h]
    assert_close("y", mixer.output(o[None], mixer.g_proj(x)), mixer(x, Sequences(1))[0], 1e-12)


def test_mamba2_is_its_equations_in_groups():
    """Written out: heads 0, 1 read with C and B of group 0, heads 2, 3 with those of group 1; a norm for each group."""
    mixer, x = build({"mixer": "mamba2", "conv_size": 4, "num_groups": 2, "clean": True}), tokens(1, 12)
    gate, inner, dt = mixer.in_proj(x)[0].split([48, 48 + 32, 4], -1)
    inner = F.conv1d(inner.T[None], mixer.conv1d.weight, mixer.conv1d.bias, padding=3, groups=80)[0, :, :12].T
    values, b, c = F.silu(inner).split([48, 16, 16], -1)
    values, b, c = values.view(12, 4, 12), b.view(12, 2, 8), c.view(12, 2, 8)
    lam = torch.sigmoid(c.flatten(1) @ mixer.cleaner.gate_weight.T + mixer.cleaner.gate_bias)
    b, c = unit_vector(b), unit_vector(c)
    dt = F.softplus(dt + mixer.dt_bias)
    y = torch.zeros(12, 4, 12, dtype=torch.float64)
    for h in range(4):
        state = torch.zeros(8, 12, dtype=torch.float64)
        for t in range(12):
            keys = b[: t + 1, h // 2]
            sigma = keys.T @ keys / (t + 1) - torch.outer(keys.mean(0), keys.mean(0))
            query = c[t, h // 2] - lam[t, h // 2] * sigma @ c[t, h // 2]
            state = (-mixer.A_log[h].exp() * dt[t, h]).exp() * state + dt[t, h] * torch.outer(keys[-1], values[t, h])
            y[t, h] = query @ state + mixer.D[h] * values[t, h]
    y = (y.flatten(1) * F.silu(gate)).view(12, 2, 24)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1) * mixer.norm.weight
    assert_close("y", mixer.out_proj(y)[None], mixer(x, Sequences(1))[0], 1e-12)


def test_steps_watch_the_lam_of_the_raw_query():
    """With a feature map, where the gate sees another query than the state."""
    mixer, x = build(ALL["ccq gla, hedgehog"]), tokens(2, 3)
    mixer.cleaner.record = True
    mixer(x, Sequences(2))
    whole, state = mixer.cleaner.lam, mixer.new_state(2, None, torch.float64)
    for t in range(3):
        mixer.step(x[:, t], state)
        assert_close("lam", whole[:, t], mixer.cleaner.lam, 1e-12)


# Parameters


def test_own_parameters_stay_full_and_do_not_decay():
    config = CCQConfig(**SIZES, mixer="gated_deltanet", **DELTA, clean=True, decay_gate_bias=False)
    mixer = make_mixer(config, 0)
    before = {name: p.clone() for name, p in mixer.named_parameters()}
    mixer.bfloat16()
    full = {"A_log", "dt_bias", "cleaner.gate_weight", "cleaner.gate_bias"}
    for name, p in mixer.named_parameters():
        assert p.dtype == (torch.float32 if name in full else torch.bfloat16), name
        if name in full:
            assert torch.equal(p, before[name])
    assert no_weight_decay(mixer) == {"A_log", "dt_bias", "cleaner.gate_bias"}
    marked = {name for name, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == no_weight_decay(mixer)
    mixer.double()
    assert {p.dtype for p in mixer.parameters()} == {torch.float64}

    config.decay_gate_bias = True
    assert no_weight_decay(make_mixer(config, 0)) == {"A_log", "dt_bias"}
    assert no_weight_decay(make_mixer(CCQConfig(**SIZES, **ALL["mamba2"]), 0)) == {"A_log", "dt_bias", "D"}
    assert no_weight_decay(nn.Sequential(make_mixer(CCQConfig(**SIZES, **ALL["gla, current key"]), 0))) == {
        "0.cleaner.current_key"
    }


def test_a_half_default_dtype_makes_full_own_parameters():
    """As transformers' from_pretrained(dtype=...) builds a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        mixer = make_mixer(CCQConfig(**SIZES, **ALL["ccq gated deltanet"]), 0)
    finally:
        torch.set_default_dtype(before)
    assert mixer.A_log.dtype == mixer.cleaner.gate_bias.dtype == torch.float32
    assert mixer.q_proj.weight.dtype == torch.bfloat16


def reset(mixer: nn.Module) -> None:
    for module in mixer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("name", ALL)
def test_parameters_are_filled_after_the_meta_device(name):
    config = CCQConfig(**SIZES, **ALL[name])
    with torch.device("meta"):
        mixer = make_mixer(config, 0)
    assert all(p.is_meta for p in mixer.parameters())
    mixer = mixer.to_empty(device="cpu")
    with torch.no_grad():
        for p in mixer.parameters():
            p.fill_(torch.nan)
    reset(mixer)
    assert all(p.isfinite().all() for p in mixer.parameters())
    assert no_weight_decay(mixer) == {n for n, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert mixer(tokens(1, 3).float(), Sequences(1))[0].isfinite().all()


def test_loaded_parameters_are_not_filled_again():
    """transformers marks what it loaded and then initialises the rest: fla's A_log once became NaN so."""
    from transformers.initialization import guard_torch_init_functions

    for name in ("ccq gated deltanet", "ccq mamba2", "gla, current key", "gla, hedgehog"):
        mixer = make_mixer(CCQConfig(**SIZES, **ALL[name]), 0)
        before = {key: torch.randn_like(p) for key, p in mixer.named_parameters()}
        mixer.load_state_dict(before)
        for p in mixer.parameters():
            p._is_hf_initialized = True
        with guard_torch_init_functions():
            reset(mixer)
        for key, p in mixer.named_parameters():
            assert torch.equal(p, before[key]), key


def test_parameters_start_as_published():
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 512, "num_heads": 64, "head_size": 16}
    gdn = make_mixer(CCQConfig(**sizes, **ALL["gated deltanet"]), 0)
    mamba2 = make_mixer(CCQConfig(**sizes, **ALL["mamba2"]), 0)
    kda = make_mixer(CCQConfig(**sizes, **ALL["kda"]), 0)
    for mixer, low in ((gdn, 0), (mamba2, 1), (kda, 1)):
        decay = mixer.A_log.exp()
        assert low <= decay.min() < low + 1
        assert 15 < decay.max() <= 16
        dt = F.softplus(mixer.dt_bias)
        assert 0.99e-3 < dt.min() < 2e-3
        assert 0.05 < dt.max() < 0.101
        assert abs(dt.log().median() - torch.tensor(0.01).log()) < 0.7  # uniform in the logarithm
    assert torch.equal(mamba2.D, torch.ones_like(mamba2.D))
    assert abs(gdn.q_conv1d.weight.std() / 0.02 - 1) < 0.1


# The registry


def test_an_unknown_mixer_is_named():
    config = CCQConfig(**SIZES)
    config.mixer = "gated_delta_net"
    with pytest.raises(ValueError, match="Did you mean 'gated_deltanet'"):
        make_mixer(config, 0)
    with pytest.raises(ValueError, match="'gla' is already registered by GatedLinearAttention"):
        register("gla")(Mixer)
    assert {"gla", "gated_deltanet", "mamba2", "linear_attention", "retnet", "deltanet", "kda", "mesa"} <= MIXERS.keys()


def test_mamba2_needs_its_convolution():
    with pytest.raises(ValueError, match="conv_size: Mamba2 has its SiLU in the convolution"):
        make_mixer(CCQConfig(**SIZES, mixer="mamba2"), 0)


# The compiler


@pytest.mark.parametrize("name", ["ccq gla"])
def test_compiled_mixers_give_the_same(fresh_compiler, name):
    """Traced and differentiated by the compiler, then run as they are: what it generates is for the slow test."""
    _compare_compiled(name, "aot_eager")


@pytest.mark.slow  # minutes: it builds C++
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["ccq gated deltanet", "ccq gla"])
def test_compiled_mixers_give_the_same_in_generated_code(fresh_compiler, name):
    _compare_compiled(name, "inductor")


def _compare_compiled(name: str, backend: str) -> None:
    mixer, x = build(ALL[name]), tokens(2, 70).requires_grad_()
    compiled = torch.compile(lambda x: mixer(x, Sequences(2))[0], backend=backend, fullgraph=True)
    ref, got = mixer(x, Sequences(2))[0], compiled(x)
    assert_close("y", ref, got, 1e-12)
    grads = gradients(mixer, got, x)
    for key, grad in gradients(mixer, ref, x).items():
        assert_close(key, grad, grads[key], 1e-11)
