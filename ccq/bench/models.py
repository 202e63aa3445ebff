"""Whole models to measure: presets with random weights, and those of flash-linear-attention with the same options."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ccq.bench.results import FLA
from ccq.data.batches import IGNORE
from ccq.model import CCQConfig, CCQForCausalLM
from ccq.model.convert.families import fla_config
from ccq.recipes import recipe
from ccq.systems import recipe_name
from ccq.train.trainer import Trainer
from ccq.train.world import World


def random_model(system: str, size: str, **changes):
    """A preset in bf16 on the GPU, with random weights."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        if system in FLA:
            return of_fla(system, size).bfloat16().eval()
        return CCQForCausalLM(CCQConfig.preset(f"{system}-{size}", **changes)).bfloat16().eval()


def of_fla(system: str, size: str) -> Any:
    """fla's model with the options of ours, and its own defaults where ours has none."""
    import fla  # noqa: F401 -- tells transformers of its models

    _, settings = fla_config(CCQConfig.preset(f"{FLA[system]}-{size}"))
    del settings["architectures"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))


class Foreign(torch.nn.Module):
    """A model of fla's as the trainer calls ours: with its own loss, of all tokens but the first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, **_: Any) -> SimpleNamespace:
        labels = torch.nn.functional.pad(targets[:, :-1], (1, 0), value=IGNORE)  # it shifts them by one
        return SimpleNamespace(loss=self.model(ids, labels=labels, use_cache=False).loss, scored=ids.numel())


def trainer_of(system: str, size: str, world: World, options: Mapping[str, Any], **runtime: bool) -> Trainer:
    """With the model of a recipe, or that of fla, under the same optimizer and the same masters."""
    config = recipe(recipe_name(FLA.get(system, system), size))
    for name, value in runtime.items():
        setattr(config.runtime, name, value)
    for name, value in options.items():
        setattr(config.model, name, type(getattr(config.model, name) or 0)(value))
    if system not in FLA:
        return Trainer(config, world)
    with world.device:
        return Trainer(config, world, Foreign(of_fla(system, size)).train())
