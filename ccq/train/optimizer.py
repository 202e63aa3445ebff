"""AdamW with the right parameters decaying, the learning rate of a step, and where decay alone takes the gate."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ccq.mixers import no_weight_decay
from ccq.train.config import Config, Optimizer

GATE_BIAS = "cleaner.gate_bias"


def decaying(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay pulls to zero: matrices, and the gate's bias if its config says so.

    Not: what a module names in `no_weight_decay` (A_log, dt_bias, ...), and vectors (norms, biases).
    """
    kept = no_weight_decay(model)
    named = ((name, p.ndim) for name, p in model.named_parameters() if name not in kept)
    return {name for name, axes in named if axes >= 2 or name.endswith(GATE_BIAS)}


def make_optimizer(masters: dict[str, Tensor], decay: set[str], options: Optimizer) -> torch.optim.AdamW:
    """AdamW over the fp32 weights, with its moments there from the start, so that a checkpoint can fill them.

    `scale` of a group is that of its learning rate.
    """
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, parameter in masters.items():  # a foreach over sharded and whole tensors together is refused by torch
        kind = (name in decay, options.scale(name), isinstance(parameter, DTensor))
        groups.setdefault(kind, []).append(parameter)
    fused = next(iter(masters.values())).device.type == "cuda"
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": options.weight_decay if decays else 0.0, "scale": scale}
            for (decays, scale, _), parameters in groups.items()
        ],
        lr=0.0,
        betas=options.betas,
        eps=options.eps,
        fused=fused,
        foreach=not fused,
    )
    for parameter in masters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # at rate 0, so nothing moves
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def learning_rate(step: int, config: Config) -> float:
    """Of the step after `step` others: linear up to `lr`, then a cosine that would reach 0 with one step more.

    lr (step + 1) / warmup                                        step < warmup
    lr (1 + cos(pi (step - warmup) / (steps - warmup))) / 2       then
    """
    options = config.optimizer
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    if options.schedule == "constant":
        return options.lr
    done = (step - options.warmup) / max(1, config.steps - options.warmup)
    return options.lr * 0.5 * (1 + math.cos(math.pi * done))


def pure_decay(config: Config) -> np.ndarray:
    """[steps + 1]: sigmoid(b) of the gate after each step if no gradient ever reached b, only weight decay.

        b_n = b_0 prod_{i < n} (1 - lr_i weight_decay)          b_0 = logit(gate_init)

    A gate that merely follows this curve has learned nothing. (That of a run that began with another's starts there.)
    """
    start = math.log(config.model.gate_init / (1 - config.model.gate_init))
    trained = config.train is None or re.search(config.train, GATE_BIAS) is not None
    decay = config.optimizer.weight_decay * config.optimizer.scale(GATE_BIAS) if trained else 0.0
    decay = decay if config.model.decay_gate_bias else 0.0
    rates = np.array([learning_rate(step, config) for step in range(config.steps)])
    bias = start * np.concatenate([[1.0], np.cumprod(1 - decay * rates)])
    return 1 / (1 + np.exp(-bias))


def squared_norms(gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sums of squares on this rank, in fp64: of the shards, which ranks add up, and of what all ranks have."""
    shards = [x.to_local() for x in gradients if isinstance(x, DTensor)]
    return _squares(shards), _squares([x for x in gradients if not isinstance(x, DTensor)])


def _squares(tensors: list[Tensor]) -> Tensor:
    filled = [x for x in tensors if x.numel()]  # a rank may hold nothing of a small tensor
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(x.dtype for x in filled):  # one launch each; bf16 would round the norms of bf16
        same = [x for x in filled if x.dtype == dtype]
        norms += torch._foreach_norm(same, dtype=torch.promote_types(dtype, torch.float32))
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def scale_(gradients: list[Tensor], factor: float | Tensor) -> None:
    local: list[Any] = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    torch._foreach_mul_(local, factor)
