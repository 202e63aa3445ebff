"""A step of training. One process on a CPU, one GPU, and torchrun over many run the same lines.

On one GPU a step never waits for the host: the learning rate, the clipping and the question whether all is finite stay
on the device. A step of a small model is thousands of short kernels, which Python launches more slowly than the GPU
runs them, so after a few steps the same kernels are replayed as one CUDA graph: the numbers are those of the steps that
are launched one by one. Over many ranks the host decides, since it knows what other ranks found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ccq.data.batches import IGNORE, Batch
from ccq.data.counter import key_of
from ccq.names import first_line
from ccq.ops.choose import Call, choose
from ccq.train import RunError
from ccq.train.config import Config
from ccq.train.monitor import Gates, call
from ccq.train.optimizer import decaying, learning_rate, make_optimizer, scale_, squared_norms
from ccq.train.parallelize import freeze, make_model, parallelize
from ccq.train.world import World

FED = ("input_ids", "labels", "positions")  # what a step reads of a batch
WARM_UP = 3  # steps of each kind before the capture: kernels are compiled and tuned, libraries make their workspaces


@dataclass(frozen=True)
class Done:
    """What came of a step, over all ranks."""

    loss: float  # mean over the scored tokens
    norm: float  # of the gradient, before clipping
    lr: float
    tokens: int  # that went through the model
    scored: int
    ok: bool  # False: loss or gradient was not finite, and the weights did not change


class Found(NamedTuple):
    """What a step leaves on the device."""

    numbers: Float[Tensor, "2"]  # loss, norm of the gradient before clipping
    gates: Float[Tensor, "kinds layers"] | None  # what Gates.collect finds, where gates are recorded


class Trainer:
    """Weights, moments and the step, and how one step changes them."""

    def __init__(self, config: Config, world: World, model: Any = None) -> None:
        self.config, self.world = config, world
        model = make_model(config, world.device) if model is None else model
        freeze(model, config)
        decay = decaying(model)
        self.prepared = parallelize(model, config, world)
        self.model = self.prepared.model
        self.optimizer = make_optimizer(self.prepared.trained, decay, config.optimizer)
        self.gates = Gates(self.model)
        self.progress = {"step": 0, "skipped": 0, "in_a_row": 0}

        self.on_device = world.size == 1 and world.device.type == "cuda"  # who decides
        kinds = {x.dtype for x in self.prepared.trained.values()}
        self.one_pass = self.on_device and kinds == {torch.float32}
        self.one_pass &= choose("adamw", Call(world.device, torch.float32)) == "triton"
        self.scored = torch.ones((), device=world.device)
        # the fused kernel reads the rate on the device, in fp32
        place, kind = (world.device, torch.float32) if self.on_device else (torch.device("cpu"), torch.float64)
        self.lr = torch.zeros((), device=place, dtype=kind)
        self.not_finite = torch.zeros_like(self.lr)
        # checkpointing asks the host for the state of the generators, compiled layers may have graphs of their own
        runtime = config.runtime
        self.captures = self.on_device and runtime.capture
        self.captures &= not (runtime.activation_checkpointing or runtime.compile or config.foreign)
        self.taken: Counter[tuple] = Counter()
        self.inputs: dict[tuple, list[Batch]] = {}  # by shapes: the memory that graphs read
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Found]] = {}
        self.pool: Any = None  # shared: nothing in it outlives a replay but what is found

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds; to be filled in place by one."""
        masters = self.prepared.masters
        return {
            "model": {name: x.detach() for name, x in masters.items()},
            "optimizer": {name: dict(self.optimizer.state[x]) for name, x in self.prepared.trained.items()},
            "progress": self.progress,
        }

    def loaded(self, state: dict[str, Any]) -> None:
        """After `state` was filled: what is no tensor, and what is computed with."""
        self.progress = state["progress"]
        self.prepared.refresh()

    def step(self, batches: list[Batch]) -> Done:
        """One step on this rank's micro-batches.

        The loss is the sum over all ranks' scored tokens divided by their number: so each micro-batch's sum is divided
        by the number of all before its backward, and gradients add up, over micro-batches and over ranks.
        """
        config, world, step = self.config, self.world, self.progress["step"]
        torch.manual_seed(key_of("step", config.seed, step, world.rank))
        lr = learning_rate(step, config)
        local_scored = sum(int((batch.labels != IGNORE).sum()) for batch in batches)
        scored, tokens = world.total(local_scored, sum(batch.input_ids.numel() for batch in batches))
        self.scored.fill_(max(scored, 1))
        self.lr.fill_(lr)
        numbers, self.gates.latest = self.found(batches)
        loss, norm = numbers.tolist()  # the one place where the host waits for the device
        ok = math.isfinite(loss) and math.isfinite(norm)
        self.progress["step"] += 1
        self.progress["skipped"] += not ok
        self.progress["in_a_row"] = 0 if ok else self.progress["in_a_row"] + 1
        return Done(loss, norm, lr, int(tokens), int(scored), ok)

    def found(self, batches: list[Batch]) -> Found:
        """The step: replayed where its shapes came before, on a stream that is not the default one."""
        if (
            not self.captures
            or torch.cuda.current_stream() == torch.cuda.default_stream()
            or any(batch.cu_seqlens is not None for batch in batches)
        ):
            return self.run(batches)
        shapes = tuple((batch.input_ids.shape, batch.labels.shape) for batch in batches)
        kind = (self.gates.recording, shapes)
        inputs = self.filled(shapes, batches)
        if self.taken[kind] < WARM_UP:
            self.taken[kind] += 1
            return self.run(inputs)
        if kind not in self.graphs:
            self.graphs[kind] = self.captured(inputs)
        graph, found = self.graphs[kind]
        graph.replay()
        return found

    def captured(self, inputs: list[Batch]) -> tuple[torch.cuda.CUDAGraph, Found]:
        """The graph of a step: nothing runs while it is captured."""
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        stream.synchronize()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            # other threads (the loader's, that of checkpoints) may go on with CUDA meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                found = self.run(inputs)
        except RuntimeError as error:
            how = "take --runtime.no-capture, or --no-capture of `ccq sweep`"
            first = error.__context__ or error  # what ended the capture, before the end of it failed too
            if isinstance(first, torch.cuda.OutOfMemoryError):
                raise first from None
            raise RunError(f"no CUDA graph of the step ({first_line(first)}): {how}") from error
        return graph, found

    def filled(self, shapes: tuple, batches: list[Batch]) -> list[Batch]:
        """The memory that graphs read, with these batches in it."""
        fed = [{name: x for name, x in batch._asdict().items() if name in FED and x is not None} for batch in batches]
        if shapes not in self.inputs:
            moved = [{name: x.to(self.world.device) for name, x in given.items()} for given in fed]
            self.inputs[shapes] = [batch._replace(**given) for batch, given in zip(batches, moved, strict=True)]
        for here, given in zip(self.inputs[shapes], fed, strict=True):
            for name, x in given.items():
                getattr(here, name).copy_(x, non_blocking=True)
        return self.inputs[shapes]

    def run(self, batches: Sequence[Batch]) -> Found:
        """The step, kernel by kernel."""
        self.prepared.collects.on = len(batches) > 1 or not self.one_pass
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for batch in batches:
            out = call(self.model, batch, self.world.device)
            loss = out.loss * out.scored / self.scored
            loss.backward()
            total += loss.detach()
        return self.update(total)

    @torch.no_grad()
    def update(self, loss: Float[Tensor, ""]) -> Found:
        """Clip, then AdamW's step, unless this rank's part of the loss, or a gradient, on any rank is not finite."""
        self.prepared.sum_whole()
        gradients, clip = self.prepared.gradients(), self.config.optimizer.clip
        shards, whole = squared_norms(gradients)
        if self.world.size > 1:
            *ours, same = torch.stack([x.to(self.world.device) for x in (loss, shards, whole)]).tolist()
            loss, squares = torch.tensor(self.world.total(*ours), dtype=torch.float64)
            whole = squares + same
        norm = whole.sqrt()
        finite = loss.isfinite() & norm.isfinite()
        factor = torch.ones_like(norm) if clip is None else (clip / norm).clamp(max=1)
        if self.one_pass:
            from ccq.train import adamw  # imports Triton

            adamw.update(self.optimizer, self.prepared.copies, finite, self.lr, factor)
        else:
            self.take_step(gradients, finite, factor)
            self.prepared.refresh()
        self.prepared.zero_grad()
        return Found(torch.stack([loss, norm]), self.gates.collect())

    def take_step(self, gradients: list[Tensor], finite: Bool[Tensor, ""], factor: Float[Tensor, ""]) -> None:
        """By PyTorch's AdamW."""
        if self.config.optimizer.clip is not None:
            if self.on_device:
                scale_(gradients, factor.to(gradients[0].dtype))
            elif factor < 1:
                scale_(gradients, factor.item())
        for group in self.optimizer.param_groups:
            lr = self.lr if group["scale"] == 1 else self.lr * group["scale"]
            group["lr"], group["capturable"] = (lr, True) if self.on_device else (lr.item(), False)
        if self.on_device:
            self.not_finite.copy_(~finite)
            self.optimizer.found_inf = self.not_finite  # type: ignore[attr-defined]
        if self.on_device or finite:
            self.optimizer.step()
