"""`ccq info PRESET`: parameters, state, FLOPs and training memory of a model, without building it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ccq import shipped, tables
from ccq.names import positive

if TYPE_CHECKING:
    from ccq.model import CCQConfig, CCQForCausalLM

# bytes a parameter in training: fp32 weights and gradients and a copy in bf16, the two moments of AdamW in fp32
WEIGHT_BYTES, OPTIMIZER_BYTES = 10, 8
ACTIVATION_BYTES = 2  # bf16


@dataclass(frozen=True)
class Info:
    """Numbers of one model, at sequences of `length` tokens."""

    config: CCQConfig
    body: int  # parameters of the layers and the last norm
    embedding: int  # parameters of embedding and head
    state_bytes: int  # of one sequence
    forward_flops: float  # a token
    activation_bytes: float  # a token, kept for the backward without checkpointing; an estimate

    @property
    def train_flops(self) -> float:
        """A token: the backward is two products for each one of the forward."""
        return 3 * self.forward_flops

    def training_bytes(self, tokens: int) -> float:
        """On one device, with `tokens` in flight."""
        return (self.body + self.embedding) * (WEIGHT_BYTES + OPTIMIZER_BYTES) + tokens * self.activation_bytes


def info(config: CCQConfig, length: int = 4096) -> Info:
    """The numbers of a model in bf16, which is made on the meta device: without memory.

    >>> from ccq.model import CCQConfig
    >>> round(info(CCQConfig.preset("ccq-gla-1.3b")).state_bytes / 2**20, 1)
    94.6
    """
    import torch  # late: `--help` needs none of this
    from torch import nn

    from ccq.model import CCQForCausalLM

    with torch.device("meta"):
        model = CCQForCausalLM(config).bfloat16()
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embedding = sum(n for name, n in parameters.items() if name.startswith(("model.embed_tokens", "lm_head")))
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    mixers = [layer.mixer for layer in model.model.blocks()]
    return Info(
        config=config,
        body=sum(parameters.values()) - embedding,
        embedding=embedding,
        state_bytes=sum(mixer.state_bytes(length) for mixer in mixers),
        forward_flops=2 * products + sum(mixer.flops(length) for mixer in mixers),
        activation_bytes=ACTIVATION_BYTES * activations(model),
    )


def activations(model: CCQForCausalLM) -> int:
    """Numbers a token leaves for the backward: what Linears put out, what norms and output projections take in,
    and the unit keys of the cleaning.

    Left out: what is computed again (the product inside the SwiGLU, statistics of the cleaning, logits).
    """
    from torch import nn

    from ccq.mixers import QueryCleaner

    hidden = model.config.hidden_size
    total = hidden
    for layer in model.model.blocks():
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        mixing = [module for module in layer.mixer.modules() if isinstance(module, nn.Linear)]
        read = max((linear.in_features for linear in mixing if linear.out_features == hidden), default=0)
        norms = 1 if model.config.intermediate_size is None else 2
        cleaners = [module for module in layer.modules() if isinstance(module, QueryCleaner) and module.clean]
        unit_keys = sum(cleaner.heads * cleaner.features for cleaner in cleaners)
        total += sum(linear.out_features for linear in linears) + read + norms * hidden + unit_keys
    return total


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq info", description=(__doc__ or "").splitlines()[0])
    what = "a preset such as ccq-gla-1.3b, or a model: shipped, a folder, a run, or a name on the Hub"
    parser.add_argument("names", nargs="+", metavar="PRESET", help=what)
    parser.add_argument("--length", type=positive, default=4096, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per training batch (default: %(default)s)")
    arguments = parser.parse_args(argv)
    from ccq.model import CCQConfig
    from ccq.pretrained import load_config

    rows = []
    for name in arguments.names:
        folder, ships = Path(name), name in shipped.names()
        if folder.is_dir() and not ships and not (folder / "config.json").exists():
            parser.error(f"{name} has no config.json: expected the folder of a checkpoint or of a run")
        is_model = folder.is_dir() or ships or "/" in name  # what `generate` takes for one; any other is a preset
        try:
            config = load_config(name) if is_model else CCQConfig.preset(name.replace("_", "-"))
        except (TypeError, ValueError, OSError) as error:
            parser.error(f"{name}: {error}" if folder.is_dir() else str(error))
        if ships:
            print(f"{name}: the model that ships; `ccq info {name.replace('-', '_')}` is about the recipe")
        if not isinstance(config, CCQConfig):
            parser.error(f"{name} is a model of another kind, {type(config).__name__}")
        rows.append((name, info(config, arguments.length)))
    show(rows, arguments.length, arguments.batch)
    return 0


def show(rows: list[tuple[str, Info]], length: int, batch: int) -> None:
    tokens = batch * length
    columns = ("model", "layers", "width", "body", "embeddings", "state", "FLOP a token", "to train",
               "weights, optimizer", "activations", "in all")  # fmt: skip
    shown = []
    for name, x in rows:
        config, fixed, all_bytes = x.config, x.training_bytes(0), x.training_bytes(tokens)
        counts = (count(x.body), count(x.embedding), size(x.state_bytes), count(x.forward_flops), count(x.train_flops))
        memory = (size(fixed), size(all_bytes - fixed), size(all_bytes))
        shown.append((name, config.num_hidden_layers, config.hidden_size, *counts, *memory))
    tables.show(columns, shown, width=150)
    print(
        f"State: of one sequence of {length:,} tokens; covariance fp32, recurrent state as `state_dtype` says, else "
        f"bf16. Memory to train: {batch} x {length:,} tokens on one GPU,\nfp32 weights, gradients and AdamW moments, "
        f"and weights in bf16 ({WEIGHT_BYTES + OPTIMIZER_BYTES} bytes a parameter), bf16 activations without "
        "checkpointing:\nan estimate, up to an eighth below what was measured."
    )


def count(x: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= scale:
            return f"{x / scale:.3g} {unit}" if x < 1000 * scale else f"{x / scale:,.0f} {unit}"
    return f"{x:.0f}"


def size(x: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if x >= scale:
            return f"{x / scale:.1f} {unit}"
    return f"{x:.0f} B"
