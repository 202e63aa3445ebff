"""What the tests of training share: small runs, processes that may be killed, and what a checkpoint holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import numpy as np
import torch

from ccq.data import shards
from ccq.data.batches import Steps
from ccq.train.config import Config, Data, Optimizer, Runtime, preset
from ccq.train.data import train_source

SYSTEMS = ("transformer", "mamba2", "gla", "gla-hedgehog", "gated-deltanet", "ccq-gla", "ccq-gated-deltanet")
EOS = 0
SLICES = ((16, 2, 300), (24, 3, 300))


def steps_of(trainer, count, accumulate=1):
    batches = iter(Steps(train_source(trainer.config), accumulate=accumulate))
    return [trainer.step(next(batches)) for _ in range(count)]


def small(system="ccq-gla", *, steps=20, dtype="fp64", seed=0, path=None, **changes) -> Config:
    """A run of milliseconds a step; `changes` are fields of Data, Optimizer, Runtime, or of the model."""
    kinds = {Data: {}, Optimizer: {}, Runtime: {}}
    model = {}
    for name, value in changes.items():
        kind = next((k for k in kinds if name in k.__dataclass_fields__), None)
        (model if kind is None else kinds[kind])[name] = value
    data = {"source": "mqar" if path is None else "tokens", "path": None if path is None else str(path)}
    defaults = {
        Data: {**data, "length": 16, "batch": 8, "slices": SLICES},
        Optimizer: {"lr": 1e-3, "warmup": 0, "schedule": "constant"},
        Runtime: {"micro_batch": 8, "checkpoint_every": 5, "log_every": 5, "tensorboard": False, "device": "cpu"},
    }
    parts = {kind: kind(**{**defaults[kind], **kinds[kind]}) for kind in kinds}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "key_size": 8,
             "value_size": 16, "state_size": 8, "head_size": 8, "feature_map_size": 4}  # fmt: skip
    if system.endswith("mamba2"):
        del shape["intermediate_size"]
    return Config(
        preset(f"{system}-tiny", **{**shape, **model}),
        parts[Data], parts[Optimizer], parts[Runtime], steps=steps, seed=seed, dtype=dtype,
    )  # fmt: skip


def write_shards(folder, groups, vocab_size=64, tokenizer=None, hash_="0" * 64):
    """One shard a group of documents (lists of ids without end-of-text); `tokenizer` is kept beside them, and `hash_`
    is what they say it has."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = shards.token_dtype(vocab_size)
    entries = []
    for number, documents in enumerate(groups):
        writer = shards.ShardWriter(folder / f"shard-{number:05d}.bin", hash_, dtype)
        for document in documents:
            writer.write(np.array([*document, EOS]))
            writer.end_document()
        entries.append(writer.finish())
    index = {
        "format": shards.FORMAT,
        "version": shards.VERSION,
        "complete": True,
        "tokenizer": {"hash": hash_, "vocab_size": vocab_size, "eos_id": EOS},
        "dtype": dtype.name,
        "shards": entries,
        "tokens": sum(entry["tokens"] for entry in entries),
        "needle_tokens": 0,
    }
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "tokenizer")
    (folder / shards.INDEX).write_text(json.dumps(index))
    return folder


def log_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in log_of(run) if "loss" in row]


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name, read in one process."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = checkpoint.parent.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint, whole)
    found = {}

    def walk(prefix, value):
        for key, x in value.items():
            if isinstance(x, dict):
                walk(f"{prefix}{key}/", x)
            else:
                found[prefix + key] = x if isinstance(x, torch.Tensor) else torch.tensor(x)

    walk("", torch.load(whole, weights_only=False))
    whole.unlink()
    return found


def names(run: Path) -> list[int]:
    """Steps of the checkpoints that have their name, read off the folder."""
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdigit())


def assert_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert any(name.startswith("optimizer/") for name in a)
    for name in a:
        assert torch.equal(a[name], b[name]), name


# Importing torch and transformers takes seconds, so processes are forked from one that has done so.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["train_helpers", "ccq.train.loop"])


def start(function, *arguments, rank=0, world=1, port=None, output: Path | None = None):
    """A process that calls `function`, as torchrun would start rank `rank`; what it prints goes to `output`."""
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)} if port else {}
    if port:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = _context.Process(target=_run, args=(function, arguments, environment, output))
    process.start()
    return process


def _run(function, arguments, environment, output):
    os.environ.update(environment)
    torch.set_num_threads(1)
    if output is not None:
        sys.stdout = sys.stderr = open(output, "w")  # noqa: SIM115 -- the process ends with it
    sys.exit(function(*arguments))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def work_that_errs(specs, options):
    """The work of a sweep in which one row raises and another one's process dies."""
    from ccq.train import sweep_runs as sweep

    if specs[0].row == "gla":
        raise RuntimeError("the kernel errs")
    if specs[0].row == "gla_unit":
        os._exit(3)
    sweep.train_together(specs, options)
