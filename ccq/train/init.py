"""Begin a run with the weights of a model: an export, a from_pretrained folder, a name that ships or on the Hub, a run.

The model's options come from it, the recipe gives data and schedule. Each rank reads its own slices. What the model has
and the file has not, such as the gates that `--model.clean` adds, starts as configured. A model of transformers, with
cleaning attached or without, is loaded whole, in one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from ccq.model.config import CCQConfig, ModelOptions
from ccq.names import first_line
from ccq.pretrained import NoTokenizerError, is_run, load_config, load_tokenizer, located
from ccq.systems import Identity
from ccq.train import RunError, folder
from ccq.train import config as configs
from ccq.train.checkpoint import FAILURES, folder_of, load, newest
from ccq.train.config import Config
from ccq.train.world import World


def begun_from(name: str, config: Config, run: Path) -> Config:
    """The recipe's config with the model of `name`; of a run that has begun so, with what it took: nothing is read."""
    place = Path(name).expanduser()
    whole = str(place.resolve()) if place.exists() else name  # a foreign model is loaded again, from anywhere
    if (run / folder.CONFIG).exists() and (before := configs.read(run / folder.CONFIG)).init in (name, whole):
        taken = {field: getattr(before, field) for field in ("init", "foreign", "model", "identity")}
        return dataclasses.replace(config, **taken)
    found = load_config(name)
    if not isinstance(found, CCQConfig):
        identity = dataclasses.replace(config.identity, system=place.name).varied(f"begun from {found.model_type}")
        model = dataclasses.replace(config.model, vocab_size=found.get_text_config().vocab_size)
        return dataclasses.replace(config, init=whole, foreign=True, model=model, identity=identity)
    model = ModelOptions(**{field.name: getattr(found, field.name) for field in dataclasses.fields(ModelOptions)})
    before_it = Identity(**found.identity) if found.identity else Identity(Path(name).name)
    tokens = f" after {before_it.tokens:,} tokens" if before_it.tokens else ""
    said = f"begun from {before_it.system}{tokens}".replace(", ", "; ")
    return dataclasses.replace(config, init=name, model=model, identity=config.identity.varied(said))


def fill(name: str, masters: dict[str, Tensor], world: World, say: Callable[[str], None]) -> None:
    """Read the weights of `name` into `masters`, in place; RunError names what does not fit."""
    where = located(name)
    weights: dict[str, Any] = {key: x.detach() for key, x in masters.items()}
    try:
        if is_run(str(where)):
            root = where / folder.CHECKPOINTS
            step = newest(root)
            if step is None:
                raise RunError(f"init: {root} holds no complete checkpoint")
            stored = FileSystemReader(folder_of(root, step)).read_metadata().state_dict_metadata
            taken = fitting(name, weights, {key[6:]: x for key, x in stored.items() if key.startswith("model.")}, say)
            step = load(root, {"model": taken}, world, say)
            say(f"weights of {name} after step {step}")
        else:
            reader = HuggingFaceStorageReader(str(where))
            taken = fitting(name, weights, dict(reader.read_metadata().state_dict_metadata), say)
            state_dict_loader.load(taken, storage_reader=reader, process_group=world.background)
            say(f"weights of {name}")
    except (OSError, SafetensorError, *FAILURES) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"init: the weights of {name} could not be read: {first_line(error)}") from error


def fitting(name: str, weights: dict[str, Any], stored: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Those of `weights` that are stored; says which are new, and raises where something does not fit."""
    taken = {key: x for key, x in weights.items() if key in stored}
    if not taken:
        raise RunError(f"init: {name} holds no weights of this model in safetensors, but {', '.join(list(stored)[:4])}")
    other = [key for key, x in taken.items() if stored[key].size != x.shape]
    wrong = [f"{key} is {list(stored[key].size)} there, {list(taken[key].shape)} here" for key in other]
    # a tied head may be stored beside the embedding that it is
    wrong += [f"{key} has no place here" for key in stored if key not in weights and key != "lm_head.weight"]
    if wrong:
        raise RunError(f"init: {name} does not fit: {some(wrong, '; ')}")
    if "lm_head.weight" in stored.keys() - weights.keys():
        say(f"the lm_head.weight of {name} is left out: here the head is the embedding (model.tie_word_embeddings)")
    if new := [key for key in weights if key not in stored]:
        say(f"new, as configured: {some(new, ', ')}")
    return taken


def some(names: list[str], between: str) -> str:
    return between.join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def other_tokenizer(name: str, config: Config) -> str | None:
    """A warning where the tokens to train on are not of the model's tokenizer."""
    from ccq.data.shards import read_index
    from ccq.data.tokenizer import tokenizer_hash

    if config.data.path is None:
        return None
    try:
        same = tokenizer_hash(load_tokenizer(name)) == read_index(Path(config.data.path))["tokenizer"]["hash"]
    except NoTokenizerError:
        return None
    return None if same else f"warning: the tokens in {config.data.path} are of another tokenizer than that of {name}"
