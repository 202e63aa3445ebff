"""`ccq bench prefill`: a batch of prompts through a whole model, states kept, logits of the last token.

The paper's protocol: 1.3B, batch 8, 4K tokens. Wall clock with a synchronisation around each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ccq.bench.results import model_parser, run_models, tokens, wall_time


@torch.inference_mode()
def measure(model, args) -> dict:
    prompt = tokens(model, args.batch, args.length)
    torch.cuda.reset_peak_memory_stats()
    timing = wall_time(lambda: model(prompt, use_cache=True, logits_to_keep=1), repeats=10, warmup=3)
    return {"T": args.length, "wall_ms": timing, "peak_bytes": torch.cuda.max_memory_allocated()}


def main(argv: Sequence[str] | None = None) -> int:
    args = model_parser("prefill", __doc__, length=4096).parse_args(argv)
    return run_models(args, "prefill of whole models", measure)
