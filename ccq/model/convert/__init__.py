"""`ccq convert SRC DST`: convert checkpoints from and to flash-linear-attention, and add cleaning.

Both sides have the same layers, so a checkpoint is renamed, not computed: what can go wrong is a config that means
another function, and a tensor that is not what its name says. Options that our layers do not have are refused by name;
names and shapes are held against our model on the meta device. Tensors go from file to file.

    families.toml   what fla's configs say, and what of it our layers have; families.py reads it
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_utils import load_state_dict

from ccq.files import ADAPTER_FILES, MODEL_FILES, check_free, whole_folder
from ccq.mixers import QueryCleaner
from ccq.model.config import REMOTE, CCQConfig
from ccq.model.convert.families import FAMILIES, RENAMED_TENSORS, Family, cleaned, fla_config, lines, our_config
from ccq.model.decoder import CCQForCausalLM
from ccq.names import first_line, nearest
from ccq.names import grouped as names_grouped
from ccq.pretrained import COMPANIONS, is_run, located
from ccq.shipped import tokenizer_folder
from ccq.systems import Identity

WEIGHTS = "model.safetensors"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # that weights come in
GATE_INIT = 0.01  # where the paper starts its gates
CLEANING: tuple[tuple[str, type, str], ...] = (
    ("gate_init", float, f"where lam starts, between 0 and 1 (default: {GATE_INIT})"),
    ("step", str, "scaled, which is the paper's and the default, or projected"),
    ("steps", int, "how often the step is taken (default: 1)"),
    ("covariance_decay", str, "how the covariance forgets: none (the default), backbone or learned"),
)

WEIGHT_FILES = re.compile(r"\.(safetensors|bin)(\.index\.json)?$")


def read(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name; they lie in its files, and are read when they are written elsewhere."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in tensors_in(file).items():
            if name in tensors:
                raise ValueError(f"{file.name}: {name} is also in another file")
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


def tensors_in(file: Path) -> dict[str, Tensor]:
    """Of one file; of a pickle, tensors and nothing that runs."""
    try:
        loaded = load_state_dict(file)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, SafetensorError) as error:
        raise OSError(f"{file}: damaged or cut off, or it contains more than tensors ({first_line(error)})") from error
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


def model_shapes(config: CCQConfig) -> tuple[CCQForCausalLM, dict[str, tuple[int, ...]]]:
    """Our model without memory, and its tensors' names and shapes as a checkpoint has them."""
    with torch.device("meta"):
        model = CCQForCausalLM(config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return model, shapes


def find(source: dict[str, Tensor], wanted: dict[str, tuple[int, ...]], unused: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors called `wanted`, also where an earlier version of fla named or joined them in another way.

    Raises with every tensor that is missing, of another shape, or not understood.
    """
    found: dict[str, Tensor] = {}
    used, missing, wrong = set(), [], []
    for name, shape in wanted.items():
        spellings = [name, *(name.replace(new, old) for old, new in RENAMED_TENSORS if new in name)]
        place = next((spelling for spelling in spellings if spelling in source), name)
        kept = source.get(place)
        joined = _joined_gate(source, name, shape)
        if joined is not None:
            place, kept = joined
        if kept is None:
            missing.append(name)
            continue
        used.add(place)
        if kept.shape != shape:
            wrong.append(f"{place}: expected shape {list(shape)}, got {list(kept.shape)}")
        found[name] = kept
    extra = [name for name in source if name not in used and not name.endswith(unused)]
    problems = [
        *(f"missing: {name}" for name in grouped(missing)),
        *(f"not understood: {name}" for name in grouped(extra)),
        *wrong,
    ]
    if problems:
        raise ValueError("the tensors are not those that config.json asks for:" + lines(problems))
    return found


def _joined_gate(source: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> tuple[str, Tensor] | None:
    """gate_proj and up_proj of a SwiGLU as halves of one tensor, called gate_proj: fla before February 2025."""
    match = re.fullmatch(r"(.*\.mlp)\.(gate|up)_proj\.weight", name)
    if match is None or f"{match[1]}.up_proj.weight" in source:
        return None
    place = f"{match[1]}.gate_proj.weight"
    joined = source.get(place)
    if joined is None or joined.shape != (2 * shape[0], *shape[1:]):
        return None
    return place, joined.chunk(2)[match[2] == "up"]


def grouped(names: Sequence[str]) -> list[str]:
    """Names, those that differ in their layer alone said once."""
    alike = names_grouped(names, lambda name: re.sub(r"(?<=\.layers\.)\d+(?=\.)", "*", name))
    return [same[0] if len(same) == 1 else f"{name} in {len(same)} layers" for name, same in alike.items()]


@dataclass(frozen=True)
class Report:
    target: Path
    layout: str  # "ccq" or "fla"
    config: CCQConfig  # of ours, on whichever side it is
    parameters: int
    ignored: list[str]  # options of the source that do not change the function
    copied: list[str]  # files that went along
    left: list[str]  # files that did not


def convert(
    source: str | Path,
    target: str | Path,
    clean: bool = False,
    gate_init: float = GATE_INIT,
    force: bool = False,
    **options: Any,
) -> Report:
    """Write the checkpoint in folder `source` in the other layout, fla's or ours, to folder `target`.

    `clean` adds cleaning, with lam = gate_init everywhere; a checkpoint of ours, which can get it too, stays ours.
    `options` of the read are step, steps and covariance_decay, as in `CCQConfig`; without them it is the paper's.

    `target` must not exist, or be empty; with `force`, the model that is there gives way. It appears when all of it is
    written, or not at all.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    if not 0 < gate_init < 1:
        raise ValueError(f"gate_init: expected a number above 0 and below 1, got {gate_init}")
    if wrong := [name for name in options if not clean or name not in (known for known, *_ in CLEANING)]:
        raise ValueError(f"{wrong[0]}: expected an option of cleaning, with clean=True")
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: there is no such folder")
    if is_run(str(source)):
        raise ValueError(f"{source} is a run: expected a model, such as `ccq export {source} OUT` makes")
    check_free(target, force)
    if target.resolve() == source.resolve():
        raise ValueError(f"target: expected another folder than the source, got {target}")
    raw = read_json(source / "config.json")
    kind = raw.get("model_type")
    types = (*FAMILIES, CCQConfig.model_type)
    if kind not in types:
        near = (nearest(kind, types) if isinstance(kind, str) else "") + " For models of transformers: ccq.attach."
        raise ValueError(f"{source}/config.json: model_type: expected one of {', '.join(types)}, got {kind!r}.{near}")
    ours = kind == CCQConfig.model_type
    to = "fla" if ours and not clean else "ccq"

    ignored: list[str] = []
    with _naming(source / "config.json"):
        if ours:
            config = CCQConfig.from_pretrained(source)
        else:
            config, ignored = our_config(raw)
        result = cleaned(config, gate_init, options) if clean else config
        model_type, settings = fla_config(config) if to == "fla" else (None if ours else kind, {})
    with _naming(source):
        tensors = arrange(read(source), config, FAMILIES[model_type] if model_type else None, to)
        if clean:
            tensors = with_gates(tensors, result)
    if to == "ccq":  # the weights are not those of a run of this name and these options
        identity = Identity(**(config.identity or {"system": target.name}))
        result.identity = asdict(identity.varied("cleaning added") if clean else identity)
    if result.dtype is None:
        result.dtype = next(iter(tensors.values())).dtype  # of the embedding

    with whole_folder(target, last="config.json", instead_of=(*MODEL_FILES, *ADAPTER_FILES)) as partial:
        if to == "ccq":
            result.architectures = [CCQForCausalLM.__name__]
            result.save_pretrained(partial)
        else:
            settings["torch_dtype"] = str(result.dtype).removeprefix("torch.")
            (partial / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        save_file({name: x.contiguous() for name, x in tensors.items()}, partial / WEIGHTS, {"format": "pt"})
        copied, left = _copy_companions(source, partial)
    parameters = sum(x.numel() for x in tensors.values())
    return Report(target, to, result, parameters, ignored, copied, left)


def arrange(source: dict[str, Tensor], config: CCQConfig, family: Family | None, to: str) -> dict[str, Tensor]:
    """The tensors under their new names, in our model's order; without a family they keep ours."""
    shapes = model_shapes(config)[1]
    fla = {name: family.name(name, config) if family else name for name in shapes}
    old, new = (shapes, fla.values()) if to == "fla" else (fla.values(), shapes)
    wanted = dict(zip(old, shapes.values(), strict=True))
    unused = tuple(family.unused) if family and to != "fla" else ()
    if config.tie_word_embeddings and "lm_head.weight" in source:
        unused = (*unused, "lm_head.weight")  # it may be stored, and is the embedding
    found = find(source, wanted, unused)
    if config.tie_word_embeddings and "lm_head.weight" in source:
        name = next(iter(found))
        if not torch.equal(found[name], source["lm_head.weight"]):
            raise ValueError(f"tie_word_embeddings is True, but lm_head.weight differs from {name}")
    return dict(zip(new, found.values(), strict=True))


def with_gates(tensors: dict[str, Tensor], config: CCQConfig) -> dict[str, Tensor]:
    """The tensors of an uncleaned model and those that cleaning adds, as a cleaner fills them."""
    model, shapes = model_shapes(config)
    gates: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, QueryCleaner):
            module.to_empty(device="cpu")
            module.reset_parameters()
            gates |= module.state_dict(prefix=f"{prefix}.")
    return {name: gates[name] if name in gates else tensors[name] for name in shapes}


@contextmanager
def _naming(place: Path) -> Iterator[None]:
    """Errors about what is written there say where."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error


def _copy_companions(source: Path, target: Path) -> tuple[list[str], list[str]]:
    copied, left = [], []
    beside = {*source.iterdir(), *tokenizer_folder(source).iterdir()}  # shipped models share a tokenizer
    for file in sorted(beside, key=lambda file: file.name):
        if file.name in COMPANIONS and file.is_file():
            shutil.copyfile(file, target / file.name)
            copied.append(file.name)
        elif file.name not in ("config.json", f"{REMOTE}.py") and not WEIGHT_FILES.search(file.name):
            left.append(file.name)
    return copied, left


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq convert", description=(__doc__ or "").splitlines()[0])
    models = "a folder, a shipped model (gla-pico), or a name on the Hub (fla-hub/gla-1.3B-100B)"
    parser.add_argument("source", metavar="SRC", help=models)
    parser.add_argument("target", metavar="DST", help="folder to write")
    parser.add_argument("--clean", action="store_true", help="add cleaning to every layer")
    for option, kind, help in CLEANING:
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, help=f"with --clean: {help}")
    parser.add_argument("--force", action="store_true", help="replace another model in DST; its files are removed")
    arguments = parser.parse_args(argv)
    given = {name: x for name, *_ in CLEANING if (x := getattr(arguments, name)) is not None}
    if given and not arguments.clean:
        parser.error(f"--{next(iter(given)).replace('_', '-')}: expected --clean beside it")
    try:
        source = located(arguments.source)
        report = convert(source, arguments.target, arguments.clean, force=arguments.force, **given)
    except ValueError as error:
        print(f"ccq convert: {error}", file=sys.stderr)
        return 1
    config = report.config
    print(
        f"{report.target}: {report.layout} layout, {config.mixer}, {config.num_hidden_layers} layers, "
        f"{report.parameters / 1e6:,.1f} million parameters"
    )
    if config.clean:
        said = [f"{name}={getattr(config, name)!r}" for name in ("normalize", "step", "steps", "covariance_decay")]
        print(f"cleaned: lam starts at {config.gate_init:g}, {', '.join(said)}")
    for what, names in (
        ("ignored, for it does not change the function", report.ignored),
        ("copied", report.copied),
        ("left behind", report.left),
    ):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 0
