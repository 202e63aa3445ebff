"""`ccq bench decode`: one token at a time through a whole model.

    step       the captured step alone: tokens in, logits out (CUDA-graph time)
    generate   tokens/s of `model.generate`, greedy, prefill not counted: what a user gets
    plain      the same step launched kernel by kernel (wall clock), to see what the graph saves

1.3B, batch 8, as in the paper, which gives no prompt length: the states do not grow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ccq.bench import systems
from ccq.bench.results import row_of, write
from ccq.bench.tables import BATCH, RANGE, find, noted, over, quoted, row_kind, spread, timed
from ccq.bench.timing import graph_time, wall_time
from ccq.report.collect import Collection, Source
from ccq.report.paper import load, numbers_of
from ccq.report.table import NOT_RUN, Block, Cell, Row, Table, marks
from ccq.systems import SYSTEMS
from ccq.tables import LiveTable


def generate_seconds(model, prompt: torch.Tensor, new: int) -> float:
    begin = time.perf_counter()
    out = model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    torch.cuda.synchronize()
    assert out.shape[1] == prompt.shape[1] + new
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    args = systems.parser("decode", __doc__, prompt=512, tokens=128).parse_args(argv)
    rows: list[dict] = []
    columns = ("system", "step ms", "added ms", "step tok/s", "generate tok/s", "plain ms", "paper tok/s")
    with LiveTable("decoding with whole models", *columns) as table:
        for system in args.systems:
            model = systems.model(system, args.size)
            prompt = systems.tokens(model, args.batch, args.prompt)
            if args.warm:
                generate_seconds(model, prompt, 4)
                del model
                torch.cuda.empty_cache()
                continue
            with torch.no_grad():
                cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
                last = prompt[:, -1].contiguous()

                def call(model=model, cache=cache, last=last):
                    model.decode(last, cache.states, cache.rows)

                step, plain = graph_time(call, inner=2, repeats=20), wall_time(call)
            del cache, call
            generate_seconds(model, prompt, 8)  # captures its graph
            short, long = (
                min(generate_seconds(model, prompt, new) for _ in range(2)) for new in (8, 8 + args.tokens)
            )  # the difference is decoding alone
            row = {
                "system": system, "size": args.size, "B": args.batch, "prompt": args.prompt, "dtype": "bfloat16",
                "step_ms": step._asdict(), "plain_ms": plain._asdict(),
                "step_tok_s": 1e3 * args.batch / step.median,
                "generate_tok_s": args.batch * args.tokens / (long - short),
                "paper_tok_s": next(iter(numbers_of("inference", system)[1:]), None),
            }  # fmt: skip
            rows.append(row)
            base = row_of(rows, system=SYSTEMS[system].family) or row
            table.add(
                system, f"{step.median:.3f}", f"{step.median - base['step_ms']['median']:+.3f}",
                f"{row['step_tok_s']:.0f}", f"{row['generate_tok_s']:.0f}", f"{plain.median:.2f}",
                row["paper_tok_s"] or "-",
            )  # fmt: skip
            del model
            torch.cuda.empty_cache()
    if not args.warm:
        write(args, {"note": args.note, "rows": rows})
    return 0


def tables(found: Collection) -> list[Table]:
    """The paper's table of inference, with what `ccq bench prefill` and `decode` measured beside it."""
    prefills, decodes = found.of("bench", "prefill"), found.of("bench", "decode")
    told = load().tables["inference"]

    def cell(sources: list[Source], system: str, value: str, **wanted: object) -> Cell:
        mine = find(sources, system=system, size="1.3b", B=BATCH, **wanted)
        if mine is None:
            return NOT_RUN
        base = find(sources, system=SYSTEMS[system].control, size="1.3b", B=BATCH, **wanted)
        if not isinstance(mine[0][value], dict):
            return timed(f"{mine[0][value]:.0f}{over(mine[0][value], base and base[0][value])}", "", mine[1])
        if value == "step_ms":
            return timed(*spread(mine[0][value]), mine[1])
        text, small = spread(mine[0][value], digits=0)
        return timed(text + over(mine[0][value]["median"], base and base[0][value]["median"]), small, mine[1])

    rows = []
    for system in systems.COMPARED:
        cells = [
            quoted("inference", system, "4K prefill, ms"),
            cell(prefills, system, "wall_ms", T=4096),
            quoted("inference", system, "decode, tokens/s"),
            *(cell(decodes, system, value) for value in ("generate_tok_s", "step_tok_s", "step_ms")),
        ]
        rows.append(Row(Cell(SYSTEMS[system].label), cells, row_kind(system)))
    both, notes = [*prefills, *decodes], []
    if both:
        notes.append(
            f"Here: one GPU, bf16, random weights; in brackets what CCQ changes{noted(both)}. `generate` is what a "
            f"user gets, the step is one CUDA graph. {marks(both)}"
        )
        notes.append(RANGE)
    head = [
        "",
        "4K prefill, ms, paper",
        "here",
        "decode, tokens/s, paper",
        "here: `generate`",
        "here: graph step",
        "ms",
    ]
    return [Table("inference", f"{told.title}, one GPU ({told.label})", head, [Block("", rows)], notes)]
