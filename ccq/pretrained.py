"""Models and tokenizers: those that ship, folders in Hugging Face's layout, runs of `ccq train` as of their newest
checkpoint, adapters of `ccq.attach`, GGUF files, and names on the Hub."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ccq.files import TOKENIZER_FILES
from ccq.names import first_line
from ccq.shipped import ModelError, locate, names, tokenizer_folder

COMPANIONS = (*TOKENIZER_FILES, "generation_config.json")  # files that belong to a model beside its weights
DTYPES = ("float32", "float64", "bfloat16", "float16")
DOWNLOADED = ("config.json", "*.safetensors", "*.safetensors.index.json", *COMPANIONS)


class NoTokenizerError(ModelError):
    """A model without a tokenizer, such as one of recall, or with one that could not be loaded."""


def load(name: str, *, device: Any = "cpu", dtype: Any = None) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of a shipped model, a from_pretrained folder, a run, an adapter, a .gguf file or
    a Hub name.

    Args:
        name: such as "ccq-gla-pico"; `ccq.shipped.names()` has all that ship.
        device: where the model goes.
        dtype: of the weights, such as torch.bfloat16 or its name; by default float32, in which a CPU computes.

    Raises:
        ccq.shipped.ModelError: there is no such model, or a file of it is damaged.
        ccq.doctor.DeviceError: there is no such device, or it cannot compute in this dtype.
    """
    from ccq.doctor import check_device

    check_device(str(device))  # before anything takes its time
    tokenizer = load_tokenizer(name)
    return load_model(name, device, dtype), tokenizer


def load_model(name: str, device: Any = "cpu", dtype: Any = None) -> Any:
    """The model alone, in eval mode. A dtype "auto" is that of the checkpoint."""
    where, how = _source(name)
    if is_adapter(where):
        from ccq.adapter import load_adapter

        return load_adapter(load_model(base_of(where), device, dtype), where).eval()
    if Path(where).is_dir() and not how and not Path(where, "config.json").exists():
        raise ModelError(f"{name} has no config.json: expected a from_pretrained folder (ccq export RUN_DIR OUT_DIR)")
    from transformers import AutoModelForCausalLM

    from ccq.doctor import check_cpu_bf16, check_device

    check_device(str(device))
    check_cpu_bf16(str(device), str(dtype).removeprefix("torch."))
    if is_run(where):
        import torch

        from ccq.train.export import as_exported

        trained, _, step = as_exported(Path(where))
        print(f"{name} is a run: its model after step {step}", file=sys.stderr)
        kind = dtype or "float32"
        return trained.to(device, None if kind == "auto" else getattr(torch, str(kind).removeprefix("torch."))).eval()
    try:
        how = how | {"dtype": dtype or "float32", "output_loading_info": True}
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(where, **how)
        model, told = loaded
        if has_gates(name):  # saved whole, with gates that from_pretrained knows nothing of
            from ccq.adapter import load_adapter

            load_adapter(model, located(name))
        elif any(".cleaner." in key for key in told["unexpected_keys"]):
            raise ModelError(f"{name} has gates, and no ccq_adapter in its config: save the model that was attached to")
        return model.to(device).eval()
    except Exception as error:  # whatever a foreign checkpoint makes of it
        raise ModelError(_failure("model", name, error)) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without reports of transformers: gates are weights that it does not expect, and one line says the rest."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_config(name: str) -> Any:
    where, how = _source(name)
    if is_run(where):
        from dataclasses import asdict

        from ccq.train.config import model_config, read, recall

        run = read(Path(where, "config.json"))
        config = load_config(str(run.init)) if run.foreign else model_config(run.model)
        config.identity, config.recall = asdict(run.identity), recall(run)
        return config
    if is_adapter(where):
        return load_config(base_of(where))
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where, **how)
    except Exception as error:
        raise ModelError(_failure("config", name, error)) from error


def load_tokenizer(name: str) -> Any:
    where, how = _source(name)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(where, "tokenizer") if is_run(where) else tokenizer_folder(Path(where))
    if is_adapter(where) and not any(folder.glob("*token*")):
        return load_tokenizer(base_of(where))
    local = folder.is_dir() or is_run(where)
    if local and not how and not (any(folder.glob("*token*")) or any(folder.glob("vocab*"))):
        raise NoTokenizerError(f"{name} has no tokenizer")
    try:
        if (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **how)
    except Exception as error:
        raise NoTokenizerError(_failure("tokenizer", name, error)) from error
    if not tokenizer("a").input_ids:  # transformers makes an empty one for a folder that has none
        raise NoTokenizerError(f"{name} has no tokenizer")
    return tokenizer


