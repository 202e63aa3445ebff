"""One typed config of a run. Recipes make it, the command line overrides any field, the run folder keeps it as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ccq.data.mqar import TRAIN
from ccq.files import read_json
from ccq.model.config import CCQConfig, ModelOptions, recognise
from ccq.systems import Identity
from ccq.train import RunError


def preset(name: str, **changes: Any) -> ModelOptions:
    """The ModelOptions of a preset of CCQConfig."""
    config = CCQConfig.preset(name, **changes)
    return ModelOptions(**{option.name: getattr(config, option.name) for option in dataclasses.fields(ModelOptions)})


def model_config(options: ModelOptions) -> CCQConfig:
    return CCQConfig(**dataclasses.asdict(options))


@dataclass
class Data:
    # tokens: shards made by `ccq data prepare`; mqar, mad: recall samples made on the fly
    source: Literal["tokens", "mqar", "mad"] = "tokens"
    path: str | None = None  # folder of the shards (tokens)
    valid_path: str | None = None  # folder of shards to validate on (tokens); none: no validation
    length: int = 4096  # tokens of a window (tokens)
    batch: int = 64  # sequences of a step, over all ranks and micro-batches
    reset: bool = False  # start the state anew at each document of a window (tokens)
    # length, pairs (mad: tokens of the longest key), samples of each kind of recall sample; zoology's by default
    slices: tuple[tuple[int, int, int], ...] = tuple((s.length, s.pairs, s.samples) for s in TRAIN)
    recall_vocab_size: int | None = None  # of the recall samples; none: the model's
    valid_slices: tuple[tuple[int, int, int], ...] = ()  # the same for validation; none: no validation
    updates: int = 0  # keys of a sample that get another value (mqar)
    noise: float = 0.0  # the share of pairs that are noise (mad)


@dataclass
class Optimizer:
    lr: float = 1e-3  # the largest learning rate
    warmup: int = 1024  # steps in which it rises to that, linearly
    schedule: Literal["cosine", "constant"] = "cosine"  # what follows: a cosine to 0 at the last step, or nothing
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    # of matrices; norms, biases, A_log, dt_bias do not decay, the gate's bias by model.decay_gate_bias
    weight_decay: float = 0.1
    clip: float | None = 1.0  # the largest norm of the gradient; none: no clipping
    # PATTERN=RATE: another largest rate of the parameters whose name matches; the first that matches counts
    rates: tuple[str, ...] = ()

    def scale(self, name: str) -> float:
        """Of the learning rate of the parameter with this name."""
        for pattern, rate in self.patterns():
            if re.search(pattern, name):
                return rate / self.lr
        return 1.0

    def patterns(self) -> list[tuple[str, float]]:
        pairs = [text.rpartition("=") for text in self.rates]
        return [(pattern, float(rate)) for pattern, _, rate in pairs]


@dataclass
class Runtime:
    """How it runs, not what it computes: these may change when a run is resumed."""

    micro_batch: int = 8  # sequences a rank takes at once; the rest of its part of the batch is accumulated
    activation_checkpointing: bool = False  # keep the inputs of layers only, and compute the rest again in the backward
    compile: bool = False  # torch.compile each layer
    capture: bool = True  # replay the step as a CUDA graph: on one GPU, where shapes are fixed, without the two above
    device: str | None = None  # cuda or cpu; none: a GPU if there is one
    workers: int = 0  # 0 or 1 processes that make batches ahead of time
    checkpoint_every: int = 500  # steps
    keep: int = 3  # checkpoints that are kept
    log_every: int = 10  # steps
    tensorboard: bool = True
    validate_every: int = 500  # steps; also after the last
    validate_windows: int = 256  # windows to validate on at most (tokens)
    sample_every: int = 0  # steps between samples of text (tokens, with a tokenizer beside the shards); 0: none
    sample_prompt: str = ""
    sample_tokens: int = 48  # tokens of prompt and sample together
    patience: int = 5  # steps in a row with a loss or gradient that is not finite, after which the run stops
    timeout: int = 600  # seconds after which a rank that does not answer is lost


@dataclass
class Config:
    """A run: what is trained, on what, how, and for how long."""

    model: ModelOptions
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    runtime: Runtime = field(default_factory=Runtime)
    steps: int = 1000  # steps of the optimizer
    seed: int = 0  # of weights and data
    dtype: Literal["bf16", "fp32", "fp64"] = "fp32"  # of the computation; weights are kept in fp32 (fp64 for fp64)
    # the model whose weights and options the run begins with (folder, run or name); none: random weights
    init: str | None = None
    foreign: bool = False  # set by init: that model is transformers' own, and of `model` only the vocabulary counts
    train: str | None = None  # train only parameters whose name matches this, as 'cleaner|q_proj'; none: all
    # what the run is of; the run fills in what the other fields say
    identity: Identity = field(default_factory=Identity)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise RunError where a value is impossible."""
        try:
            model_config(self.model)
        except (TypeError, ValueError) as error:
            raise RunError(f"model.{error}") from None
        if self.data.source != "tokens":
            if not self.data.slices:
                raise RunError("data.slices: expected one kind of sample at least, got none")
            if self.data.path or self.data.valid_path:
                raise RunError("data.path: this recipe reads no text: add --data.source tokens and --model.vocab-size")
        if self.foreign and self.init is None:
            raise RunError("foreign: expected a model in --init, which sets this, got none")
        if not -(2**63) <= self.seed < 2**63:
            raise RunError(f"seed: expected a whole number of 64 bits, got {self.seed}")
        if self.runtime.workers not in (0, 1):
            raise RunError(f"runtime.workers: expected 0 or 1, got {self.runtime.workers}")
        least_of = {
            "steps": 1, "data.length": 1, "data.batch": 1, "optimizer.lr": 0, "optimizer.warmup": 0,
            "optimizer.weight_decay": 0, "runtime.micro_batch": 1, "runtime.checkpoint_every": 1, "runtime.keep": 1,
            "runtime.log_every": 1, "runtime.validate_every": 1, "runtime.validate_windows": 1, "runtime.patience": 1,
            "runtime.sample_every": 0, "runtime.timeout": 1,
        }  # fmt: skip
        for name, least in least_of.items():
            value = operator.attrgetter(name)(self)
            if not math.isfinite(value):
                raise RunError(f"{name}: expected a finite number, got {value}")
            if value < least:
                raise RunError(f"{name}: expected at least {least}, got {value}")
        for name, slices in (("data.slices", self.data.slices), ("data.valid_slices", self.data.valid_slices)):
            for kind in slices:
                if len(kind) != 3 or min(kind) < 1:
                    raise RunError(f"{name}: expected length, pairs and samples, each from 1, got {list(kind)}")
        if self.data.recall_vocab_size is not None and self.data.recall_vocab_size < 1:
            raise RunError(f"data.recall_vocab_size: expected at least 1, got {self.data.recall_vocab_size}")
        if not self.optimizer.eps > 0:
            raise RunError(f"optimizer.eps: expected more than 0, got {self.optimizer.eps}")
        if self.optimizer.clip is not None and not self.optimizer.clip > 0:
            raise RunError(f"optimizer.clip: expected more than 0, or None for no clipping, got {self.optimizer.clip}")
        try:
            patterns = self.optimizer.patterns()
            for pattern in (self.train or "", *(pattern for pattern, _ in patterns)):
                re.compile(pattern)
        except ValueError:
            raise RunError(f"optimizer.rates: expected PATTERN=RATE, got {' '.join(self.optimizer.rates)}") from None
        except re.error as error:
            raise RunError(f"train, optimizer.rates: expected a regular expression ({error})") from None
        if patterns and not (self.optimizer.lr > 0 and all(0 <= rate < math.inf for _, rate in patterns)):
            raise RunError(f"optimizer.rates: expected rates from 0 on and an lr above 0, got {self.optimizer.rates}")
        if not all(0 <= beta < 1 for beta in self.optimizer.betas):
            raise RunError(f"optimizer.betas: expected at least 0 and below 1, got {self.optimizer.betas}")


