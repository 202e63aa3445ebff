"""Sequence mixers; `MIXERS` names them."""

from ccq.mixers import linear_attention  # noqa: F401  (it registers its backbones)
from ccq.mixers.attention import Attention
from ccq.mixers.base import MIXERS, LayerState, Mixer, Sequences, make_mixer, no_weight_decay, register
from ccq.mixers.cleaning import QueryCleaner
from ccq.mixers.mamba2 import Mamba2

__all__ = [
    "MIXERS",
    "Attention",
    "LayerState",
    "Mamba2",
    "Mixer",
    "QueryCleaner",
    "Sequences",
    "make_mixer",
    "no_weight_decay",
    "register",
]
