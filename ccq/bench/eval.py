"""`ccq bench eval`: speed of evaluation, and the effect of shared prefill.

Requests as `ccq eval MODEL --stage requests` left them, presets with random weights: speed does not depend on what a
model knows. A second row for each suite with shared contexts runs some of them both ways.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ccq.bench.results import model_parser, random_model, run
from ccq.bench.tables import newest, noted, timed
from ccq.evaluate.engine import Engine
from ccq.evaluate.requests import RequestSet
from ccq.report.collect import Collection
from ccq.report.table import Block, Cell, Row, Table, marks, scale_label
from ccq.systems import SYSTEMS


def main(argv: Sequence[str] | None = None) -> int:
    parser = model_parser(
        "eval", __doc__, suites="lm,niah", contexts=(1000, "that are scored both ways (default: %(default)s)")
    )
    parser.set_defaults(systems=("ccq-gla",), size="500m")
    parser.add_argument("--requests", type=Path, required=True, help="folder of requests, one file per suite")
    args = parser.parse_args(argv)
    return run(args, "answering requests with whole models", measured(args))


def measured(args) -> Iterator[dict]:
    for system, suite in itertools.product(args.systems, args.suites.split(",")):
        asked = RequestSet.load(args.requests / f"{suite}.npz")
        if args.warm:  # some of every length
            longest_first = sorted(asked.requests, key=lambda r: -r.length)
            asked.requests = longest_first[:: max(1, len(asked.requests) // 512)]
        most = max(asked.tokens.max().item() + 1, 32_000)
        model = random_model(system, args.size, vocab_size=int(most))
        row = {"system": system, "size": args.size, "suite": suite, "dtype": "bfloat16"} | answer(model, asked)
        if not args.warm:
            row["both_ways"] = both_ways(model, asked, args.contexts)
        yield row
        del model
        torch.cuda.empty_cache()


def answer(model, asked: RequestSet) -> dict:
    """Seconds for all of it, as a user waits for them."""
    begin = time.perf_counter()
    engine = Engine(model)
    number = sum(1 for _ in engine.run(asked))
    seconds = time.perf_counter() - begin
    return {
        "requests": number,
        "tokens": sum(request.length for request in asked.requests),
        "seconds": seconds,
        "samples_per_second": number / seconds,
        "shared": bool(engine.shared.used),
    }


def both_ways(model, asked: RequestSet, contexts: int) -> dict | None:
    """Some requests with equal contexts, plain and shared: seconds, and contexts whose likeliest answer differs."""
    groups = Engine(model, prefill="shared")._split(asked, [r for r in asked.requests if r.kind == "score"])[1]
    some = [request for group in groups[:contexts] for request in group]
    if not some:
        return None
    found: dict[str, dict[str, float]] = {}
    seconds = {}
    for way in ("plain", "shared"):
        begin = time.perf_counter()
        found[way] = {r.id: sum(row["nll"]) for r, row in Engine(model, prefill=way).run(asked, some)}
        seconds[way] = time.perf_counter() - begin
    likeliest = [
        [min(group, key=lambda request: losses[request.id]).id for group in groups[:contexts]]
        for losses in found.values()
    ]
    changed = sum(one != other for one, other in zip(*likeliest, strict=True))
    difference = max(abs(found["plain"][r.id] - found["shared"][r.id]) for r in some)
    return {
        "contexts": len(groups[:contexts]), "requests": len(some), "plain_seconds": seconds["plain"],
        "shared_seconds": seconds["shared"], "changed_answers": changed, "largest_difference": difference,
    }  # fmt: skip


def tables(found: Collection) -> list[Table]:
    """How long suites take, of the newest file."""
    source = newest(found, "eval")
    if source is None:
        return []
    rows, notes = [], []
    for row in source.content["rows"]:
        cells = (f"{row['requests']:,}", f"{row['tokens']:,}", f"{row['seconds']:,.0f}",
                 f"{row['samples_per_second']:,.1f}")  # fmt: skip
        label = f"{SYSTEMS[row['system']].label}, {scale_label(row['size'])}: {row['suite']}"
        rows.append(Row(Cell(label), [timed(text, "", source) for text in cells]))
        if both := row.get("both_ways"):
            notes.append(
                f"{label}: with the prefill of equal contexts shared, {both['changed_answers']:,} of "
                f"{both['contexts']:,} likeliest answers change in {row['dtype']}; {both['shared_seconds']:.1f} s "
                f"against {both['plain_seconds']:.1f} s."
            )
    notes.append(f"One GPU, random weights{noted([source])}. {marks([source])}")
    head = ["suite", "requests", "tokens", "seconds", "samples a second"]
    return [Table("evaluation", "Answering a suite", head, [Block("", rows)], notes)]
