"""Tile sizes of the Triton kernels: looked up, never tuned while a user waits.

A pass is a scan over states and the kernel that reads them: "clean" (of q in the forward, of its gradient in the
backward) and "dk". Sizes depend on the pass, the products' dtype, and the key size rounded up to a power of two;
nothing depends on the exact length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PASSES = ("clean", "dk")


@dataclass(frozen=True)
class Config:
    """One pass. Reads: BT tokens a tile, S a chunk, BN tokens of the other side and BS rows of the state at a time.
    Scans: BLK x BLK blocks, BR tokens at a time."""

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


def pick(name: str, dtype: torch.dtype, block_k: int, interpreted: bool = False) -> Config:
    """The sizes for a pass."""
    if interpreted:  # small, so that few tokens already make several tiles, chunks and blocks
        return Config(16, 32, 16, min(block_k, 16), 4, 1, min(block_k, 32), 16, 4, 1)
    return candidates(name, dtype, block_k)[0]


def candidates(name: str, dtype: torch.dtype, block_k: int) -> list[Config]:
    """All sizes that tuning tries and the GPU tests cover, the default first."""
    if dtype != torch.bfloat16:
        bt = 64 if block_k <= 64 else 32
        return [Config(bt, 4 * bt, bt, min(block_k, 32), 4, 2, min(block_k, 64), 32, 4, 2)]
    found = []
    reads = READS_CLEAN if name == "clean" else READS_DK
    for bt, s, bn, bs, warps, stages in reads:
        for blk, br, scan_warps, scan_stages in SCANS:
            config = Config(bt, s, bn, min(bs, block_k), warps, stages, min(blk, block_k), br, scan_warps, scan_stages)
            if config not in found:
                found.append(config)
    return found


# BT, S, BN, BS, warps, stages; the first is the default, fastest on an H200 at key size 256
READS_CLEAN = [
    (64, 256, 32, 32, 4, 3), (128, 256, 64, 64, 8, 3), (64, 128, 32, 32, 4, 3), (128, 128, 64, 64, 8, 3),
    (64, 128, 64, 64, 8, 3), (64, 256, 64, 64, 8, 3), (64, 128, 32, 64, 4, 2), (64, 128, 32, 32, 4, 2),
]  # fmt: skip
READS_DK = [
    (64, 128, 32, 64, 4, 2), (64, 128, 32, 32, 4, 2), (128, 128, 32, 32, 8, 3), (128, 128, 64, 64, 8, 2),
    (64, 128, 32, 32, 4, 3), (64, 256, 32, 64, 4, 2),
]  # fmt: skip
# BLK, BR, warps, stages
SCANS = [(64, 128, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)]
