"""Whole models for the benchmarks: presets with random weights."""

from __future__ import annotations

import argparse

import torch

from ccq.bench.results import make_parser
from ccq.names import nearest
from ccq.systems import SYSTEMS, compared

COMPARED = compared("ccq-gla", "ccq-gated-deltanet")


def parser(kind: str, about: str | None) -> argparse.ArgumentParser:
    """The options that benchmarks of whole models share."""
    parser = make_parser(kind, about)
    parser.add_argument("--systems", type=listed, default=",".join(COMPARED))
    parser.add_argument("--size", default="1.3b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--warm", action="store_true", help="only compile and tune, write nothing")
    parser.add_argument("--note", help="kept in the result file, e.g. how fla was tuned")
    return parser


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


def row_of(rows: list[dict], system: str | None, **like) -> dict | None:
    """The row of a system among those that were measured, with these other values."""
    wanted = {"system": system, **like}
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)
