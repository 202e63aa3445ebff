"""How the chunkwise backend does against the definition on a CPU: time, growth with length, memory, rounding.

    python benchmarks/operator_cpu.py            # some minutes; writes benchmarks/results/operator_cpu.json
    python benchmarks/operator_cpu.py --quick    # seconds, short sequences, writes nothing: does the script work?

Only the ratios are meant for publication: milliseconds on a CPU say more of the CPU than of the code.

What is counted, for each token and head (K key size, C chunk length, fp32):
    FLOP   forward 4 K^2 + 4 C K: k k^T into the state and a read of it, 2 K^2 each; scores and their sum, 2 C K each
           forward and backward 12 K^2 + 14 C K: the read again for the gradient, the scores of q, the adjoints of both;
           and 2 K^2 of every piece but the last, where a sequence is cut into pieces that fit the cache
           reference 6 K^2: update, symmetrise, read, 2 K^2 each; with backward three times that
    bytes  forward 4 (4 K + 3 + 4 K^2 / C): q, k, lam in; q_clean, k_bar, 1/|k|, m out; chunk states summed in a scan
           forward and backward 4 (9 K + 7 + 12 K^2 / C). A lower bound: what PyTorch writes between its calls is on top
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import ccq
from ccq.bench.results import SHIPPED
from ccq.files import write_json
from ccq.ops import correction
from ccq.ops.clean import chunk
from ccq.provenance import cpu, provenance

B, H, K = 1, 4, 64


def inputs(length: int, mean_energy: float = 0.0, grad: bool = False) -> tuple[torch.Tensor, ...]:
    """q, k, lam; `mean_energy` is the share of each unit key's energy that lies in a mean common to all."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, length, H, K, generator=generator) for _ in range(2))
    mean = torch.nn.functional.normalize(torch.randn(H, K, generator=generator), dim=-1)
    k = (1 - mean_energy) ** 0.5 * torch.nn.functional.normalize(k, dim=-1) + mean_energy**0.5 * mean
    lam = torch.rand(B, length, H, generator=generator)
    return tuple(x.requires_grad_(grad) for x in (q, k, lam))


def call(backend: str, length: int, backward: bool) -> Callable[[], None]:
    q, k, lam = inputs(length, grad=backward)
    g = torch.randn(B, length, H, K)

    def forward() -> None:
        with torch.no_grad():
            ccq.clean_query(q, k, lam, backend=backend)

    def forward_and_backward() -> None:
        q_clean, _, _ = ccq.clean_query(q, k, lam, backend=backend)
        torch.autograd.grad(q_clean, (q, k, lam), g)

    return forward_and_backward if backward else forward


def seconds(function: Callable[[], None], repeats: int, warm_up: bool = True) -> list[float]:
    """Sorted wall-clock times."""
    if warm_up:
        function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times)


def flop(backend: str, length: int, backward: bool) -> int:
    if backend == "reference":
        per_token = 6 * K * K * (3 if backward else 1)
    else:
        per_token = 12 * K * K + 14 * chunk.CHUNK * K if backward else 4 * K * K + 4 * chunk.CHUNK * K
    again = 0
    if backend == "chunk" and backward:
        again = 2 * K * K * chunk.pieces(torch.empty(B, length, H, K, device="cpu"), None)[-1].start
    return B * H * (length * per_token + again)


def traffic(length: int, backward: bool) -> int:
    state = K * K // chunk.CHUNK
    return B * length * H * 4 * (9 * K + 7 + 12 * state if backward else 4 * K + 3 + 4 * state)


def timing(backend: str, length: int, backward: bool, repeats: int, warm_up: bool = True) -> dict:
    times = seconds(call(backend, length, backward), repeats, warm_up)
    median = statistics.median(times)
    row: dict = {
        "backend": backend,
        "pass": "forward and backward" if backward else "forward",
        "B": B,
        "T": length,
        "H": H,
        "K": K,
        "C": chunk.CHUNK if backend == "chunk" else None,
        "dtype": "float32",
        "repeats": repeats,
        "median_s": median,
        "fastest_s": times[0],
        "slowest_s": times[-1],
        "gflop": flop(backend, length, backward) / 1e9,
        "gflop_per_s": flop(backend, length, backward) / median / 1e9,
    }
    if backend == "chunk":
        row["gbyte"] = traffic(length, backward) / 1e9
        row["gbyte_per_s"] = row["gbyte"] / median
    print(
        f"  {backend:<10} {row['pass']:<21} T={length:<6} {median * 1e3:10.1f} ms {row['gflop']:8.2f} GFLOP"
        f" {row['gflop_per_s']:7.1f} GFLOP/s" + (f" {row['gbyte']:6.3f} GB" if "gbyte" in row else ""),
        flush=True,
    )
    return row


