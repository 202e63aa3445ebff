"""Tiny random models of the families that cleaning can be attached to, and their cleaning by hand."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import torch
import transformers
from torch import Tensor

from ccq.adapter import attached

VOCABULARY = 64
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
KIMI = {
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "n_group": 1, "linear_head_dim": 8, "linear_num_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
LOUD = {"initializer_range": 0.1}  # else a state space writes next to nothing
MAMBA = {**LOUD, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
# name: its class, and the options of its config
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen3_next": ("Qwen3Next", {"num_hidden_layers": 4, **ATTENTION, **DELTA, **EXPERTS}),
    "qwen3_5": ("Qwen3_5", {"num_hidden_layers": 4, **ATTENTION, **DELTA}),
    "qwen3_5_moe": ("Qwen3_5Moe", {"num_hidden_layers": 4, **ATTENTION, **DELTA, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybrid", {"num_hidden_layers": 4, **ATTENTION, **DELTA}),
    "kimi_linear": ("KimiLinear", KIMI),
    "mamba2": ("Mamba2", {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8,
                          "chunk_size": 16}),
    "bamba": ("Bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1], **ATTENTION, **MAMBA}),
    "zamba2": ("Zamba2", {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
                          "num_attention_heads": 2, "n_mamba_heads": 8, **LOUD, "mamba_ngroups": 2, "mamba_d_state": 8,
                          "chunk_size": 16}),
    "falcon_h1": ("FalconH1", {"num_hidden_layers": 2, "mamba_d_ssm": 64, **ATTENTION, **MAMBA}),
    "granitemoehybrid": ("GraniteMoeHybrid", {"num_hidden_layers": 3, "num_attention_heads": 2,
                                              "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                                              "num_local_experts": 0, "shared_intermediate_size": 32, **MAMBA}),
    "nemotron_h": ("NemotronH", {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], **ATTENTION,
                                 **LOUD, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
                                 "chunk_size": 16}),
}  # fmt: skip


def make(family: str, **options) -> transformers.PreTrainedModel:
    """A model of the family, in eval mode; the same one at every call."""
    name, own = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config")
    if name == "Qwen3_5" or name == "Qwen3_5Moe":
        config_class = getattr(transformers, f"{name}TextConfig")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**COMMON | own | options)).eval()


def opened(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The model with gates that are wide open, each at another value for each token."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in attached(model).values():
            for gate, mean in ((layer.cleaner.gate_weight, 0.0), (layer.cleaner.gate_bias, 1.0)):
                gate.copy_(torch.empty(gate.shape).normal_(mean, generator=draw))
    return model


def closed(model: torch.nn.Module) -> torch.nn.Module:
    """The model with lam = 0."""
    with torch.no_grad():
        for layer in attached(model).values():
            layer.cleaner.gate_bias.fill_(-torch.inf)
    return model


def module_of(model: torch.nn.Module) -> ModuleType:
    return sys.modules[type(model).__module__]


def in_plain_torch(model: torch.nn.Module, monkeypatch) -> ModuleType:
    """Let a model of transformers that nothing is attached to run on a CPU beside an installed fla."""
    module = module_of(model)
    for name, function in list(vars(module).items()):
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
            monkeypatch.setattr(module, name, inspect.unwrap(function))
    return module


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def clean_by_hand(raw: Tensor, q: Tensor, k: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """q - lam Sigma_t q token by token, of one batch without padding; unit keys in Sigma_t. [B, T, H, K]"""
    lam = torch.sigmoid(raw.float().flatten(2) @ weight.T + bias)
    unit = k.float() / (k.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    cleaned = []
    for t in range(q.shape[1]):
        seen = unit[:, : t + 1]
        mean = seen.mean(1)
        sigma = torch.einsum("bthi,bthj->bhij", seen, seen) / (t + 1) - mean[..., :, None] * mean[..., None, :]
        cleaned.append(q[:, t] - lam[:, t, :, None] * torch.einsum("bhij,bhj->bhi", sigma, q[:, t].float()))
    return torch.stack(cleaned, 1).to(q.dtype)
