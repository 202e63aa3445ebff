"""Whole models for the benchmarks: presets with random weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch

from ccq.bench import results
from ccq.bench.results import NOTE, WARM, make_parser
from ccq.names import nearest
from ccq.systems import SYSTEMS, compared

COMPARED = compared("ccq-gla", "ccq-gated-deltanet")


def parser(kind: str, about: str | None, **options) -> argparse.ArgumentParser:
    """The options that benchmarks of whole models share, and others."""
    parser = make_parser(kind, about, size="1.3b", batch=8, warm=WARM, note=NOTE, **options)
    parser.add_argument("--systems", type=listed, default=",".join(COMPARED))
    return parser


def run(args: argparse.Namespace, title: str, measure: Callable[..., dict]) -> int:
    """Benchmark every system: `measure(system, model, args)` gives its row, which is compared with the backbone's.

    With --warm it is asked to compile, and what it gives is dropped.
    """

    def rows() -> Iterator[dict]:
        for system in args.systems:
            row = {"system": system, "size": args.size, "B": args.batch, "dtype": "bfloat16"}
            row |= measure(system, model(system, args.size), args)
            torch.cuda.empty_cache()
            if not args.warm:
                yield row

    return results.run(args, title, rows(), lambda row: {"system": SYSTEMS[row["system"]].family})


def model(system: str, size: str, **changes):
    """A preset in bf16 on the GPU, with random weights."""
    from ccq.model import CCQConfig, CCQForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        return CCQForCausalLM(CCQConfig.preset(f"{system}-{size}", **changes)).bfloat16().eval()


def tokens(made, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(made.config.vocab_size, (batch, length), device="cuda", generator=generator)


def listed(text: str) -> tuple[str, ...]:
    """Names of systems with commas between, of recipes too.

    >>> listed("gla,ccq_gla")
    ('gla', 'ccq-gla')
    """
    names = tuple(name.replace("_", "-") for name in text.split(","))
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"there is no {name!r}.{nearest(name, tuple(SYSTEMS))}")
    return names
