"""What the kinds of `ccq analyze` share: loading a model, and writing a result with its origin."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ccq.analysis.errors import AnalysisError
from ccq.data.shards import write_atomically
from ccq.evaluate import DTYPES
from ccq.evaluate.results import identity_of
from ccq.provenance import provenance

HERE = "cuda" if torch.cuda.is_available() else "cpu"


def add_model_arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs=nargs,
        help="a shipped model, a from_pretrained folder, a .gguf file, or a name on the Hub",
    )
    parser.add_argument("--device", default=HERE, help="(here: %(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--tokenizer", help="where MODEL has none")
    parser.add_argument("--bos", action="store_true", help="put the token for the beginning of a text first")


def add_prompt_arguments(parser: argparse.ArgumentParser, variants: int) -> None:
    parser.add_argument("--variants", type=int, default=variants, help="prompts of each of five kinds (%(default)s)")
    parser.add_argument("--sentences", type=int, help="of filler in a prompt; by default all 120")


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(model in eval mode on its device, its tokenizer)."""
    from ccq.evaluate import load as load_pretrained

    dtype = DTYPES[arguments.dtype or ("bfloat16" if arguments.device.startswith("cuda") else "float32")]
    path = Path(arguments.model)
    if path.suffix != ".gguf":
        found = load_pretrained(arguments.model, arguments.device, dtype, arguments.tokenizer)
        if found[1] is None:
            raise AnalysisError(f"{arguments.model} has no tokenizer: give one with --tokenizer")
        return found
    if not path.exists():
        raise AnalysisError(f"{path} is not there: expected a file in GGUF")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    except (ImportError, ValueError) as error:  # transformers names gguf or accelerate where they are missing
        raise AnalysisError(f"{path} could not be loaded: {str(error).strip().splitlines()[0]}") from error
    return model.to(arguments.device).eval(), tokenizer


def draw(result: dict, path: Path) -> None:
    """Make the figures of a result, `path` with their names behind it, and say where they are."""
    try:
        from ccq import figures
    except ModuleNotFoundError as missing:  # a bare machine: the numbers are what it was asked for
        print(f"{missing.name} is not installed: no figure is drawn")
        return
    for figure in figures.of_analysis(result):
        name = f"{path.name}_{figure.name}" if figure.name else path.name
        print(f"Wrote {figures.save(figure, path.with_name(f'{name}.png'))}")


def describe(model: Any, name: str) -> dict:
    """What a result says of its model: what it is of, and what it is."""
    parameters = list(model.parameters())
    told = {
        "name": name,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "device": parameters[0].device.type,
    }
    return {"identity": identity_of(model, name), "model": told}


def name_of(model: str) -> str:
    """What to call a model that is given by a path or by a name on the Hub.

    >>> name_of("/some/where/model-270m.gguf"), name_of("someone/model-4B")
    ('model-270m', 'model-4B')
    """
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name


def slug(name: str) -> str:
    """
    >>> slug("SmolLM2-135M Instruct")
    'smollm2_135m_instruct'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def write(path: Path, content: dict) -> None:
    """The result with its origin; a list of numbers takes one line."""
    text = json.dumps(content | {"provenance": provenance()}, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{text}\n".encode())
    print(f"Wrote {path}")


def progress(done: int, total: int) -> None:
    end = "\r" if sys.stderr.isatty() and done < total else "\n"
    print(f"prompt {done}/{total}", end=end, file=sys.stderr, flush=True)
