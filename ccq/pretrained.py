"""Models and tokenizers in Hugging Face's layout: those that ship, folders, GGUF files, and names on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ccq.names import first_line
from ccq.shipped import ModelError, locate, names, tokenizer_folder

DTYPES = ("float32", "float64", "bfloat16", "float16")


class NoTokenizerError(ModelError):
    """A model without a tokenizer, such as one of recall, or with one that could not be loaded."""


def load(name: str, *, device: Any = "cpu", dtype: Any = None) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of a shipped model, a from_pretrained folder, a .gguf file or a name on the Hub.

    Args:
        name: such as "ccq-gla-pico"; `ccq.shipped.names()` has all that ship.
        device: where the model goes.
        dtype: of the weights, such as torch.bfloat16 or its name; by default float32, in which a CPU computes.

    Raises:
        ccq.shipped.ModelError: there is no such model, or a file of it is damaged.
        ccq.doctor.DeviceError: there is no such device, or it cannot compute in this dtype.
    """
    tokenizer = load_tokenizer(name)
    return load_model(name, device, dtype), tokenizer


def load_model(name: str, device: Any = "cpu", dtype: Any = None) -> Any:
    """The model alone, in eval mode. A dtype "auto" is that of the checkpoint."""
    where, how = _source(name)
    if Path(where).is_dir() and not how and not Path(where, "config.json").exists():
        raise ModelError(f"{name} has no config.json: expected a from_pretrained folder (ccq export RUN_DIR OUT_DIR)")
    from transformers import AutoModelForCausalLM

    import ccq.model  # noqa: F401 -- registers our models
    from ccq.doctor import check_cpu_bf16, check_device

    check_device(str(device))
    check_cpu_bf16(str(device), str(dtype).removeprefix("torch."))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or "float32", **how)
        return model.to(device).eval()
    except Exception as error:  # whatever a foreign checkpoint makes of it
        raise ModelError(_failure("model", name, where, error)) from error


def load_config(name: str) -> Any:
    """The config of a model, without its weights."""
    where, how = _source(name)
    from transformers import AutoConfig

    import ccq.model  # noqa: F401

    try:
        return AutoConfig.from_pretrained(where, **how)
    except Exception as error:
        raise ModelError(_failure("config", name, where, error)) from error


def load_tokenizer(name: str) -> Any:
    where, how = _source(name)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    import ccq.model  # noqa: F401

    folder = tokenizer_folder(Path(where))
    if folder.is_dir() and not how and not (any(folder.glob("*token*")) or any(folder.glob("vocab*"))):
        raise NoTokenizerError(f"{name} has no tokenizer")
    try:
        if (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **how)
    except Exception as error:
        raise NoTokenizerError(_failure("tokenizer", name, where, error)) from error
    if not tokenizer("a").input_ids:  # transformers makes an empty one for a folder that has none
        raise NoTokenizerError(f"{name} has no tokenizer")
    return tokenizer


def _source(name: str) -> tuple[str, dict[str, str]]:
    """What from_pretrained should load for `name`, and with which further arguments."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = Path(name).expanduser()
    if not path.exists() and (path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(
            f"{name} is not there: expected a from_pretrained folder, a file in GGUF, or a name on the Hub"
        )
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return locate(str(path) if path.exists() else name), {}


def _failure(what: str, name: str, where: str, error: Exception) -> str:
    missing = "" if Path(where).exists() else f"there is no folder {name}, and "
    return (
        f"{missing}the {what} of {name} could not be loaded ({type(error).__name__}: {first_line(error)}): expected a "
        f"from_pretrained folder, a model that ships ({', '.join(names()) or 'none does'}), or a name on the Hub and a "
        "network"
    )
