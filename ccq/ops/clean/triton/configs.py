"""Tile sizes of the Triton kernels: looked up, never tuned while a user waits.

A pass is a scan over states and the kernel that reads them: "clean" (of q in the forward, of its gradient in the
backward) and "dk". tuned.json holds what was fastest on an H200, for a pass, the products' dtype, the key size rounded
up to a power of two, and the work (tokens times heads), of which the nearest power of two counts: nothing depends on
the exact length. `benchmarks/tune.py --write` measures again and rewrites it. For the rest: `default`.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

PASSES = ("clean", "dk")
TUNED = Path(__file__).with_name("tuned.json")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up. (Triton's own take microseconds outside of a kernel: as long as a launch.)"""
    return -(-n // d)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Config:
    """One pass. Reads: BT tokens a tile, S a chunk, BN tokens of the other side and BS rows of the state at a time.
    Scans: BLK x BLK blocks, BR tokens at a time. `hopper`: the reads are those of hopper.py, with as many stages."""

    BT: int
    S: int
    BN: int
    BS: int
    warps: int
    stages: int
    BLK: int
    BR: int
    scan_warps: int
    scan_stages: int
    hopper: bool = False


@functools.cache
def table() -> dict[tuple[str, str, int, bool], dict[int, Config]]:
    """(pass, dtype, BK, hopper) -> log2 of the work -> sizes."""
    found: dict[tuple[str, str, int, bool], dict[int, Config]] = {}
    for row in json.loads(TUNED.read_text())["rows"]:
        config = Config(*row["config"])
        found.setdefault((row["pass"], row["dtype"], row["BK"], config.hopper), {})[row["log2_work"]] = config
    return found


def pick(
    name: str, dtype: torch.dtype, block_k: int, work: int, interpreted: bool = False, hopper: bool = False
) -> Config:
    """The sizes for a pass over `work` = tokens times heads; with `hopper`, for the kernels of hopper.py."""
    if interpreted:  # small, so that few tokens already make several tiles, chunks and blocks
        return Config(16, 32, 16, min(block_k, 16), 4, 1, min(block_k, 32), 16, 4, 1)
    known = table().get((name, NAMES[dtype], block_k, hopper))
    if not known:
        return default(name, dtype, block_k, hopper)
    return known[min(known, key=lambda log2_work: abs(log2_work - math.log2(max(work, 1))))]


def default(name: str, dtype: torch.dtype, block_k: int, hopper: bool = False) -> Config:
    """Where nothing was measured: the first of those that benchmarks/tune.py tries."""
    clean = name == "clean"
    if dtype != torch.bfloat16:
        bt = 64 if block_k <= 64 else 32
        return Config(bt, 4 * bt, bt, min(block_k, 32), 4, 2, min(block_k, 64), 32, 4, 2)
    scan = (min(64, block_k), 128 if clean else 64, 4, 3)
    if hopper:
        return Config(128, 256, 64, 64, 8, (3 if clean else 4) * 256 // block_k, *scan, hopper=True)
    reads = (64, 256, 32, min(32, block_k), 4, 3) if clean else (64, 128, 32, min(64, block_k), 4, 2)
    return Config(*reads, *scan)
