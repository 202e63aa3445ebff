"""The step of one GPU: it never waits for the host, so it can be captured as a CUDA graph and replayed.

A step of a small model is thousands of short kernels, which Python launches more slowly than the GPU runs them. So the
learning rate, the clipping and the question whether all is finite stay on the device, and after a few steps the same
kernels are replayed as one graph: the numbers are those of the steps that are launched one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ccq.data.batches import Batch
from ccq.names import first_line
from ccq.train import RunError
from ccq.train.optimizer import squared_norms

if TYPE_CHECKING:
    from ccq.train.loop import Trainer

WARM_UP = 3  # steps of each kind before the capture: kernels are compiled and tuned, libraries make their workspaces


class Found(NamedTuple):
    """What a step leaves on the device."""

    numbers: Float[Tensor, "2"]  # loss, norm of the gradient before clipping
    gates: Float[Tensor, "kinds layers"] | None  # what Gates.collect finds, where gates are recorded


class DeviceUpdate:
    """Clip, then AdamW's step, unless something is not finite. `lr` is filled by whoever calls.

    On a GPU the fused kernel reads rate and verdict there, the rate in fp32. On a CPU there is nothing to wait for.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.prepared, self.optimizer = trainer.prepared, trainer.optimizer
        self.clip = trainer.config.optimizer.clip
        self.gpu = trainer.world.device.type == "cuda"
        self.lr = torch.zeros((), device=trainer.world.device, dtype=torch.float32 if self.gpu else torch.float64)
        self.not_finite = torch.zeros((), device=trainer.world.device)

    @torch.no_grad()
    def __call__(self, gradients: list[Tensor], loss: Tensor, norm: Tensor) -> Bool[Tensor, ""]:
        """Whether the step was taken."""
        finite = loss.isfinite() & norm.isfinite()
        if self.clip is not None:
            torch._foreach_mul_(gradients, (self.clip / norm).clamp(max=1).to(gradients[0].dtype))
        if self.gpu:
            self.not_finite.copy_(~finite)
            self.optimizer.found_inf = self.not_finite  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            lr = self.lr if group["scale"] == 1 else self.lr * group["scale"]
            group["lr"], group["capturable"] = (lr, True) if self.gpu else (lr.item(), False)
        if self.gpu or finite:
            self.optimizer.step()
        self.prepared.refresh()
        self.optimizer.zero_grad()
        return finite


class DeviceStep:
    """One step on micro-batches, replayed where their shapes came before and the current stream allows a capture."""

    def __init__(self, trainer: Trainer) -> None:
        runtime = trainer.config.runtime
        self.trainer, self.update = trainer, DeviceUpdate(trainer)
        # checkpointing asks the host for the state of the generators, compiled layers may have graphs of their own
        self.captures = runtime.capture and not (runtime.activation_checkpointing or runtime.compile)
        self.scored = torch.ones((), device=trainer.world.device)
        self.taken: Counter[tuple] = Counter()
        self.inputs: dict[tuple, list[Batch]] = {}  # by shapes: the memory that graphs read
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Found]] = {}
        self.pool: Any = None  # shared: nothing in it outlives a replay but what is found

    def __call__(self, batches: list[Batch], scored: int, lr: float) -> tuple[float, float]:
        """Loss and norm of the gradient. The host waits for the device here alone."""
        self.scored.fill_(max(scored, 1))
        self.update.lr.fill_(lr)
        found = self.found(batches)
        self.trainer.gates.latest = found.gates
        loss, norm = found.numbers.tolist()
        return loss, norm

    def found(self, batches: list[Batch]) -> Found:
        if not self.captures or on_default_stream() or any(batch.cu_seqlens is not None for batch in batches):
            return self.run(batches)
        shapes = tuple(batch.input_ids.shape for batch in batches)
        kind = (self.trainer.gates.recording, shapes)
        inputs = self.filled(shapes, batches)
        if self.taken[kind] < WARM_UP:
            self.taken[kind] += 1
            return self.run(inputs)
        if kind not in self.graphs:
            self.graphs[kind] = self.capture(inputs)
        graph, found = self.graphs[kind]
        graph.replay()
        return found

    def run(self, batches: Sequence[Batch]) -> Found:
        """The step, kernel by kernel."""
        trainer = self.trainer
        loss = trainer.backward(batches, self.scored)
        with torch.no_grad():
            gradients = trainer.prepared.gradients()
            norm = squared_norms(gradients)[1].sqrt()
            self.update(gradients, loss, norm)
            return Found(torch.stack([loss, norm]), trainer.gates.collect())

    def filled(self, shapes: tuple, batches: list[Batch]) -> list[Batch]:
        if shapes not in self.inputs:
            device = self.trainer.world.device
            self.inputs[shapes] = [
                batch._replace(input_ids=batch.input_ids.to(device), labels=batch.labels.to(device))
                for batch in batches
            ]
        for here, batch in zip(self.inputs[shapes], batches, strict=True):
            here.input_ids.copy_(batch.input_ids, non_blocking=True)
            here.labels.copy_(batch.labels, non_blocking=True)
        return self.inputs[shapes]

    def capture(self, inputs: list[Batch]) -> tuple[torch.cuda.CUDAGraph, Found]:
        """The graph of a step: nothing runs while it is captured."""
        stream = torch.cuda.current_stream()
        stream.synchronize()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads (the loader's, that of checkpoints) may go on with CUDA meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                found = self.run(inputs)
        except RuntimeError as error:
            raise RunError(f"no CUDA graph of the step ({first_line(error)}): take --runtime.no-capture") from error
        return graph, found


def on_default_stream() -> bool:
    """Which a capture cannot use."""
    return torch.cuda.current_stream() == torch.cuda.default_stream()
