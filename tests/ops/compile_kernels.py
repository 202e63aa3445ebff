"""Compile the package's Triton kernels for Hopper, on a machine that needs no GPU:

    python tests/ops/compile_kernels.py            one case of everything
    python tests/ops/compile_kernels.py --rare     sizes and dtypes that few use
    python tests/ops/compile_kernels.py --hopper   every variant of the kernels of hopper.py

Our host functions run on tensors without data, so that each kernel gets the arguments of a real call; in the place of
a launch stands what Triton does before one. Prints JSON: the kernels that somebody must launch, and what became of each
launch. The case at hand goes to stderr before it is compiled: a compiler that dies says only so who killed it.

B sequences, T tokens, H key heads, K key size, V value size, D hidden size.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia import hopper as descriptors
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface, MockTensor

import ccq
from ccq.mixers import kernels, passes
from ccq.ops import Cleaning, CovarianceState
from ccq.ops.clean.chunk import Gradients, Past, Read, Saved
from ccq.ops.clean.triton import gate as fused_gate
from ccq.ops.clean.triton import launch
from ccq.ops.recurrence import triton as fused_decode
from ccq.train import adamw

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gla_kernels


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def package_kernels() -> set[JITFunction]:
    """The kernels of the package. A jitted function whose name another one uses is inlined there, and is none."""
    package = Path(ccq.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        if re.search(r"^\s*(import|from) triton", path.read_text(), re.MULTILINE):
            module = importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
            for x in vars(module).values():
                while isinstance(x, KernelInterface) and not isinstance(x, JITFunction):
                    x = x.fn  # what an autotuner wraps
                if isinstance(x, JITFunction) and x.fn.__module__.split(".")[0] == "ccq":
                    found.add(x)
    inlined = {id(kernel.fn.__globals__.get(name)) for kernel in found for name in kernel.fn.__code__.co_names}
    return {kernel for kernel in found if id(kernel) not in inlined}


def name(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def mock(x):
    """Triton looks at a tensor's dtype and address, and one without data has no address."""
    if isinstance(x, tuple):
        return tuple(map(mock, x))
    return MockTensor(x.dtype) if isinstance(x, Tensor) else x


def message(error: BaseException | None) -> str:
    """What Triton says; where an inlined function is refused, that is the cause of what its caller says."""
    return "" if error is None else f"{type(error).__name__}: {error}\n{message(error.__cause__)}"


def machine_code(cubin: bytes) -> bytes:
    """The instructions of an ELF file of one kernel: its section .text.NAME."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    names = sections[of_names][4]
    (code,) = (cubin[at : at + n] for name, _, _, _, at, n in sections if cubin.startswith(b".text.", names + name))
    return code


def machine_products(codes: list[bytes]) -> list[int]:
    """How many products of wgmma each has. The disassembler takes long to start, so it gets them as one."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--binary", "SM90", file.name]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    places = [int(at, 16) for at in re.findall(r"/\*(\w+)\*/.* HGMMA\.64x\d+x\d+\.F32", lines)]
    ends = list(itertools.accumulate(map(len, codes), initial=0))
    return [sum(begin <= at < end for at in places) for begin, end in itertools.pairwise(ends)]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def covariance(n: int, heads: int, size: int) -> CovarianceState:
    return CovarianceState.zeros(n, heads, size, device="cuda")


def operator(
    dtype, size, B=1, T=4096, heads=6, groups=1, gated=True, packed=False, state=False, centred=True, normalize="unit",
    of="scaled", decay=None, gradients=True,
):  # fmt: skip
    """Forward and backward as ccq/ops/clean/library.py calls them; `state`: continues from one, and gives one back.

    `of`: the step, or "y" by itself. `decay`: "given", or "learned", with a gradient.
    """
    q, k = (empty(B, T, h, size, dtype=dtype) for h in (groups * heads, heads))
    lam = empty(B, T, groups * heads)
    cu = torch.empty(9, dtype=torch.int64, device="cuda") if packed else None
    seen = covariance(8 if packed else B, heads, size)
    C, s, t = (seen.second_moment, seen.key_sum, seen.count) if state else (None, None, None)
    weight, bias = empty(groups * heads, groups * heads * size), empty(groups * heads)
    if gated:
        lam = fused_gate.forward(q, weight, bias)
    past = Past(C, s, t, cu)
    given = None if of == "y" else lam
    how = Read(centred, normalize, "scaled" if of == "y" else of)
    log_decay = None if decay is None else empty(B, T, heads)
    out, k_bar, k_rnorm, means, y, dC, ds, dn = launch.forward(q, k, given, log_decay, past, how, state, gradients)
    if not gradients:
        return
    unit = normalize == "unit"
    grads = Gradients(torch.empty_like(out), torch.empty_like(k) if unit else None, dC, ds, dn)
    saved = Saved(q, k_bar if unit else k, k_rnorm, means, given, y, log_decay)
    dq, _, dlam, *_ = launch.backward(grads, saved, past, how, decay == "learned")
    if gated:
        fused_gate.backward(dlam, q, weight, lam, dq)


