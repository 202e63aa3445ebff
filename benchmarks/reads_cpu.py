"""What the other reads cost on a CPU, as ratios to the paper's step: chunkwise backend, fp32.

    python benchmarks/reads_cpu.py            # a minute; writes benchmarks/study/cost/reads_cpu.json

The reads take turns on one thread, and the fastest call of each counts: other work on the machine then changes little.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import ccq
from ccq.files import write_json
from ccq.provenance import cpu, provenance

B, T, H, K, REPEATS = 1, 4096, 4, 128, 20
READS = {"scaled": ("scaled", False), "projected": ("projected", False), "projected, decayed": ("projected", True)}
OUT = Path(__file__).parent / "study" / "cost" / "reads_cpu.json"


def passes(step: str, decayed: bool):
    """Forward, and forward with backward, of one read on fixed inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k, g = (torch.randn(B, T, H, K, generator=generator) for _ in range(3))
    lam, log_decay = torch.rand(B, T, H, generator=generator), -0.01 * torch.rand(B, T, H, generator=generator)
    how = {"step": step, "backend": "chunk", "log_decay": log_decay if decayed else None}
    leaves = [x.requires_grad_() for x in (q, k, lam)]

    def forward() -> None:
        with torch.no_grad():
            ccq.clean_query(*leaves, **how)

    def both() -> None:
        torch.autograd.grad(ccq.clean_query(*leaves, **how)[0], leaves, g)

    return {"forward": forward, "forward and backward": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (default: that of docs/reads.md)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls = {(name, which): call for name, how in READS.items() for which, call in passes(*how).items()}
    fastest = dict.fromkeys(calls, float("inf"))
    for _ in range(REPEATS):
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            fastest[key] = min(fastest[key], time.perf_counter() - begin)
    rows = []
    for (name, which), seconds in fastest.items():
        rows.append(
            {"name": name, "pass": which, "B": B, "T": T, "H": H, "K": K, "seconds": seconds,
             "over_scaled": seconds / fastest["scaled", which]}
        )  # fmt: skip
        print(f"{name:20} {which:22} {1e3 * seconds:7.1f} ms  {rows[-1]['over_scaled']:.2f}")
    write_json(arguments.out, {**provenance("python benchmarks/reads_cpu.py"), "cpu": cpu(), "rows": rows})


if __name__ == "__main__":
    main()
