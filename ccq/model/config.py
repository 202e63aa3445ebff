"""One config for all systems: sizes, the mixer and its options, the cleaning. Presets are a system times a size.

>>> CCQConfig.preset("ccq-gla-1.3b").clean
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ccq.mixers import MIXERS
from ccq.names import nearest
from ccq.ops.checks import MOST_STEPS
from ccq.ops.clean.reference import STEPS
from ccq.systems import SIZES, SYSTEMS, differing, in_words

CHOICES = {
    "feature_map": ("identity", "hedgehog", "elementwise_product"), "normalize": ("unit", "stats"),
    "covariance_decay": ("none", "backbone", "learned"), "direction": ("covariance", "other head", "mean"),
    "backend": ("auto", "chunk", "triton"), "state_dtype": ("float32", "bfloat16"),
}  # fmt: skip

# what a saved model brings along for those who do not import ccq, with trust_remote_code=True
REMOTE = "modeling_ccq"
REMOTE_CODE = '''"""The classes of this model are those of the package ccq: pip install "ccq[model]"."""

from ccq.model import CCQConfig, CCQForCausalLM, CCQModel

__all__ = ["CCQConfig", "CCQForCausalLM", "CCQModel"]
'''
AUTO_CLASSES = {"AutoConfig": "CCQConfig", "AutoModel": "CCQModel", "AutoModelForCausalLM": "CCQForCausalLM"}

# what transformers itself passes or stores beside the fields; any other name is a mistake
_FROM_TRANSFORMERS = (
    *("attn_implementation", "experts_implementation", "output_attentions", "torch_dtype", "model_type", "num_labels"),
    *("name_or_path", "auto_map", "quantization_config", "transformers_weights"),
    *("_name_or_path", "_commit_hash", "_attn_implementation"),
)


@dataclass(kw_only=True)
class ModelOptions:
    """The options of a model. Of those of mixers, one that the chosen mixer does not have is ignored by it."""

    vocab_size: int = 32000  # tokens of the tokenizer
    hidden_size: int = 1024  # width of the model
    num_hidden_layers: int = 21  # layers
    intermediate_size: int | None = 2816  # width of the SwiGLU; None: layers without an MLP
    norm_eps: float = 1e-6  # inside the square root of the norms
    initializer_range: float = 0.02  # standard deviation of random weights
    tie_word_embeddings: bool = False  # whether the head is the embedding
    max_position_embeddings: int = 4096  # the length it was trained on; nothing stops there
    use_cache: bool = True  # whether a call returns a cache to go on from
    logits_with_loss: bool | None = None  # whether labels give logits beside the loss; None: except in training
    bos_token_id: int | None = None  # the token that begins a text
    eos_token_id: int | list[int] | None = None  # the token, or tokens, that end it
    pad_token_id: int | None = None  # the token that fills shorter rows of a batch

    mixer: str = "gla"  # the backbone, a name in ccq.mixers.MIXERS
    num_heads: int = 6  # heads of the mixer
    num_kv_heads: int | None = None  # attention: key and value heads, each read by num_heads / num_kv_heads; None: all
    key_size: int = 256  # of a head; attention takes hidden_size / num_heads
    value_size: int = 512  # of a head; attention takes hidden_size / num_heads
    conv_size: int | None = None  # width of the short convolution of q, k and v; None: none
    base_conv_size: int | None = None  # layers 0, 2, ... are zoology's gated convolutions of this width, not the mixer
    # of q and k: "identity"; "hedgehog", softmax of [2x, -2x], x a learned map; or "elementwise_product" of two maps
    feature_map: str = "identity"
    feature_map_size: int = 128  # hedgehog: size of x, so that there are twice as many features
    output_gate: bool = True  # whether a gate multiplies what the mixer puts out
    rotary: bool = False  # retnet: q and k turned by their positions, as its paper has them
    rope_theta: float = 10000.0  # base of the angles: attention, and retnet with rotary
    gate_low_rank: int = 16  # GLA: rank of the map from x to the decays
    gate_normalizer: float = 16.0  # GLA: log-decay = logsigmoid(.) / this
    cg_steps: int = 30  # mesa: steps of conjugate gradient, in training as in decoding
    expand: int = 2  # mamba2: width of the inner state over hidden_size
    state_size: int = 128  # mamba2: its key size
    head_size: int = 64  # mamba2: its value size
    num_groups: int = 1  # mamba2: key heads

    unit_qk: bool = False  # unit q and k without cleaning
    current_key_read: bool = False  # Comba's read: q - d * k of the same token, d learned, one a head
    current_key_init: float = 0.02  # where d of Comba's read starts
    clean: bool = False  # clean the query: q_clean = q - lam * Sigma_t q
    # how it is cleaned: "scaled", the paper's; or "projected", where lam is a share of what q has along Sigma_t q
    step: str = "scaled"
    steps: int = 1  # how often it is cleaned
    # how Sigma_t forgets: "none"; "backbone", as the memory does; "learned", one constant a head
    covariance_decay: str = "none"
    # along "covariance" Sigma_t q; controls: Sigma_t of the "other head"'s keys, or their "mean" m alone: m (m . q)
    direction: str = "covariance"
    learned_scale: bool = False  # control: lam = s sigmoid(.), s learned, one a head, from 1
    centred: bool = True  # whether Sigma_t is centred: a covariance, not a second moment
    normalize: str = "unit"  # unit q and k; "stats": unit keys in Sigma_t only, for weights trained without either
    gate_init: float = 0.01  # where lam starts
    fixed_lam: float | None = None  # a constant lam, without a gate
    decay_gate_bias: bool = True  # whether weight decay reaches the bias of the gate
    backend: str = "auto"  # of cleaning and of the memory: "auto", "chunk" (plain PyTorch) or "triton"
    state_dtype: str = "float32"  # what the recurrent state is kept in between calls; "bfloat16" is half as large


class CCQConfig(ModelOptions, PretrainedConfig):
    """What a model is made of. Unknown names and impossible values raise."""

    model_type = "ccq"
    keys_to_ignore_at_inference = ["past_key_values", "scored"]

    identity: dict | None = None  # what was trained, as ccq.systems.Identity
    recall: dict | None = None  # what a recall model was trained on: {"vocab_size": ..., "slices": [[length, pairs]]}

    def __post_init__(self, **kwargs: Any) -> None:
        known = tuple(field.name for field in fields(self))
        for name in kwargs:
            if name not in _FROM_TRANSFORMERS:
                raise TypeError(f"CCQConfig: there is no option {name!r}.{nearest(name, known)}")
        super().__post_init__(**kwargs)
        self.auto_map = {auto: f"{REMOTE}.{ours}" for auto, ours in AUTO_CLASSES.items()}
        self.check()

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As transformers has it, with the file that makes AutoModelForCausalLM find our classes."""
        folder = Path(save_directory)
        if not folder.is_file():  # else transformers says what is wrong
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{REMOTE}.py").write_text(REMOTE_CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: `auto_map` is there already, and `save_pretrained` must not copy the files of ccq."""

    # names by which other libraries ask

    @property
    def num_attention_heads(self) -> int:
        return self.expand * self.hidden_size // self.head_size if self.mixer == "mamba2" else self.num_heads

    @property
    def num_key_value_heads(self) -> int:
        if self.mixer == "mamba2":
            return self.num_groups
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        if self.mixer == "attention":
            return self.hidden_size // self.num_heads
        return self.state_size if self.mixer == "mamba2" else self.key_size

    @property
    def layer_types(self) -> list[str]:
        kind = "full_attention" if self.mixer == "attention" else "linear_attention"
        convolutions = self.base_conv_size is not None
        return ["conv" if convolutions and not i % 2 else kind for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        """Raise TypeError or ValueError where a value is impossible. Values may be assigned; a model checks again."""
        for name, kind in (ModelOptions.__annotations__ | CCQConfig.__annotations__).items():  # such as "int | None"
            value = getattr(self, name)
            kinds = kind.split(" | ")
            if value is None and "None" in kinds:
                continue
            if isinstance(value, list) and "list[int]" in kinds:
                for item in value:
                    _check_kind(name, item, "int")
            else:
                _check_kind(name, value, kinds[0])
        for name, holds, what in (
            ("norm_eps", self.norm_eps > 0, "a positive number"),
            ("rope_theta", self.rope_theta > 0, "a positive number"),
            ("gate_normalizer", self.gate_normalizer > 0, "a positive number"),
            ("initializer_range", self.initializer_range >= 0, "a number that is not negative"),
            ("gate_init", 0 < self.gate_init < 1, "a number above 0 and below 1"),
            ("steps", 1 <= self.steps <= MOST_STEPS, f"a number from 1 to {MOST_STEPS}"),
            ("fixed_lam", self.fixed_lam is None or 0 <= self.fixed_lam <= 1, "None or a number from 0 to 1"),
        ):
            if not holds:
                raise ValueError(f"{name}: expected {what}, got {getattr(self, name)}")
        registered = {"mixer": tuple(MIXERS), "step": tuple(STEPS)}  # by now
        for name, choices in {**registered, **CHOICES}.items():
            value = getattr(self, name)
            if value not in choices:
                known, own = ", ".join(choices), " For your own: --import MODULE." if name == "mixer" else ""
                raise ValueError(f"{name}: expected one of {known}, got {value!r}.{nearest(value, choices)}{own}")
        self._check_together()

    def _check_together(self) -> None:
        if self.mixer == "attention":
            _divides("num_heads", self.num_heads, "hidden_size", self.hidden_size)
            size = self.hidden_size // self.num_heads
            if size % 2:
                raise ValueError(f"num_heads: expected heads of even size, as RoPE rotates pairs; got heads of {size}")
            if self.num_kv_heads is not None:
                _divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        if self.rotary and (self.mixer != "retnet" or self.key_size % 2 or self.feature_map == "hedgehog"):
            raise ValueError("rotary: expected mixer='retnet' with keys of even size and no Hedgehog")
        if self.mixer == "mamba2":
            _divides("head_size", self.head_size, "expand * hidden_size", self.expand * self.hidden_size)
            heads = self.expand * self.hidden_size // self.head_size
            _divides("num_groups", self.num_groups, f"{heads} heads", heads)
            if self.conv_size is None:
                raise ValueError("conv_size: Mamba2 has its SiLU in the convolution; expected a width, got None")
        if self.clean and self.mixer == "attention":
            raise ValueError("clean: attention has no key-value state to read with a cleaned query")
        if self.mixer == "mesa" and (self.clean or self.current_key_read):
            name = "clean" if self.clean else "current_key_read"
            raise ValueError(f"{name}: cannot be used with mesa, which solves for its own query")
        if self.clean and self.current_key_read:
            raise ValueError("current_key_read: it is an alternative to clean; set one of them")
        for name in ("step", "steps", "covariance_decay", "direction", "learned_scale"):
            value, usual = getattr(self, name), getattr(CCQConfig, name)
            if value != usual and not self.clean:
                raise ValueError(f"{name}: expected clean=True with {value!r}, which is a way to clean the query")
        if self.direction == "other head" and (self.num_groups if self.mixer == "mamba2" else self.num_heads) == 1:
            raise ValueError("direction: expected several key heads for 'other head', got 1")
        if self.learned_scale and (self.step, self.direction) != ("scaled", "covariance"):
            raise ValueError("learned_scale: it is of the paper's step; expected step='scaled', direction='covariance'")
        if self.steps > 1 and (self.learned_scale or self.direction == "mean"):
            raise ValueError(f"steps: expected 1 with learned_scale or direction='mean', got {self.steps}")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> CCQConfig:
        """The config called `<system>-<size>`, with some options changed.

        >>> CCQConfig.preset("gla-tiny", clean=True).num_hidden_layers
        2
        """
        for size in SIZES:
            system = name.removesuffix(f"-{size}")
            if system != name and system in SYSTEMS:
                return cls(**{**_options(system, size), **changes})
        known = presets()
        there = f"{', '.join(SYSTEMS)}; {', '.join(SIZES)}"
        raise ValueError(f"preset: there is no {name!r}.{nearest(name, known)} Presets are <system>-<size>: {there}.")


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (int, "an integer"), "float": ((int, float), "a number"), "bool": (bool, "True or False"),
    "str": (str, "a name"), "dict": (dict, "names and values"),
}  # fmt: skip


