"""What benchmarks share: options, timing on a GPU, whole models; where results are written, and where they are.

CUDA graphs are timed for the kernels' own time, wall clock for what a user waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ccq.files import replaceable, write_json
from ccq.names import nearest, slug
from ccq.provenance import provenance
from ccq.systems import SYSTEMS, compared

COMPARED = compared("ccq-gla", "ccq-gated-deltanet")
FLA = {"fla-gla": "gla", "fla-gated-deltanet": "gated-deltanet"}  # flash-linear-attention's own models of these options
OWN = Path("bench")  # beside the user
_PACKAGED = Path(__file__).with_name("measured")  # what a wheel has of the repository's results
WIDTH = 14  # of a column on the screen: a time and its ratio
NOTE = (None, "kept in the result file, e.g. how fla was tuned")
SHIPPED = _PACKAGED if _PACKAGED.exists() else Path(__file__).parents[2] / "benchmarks" / "results"


def make_parser(kind: str, about: str | None, **options) -> argparse.ArgumentParser:
    """With --out, and for each of `options` --NAME: its default, or that and what --help says."""
    parser = argparse.ArgumentParser(prog=f"ccq bench {kind}", description=(about or "").splitlines()[0])
    parser.set_defaults(kind=kind)
    out = lambda text: replaceable(Path(text), bench=kind)  # noqa: E731 -- before anything is measured
    parser.add_argument("--out", type=out, help=f"file to write (default: {OWN}/{kind.replace('-', '_')}_GPU.json)")
    for name, option in options.items():
        default, told = option if isinstance(option, tuple) else (option, "default: %(default)s")
        typed = {"type": str if default is None else type(default)}
        kind_of: dict = {"action": "store_true"} if default is False else typed
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=told, **kind_of)
    return parser


def run(
    args: argparse.Namespace, title: str, measured: Iterable[dict], control: Callable[[dict], dict] = dict, **content
) -> int:
    """Show rows as they are `measured`, each beside the one that has the values of `control`, and write them."""
    rows: list[dict] = []
    print(title)
    for row in measured:
        width = {name: max(len(name), WIDTH) for name in row}
        if not rows:
            print("  ".join(name.ljust(width[name]) for name in row).rstrip())
        rows.append(row)
        base = row_of(rows, **control(row)) or row
        cells = (shown(value, base[name]).ljust(width[name]) for name, value in row.items())
        print("  ".join(cells).rstrip(), flush=True)  # so that what is cut short leaves its rows
    write(args, {**({"note": args.note} if "note" in args else {}), **content, "rows": rows})
    return 0


def shown(value: Any, base: Any) -> str:
    """A value of a row on the screen, of timings the median; in brackets over the control's, where they differ.

    >>> shown({"median": 1.5, "low": 1.4, "high": 1.6}, {"median": 1.2}), shown(4096, 4096), shown(None, None)
    ('1.500 (1.250×)', '4,096', '-')
    """
    value, base = (x.get("median") if isinstance(x, dict) else x for x in (value, base))
    if not isinstance(value, int | float):
        return value if isinstance(value, str) else "-"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if value < 1e4 else f"{value:.3g}"
    return f"{text} ({value / base:.3f}×)" if base and value != base else text


def row_of(rows: list[dict], **like) -> dict | None:
    """The first row with these values among those that were measured."""
    return next((row for row in rows if all(row[name] == value for name, value in like.items())), None)


def write(args: argparse.Namespace, content: dict) -> None:
    """To `--out`, or to a file that is named after the benchmark and the GPU."""
    gpu = slug(torch.cuda.get_device_name().removeprefix("NVIDIA "))
    path = args.out or OWN / f"{slug(args.kind)}_{gpu}.json"
    write_json(path, {**provenance(), "bench": args.kind, **content})
    print(f"Wrote {path}")


def model_parser(kind: str, about: str | None, **options) -> argparse.ArgumentParser:
    """The options that benchmarks of whole models share, and others."""
    parser = make_parser(kind, about, size="1.3b", batch=8, note=NOTE, **options)
    parser.add_argument("--systems", type=listed, default=",".join(COMPARED), help="default: %(default)s")
    return parser


def run_models(args: argparse.Namespace, title: str, measure: Callable[..., dict]) -> int:
    """Benchmark every system: `measure(model, args)` gives its row, which is compared with the backbone's."""

    from ccq.bench.models import random_model

    def rows() -> Iterator[dict]:
        for system in args.systems:
            row = {"system": system, "size": args.size, "B": args.batch, "dtype": "bfloat16"}
            yield row | measure(random_model(system, args.size), args)
            torch.cuda.empty_cache()

    return run(args, title, rows(), lambda row: {"system": FLA.get(row["system"]) or SYSTEMS[row["system"]].family})


def tokens(made, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(made.config.vocab_size, (batch, length), device="cuda", generator=generator)


def listed(text: str) -> tuple[str, ...]:
    """Names of systems with commas between, of recipes too, and of fla's models.

    >>> listed("gla,ccq_gla")
    ('gla', 'ccq-gla')
    """
    names = tuple(name.replace("_", "-") for name in text.split(","))
    for name in names:
        if name not in SYSTEMS and name not in FLA:
            raise argparse.ArgumentTypeError(f"there is no {name!r}.{nearest(name, (*SYSTEMS, *FLA))}")
    return names


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
