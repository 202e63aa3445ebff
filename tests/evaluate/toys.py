"""Models small enough to know what they must say."""

from __future__ import annotations

import types

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class State:
    """What a Leaky model carries on: [B, D]."""

    def __init__(self, mean):
        self.mean = mean


class Leaky(nn.Module):
    """h_t = 0.9 h_{t-1} + embedding_t: a recurrent body. `forgets` drops the state it is given; `longest` is the most
    tokens it was ever called with."""

    def __init__(self, vocabulary, width, forgets):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.forgets, self.longest = forgets, 0

    def forward(self, ids, past_key_values=None, use_cache=False):
        self.longest = max(self.longest, ids.shape[1])
        h = torch.zeros(ids.shape[0], self.embedding.embedding_dim)
        if past_key_values is not None and not self.forgets:
            h = past_key_values.mean
        states = []
        for x in self.embedding(ids).unbind(1):
            h = 0.9 * h + x
            states.append(torch.tanh(h))
        return BaseModelOutputWithPast(torch.stack(states, 1), State(h) if use_cache else None)


class LeakyLM(nn.Module):
    def __init__(self, vocabulary=600, width=16, forgets=False, scale=1.0):
        super().__init__()
        torch.manual_seed(1)
        self.base_model = Leaky(vocabulary, width, forgets)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scale = scale
        self.config = types.SimpleNamespace(to_dict=dict)

    dtype = torch.float32

    def get_output_embeddings(self):
        return self.head

    def get_input_embeddings(self):
        return self.base_model.embedding

    def forward(self, ids, past_key_values=None, use_cache=False):
        out = self.base_model(ids, past_key_values, use_cache)
        logits = self.scale * self.head(out.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


class Bigram(nn.Module):
    """p(next | token) is row `token` of a table of probabilities: every perplexity is known."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table.log())
        self.config = types.SimpleNamespace(to_dict=dict)

    dtype = torch.float32

    def get_input_embeddings(self):
        return types.SimpleNamespace(weight=self.table)

    def forward(self, ids, use_cache=False, **_):
        return CausalLMOutputWithPast(logits=self.table[ids])


def make_model(kind: str, vocabulary: int = 600, positions: int = 2048):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "llama":
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=positions,
            initializer_range=0.5,  # so that what it says depends on what it read
            tie_word_embeddings=False,
            **shape,
        )
        return LlamaForCausalLM(config).eval()
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=positions, initializer_range=0.3, **shape)
    return GPT2LMHeadModel(config).eval()
