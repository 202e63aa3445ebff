"""Checkpoints as fla writes them, small and of random weights: what the tests of conversion read."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from ccq.model import CCQForCausalLM

# fla's names of its models, and of their classes
TYPES = {
    "gla": "GLA", "retnet": "RetNet", "linear_attn": "LinearAttention", "delta_net": "DeltaNet",
    "gated_deltanet": "GatedDeltaNet", "kda": "KDA", "mamba2": "Mamba2", "transformer": "Transformer",
}  # fmt: skip
each_type = pytest.mark.parametrize("model_type", TYPES)

# What fla's config classes write beside the sizes, version 0.6.
_COMMON = {
    "bos_token_id": 1, "eos_token_id": 2, "fuse_cross_entropy": True, "fuse_linear_cross_entropy": False,
    "fuse_norm": True, "hidden_size": 32, "initializer_range": 0.02, "num_hidden_layers": 2,
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.53.0", "use_cache": True,
    "use_l2warp": False, "vocab_size": 64,
}  # fmt: skip
_BLOCK = {"attnres_block_size": None, "fuse_swiglu": True, "hidden_act": "swish", "hidden_ratio": 4,
          "intermediate_size": 48, "max_position_embeddings": 2048, "norm_eps": 1e-6}  # fmt: skip
CONFIGS = {
    "gla": {
        **_COMMON, **_BLOCK, "attn": None, "attn_mode": "chunk", "clamp_min": None, "conv_size": 4,
        "elementwise_affine": True, "expand_k": 0.5, "expand_v": 1.0, "feature_map": None, "num_heads": 2,
        "num_kv_heads": None, "use_gk": True, "use_gv": False, "use_output_gate": True, "use_short_conv": False,
    },
    "retnet": {
        **_COMMON, **_BLOCK, "hidden_ratio": 2, "attn": None, "attn_mode": "chunk", "conv_size": 4,
        "elementwise_affine": True, "expand_k": 1.0, "expand_v": 2.0, "feature_map": None, "num_heads": 2,
        "num_kv_heads": None, "use_output_gate": True, "use_short_conv": False,
    },
    "linear_attn": {
        **_COMMON, **_BLOCK, "attn": None, "attn_mode": "fused_chunk", "elementwise_affine": True, "expand_k": 0.5,
        "expand_v": 1.0, "feature_map": "elementwise_product", "norm_feature_map": False, "norm_k": False,
        "norm_q": False, "num_heads": 2, "num_kv_heads": None, "tie_feature_map_qk": False,
    },
    "delta_net": {
        **_COMMON, **_BLOCK, "allow_neg_eigval": False, "attn": None, "attn_mode": "chunk", "conv_size": 4,
        "expand_k": 0.5, "expand_v": 1.0, "num_heads": 2, "qk_activation": "silu", "qk_norm": "l2", "use_beta": True,
        "use_gate": False, "use_output_norm": True, "use_short_conv": True,
    },
    "gated_deltanet": {
        **_COMMON, **_BLOCK, "allow_neg_eigval": False, "attn": None, "attn_mode": "chunk", "conv_size": 4,
        "expand_v": 2.0, "head_dim": 8, "num_heads": 3, "num_v_heads": None, "output_gate_activation": "swish",
        "use_gate": True, "use_short_conv": True,
    },
    "kda": {
        **_COMMON, **_BLOCK, "allow_neg_eigval": False, "attn": None, "attn_mode": "chunk", "conv_size": 4,
        "expand_v": 2.0, "head_dim": 8, "lower_bound": None, "num_heads": 3, "num_v_heads": None, "safe_gate": False,
        "use_short_conv": True,
    },
    "mamba2": {
        **_COMMON, "A_init_range": [1, 16], "D_has_hdim": False, "chunk_size": 256, "conv_init": None,
        "conv_kernel": 4, "dt_init_floor": 1e-4, "dt_limit": [0.0, math.inf], "dt_max": 0.1, "dt_min": 0.001,
        "expand": 2, "head_dim": 16, "hidden_act": "silu", "n_groups": 1, "norm_before_gate": False, "norm_eps": 1e-5,
        "num_heads": 4, "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": True,
        "rmsnorm": True, "state_size": 8, "use_bias": False, "use_conv_bias": True,
    },
    "transformer": {
        **_COMMON, **_BLOCK, "elementwise_affine": True, "num_heads": 4, "num_kv_heads": 2, "qk_norm": False,
        "qkv_bias": False, "rope_theta": 500.0, "window_size": None,
    },
}  # fmt: skip

# The tensors of a layer in fla's models, hidden size 32 and the sizes above: as fla's own classes make them.
_MLP = {"mlp_norm.weight": (32,), "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48)}  # fmt: skip
LAYERS = {
    "gla": {
        "attn_norm.weight": (32,), "attn.q_proj.weight": (16, 32), "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (32, 32), "attn.g_proj.weight": (32, 32), "attn.gk_proj.0.weight": (16, 32),
        "attn.gk_proj.1.weight": (16, 16), "attn.gk_proj.1.bias": (16,), "attn.o_proj.weight": (32, 32),
        "attn.g_norm_swish_gate.weight": (16,), **_MLP,
    },
    "retnet": {
        "attn_norm.weight": (32,), "attn.q_proj.weight": (32, 32), "attn.k_proj.weight": (32, 32),
        "attn.v_proj.weight": (64, 32), "attn.g_proj.weight": (64, 32), "attn.o_proj.weight": (32, 64),
        "attn.g_norm_swish_gate.weight": (32,), **_MLP,
    },
    "linear_attn": {
        "attn_norm.weight": (32,), "attn.q_proj.weight": (16, 32), "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (32, 32), "attn.norm.weight": (16,), "attn.o_proj.weight": (32, 32),
        **{f"attn.feature_map_{x}.layer{i}.{name}": shape for x in "qk" for i in (1, 2)
           for name, shape in (("weight", (8, 8)), ("bias", (8,)))}, **_MLP,
    },
    "delta_net": {
        "attn_norm.weight": (32,), "attn.q_proj.weight": (16, 32), "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (32, 32), "attn.b_proj.weight": (2, 32), "attn.q_conv1d.weight": (16, 1, 4),
        "attn.k_conv1d.weight": (16, 1, 4), "attn.v_conv1d.weight": (32, 1, 4), "attn.o_norm.weight": (16,),
        "attn.o_proj.weight": (32, 32), **_MLP,
    },
    "gated_deltanet": {
        "attn_norm.weight": (32,), "attn.A_log": (3,), "attn.dt_bias": (3,), "attn.q_proj.weight": (24, 32),
        "attn.k_proj.weight": (24, 32), "attn.v_proj.weight": (48, 32), "attn.a_proj.weight": (3, 32),
        "attn.b_proj.weight": (3, 32), "attn.q_conv1d.weight": (24, 1, 4), "attn.k_conv1d.weight": (24, 1, 4),
        "attn.v_conv1d.weight": (48, 1, 4), "attn.g_proj.weight": (48, 32), "attn.o_norm.weight": (16,),
        "attn.o_proj.weight": (32, 48), **_MLP,
    },
    "kda": {
        "attn_norm.weight": (32,), "attn.A_log": (3,), "attn.dt_bias": (24,), "attn.q_proj.weight": (24, 32),
        "attn.k_proj.weight": (24, 32), "attn.v_proj.weight": (48, 32), "attn.q_conv1d.weight": (24, 1, 4),
        "attn.k_conv1d.weight": (24, 1, 4), "attn.v_conv1d.weight": (48, 1, 4), "attn.f_proj.0.weight": (16, 32),
        "attn.f_proj.1.weight": (24, 16), "attn.b_proj.weight": (3, 32), "attn.g_proj.0.weight": (16, 32),
        "attn.g_proj.1.weight": (48, 16), "attn.g_proj.1.bias": (48,), "attn.o_norm.weight": (16,),
        "attn.o_proj.weight": (32, 48), **_MLP,
    },
    "mamba2": {
        "norm.weight": (32,), "mixer.dt_bias": (4,), "mixer.A_log": (4,), "mixer.D": (4,),
        "mixer.conv1d.weight": (80, 1, 4), "mixer.conv1d.bias": (80,), "mixer.in_proj.weight": (148, 32),
        "mixer.norm.weight": (64,), "mixer.out_proj.weight": (32, 64),
    },
    "transformer": {
        "attn_norm.weight": (32,), "attn.q_proj.weight": (32, 32), "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (16, 32), "attn.o_proj.weight": (32, 32), **_MLP,
    },
}  # fmt: skip


def make_tensors(model_type: str, layer: dict | None = None) -> dict[str, torch.Tensor]:
    """Weights of size 0.2 and norms between 0.5 and 2, so that every one of them matters."""
    base, last = ("backbone", "norm_f") if model_type == "mamba2" else ("model", "norm")
    shapes = {f"{base}.embeddings.weight": (64, 32)}
    for i in range(2):
        shapes |= {f"{base}.layers.{i}.{name}": shape for name, shape in (layer or LAYERS[model_type]).items()}
    shapes |= {f"{base}.{last}.weight": (32,), "lm_head.weight": (64, 32)}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, x in tensors.items():
        if "norm" in name or name.endswith((".D", "A_log")):
            x.uniform_(0.5, 2, generator=generator)
    return tensors


def make_folder(folder, model_type, tensors=None, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **CONFIGS[model_type], **changes}))
    save_file(make_tensors(model_type) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def logits(folder, ids) -> torch.Tensor:
    with torch.no_grad():
        return CCQForCausalLM.from_pretrained(folder).eval()(ids).logits


def assert_same_tensors(ref, got):
    assert set(ref) == set(got)
    for name, x in ref.items():
        assert x.dtype == got[name].dtype, name
        assert torch.equal(x, got[name]), name
