"""The one list of systems, systems.toml: what each is made of, what it is called, and what it is compared with.

A run, an export, a result and an analysis carry an `Identity`, which says as data what they are of.

>>> SYSTEMS["ccq-gla"].control
'gla-unit'
>>> Identity("ccq-gla", "convolution of 4", "pico").label
'CCQ-GLA, convolution of 4'
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ccq.files import read_toml

_DATA = read_toml(Path(__file__).with_suffix(".toml"))
SIZES: dict[str, dict[str, Any]] = _DATA["sizes"]  # the largest first
RUNS: dict[str, dict[str, Any]] = _DATA["runs"]  # what some of them share
SWEEPS: dict[str, dict[str, Any]] = _DATA["sweeps"]


@dataclass(frozen=True)
class System:
    """What is trained, whatever its size. Its recipe is `name_size`, with _ for -, and its preset `name-size`.

    systems.toml says what each field is.
    """

    name: str
    label: str
    help: str
    options: Mapping[str, Any]
    line: tuple[str, str]
    control: str | None = None
    equal_state: bool = False

    @property
    def family(self) -> str:
        """The plain system of its backbone: one colour a family."""
        mixer = self.options["mixer"]
        return {"attention": "transformer", "mesa": "mesa-30"}.get(mixer, mixer.replace("_", "-"))

    def over(self, size: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a model: those of its size, and the system's over them."""
        options = {**size, **self.options}
        if self.equal_state:
            options["key_size"] += options["key_size"] ** 2 // options["value_size"]
        return options


def _system(name: str, of: list[str], line: list[str], options: Mapping[str, Any] = {}, **told: Any) -> System:
    shared = {option: value for part in of for option, value in _DATA["options"][part].items()}
    return System(name, line=(line[0], line[1]), options={**shared, **options}, **told)


SYSTEMS: dict[str, System] = {name: _system(name, **told) for name, told in _DATA["systems"].items()}


def compared(*names: str) -> tuple[str, ...]:
    """Of each system its backbone, its control and itself.

    >>> compared("ccq-gla", "ccq-gated-deltanet")
    ('gla', 'gla-unit', 'ccq-gla', 'gated-deltanet', 'ccq-gated-deltanet')
    """
    found = [part for name in names for part in (SYSTEMS[name].family, SYSTEMS[name].control, name)]
    return tuple(dict.fromkeys(part for part in found if part is not None))


def recipe_name(system: str, size: str) -> str:
    """
    >>> recipe_name("ccq-gla-open", "nano")
    'ccq_gla_open_nano'
    """
    return f"{system}_{size}".replace("-", "_")


@dataclass(frozen=True)
class Identity:
    """What a run, an export, a result or an analysis is of; plain JSON, under "identity"."""

    system: str = ""  # a name in SYSTEMS, or what a foreign model calls itself
    # what tells it from other runs of the system, such as "trained on plain text"; a run adds what its options do
    variant: str = ""
    size: str = ""  # one of SIZES, or "width 96"
    seed: int | None = None
    repeat: int = 0  # 0: the first run of its seed; 1: the same once more; ...
    tokens: int | None = None  # that it was trained on; samples, of recall
    needles: float | None = None  # the share of needle documents in the training tokens, where known
    recipe: str | None = None

    def __post_init__(self) -> None:
        """TypeError where a file says something else than an identity."""
        for name, kind in typing.get_type_hints(Identity).items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "needles" and isinstance(value, int)):
                raise TypeError(f"identity: {name}: expected {getattr(kind, '__name__', kind)}, got {value!r}")

    @property
    def key(self) -> str:
        """System and variant; with the size, what runs of several seeds share."""
        return f"{self.system}, {self.variant}" if self.variant else self.system

    @property
    def label(self) -> str:
        label = SYSTEMS[self.system].label if self.system in SYSTEMS else self.system
        return f"{label}, {self.variant}" if self.variant else label

    @property
    def order(self) -> tuple[int, int, str, str]:
        """Where it stands in a table: the largest first, then as in SYSTEMS."""
        size = [*SIZES, self.size].index(self.size)
        known = list(SYSTEMS)
        place = known.index(self.system) if self.system in SYSTEMS else len(known)
        return size, place, self.system, self.variant

    def varied(self, *words: str) -> Identity:
        """The same with more words in its variant, each once."""
        said = [word for word in self.variant.split(", ") if word]
        return dataclasses.replace(self, variant=", ".join(dict.fromkeys([*said, *filter(None, words)])))


# variants of a model that `ccq analyze intervene` changes
OFF, UNCHANGED = "switched off at inference", "unchanged at inference"

# options that change nothing of what a model is, or that come with its data
_ASIDE = (
    "vocab_size", "max_position_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "backend",
    "logits_with_loss",
)  # fmt: skip


def differing(options: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Names of the options that are not as in `reference`."""
    return [name for name, value in reference.items() if name not in _ASIDE and options.get(name, value) != value]


def in_words(name: str, value: Any) -> str:
    """An option of a model as a variant.

    >>> in_words("conv_size", 4), in_words("gate_init", 0.3), in_words("output_gate", False)
    ('convolution of 4', 'gate from 0.3', 'output gate off')
    """
    if name == "conv_size":
        return f"convolution of {value}" if value else "no convolution"
    if name == "num_hidden_layers":
        return f"{value} layer{'s' if value > 1 else ''}"
    words = {"gate_init": "gate from", "fixed_lam": "lam"}.get(name, name.replace("_", " "))
    if isinstance(value, bool):
        return f"{words} {'on' if value else 'off'}"
    return f"{words} {value:g}" if isinstance(value, float) else f"{words} {value}"
