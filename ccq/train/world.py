"""The processes of a run. One process is a world of one: the same calls, the same code.

What is small and decides (counts, losses, flags) is added up on the host, in fp64, through gloo: no rank waits for its
GPU to know what the others do. What is large (weights, gradients) goes through FSDP.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ccq.doctor import best_device, check_device
from ccq.train import RunError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    background: Any = None  # a process group of its own for the thread that writes checkpoints

    @property
    def main(self) -> bool:
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Each value, added up over all ranks; the same numbers on each of them."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers.tolist()

    def gathered(self, value: T) -> list[T]:
        """What each rank has; the thread that writes checkpoints may ask too."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.background)
        return found

    def from_main(self, value: T) -> T:
        """What rank 0 has."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]


def pick_device(name: str | None, local_rank: int) -> torch.device:
    name = name or best_device()
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise RunError(f"runtime.device: expected cpu, cuda or cuda:N, got {name!r}")
    name = f"cuda:{local_rank}" if name == "cuda" else name
    check_device(name, "runtime.device")
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def join(device: str | None = None, timeout: int = 600) -> Iterator[World]:
    """The world that torchrun describes, or one process; left as it was found."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    ours = not dist.is_initialized()
    if ours:
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=HashStore() if size == 1 else None,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    try:
        background = dist.new_group(backend="gloo")
        yield World(dist.get_rank(), dist.get_world_size(), place, background)
    finally:
        if ours:
            dist.destroy_process_group()
