"""What an evaluation leaves behind, in OUT:

SUITE.json              scores with intervals, what was asked (hash), of which model (hash), with which code
SUITE.jsonl             a line a sample: prompt hash, output, score
requests/SUITE.npz      what the model is asked
responses/SUITE.jsonl   what it answered, appended as it answers: a run that was killed goes on from here
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ccq.evaluate.requests import EvaluationError
from ccq.files import whole_file
from ccq.systems import OFF, UNCHANGED, Identity

# of a config: what says where a model came from or which outputs it hands out, not what it computes
NOT_HASHED = ("transformers_version", "auto_map", "identity", "recall", "logits_with_loss")
# options that came after 0.1: at these values a model is what it was, and so is its hash
AS_BEFORE = [
    ("step", "scaled"), ("steps", 1), ("covariance_decay", "none"), ("state_dtype", "float32"),
    ("direction", "covariance"), ("learned_scale", False), ("cg_steps", 30), ("rotary", False),
]  # fmt: skip


def model_hash(model: torch.nn.Module) -> str:
    """Hash of every parameter and buffer by name, and of the config less NOT_HASHED."""
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    if config is not None:
        told = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k not in NOT_HASHED}
        known = {k: v for k, v in told.items() if (k, v) not in AS_BEFORE}
        digest.update(json.dumps(known, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()))
    return digest.hexdigest()


def interventions(model: torch.nn.Module) -> dict[str, list[int]]:
    """{what `ccq.analysis.intervene` makes of lam at this moment: in which layers}; "" where it makes nothing."""
    layers: dict[str, list[int]] = {}
    for layer, gate in enumerate(module for module in model.modules() if hasattr(module, "intervention")):
        change = gate.intervention
        name = getattr(change, "name", "") or getattr(change, "__qualname__", type(change).__qualname__)
        layers.setdefault("" if change is None else str(name), []).append(layer)
    return layers


def lam_changed(model: torch.nn.Module) -> str | None:
    """What is made of the gates, which no weight says; None: nothing."""
    layers = {name: which for name, which in interventions(model).items() if name not in ("", "none")}
    return "; ".join(f"{name} in {', '.join(map(str, which))}" for name, which in layers.items()) or None


def identity_of(model: torch.nn.Module, name: str) -> dict:
    """What a result of this model is of: what its config says; of ours without that what its options tell; of any other
    what the user calls it."""
    config: Any = getattr(model, "config", None)
    told = getattr(config, "identity", None) or {"system": name}
    if getattr(config, "model_type", "") == "ccq" and not config.identity:
        from ccq.model.config import recognise

        told = dict(zip(("system", "size", "variant"), recognise(config.to_dict()), strict=True))
    changes, changed = list(interventions(model)), lam_changed(model) or ""
    words = f"lam {changed.replace(', ', ' ')} at inference" if changed else ""
    if changes in (["none"], ["off"]):  # in all layers
        words = {"none": UNCHANGED, "off": OFF}[changes[0]]
    return dataclasses.asdict(Identity(**told).varied(words))


def describe(model: torch.nn.Module, name: str) -> dict:
    """Whose answers they are: what a result says of its model, and what it is `of`."""
    told: dict[str, Any] = {"name": name, "hash": model_hash(model), "dtype": str(model.dtype).removeprefix("torch.")}
    told |= {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    return {"model": told | {"lam": lam_changed(model)}, "of": identity_of(model, name)}


def tokenizer_hash(tokenizer) -> str | None:
    """Hash of all that decides how text becomes tokens."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps({k: str(v) for k, v in tokenizer.special_tokens_map.items()}, sort_keys=True)
    probe = json.dumps(tokenizer("a b").input_ids)  # whether a token is put first or last is not in the rules
    return hashlib.sha256(f"{rules}\n{special}\n{probe}".encode()).hexdigest()


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    with whole_file(path) as file:
        for row in rows:
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())


def read_result(out: Path, suite: str) -> dict | None:
    """OUT/SUITE.json where it is whole; it is written when it is finished."""
    path = out / f"{suite}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    parts = {"suite", "samples", "settings", "limit", "model"}
    if not isinstance(found, dict) or not parts <= found.keys() or found["suite"] != suite:
        raise EvaluationError(f"{path} is not a result of `ccq eval`: choose another --out")
    return found


class Responses:
    """The answers so far, by request key, in a file that only grows.

    Its first line says whose answers they are (`describe`). Those of another model are refused by name, never mixed; {}
    takes any. A line cut short by a kill is dropped.
    """

    def __init__(self, path: Path, identity: dict) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            rows = [json.loads(line) for line in whole.decode().splitlines()] or [{"identity": identity}]
            theirs = rows[0]["identity"]
            told = {name: theirs["model"][name] for name in ("hash", "dtype", "lam") if identity}
            self.answers: dict[str, dict] = {row["key"]: row for row in rows[1:]}
        except (ValueError, LookupError, TypeError) as error:
            raise EvaluationError(f"{path} is damaged ({error}): run with --again to start it over") from error
        for name, expected in told.items():
            if identity["model"][name] != expected:
                raise EvaluationError(
                    f"{path.parent.parent} has answers of another model: its {name} was {expected}, "
                    f"now it is {identity['model'][name]}. Take another --out, or --again to start over"
                )
        self.identity = theirs | identity
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        if not whole:
            self._append(rows)

    def add(self, rows: list[dict]) -> None:
        self._append(rows)
        self.answers.update({row["key"]: row for row in rows})

    def _append(self, rows: list[dict]) -> None:
        with self.path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
