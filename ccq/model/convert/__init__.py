"""`ccq convert SRC DST`: convert checkpoints from and to flash-linear-attention, and add cleaning.

Both sides have the same layers, so a checkpoint is renamed, not computed: what can go wrong is a config that means
another function, and a tensor that is not what its name says. Options that our layers do not have are refused by name;
names and shapes are held against our model on the meta device. Tensors pass one at a time.

    families.py   what fla's configs say, and what of it our layers have
    tensors.py    checkpoints as names, shapes and where the numbers lie
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ccq.files import ADAPTER_FILES, MODEL_FILES, check_free, whole_folder
from ccq.mixers import QueryCleaner
from ccq.model.config import REMOTE, CCQConfig
from ccq.model.convert.families import FAMILIES, RENAMED_TENSORS, Family, cleaned, fla_config, lines, our_config
from ccq.model.convert.tensors import ALL, WEIGHTS, Kept, read, read_json, write_safetensors
from ccq.model.decoder import CCQForCausalLM
from ccq.names import nearest
from ccq.pretrained import COMPANIONS, is_run, located
from ccq.shipped import tokenizer_folder
from ccq.systems import Identity

GATE_INIT = 0.01  # where the paper starts its gates

WEIGHT_FILES = re.compile(r"\.(safetensors|bin)(\.index\.json)?$")


def model_shapes(config: CCQConfig) -> tuple[CCQForCausalLM, dict[str, tuple[int, ...]]]:
    """Our model without memory, and its tensors' names and shapes as a checkpoint has them."""
    with torch.device("meta"):
        model = CCQForCausalLM(config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return model, shapes


def find(source: dict[str, Kept], wanted: dict[str, tuple[int, ...]], unused: tuple[str, ...]) -> dict[str, Kept]:
    """The tensors called `wanted`, also where an earlier version of fla named or joined them in another way.

    Raises with every tensor that is missing, of another shape, or not understood.
    """
    found: dict[str, Kept] = {}
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


def _joined_gate(source: dict[str, Kept], name: str, shape: tuple[int, ...]) -> tuple[str, Kept] | None:
    """gate_proj and up_proj of a SwiGLU as halves of one tensor, called gate_proj: fla before February 2025."""
    match = re.fullmatch(r"(.*\.mlp)\.(gate|up)_proj\.weight", name)
    if match is None or f"{match[1]}.up_proj.weight" in source:
        return None
    place = f"{match[1]}.gate_proj.weight"
    joined = source.get(place)
    rows = shape[0]
    if joined is None or joined.shape != (2 * rows, *shape[1:]):
        return None
    half = slice(0, rows) if match[2] == "gate" else slice(rows, 2 * rows)
    return place, Kept(shape, joined.dtype, lambda _: joined.read(half))


def grouped(names: Sequence[str]) -> list[str]:
    """Names with the layers that share one joined: model.layers.{0-3,5}.attn.D."""
    layers: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"\.layers\.(\d+)\.", name)
        if match is None:
            layers.setdefault(name, [])
        else:
            layers.setdefault(f"{name[: match.start(1)]}{{}}{name[match.end(1) :]}", []).append(int(match[1]))
    result = []
    for pattern, numbers in layers.items():
        spans: list[list[int]] = []
        for number in sorted(numbers):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
        one = len(spans) == 1 and spans[0][0] == spans[0][1]
        result.append(pattern.replace("{}", text if one else f"{{{text}}}") if numbers else pattern)
    return result


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

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
    to: str | None = None,
    clean: bool = False,
    gate_init: float = GATE_INIT,
    force: bool = False,
) -> Report:
    """Write the checkpoint in folder `source` in the other layout to folder `target`.

    Args:
        to: "ccq" or "fla"; None: the one that it is not in.
        clean: add cleaning, with lam = gate_init everywhere; a checkpoint of ours can get it too (to="ccq").

    `target` must not exist, or be empty; with `force`, the model that is there gives way. It appears when all of it is
    written, or not at all.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    if to not in (None, "ccq", "fla"):
        raise ValueError(f"to: expected one of ccq, fla, got {to!r}.{nearest(to, ('ccq', 'fla'))}")
    if not 0 < gate_init < 1:
        raise ValueError(f"gate_init: expected a number between 0 and 1, got {gate_init}")
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
        near = nearest(kind, types) if isinstance(kind, str) else ""
        raise ValueError(
            f"{source / 'config.json'}: model_type: expected one of {', '.join(types)}, got {kind!r}.{near}"
        )
    ours = kind == CCQConfig.model_type
    to = to or ("fla" if ours and not clean else "ccq")
    if to == "fla" and clean:
        raise ValueError("clean: fla has no cleaned layers; expected to='ccq'")
    if (to == "fla") != ours and not (ours and clean):
        raise ValueError(f"to: expected {'fla' if ours else 'ccq'}, got {to!r}: {source} already has that layout")

    ignored: list[str] = []
    with _naming(source / "config.json"):
        if ours:
            config = CCQConfig.from_pretrained(source)
        else:
            config, ignored = our_config(raw)
        result = cleaned(config, gate_init) if clean else config
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
        write_safetensors(partial / WEIGHTS, tensors)
        copied, left = _copy_companions(source, partial)
    parameters = sum(math.prod(x.shape) for x in tensors.values())
    return Report(target, to, result, parameters, ignored, copied, left)


def arrange(source: dict[str, Kept], config: CCQConfig, family: Family | None, to: str) -> dict[str, Kept]:
    """The tensors under their new names, in our model's order; without a family they keep ours."""
    shapes = model_shapes(config)[1]
    fla = {name: family.name(name, config) if family else name for name in shapes}
    old, new = (shapes, fla.values()) if to == "fla" else (fla.values(), shapes)
    wanted = dict(zip(old, shapes.values(), strict=True))
    unused = family.unused if family and to != "fla" else ()
    if config.tie_word_embeddings and "lm_head.weight" in source:
        unused = (*unused, "lm_head.weight")  # it may be stored, and is the embedding
    found = find(source, wanted, unused)
    if config.tie_word_embeddings and "lm_head.weight" in source:
        name = next(iter(found))
        if not torch.equal(found[name].read(ALL), source["lm_head.weight"].read(ALL)):
            raise ValueError(f"tie_word_embeddings is True, but lm_head.weight differs from {name}")
    return dict(zip(new, found.values(), strict=True))


