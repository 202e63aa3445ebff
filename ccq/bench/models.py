"""Whole models to measure: presets with random weights, and those of flash-linear-attention with the same options."""

from __future__ import annotations

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
from ccq.train.config import Config
from ccq.train.trainer import Trainer
from ccq.train.world import World


def random_model(system: str, size: str):
    """A preset in bf16 on the GPU, with random weights."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        if system in FLA:
            return of_fla(system, size).bfloat16().eval()
        return CCQForCausalLM(CCQConfig.preset(f"{system}-{size}")).bfloat16().eval()


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


def config_of(system: str, size: str) -> Config:
    """The run of a recipe; of fla's models, that of ours with the same options."""
    return recipe(recipe_name(FLA.get(system, system), size))


def trainer_of(system: str, config: Config, world: World) -> Trainer:
    """With the model of `config`, or that of fla, under the same optimizer and the same masters."""
    if system not in FLA:
        return Trainer(config, world)
    with world.device:
        return Trainer(config, world, Foreign(of_fla(system, config.identity.size)).train())