def resident(field: str) -> int:
    """Bytes of this process's memory that are in RAM: "VmRSS" now, "VmHWM" at the most so far.

    VmHWM and not getrusage's ru_maxrss, because a child's ru_maxrss begins at what its parent had used. Where there is
    no /proc, ru_maxrss has to do for both, in a fresh process.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def measure_memory(length: int, backward: bool) -> int:
    """Bytes that one call adds at its peak, run in a process of its own.

    What was there before the call, torch and the inputs among it, is taken off; a short call first loads what torch
    loads on its first use. In a process that had run other sizes, freed memory would be used again and hide the peak.
    """
    call("chunk", 2 * chunk.CHUNK, backward)()
    function = call("chunk", length, backward)
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def memory(length: int, backward: bool) -> dict:
    command = [sys.executable, __file__, "--memory-of", str(length), *(["--backward"] if backward else [])]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    name = "forward and backward" if backward else "forward"
    print(f"  chunk      {name:<21} T={length:<6} {peak / 2**20:10.1f} MiB", flush=True)
    return {"backend": "chunk", "pass": name, "B": B, "T": length, "H": H, "K": K, "dtype": "float32", "bytes": peak}


def rounding(length: int, mean_energy: float) -> dict:
    """RMS error of y in fp32 against the definition in fp64, relative to RMS |C_t q| / t.

    Not relative to y: with a strong mean y is a small difference of C_t q / t and the mean's part of it, so any fp32
    arithmetic on the sums loses that much.
    """
    q, k, _ = inputs(length, mean_energy)
    y = correction(q, k, backend="chunk").double()
    exact = correction(q.double(), k.double(), backend="reference")
    scale = correction(q.double(), k.double(), centred=False, backend="chunk")
    error = ((y - exact).square().mean() / scale.square().mean()).sqrt().item()
    print(f"  mean energy {mean_energy:<4} {error:.2e}", flush=True)
    return {"T": length, "mean_energy": mean_energy, "error": error}


def machine() -> dict:
    """The CPU, and how busy it is: others at work on it spoil the ratios too."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences, one repetition, nothing written")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # how the script calls itself
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(measure_memory(args.memory_of, args.backward))
        return

    length, short, long, repeats = (512, 256, 2048, 1) if args.quick else (4096, 2048, 16384, 9)
    origin = {"bench": "operator-cpu", **provenance("python benchmarks/operator_cpu.py"), **machine()}
    shape = f"B={B} H={H} K={K} C={chunk.CHUNK} float32"
    print(f"{origin['cpu']}, {origin['threads']} threads, torch {torch.__version__}; {shape}")
    if origin["load_before"] > 0.5:
        print(f"The machine is busy (load {origin['load_before']}): run this again when it is not.")
    timings: list[dict] = []
    memories: list[dict] = []
    errors: list[dict] = []
    goals: list[dict] = []

    def goal(name: str, value: float, at_least: float | None = None, at_most: float | None = None) -> None:
        ok = value >= at_least if at_least is not None else value <= (at_most or 0)
        goals.append({"name": name, "value": value, "at_least": at_least, "at_most": at_most, "ok": ok})

    print("Time against the definition")
    for backward, at_least in ((False, 15), (True, 40)):
        fast = timing("chunk", length, backward, repeats)
        # seconds a call, so that warming up changes nothing; the backward keeps gigabytes and runs once
        slow = timing("reference", length, backward, 1 if backward else 2, warm_up=False)
        timings += [fast, slow]
        goal(f"times faster than reference, {fast['pass']}", slow["median_s"] / fast["median_s"], at_least=at_least)

    print(f"Time and peak memory from {short} to {long} tokens")
    for backward in (False, True):
        small, large = (timing("chunk", n, backward, repeats) for n in (short, long))
        timings += [small, large]
        goal(f"time of {long} over {short}, {small['pass']}", large["median_s"] / small["median_s"], at_most=10)
    for backward in (False, True):
        small, large = (memory(n, backward) for n in (short, long))
        memories += [small, large]
        goal(f"memory of {long} over {short}, {small['pass']}", large["bytes"] / small["bytes"], at_most=10)

    print("RMS error of y = Sigma q in fp32 against fp64, relative to RMS |C q| / t")
    for mean_energy in (0.0, 0.5, 0.9):
        errors.append(rounding(length, mean_energy))
        goal(f"error at mean energy {mean_energy}", errors[-1]["error"], at_most=1e-6)

    print("Chunk length")
    chosen = chunk.CHUNK
    for size in (32, 64, 128, 256):
        chunk.CHUNK = size
        print(f"  C={size}{' (chosen)' if size == chosen else ''}")
        timings += [timing("chunk", length, backward, repeats) for backward in (False, True)]
    chunk.CHUNK = chosen

    print("Goals")
    for g in goals:
        bound = f">= {g['at_least']:g}" if g["at_least"] is not None else f"<= {g['at_most']:g}"
        print(f"  {g['name']:<55} {g['value']:10.3g}   {bound:<10} {'ok' if g['ok'] else 'missed'}")
    if args.quick:
        print("Quick: these lengths say nothing of the goals. Nothing written.")
        return
    parts = {**origin, "chunk": chunk.CHUNK, "goals": goals, "timings": timings, "memory": memories, "errors": errors}
    write_json(SHIPPED / "operator_cpu.json", parts)
    print("Only the ratios above are meant for publication.")


if __name__ == "__main__":
    main()
