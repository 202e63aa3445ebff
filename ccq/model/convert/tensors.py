"""A checkpoint as names, shapes and where the numbers lie: they are read one tensor at a time."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ccq.files import whole_file

WEIGHTS = "model.safetensors"
# safetensors' names of the dtypes that weights come in
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Kept:
    """Where a tensor lies and what it is, without its numbers."""

    shape: tuple[int, ...]
    dtype: Any  # a torch.dtype, or the name of one that is none of DTYPES
    read: Callable[[slice], Tensor]  # some of its rows


ALL = slice(None)


def read(folder: Path) -> dict[str, Kept]:
    """The tensors of a checkpoint by name; their numbers are read when asked for."""
    tensors: dict[str, Kept] = {}
    for file in weight_files(folder):
        for name, tensor in _safetensors(file) if file.suffix == ".safetensors" else _pickled(file):
            if name in tensors:
                raise ValueError(f"{file.name}: {name} is also in another file")
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"{file.name}: {name} is of {tensor.dtype}; expected one of {', '.join(DTYPES)}")
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


def _safetensors(file: Path) -> Iterator[tuple[str, Kept]]:
    try:
        handle = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise OSError(f"{file}: damaged or cut off ({error})") from error
    for name in list(handle.keys()):
        part = handle.get_slice(name)
        dtype = DTYPES.get(part.get_dtype(), part.get_dtype())
        yield name, Kept(tuple(part.get_shape()), dtype, part.__getitem__)


def _pickled(file: Path) -> Iterator[tuple[str, Kept]]:
    """Of a file of torch.save: tensors and nothing that runs; mapped, not read."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise OSError(f"{file}: damaged, or it contains more than tensors ({str(error).splitlines()[0]})") from error
    if not isinstance(loaded, dict) or not all(isinstance(x, Tensor) for x in loaded.values()):
        raise ValueError(f"{file}: expected tensors by name")
    for name, tensor in loaded.items():
        yield name, Kept(tuple(tensor.shape), tensor.dtype, tensor.__getitem__)


def write_safetensors(path: Path, tensors: dict[str, Kept]) -> None:
    """One file, tensor by tensor: its header says what will come, so that no two need to be in memory."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            x = tensor.read(ALL).contiguous()
            assert (tuple(x.shape), x.dtype) == (tensor.shape, tensor.dtype), name
            file.write(x.detach().flatten().view(torch.uint8).numpy().data)


def read_json(file: Path) -> dict[str, Any]:
    try:
        # infinity is an object in what transformers 5 writes
        loaded = json.loads(file.read_text(), object_hook=lambda x: float(x["__float__"]) if "__float__" in x else x)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return loaded
