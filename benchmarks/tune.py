"""Find tile sizes for this GPU, and keep them:

    python benchmarks/tune.py --write

Every candidate is compiled (in parallel processes) and timed at batch 1 and 8 (`pytest -m gpu` compares the numbers of
each with fp64). The scan and the kernel that reads its states are timed apart, since they share only BN and S.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path

import torch

from ccq.bench.results import graph_time, make_parser, write
from ccq.ops.choose import Call, hopper_refuses
from ccq.ops.clean.triton import launch
from ccq.ops.clean.triton.configs import NAMES, PASSES, TUNED, Config, default
from ccq.provenance import provenance

DTYPES = {name: dtype for dtype, name in NAMES.items()}
NEVER = launch.Decay()  # nothing is forgotten
SCAN_FIELDS = ("BLK", "BR", "scan_warps", "scan_stages")


# BT, S, BN, BS, warps, stages
READS_CLEAN = [
    (64, 256, 32, 32, 4, 3), (64, 128, 32, 32, 4, 3), (64, 256, 16, 32, 4, 4), (64, 128, 16, 32, 4, 4),
    (64, 256, 64, 64, 4, 3), (64, 128, 64, 64, 4, 3), (128, 256, 64, 64, 8, 3), (128, 128, 64, 64, 8, 3),
]  # fmt: skip
READS_DK = [
    (64, 128, 32, 64, 4, 2), (64, 128, 16, 32, 4, 3), (64, 128, 16, 32, 4, 4), (64, 256, 32, 64, 4, 2),
    (64, 128, 64, 64, 4, 2), (64, 128, 32, 32, 4, 3), (128, 128, 32, 32, 8, 2), (128, 128, 64, 64, 8, 2),
]  # fmt: skip
# BLK, BR, warps, stages
SCANS_CLEAN = [(64, 128, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)]
SCANS_DK = [(64, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2)]


def candidates(name: str, dtype: torch.dtype, block_k: int, hopper: bool = False) -> list[Config]:
    """All sizes that tuning tries and the GPU tests cover."""
    first = default(name, dtype, block_k, hopper)
    if hopper:
        return [first, replace(first, S=128)]
    if dtype != torch.bfloat16:
        return [first, replace(first, S=first.S // 2), replace(first, BS=min(block_k, 16), stages=1)]
    found = [first]
    reads, scans = (READS_CLEAN, SCANS_CLEAN) if name == "clean" else (READS_DK, SCANS_DK)
    for bt, s, bn, bs, warps, stages in reads:
        for blk, br, scan_warps, scan_stages in scans:
            config = Config(bt, s, bn, min(bs, block_k), warps, stages, min(blk, block_k), br, scan_warps, scan_stages)
            if config not in found:
                found.append(config)
    return found


class Case:
    """Inputs of one size, and the stages of each pass as calls."""

    def __init__(self, batch: int, length: int, heads: int, size: int, dtype: torch.dtype):
        generator = torch.Generator("cuda").manual_seed(0)
        q, g, k = torch.randn(3, batch, length, heads, size, device="cuda", generator=generator)
        self.q, self.g = q.to(dtype), g.to(dtype)
        self.k = torch.nn.functional.normalize(k + 0.5, dim=-1).to(dtype)
        self.lam = torch.rand(batch, length, heads, device="cuda", generator=generator)
        self.inputs: dict = {}

    def grid(self, config: Config) -> launch.Grid:
        return launch.Grid(config, self.q, self.k, None, None)

    def scan(self, name: str, config: Config):
        grid = self.grid(config)
        if name == "dk":
            return lambda: launch.adjoint_states(grid, self.q, self.g, NEVER, None, None)
        keys = launch.prepare_keys(grid, self.k, False, True, NEVER)
        keys = keys._replace(sums=launch.run_sums(grid, keys.sums, keys.fades, None, None, 1, False))
        return lambda: (launch.key_states(grid, keys, NEVER, None, True, None), keys)

    def read(self, name: str, config: Config):
        grid = self.grid(config)
        key = (name, config.BN, config.S)  # the states do not depend on anything else
        if key not in self.inputs:
            self.inputs = {key: self.scan(name, config)()}
        if name == "dk":
            states = self.inputs[key]
            pulls = self.q.new_ones(grid.sums, grid.query_heads, grid.size, dtype=torch.float32)
            adjoint = launch.Adjoint(self.g, self.g, pulls, self.lam, self.lam, self.lam)
            return lambda: launch.dk_tiles(
                grid, grid, self.q, self.k, self.lam, self.g, adjoint, NEVER, states, None, True, None
            )
        states, keys = self.inputs[key]
        return lambda: launch.read_tiles(
            grid, self.q, keys, self.lam, launch.SCALED, NEVER, states, True, True, self.q.dtype, launch.Rows()
        )


def stages(name: str, dtype: torch.dtype, block_k: int, hopper: bool) -> list[tuple[str, str, Config]]:
    """The distinct (stage, pass, config) to compile and time; fields the stage does not use are those of the first."""
    every = candidates(name, dtype, block_k, hopper)
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


def compile_all(jobs: list[tuple], workers: int) -> list[str | None]:
    """What went wrong with each (stage, pass, config, key size, dtype); None where it runs."""
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
        return pool.map(_compile, jobs, chunksize=1)


def tune(
    name: str, size: int, dtype: torch.dtype, heads: int, length: int, jobs: list[tuple[tuple, str | None]]
) -> tuple[list, list]:
    """Every timing of a pass, and its fastest sizes at batch 1 and 8 as rows of tuned.json."""
    block_k = launch.block_size(size)
    rows, best = [], []
    for batch in (1, 8):
        case = Case(batch, length, heads, size, dtype)
        timed: dict[str, list[tuple[float, Config]]] = {"scan": [], "read": []}
        for (stage, _, config, *_), failure in sorted(jobs, key=lambda job: str(job[0])):  # states are used again
            row = {"pass": name, "BK": block_k, "B": batch, "stage": stage, **asdict(config), "failure": failure}
            if failure is None:
                us = 1e3 * graph_time(getattr(case, stage)(name, config), inner=5, repeats=5, warmup=1)["median"]
                timed[stage].append((us, config))
                row["us"] = us
            rows.append(row)
        us, scan, read = min(
            (
                (a + b, scan, read)
                for a, scan in timed["scan"]
                for b, read in timed["read"]
                if (scan.BN, scan.S) == (read.BN, read.S)
            ),
            key=lambda pair: pair[0],
        )
        config = replace(read, **{field: getattr(scan, field) for field in SCAN_FIELDS})
        log2_work = round(math.log2(batch * length * heads))
        best.append(
            {"pass": name, "dtype": NAMES[dtype], "BK": block_k, "log2_work": log2_work, "config": astuple(config)}
        )
        print(f"{name:<6} {NAMES[dtype]} BK {block_k:<4} batch {batch} {us:8.1f} us  {config}", flush=True)
    return rows, best


def main() -> None:
    parser = make_parser("tune", __doc__)
    parser.prog = "python benchmarks/tune.py"
    parser.add_argument("--key-sizes", default="64,128,256")
    parser.add_argument("--dtypes", default="bf16", help=f"of {', '.join(DTYPES)} (%(default)s)")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=TUNED, help=f"keep the fastest, in {TUNED.name} by default"
    )
    options = parser.parse_args()
    groups = [
        (name, int(size), DTYPES[dtype], hopper)
        for dtype in options.dtypes.split(",")
        for size in options.key_sizes.split(",")
        for name in options.passes.split(",")
        for hopper in (False, True)
        if not hopper or hopper_refuses(Call(torch.device("cuda"), DTYPES[dtype], int(size), options.length)) is None
    ]
    jobs = [
        (*job, size, dtype)
        for name, size, dtype, hopper in groups
        for job in stages(name, dtype, launch.block_size(size), hopper)
    ]
    results = list(zip(jobs, compile_all(jobs, options.workers), strict=True))
    rows: list[dict] = []
    best: list[dict] = []
    for name, size, dtype, hopper in groups:
        mine = [r for r in results if (r[0][1], *r[0][3:], r[0][2].hopper) == (name, size, dtype, hopper)]
        more = tune(name, size, dtype, options.heads, options.length, mine)
        rows += more[0]
        best += more[1]
    for row in [r for r in rows if r["failure"] and r["B"] == 1][:6]:
        print("failed", *(row[x] for x in ("pass", "BK", "stage", "BT", "S", "BN", "BS", "warps", "stages", "failure")))
    write(options, {"rows": rows})
    if options.write is not None:
        keep(best, options.write)


def keep(best: list[dict], path: Path) -> None:
    """Put `best` into the table at `path`, in the place of what it holds of the same."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    names = ("pass", "dtype", "BK", "log2_work")
    table = {(*(row[name] for name in names), Config(*row["config"]).hopper): row for row in [*known, *best]}
    lines = ",\n  ".join(json.dumps(table[key]) for key in sorted(table))
    about = json.dumps({**provenance(), "config": [field.name for field in fields(Config)]})
    path.write_text(f'{{"about": {about},\n "rows": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    main()
