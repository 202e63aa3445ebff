"""Every kernel of ours at small sizes, forward and backward, for the checkers of CUDA. In a clone, on a GPU:

    compute-sanitizer --tool memcheck python benchmarks/every_kernel.py
    compute-sanitizer --tool racecheck python benchmarks/every_kernel.py --only passes,adamw,decode

`racecheck` reports the hazards of Triton's own warp specialisation in the Hopper reads: docs/kernels.md says which.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ccq.ops import Cleaning, CovarianceState, Gate, clean_query, decode_step

DEVICE = "cuda"
BORDERS = (0, 1, 1, 130, 300, 700)  # of packed sequences: one token, none, a tile and two more, several tiles


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def gate_of(size: int) -> Gate:
    """Of two heads."""
    return Gate(draw(2, 2 * size, dtype=torch.float32), draw(2, dtype=torch.float32))


def both(outputs: tuple[Tensor | None, ...] | Tensor) -> None:
    """The backward of all that is differentiable."""
    found = [x for x in ((outputs,) if isinstance(outputs, Tensor) else outputs) if x is not None and x.requires_grad]
    torch.autograd.backward(found, [torch.randn_like(x) for x in found])


def passes() -> None:
    from ccq.mixers.passes import add_norm, gated_norm, swiglu

    for rows, width in ((7, 20), (300, 2048)):
        weight, linear = draw(width), draw(24, width)
        x, y = draw(rows, width), draw(rows, width)
        both(swiglu(x, y, linear))
        both(add_norm(x, None, weight, 1e-6))
        both(add_norm(x, y, weight, 1e-6))
        for sigmoid in (False, True):
            both(gated_norm(x[:, None], y[:, None], weight, 1e-6, sigmoid, linear))


def adamw() -> None:
    from ccq.train.adamw import update
    from ccq.train.config import Optimizer
    from ccq.train.optimizer import make_optimizer

    copies = {f"{size}": nn.Parameter(draw(size)) for size in (5, 2048, 5000)}
    masters = {name: nn.Parameter(copy.detach().float()) for name, copy in copies.items()}
    optimizer = make_optimizer(masters, set(masters), Optimizer())
    for copy in copies.values():
        copy.grad = torch.randn_like(copy)
    finite, rate = torch.tensor(True, device=DEVICE), torch.tensor(1e-3, device=DEVICE)
    update(optimizer, [(copies[name], master) for name, master in masters.items()], finite, rate, 0.5)


def clean() -> None:
    borders = torch.tensor(BORDERS, dtype=torch.int32, device=DEVICE)
    reads: tuple[tuple[str, bool], ...] = (("scaled", False), ("projected", False), ("projected", True))
    for size, packed, (step, decays) in itertools.product((48, 64, 128, 256), (False, True), reads):
        shape = (1, BORDERS[-1], 2) if packed else (2, 200, 2)
        q, k, gate = draw(*shape, size), draw(*shape, size), gate_of(size)
        decay = -torch.rand(shape, device=DEVICE) if decays else None
        more: dict[str, Any] = {"cu_seqlens": borders if packed else None, "log_decay": decay, "step": step}
        both(clean_query(q, k, gate, backend="triton", **more)[:2])


@torch.no_grad()
def decode() -> None:
    for delta, size in itertools.product((False, True), (64, 256)):
        q, k, v = draw(3, 2, size), draw(3, 2, size), draw(3, 2, 2 * size)
        state = torch.zeros(3, 2, size, 2 * size, device=DEVICE)
        g = -torch.rand(3, 2, *(() if delta else (size,)), device=DEVICE)
        cleaning = Cleaning(CovarianceState.zeros(3, 2, size, device=DEVICE), gate=gate_of(size))
        decode_step(q, k, v, state, g, torch.rand(3, 2, device=DEVICE) if delta else None, cleaning=cleaning)


KERNELS: dict[str, Callable[[], None]] = {run.__name__: run for run in (passes, adamw, clean, decode)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(KERNELS), help="which, with commas between (default: %(default)s)")
    names = parser.parse_args().only.split(",")
    if unknown := [name for name in names if name not in KERNELS]:
        parser.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(KERNELS)}")
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here")
    for name in names:
        KERNELS[name]()
        torch.cuda.synchronize()
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
