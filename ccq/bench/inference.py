"""`ccq bench prefill`: a batch of prompts through a whole model, states kept, logits of the last token. `ccq bench
decode`: one token at a time.

    wall       of a prefill of 4K tokens, with a synchronisation around each call
    step       the captured step alone: tokens in, logits out (CUDA-graph time)
    generate   tokens/s of `model.generate`, greedy, prefill not counted: what a user gets
    plain      the same step launched kernel by kernel (wall clock), to see what the graph saves

1.3B, batch 8, as in the paper, which gives no prompt length for decoding: the states do not grow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ccq.bench import KINDS
from ccq.bench.results import COMPARED, graph_time, model_parser, run_models, tokens, wall_time
from ccq.bench.tables import BATCH, RANGE, beside, changed, control_of, label_of, measured_of_fla, noted, quoted
from ccq.report.collect import Collection
from ccq.report.paper import load
from ccq.report.table import WORDS, Block, Cell, Row, Table, marks, row_kind


@torch.inference_mode()
def measure_prefill(model, args) -> dict:
    prompt = tokens(model, args.batch, args.length)
    torch.cuda.reset_peak_memory_stats()
    timing = wall_time(lambda: model(prompt, use_cache=True, logits_to_keep=1), repeats=10, warmup=3)
    return {"T": args.length, "wall_ms": timing, "peak_bytes": torch.cuda.max_memory_allocated()}


def generate_seconds(model, prompt: torch.Tensor, new: int) -> float:
    begin = time.perf_counter()
    out = model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    torch.cuda.synchronize()
    assert out.shape[1] == prompt.shape[1] + new
    return time.perf_counter() - begin


def measure_decode(model, args) -> dict:
    prompt = tokens(model, args.batch, args.prompt)
    generate_seconds(model, prompt, 8)  # captures its graph
    # the difference is decoding alone
    short, long = (min(generate_seconds(model, prompt, new) for _ in range(2)) for new in (8, 8 + args.tokens))
    speed = {"generate_tok_s": args.batch * args.tokens / (long - short)}
    if not hasattr(model, "decode"):  # fla's: no step that a graph could hold
        return {"prompt": args.prompt, "step_ms": None, "plain_ms": None, "step_tok_s": None, **speed}
    with torch.no_grad():
        cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
        last = prompt[:, -1].contiguous()

        def call() -> None:
            model.decode(last, cache.states, cache.rows)

        step, plain = graph_time(call, inner=2, repeats=20), wall_time(call)
    return {
        "prompt": args.prompt, "step_ms": step, "plain_ms": plain,
        "step_tok_s": 1e3 * args.batch / step["median"], **speed,
    }  # fmt: skip


def prefill(argv: Sequence[str]) -> int:
    args = model_parser("prefill", KINDS["prefill"][1], length=4096).parse_args(argv)
    return run_models(args, "prefill of whole models", measure_prefill)


def decode(argv: Sequence[str]) -> int:
    args = model_parser("decode", KINDS["decode"][1], prompt=512, tokens=128).parse_args(argv)
    return run_models(args, "decoding with whole models", measure_decode)


def tables(found: Collection) -> list[Table]:
    """The paper's table of inference, with what `ccq bench prefill` and `decode` measured beside it."""
    prefills, decodes = found.of("bench", "prefill"), found.of("bench", "decode")
    told = load().tables["inference"]

    rows = []
    for system in (*COMPARED, *measured_of_fla([*prefills, *decodes])):
        control = {"system": control_of(system)}
        at = {"system": system, "size": "1.3b", "B": BATCH}
        line = [
            quoted("inference", system, "4K prefill, ms"),
            beside(prefills, changed("wall_ms"), control, **at, T=4096),
            quoted("inference", system, "decode, tokens/s"),
            *(beside(decodes, changed(key), control, **at) for key in ("generate_tok_s", "step_tok_s")),
            beside(decodes, changed("step_ms", ".2f", ratio=None), control, **at),
        ]
        rows.append(Row(Cell(label_of(system)), line, row_kind(system)))
    both = [*prefills, *decodes]
    notes = [WORDS["inference"].format(noted=noted(both), marks=marks(both)), RANGE] if both else []
    decoding = ("decode, tokens/s, paper", "here: `generate`", "here: graph step", "ms")
    head = ["", "4K prefill, ms, paper", "here", *decoding]
    return [Table("inference", f"{told.title}, one GPU ({told.label})", head, [Block("", rows)], notes)]