def check_read(data: Data) -> None:
    """Raise RunError where an option would be ignored. A run of an older version that took it stays what it is."""
    for name, source in (("noise", "mad"), ("updates", "mqar"), ("reset", "tokens")):
        if (value := getattr(data, name)) and data.source != source:
            cure = f"set it to {type(value)()!r}"
            raise RunError(f"data.{name}: this is for --data.source {source}, here it is {data.source}: {cure}")


def recall(config: Config) -> dict[str, Any] | None:
    """What `ccq eval --suite mqar` or `mad` asks a model of this run; None for one that is trained on text."""
    data = config.data
    if data.source == "tokens":
        return None
    slices = [list(kind[:2]) for kind in data.valid_slices or data.slices]  # length, pairs
    told = {"vocab_size": data.recall_vocab_size or config.model.vocab_size, "slices": slices}
    if data.source == "mad":
        return told | {"source": "mad", "noise": data.noise}
    return told | ({"updates": data.updates} if data.updates else {})


def other_data(config: Config) -> list[str]:
    """How the data differ from those of the recipe, where the run is of one, in words."""
    from ccq.recipes import RECIPES  # which imports this module

    if config.identity.recipe not in RECIPES:
        return []
    data, usual = config.data, RECIPES[config.identity.recipe]().data
    words = {"source": f"trained on {data.source}"}
    if data.source == "tokens":
        words |= {"length": f"windows of {data.length}"}
        words |= {"reset": f"state {'reset at' if data.reset else 'kept over'} documents"}
    else:
        words |= dict.fromkeys(("slices", "recall_vocab_size"), "other recall samples")
        words |= {"updates": f"{data.updates} keys overwritten", "noise": f"noise {data.noise:g}"}
    return [said for name, said in words.items() if getattr(data, name) != getattr(usual, name)]


