"""Sequence mixers, one file a backbone; `MIXERS` names them."""

from ccq.mixers.base import MIXERS, LayerState, Mixer, Sequences, make_mixer, register

__all__ = ["MIXERS", "LayerState", "Mixer", "Sequences", "make_mixer", "register"]
