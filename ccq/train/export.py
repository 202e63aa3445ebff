"""`ccq export RUN_DIR OUT_DIR`: write the weights of a run as a folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ccq.files import ADAPTER_FILES, MODEL_FILES, check_free, whole_folder, write_json
from ccq.model import CCQForCausalLM
from ccq.pretrained import quiet
from ccq.train import RunError, folder
from ccq.train import config as configs
from ccq.train.checkpoint import load, reason, steps_in
from ccq.train.monitor import tokenizer_of
from ccq.train.parallelize import DTYPES, make_model
from ccq.train.world import join

ORIGIN = "export.json"  # of which run and step an export is
CARD = "README.md"  # card.md for all, so that it is never that of an older export


def as_exported(run: Path, step: int | None = None) -> tuple[Any, Any, int]:
    """The model of a run as an export has it, on the CPU, in full precision; its tokenizer or None; and the step it is
    from: the newest, or `step`."""
    config = configs.read(run / folder.CONFIG)
    root = run / folder.CHECKPOINTS
    have = steps_in(root)
    if not have if step is None else step not in have:
        what = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        others = f"; it has step {', '.join(map(str, have))}" if have else ""
        raise RunError(f"{root} holds no {what}{others}")
    model: Any = make_model(config, torch.device("cpu"))
    with join("cpu") as world:
        state = {"model": {name: x.detach() for name, x in model.named_parameters()}}
        step = load(root, state, world, lambda line: print(line, file=sys.stderr), step)
    assert step is not None
    tokens = config.identity.tokens or 0
    identity = dataclasses.replace(config.identity, tokens=tokens * step // config.steps)
    model.config.identity = dataclasses.asdict(identity)
    if not config.foreign:
        model.config.recall = configs.recall(config)
    tokenizer = tokenizer_of(run)
    if tokenizer is not None:
        for told in filter(None, (model.config, model.generation_config)):  # what they have stays
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if getattr(told, name) is None:
                    setattr(told, name, getattr(tokenizer, name))
    return model.eval(), tokenizer, step


def export(run: Path, out: Path, step: int | None = None, dtype: str | None = None, force: bool = False) -> int:
    """Write `out`, with the tokenizer where the run has one; returns the step.

    It may hold an older export of the run, or with `force` anything but a run; no file of the old model stays.
    """
    mark = folder.mark(run)
    ours = run_of(out) == mark
    check_free(out, force, ours, older="one with an older export of this run")
    model, tokenizer, step = as_exported(run, step)
    if dtype is not None:
        model = model.to(DTYPES[dtype])
    model.config.dtype = next(p.dtype for p in model.parameters())
    try:
        adapters = () if ours else ADAPTER_FILES  # of this run's model they still are
        with quiet(), whole_folder(out, last="config.json", instead_of=(*MODEL_FILES, *adapters)) as partial:
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            model.save_pretrained(partial)
            write_json(partial / ORIGIN, {"run": mark, "step": step})
            mine = isinstance(model, CCQForCausalLM)  # whom the card tells how to load
            if mine and not (ours and (out / CARD).exists()):  # one that somebody has written of this model stays
                shutil.copyfile(Path(__file__).with_name("card.md"), partial / CARD)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{out} could not be written: {reason(error)}") from error
    return step


def run_of(out: Path) -> str | None:
    """The mark of the run that `out` is an export of; None where it says none."""
    try:
        return json.loads((out / ORIGIN).read_text())["run"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of a run of `ccq train`")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--step", type=int, help="checkpoint to export (default: the newest)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="dtype of the weights (default: as trained)")
    parser.add_argument("--force", action="store_true", help="replace another model in OUT_DIR; its files are removed")
    options = parser.parse_args(argv)
    step = export(options.run, options.out, options.step, options.dtype, options.force)
    print(f"Wrote {options.out}: step {step} of {options.run}")
    return 0
