"""Our Transformer is transformers' Llama, our Mamba2 its Mamba2: equal weights give equal logits and gradients."""

from __future__ import annotations

import pytest
import torch
from model_helpers import relative, tokens
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from ccq.model import CCQConfig, CCQForCausalLM

TOLERANCE = 1e-4


def assert_same_function(ours, theirs, names, ids):
    """`names`: their parameter's name for each of ours."""
    mine = dict(ours.named_parameters())
    other = dict(theirs.named_parameters())
    assert {names(name) for name in mine} == set(other), "a parameter has no counterpart"
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(other[names(name)].view_as(parameter))
    logits, ref = ours(ids).logits, theirs(ids, use_cache=False).logits
    assert ref.std() > 0.3
    assert relative(ref, logits) < TOLERANCE
    weight = torch.randn(ref.shape, generator=torch.Generator().manual_seed(1))
    (logits * weight).sum().backward()
    (ref * weight).sum().backward()
    for name, parameter in mine.items():
        theirs_grad = other[names(name)].grad
        assert relative(theirs_grad, parameter.grad.view_as(theirs_grad)) < TOLERANCE, name
    out, ref = ours(ids, labels=ids), theirs(ids, labels=ids, use_cache=False)
    torch.testing.assert_close(out.loss, ref.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("tie", [False, True])
def test_transformer_is_llama(kv_heads, tie):
    torch.manual_seed(0)
    config = CCQConfig.preset("transformer-tiny", num_kv_heads=kv_heads, rope_theta=500.0, tie_word_embeddings=tie)
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=kv_heads or config.num_heads,
        rms_norm_eps=config.norm_eps,
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tie,
    )
    theirs = LlamaForCausalLM(settings).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)

    def names(name: str) -> str:
        name = name.replace("mixer_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")
        return name.replace(".mixer.", ".self_attn.")

    ours = CCQForCausalLM(config).eval()
    assert_same_function(ours, theirs, names, tokens(2, 100))

    prompt = tokens(2, 10)  # and they generate the same, each with its own cache
    generated = [
        model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
        for model in (ours, theirs)
    ]
    assert torch.equal(*generated)


def test_mamba2_is_mamba2():
    torch.manual_seed(0)
    config = CCQConfig.preset("mamba2-tiny")
    theirs = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            state_size=config.state_size,
            head_dim=config.head_size,
            num_heads=config.expand * config.hidden_size // config.head_size,
            expand=config.expand,
            n_groups=config.num_groups,
            conv_kernel=config.conv_size,
            layer_norm_epsilon=config.norm_eps,
            chunk_size=32,
            initializer_range=0.15,
            tie_word_embeddings=False,
            use_bias=False,
            rms_norm=True,
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or name.endswith(".D"):
                parameter.uniform_(0.5, 2)
            elif name.endswith("conv1d.bias"):
                parameter.normal_(std=0.3)

    def names(name: str) -> str:
        name = name.replace("model.", "backbone.").replace("embed_tokens", "embeddings")
        return name.replace("mixer_norm", "norm").replace("backbone.norm.", "backbone.norm_f.")

    ours = CCQForCausalLM(config).eval()
    assert_same_function(ours, theirs, names, tokens(2, 100))
