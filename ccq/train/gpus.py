"""What the vendors' data sheets say of GPUs, by a part of their names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ccq.files import read_toml


class Gpu(NamedTuple):
    """As gpus.toml has it."""

    peak: float
    memory: float
    link: float


_TOLD = read_toml(Path(__file__).with_suffix(".toml"))
GPUS = {name: Gpu(**told) for name, told in _TOLD.items()}


def named(name: str) -> str | None:
    """The entry of GPUS that a device's full name is of.

    >>> named("NVIDIA H200"), named("Tesla T4")
    ('H200', None)
    """
    return next((gpu for gpu in GPUS if gpu.lower() in name.lower()), None)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a GPU that we know."""
    name = named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if name is None else GPUS[name].peak
