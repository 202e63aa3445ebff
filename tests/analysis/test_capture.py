"""Keys that were caught against keys computed by hand from the hidden states, with nothing of a model but weights.

B = 1 sequence, T tokens, D hidden size, H query heads, Hk key heads, K head size.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import AttentionInterface

from ccq.analysis import AnalysisError, capture
from ccq.analysis.alignment import measure
from ccq.analysis.capture import find_projections, run, watch
from ccq.analysis.prompts import make_prompts
from ccq.model import CCQConfig, CCQForCausalLM

T, THETA, EPS = 21, 10000.0, 1e-6
SMALL = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64, "initializer_range": 0.3, "rms_norm_eps": EPS}


def llama():
    return LlamaForCausalLM(LlamaConfig(**GROUPED))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16))  # heads wider than D / H


def phi3():
    return Phi3ForCausalLM(Phi3Config(**GROUPED, pad_token_id=0))


def gpt2():
    config = GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3)
    return GPT2LMHeadModel(config)


def gpt_neox():
    config = {**SMALL, "hidden_size": 64, "intermediate_size": 64}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**config, initializer_range=0.3))


def made(function):
    torch.manual_seed(0)
    model = function().double().eval()
    for name, parameter in model.named_parameters():  # norms start at 1, biases at 0: then a mistake there is not seen
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=float("norm" in name or "ln_" in name), std=0.3)
    return model


@torch.no_grad()
def caught(model):
    """{layer: keys} at both points, and the hidden states that enter each layer."""
    ids = torch.randint(97, (1, T), generator=torch.Generator().manual_seed(1))
    projected, read = {}, {}
    with watch(model, lambda p, k: projected.update({p.layer: k}), lambda r: read.update({r.layer: r})):
        run(model, ids[0])
    hidden = [h[0] for h in model(ids, output_hidden_states=True).hidden_states]
    return projected, read, hidden


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def layer_norm(x, norm):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def rope(x, share=1.0):
    """[T, H, K]: channel j and j + n/2 of the first n as a complex number, turned by the angle t theta^(-2j/n)."""
    n = int(x.shape[-1] * share)
    z = torch.complex(x[..., : n // 2].contiguous(), x[..., n // 2 : n].contiguous())
    angle = torch.arange(len(x))[:, None, None] * THETA ** (-2 * torch.arange(n // 2) / n).double()
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag, x[..., n:]], -1)


def close(a, b):
    # transformers computes RoPE's angles, up to T, in fp32: they err by T * 2^-24, and elements are below 10
    torch.testing.assert_close(a, b, rtol=0, atol=10 * T * 2**-24)


def test_llama_keys_are_those_computed_by_hand():
    model = made(llama)
    projected, read, hidden = caught(model)
    assert sorted(projected) == sorted(read) == [0, 1, 2]
    for i, layer in enumerate(model.model.layers):
        k = rms(hidden[i], layer.input_layernorm.weight) @ layer.self_attn.k_proj.weight.T
        k = k.view(T, 2, 12)
        close(projected[i], k)
        close(read[i].k, rope(k))
        q = rms(hidden[i], layer.input_layernorm.weight) @ layer.self_attn.q_proj.weight.T
        close(read[i].q, rope(q.view(T, 4, 12)))


def test_qwen3_keys_are_those_computed_by_hand():
    model = made(qwen3)
    projected, read, hidden = caught(model)
    for i, layer in enumerate(model.model.layers):
        k = rms(hidden[i], layer.input_layernorm.weight) @ layer.self_attn.k_proj.weight.T
        k = k.view(T, 2, 16)
        close(projected[i], k)
        close(read[i].k, rope(rms(k, layer.self_attn.k_norm.weight)))


def test_gpt2_keys_are_those_computed_by_hand():
    model = made(gpt2)
    projected, read, hidden = caught(model)
    for i, layer in enumerate(model.transformer.h):
        weight, bias = layer.attn.c_attn.weight, layer.attn.c_attn.bias
        k = layer_norm(hidden[i], layer.ln_1) @ weight[:, 48:96] + bias[48:96]
        k = k.view(T, 4, 12)
        close(projected[i], k)
        close(read[i].k, k)


def test_phi3_keys_lie_behind_the_queries_of_all_heads():
    model = made(phi3)
    projected, read, hidden = caught(model)
    for i, layer in enumerate(model.model.layers):
        weight = layer.self_attn.qkv_proj.weight[48:72]  # 4 x 12 of q, then 2 x 12 of k
        k = (rms(hidden[i], layer.input_layernorm.weight) @ weight.T).view(T, 2, 12)
        close(projected[i], k)
        close(read[i].k, rope(k))


def test_gpt_neox_keys_lie_between_query_and_value_of_each_head():
    model = made(gpt_neox)
    projected, read, hidden = caught(model)
    for i, layer in enumerate(model.gpt_neox.layers):
        fused = layer.attention.query_key_value
        out = layer_norm(hidden[i], layer.input_layernorm) @ fused.weight.T + fused.bias
        k = out.view(T, 4, 3, 16)[:, :, 1]
        close(projected[i], k)
        close(read[i].k, rope(k, share=0.25))


@pytest.mark.parametrize("system", ["transformer", "gla", "ccq-gla", "gla-unit", "ccq-gated-deltanet", "mamba2"])
def test_our_keys_are_those_computed_by_hand(system):
    def ours():
        settings = {"num_kv_heads": 1} if system == "transformer" else {}
        return CCQForCausalLM(CCQConfig.preset(f"{system}-tiny", initializer_range=0.2, **settings))

    model = made(ours)
    projected, read, hidden = caught(model)
    assert sorted(projected) == sorted(read) == list(range(len(model.model.layers)))
    for i, layer in enumerate(model.model.layers):
        mixer, x = layer.mixer, rms(hidden[i], layer.mixer_norm.weight)
        if system == "mamba2":
            inner, width = mixer.inner, mixer.groups * mixer.state_size
            k = x @ mixer.in_proj.weight[2 * inner : 2 * inner + width].T
            taps, bias = (w[inner : inner + width] for w in (mixer.conv1d.weight, mixer.conv1d.bias))
        else:
            k = x @ mixer.k_proj.weight.T
            taps, bias = (mixer.k_conv1d.weight, 0) if system == "ccq-gated-deltanet" else (None, 0)
        heads = {"transformer": 1, "mamba2": 1}.get(system, 2)
        close(projected[i], k.view(T, heads, -1))
        if taps is not None:
            padded = torch.cat([k.new_zeros(taps.shape[-1] - 1, k.shape[1]), k])
            k = nn.functional.silu(sum(padded[w : w + T] * taps[:, 0, w] for w in range(taps.shape[-1])) + bias)
        k = k.view(T, heads, -1)
        if system == "transformer":
            k = rope(k)
        if system == "gla-unit":  # cleaning, where there is any, makes them unit itself
            k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        close(read[i].k, k)
        assert (read[i].lam is not None) == system.startswith("ccq")


@pytest.mark.parametrize("make", [llama, gpt2, lambda: CCQForCausalLM(CCQConfig.preset("ccq-gla-tiny"))])
def test_watching_changes_nothing_and_leaves_nothing_behind(make):
    model = made(make)
    ids = torch.randint(97, (1, T))
    before = AttentionInterface.get_interface
    with torch.no_grad():
        plain = model(ids).logits
        with watch(model, lambda *_: None, lambda *_: None):
            assert torch.equal(model(ids).logits, plain)
        with pytest.raises(RuntimeError, match="stop"), watch(model, stop, stop):
            model(ids)
        assert torch.equal(model(ids).logits, plain)
    assert AttentionInterface.get_interface is before
    assert not any(module._forward_hooks for module in model.modules())


def stop(*_):
    raise RuntimeError("stop")


@pytest.mark.parametrize("make", [llama, lambda: CCQForCausalLM(CCQConfig.preset("ccq-gla-tiny", num_hidden_layers=6))])
def test_nothing_is_kept_of_earlier_layers(make, tokenizer, monkeypatch):
    """Tensors with a row for every token, alive when each layer is looked at: as many in the last as in the second."""
    torch.manual_seed(0)
    model = make().eval()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    alive = []
    add = capture.Projection.keys

    def keys(projection, output):
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() > 16 * len(output)]
        alive.append(sum(x.untyped_storage().nbytes() for x in tensors))
        return add(projection, output)

    monkeypatch.setattr(capture.Projection, "keys", keys)
    measure(model, tokenizer, make_prompts(3, 12)[:1])
    assert len(alive) >= 3
    assert max(alive[1:]) <= 1.02 * min(alive[1:])


class Odd(nn.Module):
    """A causal model that calls its parts by names of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mixing": nn.Linear(8, 8)}) for _ in range(2))
        self.look_up = nn.Embedding(97, 8)


