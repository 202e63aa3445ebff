"""What a result is of: a system, a variant of it, its size, and the seed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# what the page calls the systems; the paper's seven, and the control of one of them, first, in the order of its tables
LABELS = {
    "mamba2": "Mamba2",
    "gla": "GLA",
    "gla-unit": "Unit-norm GLA",
    "gla-hedgehog": "GLA-Hedgehog",
    "gated-deltanet": "Gated DeltaNet",
    "ccq-gla": "CCQ-GLA",
    "ccq-gated-deltanet": "CCQ-Gated DeltaNet",
    "transformer": "Transformer",
    "gla-current-key": "GLA, current-key read",
    "gated-deltanet-current-key": "Gated DeltaNet, current-key read",
    "ccq-gla-hedgehog": "CCQ-GLA-Hedgehog",
    "linear-attention": "Linear attention",
    "linear-attention-unit": "Unit-norm Linear attention",
    "ccq-linear-attention": "CCQ-Linear attention",
    "retnet": "RetNet",
    "retnet-unit": "Unit-norm RetNet",
    "ccq-retnet": "CCQ-RetNet",
    "deltanet": "DeltaNet",
    "ccq-deltanet": "CCQ-DeltaNet",
    "mamba2-unit": "Unit-norm Mamba2",
    "ccq-mamba2": "CCQ-Mamba2",
}
# what a system with CCQ is held against: its backbone with unit q and k
CONTROL = {
    "ccq-gla": "gla-unit",
    "ccq-gated-deltanet": "gated-deltanet",
    "ccq-linear-attention": "linear-attention-unit",
    "ccq-retnet": "retnet-unit",
    "ccq-deltanet": "deltanet",
    "ccq-mamba2": "mamba2-unit",
}
SIZES = ("1.3b", "500m", "nano", "pico", "mqar", "tiny")  # the largest first
WIDTHS = {2048: "1.3b", 1024: "500m", 512: "nano", 256: "pico", 64: "tiny"}
MIXERS = {"attention": "transformer"}  # where the name of the mixer is not that of the system
ALWAYS_UNIT = ("gated_deltanet", "deltanet")
CONVOLUTION = {"gated_deltanet": 4, "deltanet": 4, "mamba2": 4}  # that a mixer has by itself
WITH_CONVOLUTION = "convolution of 4"  # a variant: over q, k and v, which the paper's GLA lacks


@dataclass(frozen=True)
class System:
    """A row of a table: runs that differ in the seed alone."""

    name: str  # of LABELS, or what the result calls its model
    variant: str = ""
    size: str = ""

    @property
    def key(self) -> str:
        """As paper.toml and claims.toml name it."""
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def label(self) -> str:
        label = LABELS.get(self.name, self.name)
        return f"{label}, {self.variant}" if self.variant else label

    @property
    def order(self) -> tuple:
        known = list(LABELS)
        place = known.index(self.name) if self.name in known else len(known)
        size = SIZES.index(self.size) if self.size in SIZES else len(SIZES)
        return size, place, self.name, self.variant


def label_of(key: str) -> str:
    """
    >>> label_of("ccq-gated-deltanet, uncentred")
    'CCQ-Gated DeltaNet, uncentred'
    """
    name, _, variant = key.partition(", ")
    return System(name, variant).label


def seeds_label(seeds: Iterable[int | None]) -> str:
    """
    >>> seeds_label([2, None, 2]), seeds_label([0, 1])
    (', seed 2', ', seeds 0, 1')
    """
    known = list(dict.fromkeys(str(seed) for seed in seeds if seed is not None))
    return f", seed{'s' if len(known) > 1 else ''} {', '.join(known)}" if known else ""


def tokens_label(count: int) -> str:
    """
    >>> tokens_label(512), tokens_label(4096)
    ('512', '4K')
    """
    return f"{count // 1024}K" if count >= 1024 else str(count)


def scale_label(scale: str) -> str:
    """
    >>> scale_label("500m"), scale_label("nano")
    ('500M', 'nano')
    """
    return scale.upper() if scale[:1].isdigit() else scale


def from_name(name: str) -> tuple[System, int | None]:
    """System and seed that a name speaks of: <system>[-<variant>]-<size>[-seed<n>][-repeat<m>], with _ or -.

    >>> from_name("ccq_gla_nano_seed2")
    (System(name='ccq-gla', variant='', size='nano'), 2)
    >>> from_name("SmolLM2-135M")
    (System(name='SmolLM2-135M', variant='', size=''), None)
    """
    text = "-".join(part for part in re.split(r"[-_/ ,]+", name.lower()) if part)
    found = [known for known in LABELS if re.search(rf"(^|-){re.escape(known)}(-|$)", text)]
    if not found:
        return System(name), None
    system = max(found, key=len)
    rest = [part for part in re.sub(rf"(^|-){re.escape(system)}(-|$)", "-", text, count=1).split("-") if part]
    size, seed, left = "", None, []
    for at, part in enumerate(rest):
        if part in SIZES and not size:
            size = part
        elif match := re.fullmatch(r"s(?:eed)?(\d+)", part):
            seed = int(match[1])
        elif part.isdigit() and at and rest[at - 1] == "seed":
            seed = int(part)
        elif part != "seed" and not re.fullmatch(r"repeat\d*", part):  # the same run once more
            left.append(part)
    return System(system, " ".join(left), size), seed


def from_config(config: dict[str, Any], folder: str) -> tuple[System, int | None]:
    """System and seed of a run of `ccq train` from its config.json; the size from its folder's name or its width."""
    model = config["model"]
    mixer = model["mixer"]
    name = MIXERS.get(mixer, mixer.replace("_", "-"))
    if model.get("feature_map") == "hedgehog":
        name += "-hedgehog"
    if model.get("clean"):
        name = f"ccq-{name}"
    elif model.get("current_key_read"):
        name += "-current-key"
    elif model.get("unit_qk") and mixer not in ALWAYS_UNIT:
        name += "-unit"
    variant = []
    if model.get("clean"):
        if not model.get("centred", True):
            variant.append("uncentred")
        if model.get("normalize", "unit") != "unit":
            variant.append(model["normalize"])
        if model.get("fixed_lam") is not None:
            variant.append(f"lam {model['fixed_lam']:g}")
        else:
            if model.get("gate_init", 0.01) != 0.01:
                variant.append(f"gate from {model['gate_init']:g}")
            if not model.get("decay_gate_bias", True):
                variant.append("bias not decayed")
    size = from_name(folder)[0].size or WIDTHS.get(model.get("hidden_size"), "")
    if not size and model.get("hidden_size"):
        size = f"width {model['hidden_size']}"
    convolution = model.get("conv_size", CONVOLUTION.get(mixer))
    if convolution != CONVOLUTION.get(mixer) and size != "tiny":  # those that `make run` trains all have one
        variant.insert(0, f"convolution of {convolution}" if convolution else "no convolution")
    return System(name, ", ".join(variant), size), config.get("seed")