def most_tokens(model: Any) -> int | None:
    """The longest sequence that a model can take at all: as many as it has learned positions; None: any."""
    from torch import nn

    told = getattr(model.config, "max_position_embeddings", None)
    tables = [m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and re.search(r"pos|wpe", name)]
    return told if told and any(table.num_embeddings >= told for table in tables) else None


def is_run(where: str) -> bool:
    """Whether it is the folder of a run of `ccq train`, whose config.json is of another kind."""
    return Path(where, "config.json").is_file() and Path(where, "checkpoints").is_dir()


def is_adapter(where: str) -> bool:
    """Whether it is what `ccq.save_adapter` wrote: gates without the model that they are for."""
    return Path(where, "ccq_adapter.json").is_file()


def has_gates(name: str) -> bool:
    """Whether cleaning is attached to a model of transformers, in its folder or by an adapter."""
    return is_adapter(name) or hasattr(load_config(name), "ccq_adapter")


def base_of(where: str) -> str:
    from ccq.adapter import read_adapter

    base = read_adapter(Path(where))["base_model"]
    if base is None:
        raise ModelError(f"{where} does not name its base model: load that, and then ccq.load_adapter(model, folder)")
    if Path(base).is_absolute() and not Path(base).exists():
        raise ModelError(f"{where}/ccq_adapter.json: its base_model {base} does not exist: correct it there")
    return base


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """What from_pretrained should load for `name`, and with which further arguments."""
    path = Path(name).expanduser()
    if not path.exists() and (path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"{name} does not exist: expected a folder, a run, a .gguf file, or a name on the Hub")
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.exists():
        return locate(str(path)), {}
    if name not in names():
        from ccq.model import presets

        if (preset := name.replace("_", "-")) in presets():
            recipe = preset.replace("-", "_")
            raise ModelError(f"{name} is a preset without weights: train it with `ccq train {recipe}`")
    where = locate(name)
    return where, {} if Path(where).exists() else on_hub(name)


def located(name: str) -> Path:
    """The folder of a model's files: its own, that of a run, or a snapshot of the Hub's."""
    where, how = _source(name)
    if "gguf_file" in how:
        raise ModelError(f"{name}: expected a folder with safetensors, a run, or a name, got a file in GGUF")
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(where, allow_patterns=list(DOWNLOADED), **how))


@functools.cache
def on_hub(name: str) -> dict[str, Any]:
    """How to get `name` from the Hub: out of the cache where there is no network. ModelError where it is in neither.

    It asks once. from_pretrained, for each file that it looks for, would go on asking for a minute.
    """
    import huggingface_hub

    try:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        huggingface_hub.model_info(name, timeout=10)
        return {}
    except Exception as error:  # of the network's libraries
        with contextlib.suppress(ValueError):  # no name that the Hub could have
            if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
                return {"local_files_only": True}
        raise ModelError(
            f"there is no model {name!r}: it is not a folder here, not a shipped model "
            f"({', '.join(names()) or 'none ships'}), and the Hub gives none ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error


@contextlib.contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Loading from the Hub inside; if the Hub does not answer, from its cache alone. Gives the reason, or None.

    It asks once. The libraries inside would ask for half a minute, for each file.
    """
    import huggingface_hub
    from huggingface_hub import constants

    def set_offline(offline: bool) -> None:
        constants.HF_HUB_OFFLINE = offline
        copied = getattr(sys.modules.get("datasets"), "config", None)  # made when it is imported
        if copied is not None:
            copied.HF_HUB_OFFLINE = offline

    before = constants.HF_HUB_OFFLINE
    if before:
        yield "HF_HUB_OFFLINE is set"
        return
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of the network's libraries
        reason = f"{type(error).__name__}: {first_line(error)}"
    else:
        yield None
        return
    set_offline(True)
    try:
        yield reason
    finally:
        set_offline(before)


def _failure(what: str, name: str, error: Exception) -> str:
    return f"the {what} of {name} could not be loaded ({type(error).__name__}: {first_line(error)})"