def test_a_model_without_a_known_projection_is_refused_with_its_modules_named():
    with pytest.raises(AnalysisError) as refused:
        find_projections(Odd())
    message = str(refused.value)
    assert message.startswith("Odd has no key projection")
    assert "k_proj" in message
    assert message.endswith("Its modules: layers, layers.*, layers.*.mixing, look_up")


def test_a_key_that_is_no_key_projection_is_not_taken_for_one():
    """RWKV's channel mixing has a `key` too, beside `receptance` and `value`."""
    model = nn.ModuleDict({"feed_forward": nn.ModuleDict({"key": nn.Linear(8, 8), "receptance": nn.Linear(8, 8)})})
    with pytest.raises(AnalysisError, match="no key projection"):
        find_projections(model)


def fused(kind, **changes):
    """A small model of a type, by the names that it has for its sizes."""
    sizes = {**SMALL, "intermediate_size": 64}
    if kind == "mpt":
        sizes = {"vocab_size": 97, "d_model": 48, "n_heads": 4, "n_layers": 3}
    elif kind == "bloom":
        sizes = {"vocab_size": 97, "hidden_size": 48, "n_head": 4, "n_layer": 3}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **changes))


MADE = {
    "gpt2": gpt2, "phi3": phi3, "gpt_neox": gpt_neox, "mpt": lambda: fused("mpt"), "bloom": lambda: fused("bloom"),
    "falcon": lambda: fused("falcon"), "persimmon": lambda: fused("persimmon", qk_layernorm=False),
    "falcon, a key head each": lambda: fused("falcon", multi_query=False),
    "falcon, grouped": lambda: fused("falcon", new_decoder_architecture=True, num_kv_heads=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
@torch.no_grad()
def test_keys_of_a_fused_projection_are_those_that_the_cache_keeps(kind):
    """RoPE turns them and keeps their lengths, which those of queries and values are not."""
    model = made(MADE[kind])
    projected = {}
    with watch(model, lambda p, k: projected.update({p.layer: k})):
        cache = model(torch.arange(T)[None], use_cache=True).past_key_values
    assert {kind.partition(",")[0] for kind in MADE} == set(capture.FUSED)
    for i, layer in enumerate(cache.layers):
        keys = layer.keys[0].transpose(0, 1)  # [T, Hk, K]; falcon's has a copy for each query head of a group
        copies = keys.shape[1] // projected[i].shape[1]
        close(projected[i].norm(dim=-1).repeat_interleave(copies, 1), keys.norm(dim=-1))


def test_a_fused_projection_of_another_model_is_refused_not_misread(monkeypatch):
    monkeypatch.delitem(capture.FUSED, "gpt_neox")
    with pytest.raises(AnalysisError, match=r"GPTNeoXForCausalLM has no key projection .*query_key_value"):
        find_projections(made(gpt_neox))


def test_one_sequence_at_a_time():
    model = made(llama)
    with pytest.raises(AnalysisError, match="one sequence at a time, got a batch of 2"), watch(model, stop):
        model(torch.zeros(2, 4, dtype=torch.int64))


def test_fused_sizes_that_do_not_add_up_are_refused():
    model = made(gpt2)
    projection = find_projections(model)[0]
    with pytest.raises(AnalysisError, match="expected q, k and v of 4 heads, got 5 heads"):
        projection.keys(torch.zeros(3, 60))
    assert np.isclose(projection.keys(torch.arange(144.0)[None])[0, 0, 0].item(), 48)