def gate(dtype, size, rows, heads=6):
    """The gate alone: of a query that a feature map stands between."""
    q, weight = empty(1, rows, heads, size, dtype=dtype), empty(heads, heads * size)
    lam = fused_gate.forward(q, weight, empty(heads))
    fused_gate.backward(torch.empty_like(lam), q, weight, lam)


def decode(
    dtype, size, mixer, clean=True, gated=True, centred=True, normalize="unit", B=8, step="scaled", decay=False, steps=1
):
    """The step of a mixer: how it decays and writes, and its heads."""
    heads, value_heads, V = (1, 64, 64) if mixer == "mamba2" else (6, 6, 512)
    q = empty(B, heads, size, dtype=dtype)
    v, recurrent = empty(B, value_heads, V, dtype=dtype), empty(B, value_heads, size, V)
    g = {"gla": q, "linear_attention": None}.get(mixer, empty(B, value_heads))
    beta = empty(B, value_heads) if mixer == "gated_deltanet" else None
    by = {"gate": (empty(heads, heads * size), empty(heads))} if gated else {"lam": empty(B, heads)}
    seen = CovarianceState.zeros(B, heads, size, device="cuda", decayed=decay)
    log_decay = empty(B, heads) if decay else None
    cleaning = Cleaning(seen, **by, centred=centred, normalize=normalize, step=step, log_decay=log_decay, steps=steps)
    cleaning = cleaning if clean else None
    fused_decode.decode_step(q, torch.empty_like(q), v, recurrent, g, beta, size**-0.5, normalize == "unit", cleaning)


def linears(dtype, D, outputs, B=8):
    """Those of a mixer that see the same x, and the MLP's; the first of `outputs` is its width."""
    x = empty(B, D, dtype=dtype)
    weights = [empty(n, D, dtype=dtype) for n in outputs]
    kernels.project(x, weights)
    kernels.swiglu(x, weights[0], torch.empty_like(weights[0]))


class Context:
    """What autograd hands a function, which wants a GPU for tensors of one."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None: ...


def between(dtype, size, linear, sigmoid=False, rows=64):
    """What lies between products in training; with a Linear after it, what that sees is stored again."""
    x, other = (empty(rows, 2, size, dtype=dtype) for _ in range(2))
    heads, one = (empty(8, n * size, dtype=dtype) if linear else None for n in (2, 1))
    for function, given in (
        (passes.GatedNorm, (x, other, empty(size, dtype=dtype), 1e-6, sigmoid, heads)),
        (passes.SwiGLU, (x, other, one)),
    ):
        context = Context()
        context.needs_input_grad = tuple(part is not None for part in given)
        function.backward(context, torch.empty_like(function.forward(context, *given)))


def optimizer(dtype, size):
    """A step of AdamW, without the sums around it: `dtype` of the gradient."""
    g, numbers = empty(size, dtype=dtype), [empty(size, dtype=FP32) for _ in range(5)]
    copy = g if dtype == BF16 else None
    adamw.adamw_kernel[(1,)](
        g, *numbers[:3], copy, *numbers[3:], size, 1.0, 0.1, -0.1, -0.1, 0.1, 0.1, 1e-8,
        COPY=copy is not None, EVEN=size % adamw.BLOCK == 0, BLOCK=adamw.BLOCK,
    )  # fmt: skip


def add_norm(dtype, size, add, rows=64):
    """`add`: a y forward, and a gradient of the total backward."""
    x, context = empty(rows, size, dtype=dtype), Context()
    context.needs_input_grad = (True, add, True, False)
    total, normed = passes.AddNorm.forward(context, x, x if add else None, empty(size, dtype=dtype), 1e-6)
    passes.AddNorm.backward(context, total if add else None, normed)


def convolutions(dtype, channels, bias=False, silu=True, B=8):
    """Each x is columns of a wider projection, as Mamba2's is."""
    xs = [torch.empty_strided((B, c), (c + 8, 1), dtype=dtype, device="cuda") for c in channels]
    weights = [empty(c, 1, 4, dtype=dtype) for c in channels]
    state = empty(B, sum(channels), 3, dtype=dtype)
    kernels.conv_step(xs, state, weights, empty(*channels, dtype=dtype) if bias else None, silu)


