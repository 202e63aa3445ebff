"""Run clean/triton/hopper.py on a CPU: its source, with PyTorch in the place of Gluon, which Triton does not interpret.

Everything is fp32 (Triton's interpreter, which runs the other kernels, truncates to bf16). Each partition of a
program is a thread, and barriers count arrivals and bytes as the hardware does: a wrong phase waits for ever (and fails
after WAIT seconds), a buffer that is read before it is filled gives NaN. Layouts mean nothing here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import ccq.ops

WAIT = 30
place = SimpleNamespace(pid=0, programs=1)


class Jit:
    """A function of the kernel; a kernel, where a grid is asked for."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **options):
        return self.function(*args, **options)

    def __get__(self, instance, owner):
        return self if instance is None else lambda *args: self.function(instance, *args)

    def __getitem__(self, grid):
        def launch(*args, num_warps, maxnreg, **options):
            args = [Pointer(x.reshape(-1)) if isinstance(x, Tensor) else x for x in args]
            for pid in range(grid[0]):
                place.pid, place.programs = pid, grid[0]
                self.function(*args, **options)

        return launch


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other):
        return Pointer(self.memory, self.offset + other)

    def at(self, mask):
        where = torch.as_tensor(self.offset)
        return torch.broadcast_tensors(where, torch.as_tensor(True if mask is None else mask))


def load(pointer, mask=None, other=0.0):
    where, inside = pointer.at(mask)
    return torch.where(inside, pointer.memory[torch.where(inside, where, 0)], torch.as_tensor(other).to(pointer.memory))


def store(pointer, value, mask=None):
    where, inside = pointer.at(mask)
    pointer.memory[where[inside]] = value[inside]


class Shared:
    """Shared memory: a view of it, as the kernel's operations make them."""

    def __init__(self, data: Tensor, barriers: list | None = None):
        self.data, self.barriers = data, barriers

    def index(self, i):
        return self.barriers[int(i)] if self.barriers else Shared(self.data[int(i)])

    def reshape(self, shape):
        return Shared(self.data.view(*shape))

    def permute(self, order):
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype, shape, layout):
        """[64, K] as [K / 64, 64, 64]: so it lies there, 64 columns after the other."""
        parts, rows, columns = shape
        return Shared(self.data.view(rows, parts, columns).permute(1, 0, 2))

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        self.data.copy_(value)


class Barrier:
    def __init__(self):
        self.changed = threading.Condition()
        self.phase = self.bytes = 0

    def init(self, count):
        self.count = self.pending = count

    def change(self, arrivals=0, expected=0):
        with self.changed:
            self.pending -= arrivals
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than the barrier was made for"
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != int(phase), WAIT), "waits for ever"


class Descriptor:
    def __init__(self, base, shape, strides, block_shape, layout):
        self.base, self.shape, self.strides = base, shape, strides
        self.block_shape, self.layout = block_shape, layout
        self.block_type = SimpleNamespace(nbytes=torch.Size(block_shape).numel() * base.element_size())

    def inside(self, at):
        """The rows of a block that lie in the tensor, and how many they are. Addresses have 64 bits."""
        at = [int(x) for x in at]
        *lead, row, col = at
        assert len(at) == len(self.shape)
        assert all(0 <= x < size for x, size in zip(lead, self.shape, strict=False))
        assert row >= 0
        assert col + self.block_shape[-1] <= self.shape[-1]
        count = max(0, min(self.block_shape[-2], self.shape[-2] - row))
        width = self.base.element_size()
        byte = sum(x * stride for x, stride in zip(at, self.strides, strict=True)) * width % 2**64
        where = self.base.storage_offset() + (byte // width if count else 0)
        return self.base.as_strided((count, self.block_shape[-1]), self.strides[-2:], where), count


def async_load(tensor, at, barrier, buffer):
    found, count = tensor.inside(at)
    buffer.data.zero_()
    buffer.data.view(-1, found.shape[1])[:count] = found
    barrier.change(expected=-tensor.block_type.nbytes)


def async_store(tensor, at, buffer):
    found, count = tensor.inside(at)
    found.copy_(buffer.data.view(-1, found.shape[1])[:count])


def allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Shared(torch.empty(0), [Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def warp_specialize(partitions, warps, registers):
    errors: list[BaseException] = []

    def run(function, args):
        try:
            with torch.no_grad():  # each thread has a switch of its own
                function(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=partition, daemon=True) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
        if errors:  # the others wait for it
            break
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a partition does not end"


def matrix(x):
    return (x.data if isinstance(x, Shared) else x).float()


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    product = matrix(a) @ matrix(b)
    return acc + product if use_acc else product


def assemble(asm, constraints, args, dtype, is_pure, pack):
    return {"ex2.approx.ftz.f32": torch.exp2, "mov.b32": torch.clone}[asm.split()[0]](*args)


def pair(function):
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def jit(function=None, **options):
    return Jit if function is None else Jit(function)


def nothing(*args, **options):
    return None


def interpreted() -> ModuleType:
    """ccq.ops.clean.triton.hopper, to be called with CPU tensors."""
    gl = SimpleNamespace(
        constexpr=lambda x: x, tensor=None, shared_memory_descriptor=None,
        NVMMASharedLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing, BlockedLayout=nothing,
        SliceLayout=nothing, int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.float32,
        program_id=lambda axis: torch.tensor(place.pid), num_programs=lambda axis: place.programs,
        arange=lambda begin, end, layout: torch.arange(begin, end), static_range=range,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        minimum=pair(torch.minimum), maximum=pair(torch.maximum), rsqrt=torch.rsqrt, exp=torch.exp,
        where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
        sum=lambda x, axis: x.sum(axis), convert_layout=lambda x, layout: x, load=load, store=store,
        inline_asm_elementwise=assemble,
        allocate_shared_memory=allocate, warp_specialize=warp_specialize,
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        MBarrierLayout=nothing, init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, phase: barrier.wait(phase), arrive=lambda barrier, count: barrier.change(arrivals=count),
        expect=lambda barrier, size: barrier.change(arrivals=1, expected=size),
    )  # fmt: skip
    tma = SimpleNamespace(async_load=async_load, async_store=async_store, store_wait=nothing)
    gluon = SimpleNamespace(jit=jit, aggregate=dataclasses.dataclass, language=gl)
    hopper = SimpleNamespace(
        fence_async_shared=nothing, mbarrier=mbarrier, tma=tma, warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=lambda count, deps: deps[0] if len(deps) == 1 else deps,
    )  # fmt: skip
    root = "triton.experimental"
    stand_ins: dict[str, Any] = {
        root: SimpleNamespace(gluon=gluon),
        f"{root}.gluon": gluon,
        f"{root}.gluon.language.nvidia.hopper": hopper,
        f"{root}.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
    }
    for name in ("hopper_rings", "hopper"):
        path = Path(ccq.ops.__file__).parent / f"clean/triton/{name}.py"
        spec = importlib.util.spec_from_file_location(f"ccq.ops.clean.triton.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = stand_ins[spec.name] = importlib.util.module_from_spec(spec)
        with patch.dict(sys.modules, stand_ins):  # dataclasses look their module up
            spec.loader.exec_module(module)
    return module
