"""`ccq bench prefill`: a batch of prompts through a whole model, states kept, logits of the last token.

The paper's protocol: 1.3B, batch 8, 4K tokens. Wall clock with a synchronisation around each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ccq.bench import systems
from ccq.bench.results import row_of, write
from ccq.bench.timing import wall_time
from ccq.report.paper import numbers_of
from ccq.systems import SYSTEMS
from ccq.tables import LiveTable


def main(argv: Sequence[str] | None = None) -> int:
    args = systems.parser("prefill", __doc__, length=4096).parse_args(argv)
    rows: list[dict] = []
    with LiveTable("prefill of whole models", "system", "ms", "over backbone", "peak GiB", "paper ms") as table:
        for system in args.systems:
            model = systems.model(system, args.size)
            prompt = systems.tokens(model, args.batch, args.length)

            @torch.inference_mode()
            def call(model=model, prompt=prompt):
                model(prompt, use_cache=True, logits_to_keep=1)

            if args.warm:
                call()
                torch.cuda.synchronize()
            else:
                torch.cuda.reset_peak_memory_stats()
                timing = wall_time(call, repeats=10, warmup=3)
                row = {
                    "system": system, "size": args.size, "B": args.batch, "T": args.length, "dtype": "bfloat16",
                    "wall_ms": timing._asdict(), "peak_bytes": torch.cuda.max_memory_allocated(),
                    "paper_ms": next(iter(numbers_of("inference", system)), None),
                }  # fmt: skip
                rows.append(row)
                base = row_of(rows, system=SYSTEMS[system].family) or row
                ratio = timing.median / base["wall_ms"]["median"]
                peak = f"{row['peak_bytes'] / 2**30:.1f}"
                table.add(system, f"{timing.median:.1f}", f"{ratio:.3f}", peak, row["paper_ms"] or "-")
            del model, prompt, call
            torch.cuda.empty_cache()
    if not args.warm:
        write(args, {"note": args.note, "rows": rows})
    return 0