def _check_kind(name: str, value: object, kind: str) -> None:
    types, what = _KINDS[kind]
    if not isinstance(value, types) or (kind != "bool" and isinstance(value, bool)):
        raise TypeError(f"{name}: expected {what}, got {value!r}")
    least = 0 if name.endswith("_token_id") else 1
    if kind == "int" and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _divides(name: str, value: int, whole_name: str, whole: int) -> None:
    if whole % value:
        raise ValueError(f"{name}: expected a divisor of {whole_name} = {whole}, got {value}")


def presets() -> tuple[str, ...]:
    return tuple(f"{system}-{size}" for system in SYSTEMS for size in SIZES)


def sized(mixer: str, size: str) -> dict[str, Any]:
    """The options that make a size, of a model with this mixer."""
    if "width" in SIZES[size]:
        return _zoology(mixer, SIZES[size]["width"])
    options = {**SIZES[size]["model"], "feature_map_size": SIZES[size]["model"]["key_size"] // 2}
    linear, attention, mamba2 = options.pop("layers")
    options["num_hidden_layers"] = {"attention": attention, "mamba2": mamba2}.get(mixer, linear)
    if mixer == "mesa":  # values as long as keys, at most 128, and together as wide as the model: as its paper has them
        options["key_size"] = options["value_size"] = min(options["key_size"], 128)
        options["num_heads"] = options["hidden_size"] // options["key_size"]
    if mixer == "attention":  # heads of 64, as Llama's at these widths
        options["num_heads"] = max(options["hidden_size"] // 64, 4)
    return options


def _zoology(mixer: str, width: int) -> dict[str, Any]:
    """zoology's recall models; docs/training.md says what is the same and what is not.

    Two layers of two heads, no MLP, tied embeddings: a gated convolution, then the mixer (Mamba2, which has a
    convolution of its own: twice the mixer). Sizes of keys and values and the output gate are those of its layers.
    """
    head = width // 2
    shapes: dict[str, dict[str, Any]] = {
        "attention": {},
        "mamba2": {"base_conv_size": None, "state_size": 16, "head_size": 64},
        "deltanet": {"key_size": head, "value_size": head, "output_gate": False},
        "kda": {"key_size": head, "value_size": head, "output_gate": False},
        "mesa": {"key_size": head, "value_size": head, "output_gate": False},
        "gated_deltanet": {"key_size": head, "value_size": 2 * head, "output_gate": False},
    }
    return {
        **sized(mixer, "tiny"),
        "vocab_size": 8192, "hidden_size": width, "intermediate_size": None, "num_hidden_layers": 2, "num_heads": 2,
        "base_conv_size": 3, "tie_word_embeddings": True,
        **shapes.get(mixer, {"key_size": head // 2, "value_size": head, "feature_map_size": head // 4}),
    }  # fmt: skip


def _options(system: str, size: str) -> dict[str, Any]:
    known = SYSTEMS[system]
    return known.over(sized(known.options["mixer"], size))


def recognise(options: Mapping[str, Any], system: str = "", size: str = "") -> tuple[str, str, str]:
    """(system, size, variant) of a model with these options; of those that fit equally well `system` and `size`.

    >>> recognise(CCQConfig.preset("gla-pico", clean=True, conv_size=4).to_dict())
    ('ccq-gla', 'pico', 'convolution of 4')
    """
    mixer, width = options["mixer"], options["hidden_size"]
    systems = [name for name in SYSTEMS if SYSTEMS[name].options["mixer"] == mixer]
    if not systems:  # a mixer of the user's own
        return mixer, f"width {width}", ""
    systems.sort(key=lambda name: name != system)
    widths = {name: sized(mixer, name)["hidden_size"] for name in SIZES}
    sizes = [name for name in sorted(SIZES, key=lambda name: name != size) if widths[name] == width]
    defaults = asdict(ModelOptions())
    found = [(differing(options, defaults | _options(name, of)), name, of) for of in sizes for name in systems]
    if not found:  # a size of the user's own: what makes a size tells nothing
        shape = {"hidden_size", "output_gate", *sized(mixer, "mqar")}
        known = {name: value for name, value in defaults.items() if name not in shape}
        found = [(differing(options, {**known, **SYSTEMS[name].options}), name, f"width {width}") for name in systems]
    different, name, of = min(found, key=lambda each: len(each[0]))
    return name, of, ", ".join(in_words(option, options[option]) for option in different)