def identified(config: Config, needles: float | None = None) -> Config:
    """The config whose identity says what its other fields say, and the share of needle documents in its text.

    The one place where a variant is made: of the options that differ from the registry's, and of words that were given.
    """
    told, data = config.identity, config.data
    system, size, variant = told.system, "", ""
    if not config.foreign:
        system, size, variant = recognise(dataclasses.asdict(config.model), told.system, told.size)
    identity = dataclasses.replace(
        Identity().varied(*variant.split(", "), *other_data(config), *told.variant.split(", ")),
        system=system,
        size=size,
        seed=config.seed,
        repeat=told.repeat,
        recipe=told.recipe,
        tokens=config.steps * data.batch * (data.length if data.source == "tokens" else 1),
        needles=told.needles if needles is None else needles,
    )
    return dataclasses.replace(config, identity=identity)


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=1) + "\n"


def flat(config: Config) -> dict[str, Any]:
    """The fields by dotted name, as JSON has them."""
    found: dict[str, Any] = {}
    for name, value in json.loads(to_json(config)).items():
        found |= {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
    return found


def read(path: Path) -> Config:
    """The config that `to_json` wrote; RunError where there is none, or one with other fields."""
    content = read_json(path, RunError, "the folder of a run of `ccq train`")
    parts = {"model": ModelOptions, "data": Data, "optimizer": Optimizer, "runtime": Runtime, "identity": Identity}
    try:
        if "system" in content:  # what versions before 0.2 called it
            content["runtime"] = content.pop("system")
        old = content.setdefault("identity", {}) == {}  # a run of theirs: its options tell what it is
        made = {name: kind(**tuples(content.pop(name))) for name, kind in parts.items()}
        config = Config(**made, **content)
        return identified(config) if old else config
    except KeyError as error:
        raise RunError(f"{path} has no {error}: expected the folder of a run of `ccq train`") from None
    except TypeError as error:
        raise RunError(f"{path} is not a config of this version of ccq: {error}") from None


def tuples(value: Any) -> Any:
    """Lists, in which JSON has them, as the tuples that they were: all but eos_token_id, which transformers reads."""
    if isinstance(value, dict):
        return {name: x if name == "eos_token_id" else tuples(x) for name, x in value.items()}
    return tuple(tuples(x) for x in value) if isinstance(value, list) else value


# of the paths, the run compares what lies there; an identity follows from the other fields
MAY_CHANGE = ("runtime.", "identity.", "data.path", "data.valid_path")
LATER = ("init", "foreign", "train", "optimizer.rates")  # which older runs have not: unset they change no hash of a run


def fixed(config: Config) -> dict[str, Any]:
    """The fields that must not change within a run: its length may where no step depends on it."""
    may_change = (*MAY_CHANGE, *(("steps",) if config.optimizer.schedule == "constant" else ()))
    found = {name: value for name, value in flat(config).items() if not name.startswith(may_change)}
    return {name: value for name, value in found.items() if value or name not in LATER}


def differences(saved: Config, asked: Config) -> list[str]:
    """'field: the run has x, asked for y' for each field that must not change within a run."""
    before, now = fixed(saved), fixed(asked)
    if saved.optimizer.schedule != asked.optimizer.schedule:  # which is named; only one of them may fix the length
        before["steps"] = now["steps"] = None
    return [
        f"{name}: the run has {before.get(name)!r}, asked for {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
