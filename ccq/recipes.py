"""Recipes: a system times a size of ccq/systems.toml; `recipe("ccq_gla_500m")` is a whole run.

>>> recipe("ccq_gla_500m").model.clean, recipe("gla_500m").model.clean
(True, False)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ccq.systems import RUNS, SIZES, SYSTEMS, Identity, recipe_name
from ccq.train.config import Config, Data, Optimizer, Runtime, preset, tuples


def make(system: str, size: str) -> Config:
    run = SIZES[size]["run"]
    told = tuples(RUNS[run] if isinstance(run, str) else run)
    kinds = {"data": Data, "optimizer": Optimizer, "runtime": Runtime}
    parts = {name: kind(**told.pop(name, {})) for name, kind in kinds.items()}
    identity = Identity(system, size=size, recipe=recipe_name(system, size))
    return Config(preset(f"{system}-{size}"), **parts, **told, identity=identity)


RECIPES: dict[str, Callable[[], Config]] = {
    recipe_name(system, size): functools.partial(make, system, size) for system in SYSTEMS for size in SIZES
}


def recipe(name: str) -> Config:
    return RECIPES[name]()
