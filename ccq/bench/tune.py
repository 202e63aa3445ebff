"""Find tile sizes for this GPU:  ccq bench tune --out tuned.json

Every candidate is compiled (in parallel processes), checked against fp64, and timed at batch 1 and 8. The scan and the
kernel that reads its states are timed apart, since they share only BT and S.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ccq.bench.timing import graph_time
from ccq.ops import fused
from ccq.ops.configs import PASSES, Config, candidates

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Case:
    """Inputs of one size, and the stages of each pass as calls."""

    def __init__(self, batch: int, length: int, heads: int, size: int, dtype: torch.dtype):
        generator = torch.Generator("cuda").manual_seed(0)
        q, g, k = torch.randn(3, batch, length, heads, size, device="cuda", generator=generator)
        self.q, self.g = q.to(dtype), g.to(dtype)
        self.k = torch.nn.functional.normalize(k + 0.5, dim=-1).to(dtype)
        self.lam = torch.rand(batch, length, heads, device="cuda", generator=generator)
        self.inputs: dict = {}

    def grid(self, config: Config) -> fused.Grid:
        return fused.Grid(config, self.q, self.k, None, None)

    def scan(self, name: str, config: Config):
        grid = self.grid(config)
        if name == "dk":
            return lambda: fused.adjoint_states(grid, self.q, self.g, None, None)
        sums = fused.prepare_keys(grid, self.k, False, True)[2]
        fused.run_sums(grid, sums, None, grid.per_sums, None, None, 1, False)
        return lambda: (fused.key_states(grid, self.k, sums, None, True, None), sums)

    def read(self, name: str, config: Config):
        grid = self.grid(config)
        key = (name, config.BN, config.S)  # the states do not depend on anything else
        if key not in self.inputs:
            self.inputs = {key: self.scan(name, config)()}
        if name == "dk":
            states = self.inputs[key]
            pulls = self.q.new_ones(grid.sums, grid.query_heads, grid.size, dtype=torch.float32)
            adjoint = fused.Adjoint(self.g, pulls, self.lam, self.lam)
            return lambda: fused.dk_tiles(grid, grid, self.q, self.k, self.lam, self.g, adjoint, states, None, True)
        states, sums = self.inputs[key]
        return lambda: fused.read_tiles(grid, self.q, self.k, self.lam, states, sums, True, True, self.q.dtype)


def stages(name: str, dtype: torch.dtype, block_k: int) -> list[tuple[str, str, Config]]:
    """The distinct (stage, pass, config) to compile and time; fields the stage does not use are those of the first."""
    every = candidates(name, dtype, block_k)
    plain = every[0]
    scan_fields = ("BN", "S", "BLK", "BR", "scan_warps", "scan_stages")
    read_fields = ("BT", "S", "BN", "BS", "warps", "stages")
    scans, reads = (
        {replace(plain, **{field: getattr(c, field) for field in fields}) for c in every}
        for fields in (scan_fields, read_fields)
    )
    return [("scan", name, c) for c in scans] + [("read", name, c) for c in reads]


def _compile(arguments: tuple) -> str | None:
    stage, name, config, size, dtype = arguments
    try:
        case = Case(1, 2 * config.S, 2, size, dtype)
        getattr(case, stage)(name, config)()
        torch.cuda.synchronize()
    except Exception as error:  # a config that does not fit the chip is an answer, not a failure
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ccq bench tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--key-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("tuned.json"))
    options = parser.parse_args(argv)
    dtype, block_k = DTYPES[options.dtype], fused.block_size(options.key_size)

    jobs = [job for name in options.passes.split(",") for job in stages(name, dtype, block_k)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        failures = pool.map(_compile, [(*job, options.key_size, dtype) for job in jobs], chunksize=1)
    results = []
    cases = {batch: Case(batch, options.length, options.heads, options.key_size, dtype) for batch in (1, 8)}
    order = sorted(zip(jobs, failures, strict=True), key=lambda job: str(job[0]))
    for (stage, name, config), failure in order:
        row: dict = {"pass": name, "stage": stage, **asdict(config), "failure": failure}
        if failure is None:
            for batch, case in cases.items():
                row[f"b{batch}_us"] = 1e3 * graph_time(getattr(case, stage)(name, config), inner=5, repeats=5).median
        results.append(row)
    best = {}
    for name in options.passes.split(","):
        for batch in cases:
            fine = [r for r in results if r["pass"] == name and not r["failure"]]
            pairs = [
                (a[f"b{batch}_us"] + b[f"b{batch}_us"], a, b)
                for a in fine
                for b in fine
                if a["stage"] == "scan" and b["stage"] == "read" and (a["BN"], a["S"]) == (b["BN"], b["S"])
            ]
            pairs.sort(key=lambda pair: pair[0])
            best[f"{name}_b{batch}"] = pairs[:3]
            for total, a, b in pairs[:4]:
                scan, read = a[f"b{batch}_us"], b[f"b{batch}_us"]
                print(
                    f"{name:<6} b{batch} {total:7.1f} us  BT {b['BT']:>3} S {a['S']:>3} | scan {scan:6.1f} "
                    f"BLK {a['BLK']} BR {a['BR']} warps {a['scan_warps']} stages {a['scan_stages']} | read {read:6.1f} "
                    f"BN {b['BN']} BS {b['BS']} warps {b['warps']} stages {b['stages']}"
                )
    broken = [r for r in results if r["failure"]]
    for r in broken[:6]:
        print("failed", *(r[x] for x in ("pass", "stage", "BT", "S", "BN", "BS", "warps", "stages", "failure")))
    options.out.write_text(json.dumps(results, indent=1))
    return 0
