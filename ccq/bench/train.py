"""`ccq bench train`: whole training steps of 32K tokens over sequence lengths: the paper's efficiency figure.

The trainer's own step: bf16 weights, fp32 masters, forward, backward, clipping, AdamW. Random tokens, one GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence

import torch

from ccq.bench.results import COMPARED, FLA, NOTE, listed, make_parser, run, summarise
from ccq.bench.tables import beside, changed, control_of, label_of, measured_of_fla, newest, noted, quoted
from ccq.data.batches import Batch
from ccq.report.collect import Collection, Source
from ccq.report.paper import load
from ccq.report.table import WORDS, Block, Cell, Row, Table, marks, row_kind, scale_label
from ccq.systems import SYSTEMS


def batch_of(tokens: int, length: int, vocabulary: int, step: int) -> Batch:
    rng = torch.Generator().manual_seed(step)
    ids = torch.randint(vocabulary, (tokens // length, length + 1), generator=rng)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, torch.arange(tokens // length))


def measure(trainer, tokens: int, length: int, steps: int, warmup: int) -> dict:
    """Milliseconds of a step (it ends with the host waiting for the device), and the peak of memory."""
    samples = []
    for step in range(warmup + steps):
        batch = batch_of(tokens, length, trainer.config.model.vocab_size, step)
        if step == warmup:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        done = trainer.step([batch])
        torch.cuda.synchronize()
        if not done.ok:
            raise RuntimeError(f"step {step}: loss {done.loss}, gradient norm {done.norm}: not worth timing")
        if step >= warmup:
            samples.append(1e3 * (time.perf_counter() - begin))
    timing, peak = summarise(samples), torch.cuda.max_memory_allocated() / 2**30
    return {"step_ms": timing, "tokens_per_second": 1e3 * tokens / timing["median"], "peak_gib": peak}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "train", __doc__, size="1.3b", lengths="2048,4096,8192,16384",
        tokens=(32768, "tokens per step (default: %(default)s)"), steps=(10, "timed steps (default: %(default)s)"),
        warmup=(3, "warm-up steps (default: %(default)s)"), compile=False, activation_checkpointing=False,
        note=NOTE,
    )  # fmt: skip
    systems = ",".join((*COMPARED, "transformer"))
    parser.add_argument("--systems", type=listed, default=systems, help="default: %(default)s")
    args = parser.parse_args(argv)
    if (args.compile or args.activation_checkpointing) and FLA.keys() & set(args.systems):
        parser.error("--compile, --activation-checkpointing: fla's models are measured without them")

    def control(row: dict) -> dict:
        return {"system": FLA.get(row["system"]) or SYSTEMS[row["system"]].control, "length": row["length"]}

    options = {"compile": args.compile, "activation_checkpointing": args.activation_checkpointing}
    return run(args, "training steps of whole models", measured(args), control, **options)


def measured(args) -> Iterator[dict]:
    from ccq.bench.models import config_of, trainer_of
    from ccq.model.info import info
    from ccq.train.config import model_config
    from ccq.train.gpus import peak_flops
    from ccq.train.world import join

    with join("cuda") as world:
        peak = peak_flops(world.device)
        for system in args.systems:
            config = config_of(system, args.size)
            config.runtime.compile = args.compile
            config.runtime.activation_checkpointing = args.activation_checkpointing
            trainer = trainer_of(system, config, world)
            for length in map(int, args.lengths.split(",")):
                row = {"system": system, "size": args.size, "length": length, "tokens": args.tokens, "dtype": "bf16"}
                row |= measure(trainer, args.tokens, length, args.steps, args.warmup)
                flops = info(model_config(trainer.config.model), length).train_flops
                row["mfu"] = None if peak is None else row["tokens_per_second"] * flops / peak
                yield row
            del trainer
            gc.collect()
            torch.cuda.empty_cache()


def tables(found: Collection) -> list[Table]:
    """The paper's table of training with ours beside it, and steps over the length of sequences."""
    sources = found.of("bench", "train")
    told = load().tables["training"]
    rows = []
    for system in (*COMPARED, "transformer", *measured_of_fla(sources)):
        cells = []
        for column, key, form in zip(told.columns, ("tokens_per_second", "peak_gib"), (",.0f", ".1f"), strict=True):
            at = {"system": system, "size": "1.3b", "length": 4096}
            cells.append(quoted("training", system, column.heading))
            cells.append(beside(sources, changed(key, form), {"system": control_of(system)}, **at))
        rows.append(Row(Cell(label_of(system)), cells, row_kind(system)))
    notes = [WORDS["training"]]
    if sources:
        tokens = sources[-1].content["rows"][0]["tokens"]
        notes.append(f"Here: {tokens:,} tokens a step on one GPU{noted(sources)}. {marks(sources)}")
    head = ["", "tokens/s a GPU, paper (8 GPUs)", "here (one GPU)", "peak GiB a GPU, paper (8 GPUs)", "here (one GPU)"]
    made = [Table("training", f"{told.title} ({told.label})", head, [Block("", rows)], notes)]
    source = newest(found, "train")
    return made if source is None else [*made, lengths_table(source)]


def lengths_table(source: Source) -> Table:
    """The numbers of the figure of throughput."""
    first = source.content["rows"][0]
    lengths = sorted({row["length"] for row in source.content["rows"]})

    def shown(row: dict, control: dict | None) -> tuple[str, str]:
        used = "" if row.get("mfu") is None else f"MFU {row['mfu']:.0%}, "
        return changed("tokens_per_second", ",.0f")(row, control)[0], f"{used}{row['peak_gib']:.1f} GiB"

    rows = []
    for system, size in dict.fromkeys((row["system"], row["size"]) for row in source.content["rows"]):
        control = {"system": control_of(system)}
        cells = [beside([source], shown, control, system=system, size=size, length=length) for length in lengths]
        rows.append(Row(Cell(f"{label_of(system)}, {scale_label(size)}"), cells, row_kind(system)))
    told = WORDS["lengths"].format(**first, noted=noted([source]), marks=marks([source]))
    notes = [told, "Small print in a cell: the share of the GPU's peak FLOP/s, and the peak of memory."]
    head = ["", *(f"{length:,} tokens" for length in lengths)]
    return Table("lengths", "Training over the length of sequences", head, [Block("", rows)], notes)
