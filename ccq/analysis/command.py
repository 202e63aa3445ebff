"""What the kinds of `ccq analyze` share: loading a model, and writing a result with its origin."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from ccq.analysis import AnalysisError
from ccq.doctor import best_device
from ccq.evaluate.results import identity_of
from ccq.files import replaceable, write_atomically
from ccq.names import slug
from ccq.pretrained import DTYPES, NoTokenizerError, load_model, load_tokenizer
from ccq.provenance import provenance


def make_parser(kind: str, about: str | None, variants: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"ccq analyze {kind}", description=(about or "").splitlines()[0])
    add = parser.add_argument
    models = "a shipped model, a run, a from_pretrained folder, a .gguf file, or a name on the Hub"
    add("model", metavar="MODEL", help=models)
    add("--device", default=best_device(), help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 elsewhere")
    add("--tokenizer", help="a folder or name, if MODEL has no tokenizer")
    add("--bos", action="store_true", help="start every prompt with the beginning-of-text token")
    add("--variants", type=int, default=variants, help="prompts of each of five kinds, 3 to 8 (default: %(default)s)")
    add("--sentences", type=int, help="filler sentences per prompt (default: all 120)")
    add("--name", help="name of the model in the result (default: its file or folder)")
    add("--out", type=Path, default=Path("runs/analysis"), help="folder to write to (default: %(default)s)")
    return parser


def begin(kind: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], Any, Any]:
    """(how the result begins, the model in eval mode on its device, its tokenizer)."""
    dtype = arguments.dtype or ("bfloat16" if arguments.device.startswith("cuda") else "float32")
    try:
        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    except NoTokenizerError as error:
        raise AnalysisError(f"{error}: give one with --tokenizer") from error
    model = load_model(arguments.model, arguments.device, dtype)
    name = arguments.name or Path(arguments.model).absolute().name.removesuffix(".gguf")
    return {"kind": kind, **describe(model, name)}, model, tokenizer


def path_of(result: dict, out: Path) -> Path:
    """Where a result goes; FileExistsError where that of another model of this name lies: better before it is made."""
    return replaceable(out / f"{result['kind']}_{slug(result['model']['name'])}.json", identity=result["identity"])


def finish(result: dict, out: Path, figures_in: Path | None = None) -> None:
    """Write the result of a kind and its figures, and say where they are."""
    path = path_of(result, out)
    write(path, result)
    try:
        from ccq import figures
    except ModuleNotFoundError as missing:  # a bare machine: the numbers are what it was asked for
        print(f"{missing.name} is not installed: no figure is drawn")
        return
    for figure in figures.of_analysis(result):
        name = f"{path.stem}_{figure.name}" if figure.name else path.stem
        print(f"Wrote {figures.save(figure, (figures_in or out) / f'{name}.png')}")


def describe(model: Any, name: str) -> dict:
    """What a result says of its model: what it is of, and what it is."""
    first, size = next(model.parameters()), sum(p.numel() for p in model.parameters())
    where = {"dtype": str(first.dtype).removeprefix("torch."), "device": first.device.type}
    told = {"name": name, "class": type(model).__name__, "parameters": size, **where}
    return {"identity": identity_of(model, name), "model": told}


def write(path: Path, content: dict) -> None:
    """The result with its origin; a list of numbers takes one line."""
    text = json.dumps(content | {"provenance": provenance()}, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_atomically(path, f"{text}\n".encode())
    print(f"Wrote {path}")
