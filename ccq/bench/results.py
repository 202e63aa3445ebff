"""Where benchmarks write what they measure, and where it is found."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ccq.files import replaceable, write_json
from ccq.names import slug
from ccq.provenance import provenance

OWN = Path("bench")  # beside the user
_PACKAGED = Path(__file__).with_name("measured")  # what a wheel has of the repository's results
WARM = (False, "only compile and tune, write nothing")
NOTE = (None, "kept in the result file, e.g. how fla was tuned")
SHIPPED = _PACKAGED if _PACKAGED.exists() else Path(__file__).parents[2] / "benchmarks" / "results"


def make_parser(kind: str, about: str | None, **options) -> argparse.ArgumentParser:
    """With --out, and for each of `options` --NAME: its default, or that and what --help says."""
    parser = argparse.ArgumentParser(prog=f"ccq bench {kind}", description=(about or "").splitlines()[0])
    parser.set_defaults(kind=kind)
    out = lambda text: replaceable(Path(text), bench=kind)  # noqa: E731 -- before anything is measured
    parser.add_argument("--out", type=out, help=f"file to write (default: {OWN}/{kind.replace('-', '_')}_GPU.json)")
    for name, option in options.items():
        default, told = option if isinstance(option, tuple) else (option, None)
        kind_of: dict = (
            {"action": "store_true"} if default is False else {"type": str if default is None else type(default)}
        )
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=told, **kind_of)
    return parser


def row_of(rows: list[dict], **like) -> dict | None:
    """The first row with these values among those that were measured."""
    return next((row for row in rows if all(row[name] == value for name, value in like.items())), None)


def write(args: argparse.Namespace, content: dict) -> None:
    """To `--out`, or to a file that is named after the benchmark and the GPU."""
    gpu = slug(torch.cuda.get_device_name().removeprefix("NVIDIA "))
    path = args.out or OWN / f"{slug(args.kind)}_{gpu}.json"
    write_json(path, {**provenance(), "bench": args.kind, **content})
    print(f"Wrote {path}")
