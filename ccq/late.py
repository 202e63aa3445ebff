"""What is imported late: names of a package when they are asked for, and what other packages should know of our models
once they are imported themselves. So `import ccq` is light, and transformers' Auto classes know our models after it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def lazily(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: {name: the module that has it, or that it is}."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(places[name])
        return module if places[name] == f"{package}.{name}" else getattr(module, name)

    return get


def know_config(auto: ModuleType) -> None:
    """transformers finds the module of a model type by its name, and our classes in it when it needs them."""
    auto.CONFIG_MAPPING_NAMES["ccq"] = "CCQConfig"
    sys.modules["transformers.models.ccq"] = importlib.import_module("ccq.model")


def know_models(auto: ModuleType) -> None:
    """Beside the Auto classes, Trainer looks here: it shifts the labels that it smooths only for these classes."""
    auto.MODEL_MAPPING_NAMES["ccq"] = "CCQModel"
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["ccq"] = "CCQForCausalLM"
    for mapping in (auto.MODEL_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        mapping._reverse_config_mapping["CCQConfig"] = "ccq"


def know_targets(constants: ModuleType) -> None:
    """What LoRA adapts unless told otherwise, as PEFT has it for Llama; `in_proj` is Mamba2's."""
    constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["ccq"] = ["q_proj", "v_proj", "in_proj"]


# other people's modules, and what is done once they are there
THEIRS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": know_config,
    "transformers.models.auto.modeling_auto": know_models,
    "peft.utils.constants": know_targets,
}


class _Watch:
    """Finds THEIRS as Python would, and acts when they have been run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in THEIRS else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            THEIRS[name](module)

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Act on those of THEIRS that are imported, and on the others when they are."""
    for name, act in THEIRS.items():
        if name in sys.modules:
            act(sys.modules[name])
    sys.meta_path.insert(0, _Watch())
