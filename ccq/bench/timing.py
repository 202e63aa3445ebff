"""Timing on a GPU: CUDA graphs for the kernels' own time, wall clock for what a user waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Timing = dict[str, float]  # milliseconds: median, and the quantiles that hold the middle 60%


def summarise(samples: list[float]) -> Timing:
    ordered = sorted(samples)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return {"median": statistics.median(ordered), "low": low, "high": high}


def graph_time(call: Callable[[], object], inner: int = 10, repeats: int = 10, warmup: int = 3) -> Timing:
    """Time of one call with its kernels recorded in a CUDA graph: no launch overhead."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    graph.replay()
    samples = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / inner)
    return summarise(samples)


def wall_time(call: Callable[[], object], repeats: int = 40, warmup: int = 5) -> Timing:
    """Wall clock of one call with a synchronisation around it, the paper's way."""
    samples = []
    for i in range(warmup + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= warmup:
            samples.append(1e3 * (time.perf_counter() - begin))
    return summarise(samples)