def with_gates(tensors: dict[str, Kept], config: CCQConfig) -> dict[str, Kept]:
    """The tensors of an uncleaned model and those that cleaning adds, as a cleaner fills them."""
    model, shapes = model_shapes(config)
    gates = {}
    for prefix, module in model.named_modules():
        if isinstance(module, QueryCleaner):
            module.to_empty(device="cpu")
            module.reset_parameters()
            for name, x in module.state_dict().items():
                gates[f"{prefix}.{name}"] = Kept(tuple(x.shape), x.dtype, x.__getitem__)
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
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a folder, a shipped model (gla-pico), or a name on the Hub (fla-hub/gla-1.3B-100B)",
    )
    parser.add_argument("target", metavar="DST", help="folder to write")
    parser.add_argument("--clean", action="store_true", help="add cleaning to every layer")
    parser.add_argument(
        "--gate-init",
        type=float,
        metavar="LAM",
        help=f"with --clean: where lam starts, between 0 and 1 (default: {GATE_INIT})",
    )
    parser.add_argument(
        "--to", choices=("ccq", "fla"), help="the layout to write (default: the layout that SRC does not have)"
    )
    parser.add_argument("--force", action="store_true", help="replace another model in DST; its files are removed")
    arguments = parser.parse_args(argv)
    if arguments.gate_init is not None and not arguments.clean:
        parser.error("--gate-init: expected --clean beside it")
    gate_init = GATE_INIT if arguments.gate_init is None else arguments.gate_init
    try:
        source = located(arguments.source)
        report = convert(source, arguments.target, arguments.to, arguments.clean, gate_init, arguments.force)
    except ValueError as error:
        print(f"ccq convert: {error}", file=sys.stderr)
        return 1
    config = report.config
    print(
        f"{report.target}: {report.layout} layout, {config.mixer}, {config.num_hidden_layers} layers, "
        f"{report.parameters / 1e6:,.1f} million parameters"
    )
    if config.clean:
        print(f"cleaned: lam starts at {config.gate_init:g}, normalize={config.normalize!r}")
    for what, names in (
        ("ignored, for it does not change the function", report.ignored),
        ("copied", report.copied),
        ("left behind", report.left),
    ):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 0
