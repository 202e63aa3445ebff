"""The one list of systems: what each is made of, what it is called, and what it is compared with.

Presets, recipes, sweeps, benchmarks and the report read it. A run, an export, a result and an analysis carry an
`Identity`, which says as data what they are of.

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
from typing import Any

# the largest first, with what `ccq train --help` says of its recipes; mqar are zoology's recall
SIZES = {
    "1.3b": "the paper's: 40B tokens, 524,288 a step, 4K context; needs --data.path",
    "500m": "the paper's: 15B tokens, 262,144 a step, 4K context; needs --data.path",
    "nano": "tens of millions of parameters, one GPU, minutes: 0.1B tokens, 32,768 a step, 4K context; needs "
            "--data.path",
    "pico": "a few million parameters on text with an 8K vocabulary: 0.23B tokens, 32,768 a step; needs --data.path",
    "mqar256": "recall at zoology's settings, width 256, 2,000 steps",
    "mqar": "the same at width 128; tune the learning rate with `ccq sweep`",
    "mqar-overwrite": "the same with overwritten keys: zoology's forgetting variant",
    "mqar64": "mqar at width 64",
    "mad-noisy": "MAD's in-context recall with noise, width 128, 20,000 steps; see `ccq sweep mad`",
    "mad-fuzzy": "the same with keys and values of 1 to 3 tokens instead of noise",
    "tiny": "recall, in minutes on a laptop; no data, no GPU",
}  # fmt: skip


@dataclass(frozen=True)
class System:
    """What is trained, whatever its size. Its recipe is `name_size`, with _ for -, and its preset `name-size`."""

    name: str
    label: str  # in tables and figures
    help: str  # in `ccq train --help`
    options: Mapping[str, Any]  # of CCQConfig, over those of the size
    line: tuple[str, str]  # dashes and marker, which tell apart the lines of a family
    control: str | None = None  # the system that it is compared with
    paper: str | None = None  # its rows in report/paper.toml
    equal_state: bool = False  # keys so much longer that the state is as large as with a covariance beside it

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


_GLA, _LINEAR, _RETNET = {"mixer": "gla"}, {"mixer": "linear_attention"}, {"mixer": "retnet"}
_HEDGEHOG = {"mixer": "gla", "feature_map": "hedgehog"}
_GDN = {"mixer": "gated_deltanet", "conv_size": 4, "unit_qk": True}
_KDA = {"mixer": "kda", "conv_size": 4, "unit_qk": True}
_MESA = {"mixer": "mesa", "conv_size": 4, "unit_qk": True}
_DELTANET = {"mixer": "deltanet", "conv_size": 4, "unit_qk": True}
_MAMBA2 = {"mixer": "mamba2", "conv_size": 4, "intermediate_size": None}
_UNIT, _CLEAN = {"unit_qk": True}, {"clean": True}  # what a control and CCQ add to a backbone
_PROJECTED = {"clean": True, "step": "projected", "gate_init": 0.5}  # reads beside the paper's: docs/study.md
_DECAYED, _LEARNED = {"covariance_decay": "backbone"}, {"covariance_decay": "learned"}
_PLAIN_LINE, _UNIT_LINE, _CCQ_LINE = ("--", "s"), (":", "D"), ("-", "o")

# in the order of tables: the paper's seven with what varies them, then other controls and other backbones
_ALL = (
    System("mamba2", "Mamba2", "Mamba-2, without MLPs", _MAMBA2, _PLAIN_LINE, paper="mamba2"),
    System("gla", "GLA", "gated linear attention", _GLA, _PLAIN_LINE, paper="gla"),
    System("gla-unit", "Unit-norm GLA", "the control of CCQ-GLA: unit q and k, no cleaning",
           _GLA | _UNIT, _UNIT_LINE),
    System("gla-unit-equal-state", "Unit-norm GLA, equal state",
           "control: unit-norm GLA with longer keys, so that its state is as large as CCQ-GLA's",
           _GLA | _UNIT, ("-.", ">"), equal_state=True),
    System("gla-hedgehog", "GLA-Hedgehog", "GLA with Hedgehog's learned features",
           _HEDGEHOG, (":", "v"), paper="gla-hedgehog"),
    System("gated-deltanet", "Gated DeltaNet",
           "Gated DeltaNet, with unit q and k: also the control of CCQ-Gated DeltaNet",
           _GDN, _PLAIN_LINE, paper="gated-deltanet"),
    System("ccq-gla", "CCQ-GLA", "GLA + CCQ", _GLA | _CLEAN, _CCQ_LINE, "gla-unit", "ccq-gla"),
    System("ccq-gla-no-decay", "CCQ-GLA, bias not decayed",
           "CCQ-GLA without weight decay on the gate's bias",
           _GLA | _CLEAN | {"decay_gate_bias": False}, ("--", "*"), "gla-unit"),
    System("ccq-gla-open", "CCQ-GLA, gate from 0.5", "CCQ-GLA whose gate starts at 0.5 instead of 0.01",
           _GLA | _CLEAN | {"gate_init": 0.5}, ("-", "P"), "gla-unit"),
    System("ccq-gla-fixed-lam", "CCQ-GLA, lam 0.1", "CCQ-GLA with a fixed lam = 0.1",
           _GLA | _CLEAN | {"fixed_lam": 0.1}, (":", "h"), "gla-unit"),
    System("ccq-gla-stats", "CCQ-GLA, stats",
           "GLA with cleaning but without unit q and k; unit keys only in the covariance",
           _GLA | _CLEAN | {"normalize": "stats"}, ("-", "<"), "gla"),
    System("ccq-gla-uncentred", "CCQ-GLA, uncentred", "CCQ-GLA without centring the keys",
           _GLA | _CLEAN | {"centred": False}, ("-.", "d"), "gla-unit"),
    System("gla-projected", "GLA, projected read", "GLA with the projected read (docs/reads.md)",
           _GLA | _PROJECTED, ("--", "^"), "gla-unit"),
    System("gla-projected-decay", "GLA, projected read with decay",
           "the same, with a covariance that decays as GLA does",
           _GLA | _PROJECTED | _DECAYED, ("-", "^"), "gla-unit"),
    System("gla-projected-learned-decay", "GLA, projected read with learned decay",
           "the same, with a covariance that decays by a learned constant per head",
           _GLA | _PROJECTED | _LEARNED, ("-.", "^"), "gla-unit"),
    System("gla-projected-twice", "GLA, projected twice with decay", "two projected steps, with GLA's decay",
           _GLA | _PROJECTED | _DECAYED | {"steps": 2}, (":", "^"), "gla-projected-decay"),
    System("ccq-gla-free-scale", "CCQ-GLA, free scale", "control: the paper's step with lam = s sigmoid(.), s learned",
           _GLA | _CLEAN | {"gate_init": 0.5, "learned_scale": True}, ("--", "P"), "gla-unit"),
    System("gla-other-head", "GLA, another head's keys",
           "control: the projected read with decay, with another head's covariance",
           _GLA | _PROJECTED | _DECAYED | {"direction": "other head"}, ("--", "<"), "gla-unit"),
    System("gla-mean-key", "GLA, mean of the keys", "control: the projected read with decay, along the mean key only",
           _GLA | _PROJECTED | _DECAYED | {"direction": "mean"}, (":", "<"), "gla-unit"),
    System("ccq-gated-deltanet", "CCQ-Gated DeltaNet", "Gated DeltaNet + CCQ",
           _GDN | _CLEAN, _CCQ_LINE, "gated-deltanet", "ccq-gated-deltanet"),
    System("ccq-gated-deltanet-no-decay", "CCQ-Gated DeltaNet, bias not decayed",
           "CCQ-Gated DeltaNet without weight decay on the gate's bias",
           _GDN | _CLEAN | {"decay_gate_bias": False}, ("--", "*"), "gated-deltanet"),
    System("ccq-gated-deltanet-open", "CCQ-Gated DeltaNet, gate from 0.5",
           "CCQ-Gated DeltaNet whose gate starts at 0.5",
           _GDN | _CLEAN | {"gate_init": 0.5}, ("-.", "P"), "gated-deltanet"),
    System("ccq-gated-deltanet-fixed-lam", "CCQ-Gated DeltaNet, lam 0.1",
           "the paper's ablation: a fixed lam = 0.1",
           _GDN | _CLEAN | {"fixed_lam": 0.1}, (":", "h"), "gated-deltanet", "ccq-gated-deltanet-fixed-lam"),
    System("ccq-gated-deltanet-uncentred", "CCQ-Gated DeltaNet, uncentred",
           "the paper's ablation: no centring of the keys",
           _GDN | _CLEAN | {"centred": False}, ("--", "d"), "gated-deltanet", "ccq-gated-deltanet-uncentred"),
    System("gated-deltanet-projected", "Gated DeltaNet, projected read", "Gated DeltaNet with the projected read",
           _GDN | _PROJECTED, ("--", "^"), "gated-deltanet"),
    System("gated-deltanet-projected-decay", "Gated DeltaNet, projected read with decay",
           "the same, with a covariance that decays as Gated DeltaNet does",
           _GDN | _PROJECTED | _DECAYED, ("-", "^"), "gated-deltanet"),
    System("transformer", "Transformer", "softmax attention, RoPE, SwiGLU",
           {"mixer": "attention"}, ("-.", "x"), paper="transformer"),
    System("gla-current-key", "GLA, current-key read",
           "control: unit-norm GLA with Comba's read, q - d k of the same token",
           _GLA | _UNIT | {"current_key_read": True}, (":", "X"), "gla-unit"),
    System("gated-deltanet-current-key", "Gated DeltaNet, current-key read", "Gated DeltaNet with Comba's read",
           _GDN | {"current_key_read": True}, (":", "X"), "gated-deltanet"),
    System("ccq-gla-hedgehog", "CCQ-GLA-Hedgehog", "GLA-Hedgehog + CCQ",
           _HEDGEHOG | _CLEAN, ("-", "v"), "gla-hedgehog"),
    # other writes, to show that the cleaning does not depend on them
    System("linear-attention", "Linear attention", "linear attention without decay", _LINEAR, _PLAIN_LINE),
    System("linear-attention-unit", "Unit-norm Linear attention", "the control of CCQ-Linear attention",
           _LINEAR | _UNIT, _UNIT_LINE),
    System("ccq-linear-attention", "CCQ-Linear attention", "linear attention + CCQ",
           _LINEAR | _CLEAN, _CCQ_LINE, "linear-attention-unit"),
    System("retnet", "RetNet", "RetNet: a fixed decay per head", _RETNET, _PLAIN_LINE),
    System("retnet-unit", "Unit-norm RetNet", "the control of CCQ-RetNet", _RETNET | _UNIT, _UNIT_LINE),
    System("ccq-retnet", "CCQ-RetNet", "RetNet + CCQ", _RETNET | _CLEAN, _CCQ_LINE, "retnet-unit"),
    System("deltanet", "DeltaNet", "DeltaNet: the delta rule without decay", _DELTANET, _PLAIN_LINE),
    System("ccq-deltanet", "CCQ-DeltaNet", "DeltaNet + CCQ", _DELTANET | _CLEAN, _CCQ_LINE, "deltanet"),
    System("kda", "KDA", "Kimi Delta Attention: the delta rule with a decay for each channel", _KDA, _PLAIN_LINE),
    System("ccq-kda", "CCQ-KDA", "KDA + CCQ", _KDA | _CLEAN, _CCQ_LINE, "kda"),
    System("kda-projected-decay", "KDA, projected read with decay",
           "KDA with the projected read; the covariance has KDA's mean decay",
           _KDA | _PROJECTED | _DECAYED, ("-", "^"), "kda"),
    System("mesa-30", "MesaNet, 30 steps", "MesaNet: reads with (H + Lambda)^-1 q by 30 steps of conjugate gradient",
           _MESA | {"cg_steps": 30}, _PLAIN_LINE),
    System("mesa-2", "MesaNet, 2 steps", "MesaNet by 2 steps of conjugate gradient",
           _MESA | {"cg_steps": 2}, (":", "s")),
    System("mamba2-unit", "Unit-norm Mamba2", "the control of CCQ-Mamba2", _MAMBA2 | _UNIT, _UNIT_LINE),
    System("ccq-mamba2", "CCQ-Mamba2", "Mamba-2 + CCQ", _MAMBA2 | _CLEAN, _CCQ_LINE, "mamba2-unit"),
    System("mamba2-projected-decay", "Mamba2, projected read with decay",
           "Mamba-2 with the projected read; the covariance decays as Mamba-2 does",
           _MAMBA2 | _PROJECTED | _DECAYED, ("-", "^"), "mamba2-unit"),
)  # fmt: skip
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}


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
    "identity", "recall", "logits_with_loss",
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