def decays(dtype, heads=6, size=256, B=8):
    a, b = (empty(B, heads, dtype=dtype) for _ in range(2))
    kernels.gates(a, b, empty(heads), empty(heads))
    x, weight, bias = (empty(*shape, dtype=dtype) for shape in ((B, 16), (heads * size, 16), (heads * size,)))
    kernels.low_rank_decay(x, weight, bias, 16.0)


def candidate(dtype, size, packed=False, B=2, T=200, H=6, V=512):
    """Gated linear attention by gla_kernels.py of the benchmarks."""
    q, k, g = (empty(B, T, H, size, dtype=dtype) for _ in range(3))
    v, state = empty(B, T, H, V, dtype=dtype), empty(8 if packed else B, H, size, V) if packed else None
    cu, context = torch.empty(9, dtype=torch.int64, device="cuda") if packed else None, Context()
    o, final = gla_kernels.GatedLinearAttention.forward(context, q, k, v, g, 1.0, state, packed, cu)
    gla_kernels.GatedLinearAttention.backward(context, torch.empty_like(o), final)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Every switch of every kernel is on in one case and off in another (on Hopper, that of Arch.overlaps is always
# on); each with each would take minutes.
CASES: list[tuple[Callable, dict[str, Any]]] = [
    (operator, {"dtype": BF16, "size": 256, "B": 8}),
    (operator, {"dtype": BF16, "size": 128, "gated": False, "state": True, "centred": False, "normalize": "none"}),
    (operator, {"dtype": BF16, "size": 256, "packed": True, "state": True}),
    (operator, {"dtype": BF16, "size": 64, "heads": 1, "gated": False, "packed": True, "state": True, "of": "y"}),
    (operator, {"dtype": FP16, "size": 64, "gated": False, "centred": False, "gradients": False}),
    (operator, {"dtype": FP32, "size": 32, "B": 64}),
    (operator, {"dtype": BF16, "size": 256, "B": 8, "of": "projected", "decay": "given"}),
    (operator, {"dtype": BF16, "size": 128, "groups": 2, "gated": False, "of": "projected", "decay": "learned",
                "state": True, "normalize": "stats"}),
    (operator, {"dtype": BF16, "size": 64, "groups": 2, "gated": False, "packed": True, "of": "projected",
                "decay": "given", "normalize": "stats"}),
    (operator, {"dtype": BF16, "size": 32, "packed": True, "of": "projected", "decay": "learned", "centred": False}),
    (optimizer, {"dtype": BF16, "size": 8192}),
    (optimizer, {"dtype": FP32, "size": 100}),
    (between, {"dtype": BF16, "size": 256, "linear": True}),
    (between, {"dtype": FP32, "size": 100, "linear": False, "sigmoid": True, "rows": 3}),
    (add_norm, {"dtype": BF16, "size": 2048, "add": True, "rows": 32768}),
    (add_norm, {"dtype": FP32, "size": 100, "add": False, "rows": 3}),
    (gate, {"dtype": BF16, "size": 64, "rows": 40, "heads": 32}),
    (decode, {"dtype": BF16, "size": 256, "mixer": "gla"}),
    (decode, {"dtype": BF16, "size": 256, "mixer": "gated_deltanet", "B": 1}),
    (decode, {"dtype": BF16, "size": 256, "mixer": "gated_deltanet", "clean": False}),
    (decode, {"dtype": BF16, "size": 64, "mixer": "gla", "clean": False, "normalize": "none"}),
    (decode, {"dtype": BF16, "size": 64, "mixer": "mamba2", "centred": False}),
    (decode, {"dtype": BF16, "size": 256, "mixer": "gla", "step": "projected", "decay": True}),
    (decode, {"dtype": BF16, "size": 256, "mixer": "gla", "step": "projected", "decay": True, "steps": 2}),
    (decode, {"dtype": FP16, "size": 64, "mixer": "linear_attention", "gated": False, "normalize": "stats"}),
    (decode, {"dtype": FP32, "size": 256, "mixer": "gla", "normalize": "none"}),
    (linears, {"dtype": BF16, "D": 2048, "outputs": [1536, 3072, 16]}),
    (linears, {"dtype": FP16, "D": 300, "outputs": [40, 6, 6], "B": 1}),
    (linears, {"dtype": FP32, "D": 1024, "outputs": [1536]}),
    (convolutions, {"dtype": BF16, "channels": [1536, 1536, 3072]}),
    (convolutions, {"dtype": FP16, "channels": [60], "bias": True, "B": 1}),
    (convolutions, {"dtype": FP32, "channels": [1536], "silu": False}),
    (decays, {"dtype": BF16}),
    (decays, {"dtype": FP16, "heads": 1, "size": 64, "B": 1}),
    (decays, {"dtype": FP32}),
    (candidate, {"dtype": BF16, "size": 256}),
    (candidate, {"dtype": BF16, "size": 100, "packed": True, "B": 1, "V": 64}),
]  # fmt: skip
RARE: list[tuple[Callable, dict[str, Any]]] = [  # the same kernels at sizes and in dtypes that few use
    (operator, {"dtype": BF16, "size": 32, "heads": 1, "packed": True, "state": True, "normalize": "stats"}),
    (operator, {"dtype": FP16, "size": 64, "groups": 2, "gated": False, "centred": False, "normalize": "none",
                "of": "y"}),
    (operator, {"dtype": BF16, "size": 32, "B": 64, "groups": 2, "gated": False, "state": True, "centred": False,
                "normalize": "none"}),
    (operator, {"dtype": FP16, "size": 64, "groups": 2, "gated": False, "decay": "given", "state": True,
                "normalize": "stats"}),
]  # fmt: skip
READS: list[dict[str, Any]] = [
    {"normalize": "unit"}, {"normalize": "stats"}, {"normalize": "none"},
    {"of": "projected"}, {"of": "projected", "decay": "given"}, {"of": "scaled", "decay": "given"},
]  # fmt: skip
# every switch with each: whether the assembler drops a product changes with any of them
HOPPER: list[tuple[Callable, dict[str, Any]]] = [
    (operator, {"dtype": BF16, "size": size, "packed": packed, "state": state, "centred": centred, **read})
    for size, packed, state, centred, read in itertools.product(
        (64, 128, 256), (False, True), (False, True), (False, True), READS
    )
]


def main() -> None:
    case, launches, compile_and_launch = "", [], JITFunction.run
    codes: list[bytes] = []  # of the launches with products

    def run(self: JITFunction, *args, grid, warmup, **options) -> None:
        print(f"{name(self)} in {case}", file=sys.stderr, flush=True)
        launch: dict[str, Any] = {"kernel": name(self), "case": case}
        launches.append(launch)
        options = {key: mock(x) for key, x in options.items()}
        try:
            kernel = compile_and_launch(self, *map(mock, args), grid=grid, warmup=True, **options)
            launch["shared"] = kernel.metadata.shared
            launch["products"] = kernel.asm["ptx"].count("wgmma.mma_async")
            if launch["products"]:
                codes.append(machine_code(kernel.asm["cubin"]))
        except Exception as error:  # the next ones may have something to say too
            launch["error"] = message(error)

    driver.set_active(Hopper())
    with (
        patch.object(JITFunction, "run", run),
        # what our host functions ask of the GPU
        patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)),
        patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        patch.object(descriptors, "_validate_common_descriptor", lambda tensor, shape, *rest: len(shape)),  # no address
        # it writes with copy_, for which torch without CUDA refuses a GPU even where there is no data
        patch.object(CovarianceState, "lower_triangle", lambda state: state._second_moment),
        # and this one makes a copy
        patch.object(launch, "weight_of", lambda count, heads, dtype: empty(len(count), heads)),
        FakeTensorMode(),
    ):
        for function, options in {"--hopper": HOPPER, "--rare": RARE}.get(sys.argv[-1], CASES):
            case = f"{function.__name__}({', '.join(f'{key}={x}' for key, x in options.items())})"
            function(**options)
    for told, count in zip([x for x in launches if x.get("products")], machine_products(codes), strict=True):
        told["machine_products"] = count
    json.dump({"kernels": sorted(map(name, package_kernels())), "launches": launches}, sys.stdout)


if __name__ == "__main__":
    main()
