"""What the tests of mixers share: every mixer, plain, cleaned and varied, small and in fp64."""

from __future__ import annotations

import re

import torch
from helpers import TOLERANCE, assert_close
from torch import Tensor
from torch.utils import _pytree as pytree

from ccq.mixers import LayerState, Mixer, make_mixer
from ccq.model.config import CCQConfig

D = 24
SIZES = {
    "hidden_size": D, "num_heads": 2, "key_size": 8, "value_size": 12, "gate_low_rank": 4, "feature_map_size": 4,
    "expand": 2, "state_size": 8, "head_size": 12,
}  # fmt: skip
DELTA = {"conv_size": 4, "unit_qk": True}
BACKBONES: dict[str, dict] = {
    "gla": {"mixer": "gla"},
    "gla, conv": {"mixer": "gla", "conv_size": 3},
    "gla, hedgehog": {"mixer": "gla", "feature_map": "hedgehog"},
    "gla, no output gate": {"mixer": "gla", "output_gate": False},
    "gated deltanet": {"mixer": "gated_deltanet", **DELTA},
    "gated deltanet, no conv": {"mixer": "gated_deltanet", "unit_qk": True},
    "kda": {"mixer": "kda", **DELTA},
    "deltanet": {"mixer": "deltanet", **DELTA},
    "linear attention": {"mixer": "linear_attention"},
    "retnet": {"mixer": "retnet"},
    "retnet, rotary": {"mixer": "retnet", "rotary": True},
    "linear attention, product": {"mixer": "linear_attention", "feature_map": "elementwise_product"},
    "mamba2": {"mixer": "mamba2", "conv_size": 4},
    "mamba2, groups": {"mixer": "mamba2", "conv_size": 4, "num_groups": 2},
}
CLEANED = {f"ccq {name}": {**options, "clean": True} for name, options in BACKBONES.items() if "no " not in name}
VARIANTS = {
    "gla, unit": {"mixer": "gla", "unit_qk": True},
    "mamba2, unit": {"mixer": "mamba2", "conv_size": 4, "unit_qk": True},
    "gla, current key": {"mixer": "gla", "unit_qk": True, "current_key_read": True},
    "gated deltanet, current key": {"mixer": "gated_deltanet", **DELTA, "current_key_read": True},
    "ccq gla, stats": {"mixer": "gla", "clean": True, "normalize": "stats"},
    "ccq gated deltanet, stats": {"mixer": "gated_deltanet", **DELTA, "clean": True, "normalize": "stats"},
    "ccq gla, uncentred": {"mixer": "gla", "clean": True, "centred": False},
    "ccq gla, fixed": {"mixer": "gla", "clean": True, "fixed_lam": 0.7},
}
PROJECTED = {"clean": True, "step": "projected", "covariance_decay": "backbone"}
VARIANTS |= {  # controls of the study
    "gla, free scale": {"mixer": "gla", "clean": True, "learned_scale": True},
    "gla, another head": {"mixer": "gla", **PROJECTED, "steps": 2, "direction": "other head"},
    "gla, mean": {"mixer": "gla", **PROJECTED, "direction": "mean"},
    "mamba2, mean, stats": {
        "mixer": "mamba2",
        "conv_size": 4,
        "clean": True,
        "direction": "mean",
        "normalize": "stats",
    },
    "mesa": {"mixer": "mesa", **DELTA, "cg_steps": 2},
    "mesa, 30 steps": {"mixer": "mesa", **DELTA, "output_gate": False},
    "mamba2, another group": {
        "mixer": "mamba2",
        "conv_size": 4,
        "num_groups": 2,
        **PROJECTED,
        "direction": "other head",
    },
}
READS = {  # beside the paper's: projected, with the backbone's decay, and twice with a learned one
    f"projected {name}": {**options, "clean": True, "step": "projected", **more}
    for (name, options), more in zip(
        BACKBONES.items(), 5 * [{"covariance_decay": "backbone"}, {}, {"covariance_decay": "learned", "steps": 2}],
        strict=False,
    )
}  # fmt: skip
READS |= {
    f"projected {name}, decay": {**BACKBONES[name], **PROJECTED}
    for name in ("gated deltanet", "kda", "deltanet", "retnet", "mamba2", "mamba2, groups")
}
ALL = {**READS, **BACKBONES, **CLEANED, **VARIANTS}


def build(options: dict, seed: int = 0) -> Mixer:
    """A mixer in fp64 whose every parameter matters."""
    torch.manual_seed(seed)
    mixer = make_mixer(CCQConfig(**SIZES | options), layer=0).double()
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            own_start = re.search("A_log|dt_bias", name) is not None
            if not own_start:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim > 1 else 1 + torch.randn_like(p) / 4)
    return mixer


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clone(state: LayerState) -> LayerState:
    return pytree.tree_map(torch.clone, state)


def assert_same_state(ref: LayerState, got: LayerState, ratio: float = 10 * TOLERANCE[torch.float64]) -> None:
    assert ref.keys() == got.keys()
    leaves = zip(*(pytree.tree_leaves_with_path(s) for s in (ref, got)), strict=True)
    for (path, a), (other, b) in leaves:
        assert path == other
        assert_close(pytree.keystr(path), a.double(), b.double(), ratio)
