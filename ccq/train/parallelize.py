"""What is done to a model from outside before it trains, in this order: activation checkpointing, compile, and FSDP2
over many ranks or fp32 master weights on one.

Either way the optimizer and checkpoints see the *masters*: by the name of the parameter, the weights in full precision
(sharded DTensors over many ranks). With dtype bf16 the layers compute with bf16 copies of them.

A few parameters are delicate (the gate's, A_log, dt_bias: see ccq.mixers.base.Owner) and stay in fp32 in the
computation too. FSDP would cast them, so they are left out of it: each rank has them whole, and their gradients are
added up in one call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ccq.mixers.base import Owner
from ccq.model import CCQForCausalLM
from ccq.pretrained import load_model
from ccq.train import RunError
from ccq.train.config import Config, model_config
from ccq.train.world import World

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass
class Switch:
    """A flag that hooks of parameters read. A hook must not hold the model itself: then nothing could free it."""

    on: bool


@dataclass
class Prepared:
    model: CCQForCausalLM  # what is called
    masters: dict[str, Tensor]  # what is optimized and saved; gradients are here after a backward
    whole: list[Tensor]  # those of them that every rank has, and whose gradients are still to be added up
    copies: list[tuple[Tensor, Tensor]]  # (computed with, its master), where they are two tensors
    # whether masters get the gradients of their copies, in which micro-batches add up
    collects: Switch = field(default_factory=lambda: Switch(True))

    @property
    def trained(self) -> dict[str, Tensor]:
        """Those of the masters that are not frozen."""
        return {name: x for name, x in self.masters.items() if x.requires_grad}

    def gradients(self) -> list[Tensor]:
        copies = () if self.collects.on else (copy for copy, _ in self.copies)
        return [x.grad for x in (*copies, *self.masters.values()) if x.grad is not None]

    def sum_whole(self) -> None:
        """Add up over ranks what FSDP does not."""
        gradients = [x.grad for x in self.whole if x.grad is not None]
        if gradients:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def zero_grad(self) -> None:
        for x in (*self.masters.values(), *(copy for copy, _ in self.copies)):
            x.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the masters' new values reach what is computed with."""
        if self.copies:
            copies, masters = zip(*self.copies, strict=True)
            torch._foreach_copy_(list(copies), list(masters))


def make_model(config: Config, device: torch.device) -> CCQForCausalLM:
    """The model of a run at its start, in fp32 (fp64): the same on every rank, whatever their number."""
    full = torch.float64 if config.dtype == "fp64" else torch.float32
    if config.foreign:
        return load_model(str(config.init), device, full).train()
    before = torch.get_default_dtype()
    torch.set_default_dtype(full)
    try:
        torch.manual_seed(config.seed)
        with device:
            return CCQForCausalLM(model_config(config.model)).train()
    finally:
        torch.set_default_dtype(before)


def freeze(model: nn.Module, config: Config) -> None:
    """Leave only the parameters whose name matches `train`; RunError lists the names where a pattern matches none."""
    rates = [("optimizer.rates", pattern) for pattern, _ in config.optimizer.patterns()]
    for field_name, pattern in [("train", config.train or ""), *rates]:
        if not any(re.search(pattern, name) for name, _ in model.named_parameters()):
            names = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name, _ in model.named_parameters())
            raise RunError(f"{field_name}: no name of a parameter matches {pattern!r}. There are: {', '.join(names)}")
    for name, parameter in model.named_parameters():
        if config.train is not None:
            parameter.requires_grad_(re.search(config.train, name) is not None)


def parallelize(model: CCQForCausalLM, config: Config, world: World) -> Prepared:
    """Apply what the config asks for; the model is changed in place."""
    if config.foreign and (world.size > 1 or config.runtime.compile):
        raise RunError("init: a model of transformers trains in one process and is not compiled; its Trainer does both")
    if config.runtime.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.runtime.compile:
        for block in model.model.blocks():
            block.compile()
    if world.size > 1:
        return shard(model, config, world)
    if config.dtype == "bf16":
        return keep_masters(model)
    return Prepared(model, dict(model.named_parameters()), [], [])


def delicate(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that stay in full precision, in the order of the model."""
    return [p for m in model.modules() if isinstance(m, Owner) for p in m.parameters(recurse=False)]


def shard(model: CCQForCausalLM, config: Config, world: World) -> Prepared:
    """FSDP2 around each layer, and around the rest: embedding, last norm and head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if config.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(world.device.type, (world.size,))
    whole = delicate(model)
    for module in (*model.model.blocks(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=set(whole))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the loss is divided by the tokens of all ranks: gradients only add up
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Prepared(model, dict(model.named_parameters()), list(whole), [])


def keep_masters(model: CCQForCausalLM, dtype: torch.dtype = torch.bfloat16) -> Prepared:
    """Weights in `dtype` to compute with, masters as they were to optimize, in which gradients are added up."""
    masters: dict[str, Tensor] = {
        name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()
    }
    nn.Module.to(model, dtype)  # transformers wraps its own
    copies: list[tuple[Tensor, Tensor]] = []
    collects = Switch(True)
    for name, parameter in model.named_parameters():
        if parameter.dtype == masters[name].dtype:  # a delicate one: it is its own master
            masters[name] = parameter
            continue
        copies.append((parameter, masters[name]))
        if not parameter.requires_grad:
            continue

        def collect(p: Tensor, master: Tensor = masters[name]) -> None:
            if not collects.on:
                return
            assert p.grad is not None
            if master.grad is None:
                master.grad = p.grad.to(master.dtype)
            else:
                master.grad += p.grad
            p.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
    return Prepared(model, masters, [], copies, collects)
