"""Sequence mixers, one file a backbone; `MIXERS` names them."""

from ccq.mixers.attention import Attention
from ccq.mixers.base import MIXERS, LayerState, Mixer, Sequences, make_mixer, no_weight_decay, register
from ccq.mixers.cleaning import QueryCleaner
from ccq.mixers.linear_attention import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    Mesa,
    RetNet,
)
from ccq.mixers.mamba2 import Mamba2

__all__ = [
    "MIXERS",
    "Attention",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LayerState",
    "LinearAttention",
    "Mamba2",
    "Mesa",
    "Mixer",
    "QueryCleaner",
    "RetNet",
    "Sequences",
    "make_mixer",
    "no_weight_decay",
    "register",
]
