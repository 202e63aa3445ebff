"""What the vendors' data sheets say of GPUs, by a part of their names."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    peak: float  # dense bf16 FLOP/s
    memory: float  # bytes
    link: float  # bytes/s that one sends to others of its node: half of NVLink's both ways together, or PCIe


GPUS = {
    "B200": Gpu(2250e12, 180e9, 900e9),
    "H200": Gpu(989e12, 141e9, 450e9),
    "H100": Gpu(989e12, 80e9, 450e9),
    "A100": Gpu(312e12, 80e9, 300e9),
    "L40S": Gpu(362e12, 48e9, 32e9),
    "4090": Gpu(165e12, 24e9, 32e9),
}


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
