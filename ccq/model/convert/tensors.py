"""A checkpoint as tensors that lie in its files: mapped into memory, and read when they are written elsewhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS = "model.safetensors"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # that weights come in


def read(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in (_safetensors(file) if file.suffix == ".safetensors" else _pickled(file)).items():
            if name in tensors:
                raise ValueError(f"{file.name}: {name} is in another file too")
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{file.name}: {name} is of {tensor.dtype}; expected {' or '.join(map(str, DTYPES))}")
            tensors[name] = tensor
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's tensors, in the order in which transformers looks for them."""
    for single in (WEIGHTS, "pytorch_model.bin"):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict) or not places or not all(isinstance(x, str) for x in places.values()):
                raise ValueError(f"{index}: expected a weight_map from tensors to files")
            files = [folder / name for name in sorted(set(places.values()))]
            for file in files:
                if file.parent != folder or not file.is_file():
                    raise FileNotFoundError(f"{index} names {file.name}: there is no such file beside it")
            return files
    raise FileNotFoundError(
        f"{folder}: expected {WEIGHTS} or pytorch_model.bin, or their index.json, got "
        + (", ".join(sorted(file.name for file in folder.iterdir())) or "an empty folder")
    )


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        handle = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise OSError(f"{file}: damaged or cut off ({error})") from error
    return {name: handle.get_tensor(name) for name in list(handle.keys())}


def _pickled(file: Path) -> dict[str, Tensor]:
    """Of a file of torch.save: tensors and nothing that runs."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise OSError(f"{file}: damaged, or more than tensors is in it ({str(error).splitlines()[0]})") from error
    if not isinstance(loaded, dict) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise ValueError(f"{file}: expected tensors by name")
    return loaded


def read_json(file: Path) -> dict[str, Any]:
    try:
        # infinity is an object in what transformers 5 writes
        loaded = json.loads(file.read_text(), object_hook=lambda x: float(x["__float__"]) if "__float__" in x else x)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return loaded
