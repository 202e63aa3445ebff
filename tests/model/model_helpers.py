"""What the tests of models share: tiny models whose weights are large enough that every part of them matters."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ccq.model import CCQConfig, CCQForCausalLM

# one of each mixer, cleaned where it can be, and each option that changes the path through a mixer
SYSTEMS = (
    "transformer",
    "mamba2",
    "gla",
    "gla-hedgehog",
    "gated-deltanet",
    "ccq-gla",
    "ccq-gated-deltanet",
    "gla-unit",
    "gated-deltanet-current-key",
    "linear-attention",
    "ccq-linear-attention",
    "ccq-retnet",
    "ccq-deltanet",
    "ccq-kda",
    "mesa-2",
    "ccq-mamba2",
    "ccq-gla-hedgehog",
    "ccq-gla+base-conv",  # as zoology's recall models: its convolution in layer 0, the mixer in layer 1
)

# fp32 logits of one model along two paths differ by less: they are of size 1, and err by 1e-5 from fp64
CLOSE = 3e-5


def make_config(system: str, size: str = "tiny", **changes) -> CCQConfig:
    name, _, base_conv = system.partition("+")
    return CCQConfig.preset(f"{name}-{size}", **({"base_conv_size": 3} if base_conv else {}), **changes)


def make_model(system: str, seed: int = 0, **changes) -> CCQForCausalLM:
    """A tiny model, in eval mode, with weights of size 0.1 and gates that differ from token to token."""
    torch.manual_seed(seed)
    settings = {"initializer_range": 0.1, "gate_init": 0.5, **changes}
    if system == "transformer":
        settings.setdefault("num_kv_heads", 2)
    model = CCQForCausalLM(make_config(system, **settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_weight"):
                parameter.normal_(std=0.5)  # zero at the start of training: lam would be a constant
    return model


@functools.cache
def shared_model(system: str) -> CCQForCausalLM:
    """The model of a system, for tests that leave it as it is."""
    return make_model(system)


def tokens(*shape: int, seed: int = 0, vocabulary: int = 256) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def relative(ref: Tensor, got: Tensor) -> float:
    return ((got - ref).norm() / ref.norm()).item()
