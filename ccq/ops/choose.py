"""Which implementation of an operation runs: one table, one function that decides, reasons that `ccq doctor` prints.

    choose("recurrence", Call.of(q, delta=True), backend)        the name of the implementation that runs
    explain("recurrence", Call.of(q, delta=True), backend)       the same, and why no faster one does

`OPS` has the implementations of each operation, `ARCHS` the generations of GPUs and what runs on none of their chips.
A kernel that misbehaves on one generation is refused by a line there: `refuses={"decode_step/triton": "why"}`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ccq.errors import UserError
from ccq.names import nearest

NAMES = ("reference", "chunk", "triton")  # what a user may ask for, slowest first
LARGEST_KEY = 256  # what the Triton kernels hold of a key
ROWS = 16  # of x, up to which our kernels stand for Linears: those of a tensor core's tile. With more a GEMM has work
PLAIN: frozenset[str] = frozenset()  # operations that go without kernels wherever they run: to look for one that errs
# looked for once, and not inside what a compiler traces
WANTED = ("triton", "fla", "flash_qla", "torch.nn.attention.varlen")
TRITON, FLA, QLA, VARLEN = (importlib.util.find_spec(x) is not None for x in WANTED)


class BackendUnavailableError(UserError, RuntimeError):
    """A backend was asked for by name where it cannot run."""


class BackendFallbackWarning(UserWarning):
    """A GPU is there, and the operator still runs on a slower path."""


class Call(NamedTuple):
    """All that a choice may depend on."""

    device: torch.device
    dtype: torch.dtype
    size: int = 0  # channels of a key
    length: int = 0  # tokens of a sequence
    packed: bool = False  # sequences behind one another
    delta: bool = False  # the delta rule
    width: int = 4  # tokens that a convolution sees
    rows: int = 0  # of what Linears see; 0: it has more dimensions
    unwatched: bool = False  # nothing but numbers is wanted: no autograd, autocast, compiler or hook sees it

    @classmethod
    def of(cls, x: Tensor, **facts) -> Call:
        return cls(x.device, x.dtype, x.shape[-1], **facts)


def unwatched(x: Tensor) -> bool:
    """Whether neither autograd nor a compiler nor autocast looks at what is done with x."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or autocasts(x))


def autocasts(x: Tensor) -> bool:
    """Whether autocast chooses the dtype of what is computed with x."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


# Generations of GPUs


@dataclass(frozen=True)
class Arch:
    name: str
    since: tuple[int, int] = (0, 0)  # the lowest compute capability of it
    overlaps: bool = False  # whether a launch may begin while the one before it ends (programmatic dependent launch)
    refuses: Mapping[str, str] = field(default_factory=dict)  # "triton", or "operation/triton": why it cannot run


NO_GPU = Arch("none")
OTHER = "the kernels are written and tested for NVIDIA GPUs only"
ROCM = Arch("rocm", refuses=dict.fromkeys(("triton", "flash"), OTHER))
OLD = "the kernels need compute capability 8.0 or newer, and this GPU is older"
ARCHS = (
    Arch("before ampere", refuses=dict.fromkeys(("triton", "flash"), OLD)),
    Arch("ampere", (8, 0)),
    Arch("ada", (8, 9)),
    Arch("hopper", (9, 0), overlaps=True),
    Arch("blackwell", (10, 0), overlaps=True),
)


def arch_of(capability: tuple[int, int]) -> Arch:
    return next(arch for arch in reversed(ARCHS) if arch.since <= capability)


def arch(device: torch.device) -> Arch:
    """The generation of a GPU."""
    if device.type != "cuda":
        return NO_GPU
    return arch_of(torch.cuda.get_device_capability(device)) if torch.version.hip is None else ROCM


def arch_refuses(device: torch.device, op: str, name: str) -> str | None:
    """Why the generation cannot run this implementation of an operation, or None."""
    refuses = arch(device).refuses
    return refuses.get(name) or refuses.get(f"{op}/{name}")


arch_refuses._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a compiler asks once, and does not trace it


# Why an implementation cannot take a call, or None


def interpreted() -> bool:
    """Whether Triton interprets its kernels in Python, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_refuses(call: Call) -> str | None:
    if not TRITON:
        return "Triton is not installed (pip install 'ccq[gpu]')"
    if call.device.type != "cuda" and not (call.device.type == "cpu" and interpreted()):
        return f"tensors on {call.device.type} are not on an NVIDIA GPU, and TRITON_INTERPRET=1 is not set"
    if call.dtype == torch.float64:
        return "the kernels compute in fp32, and float64 asks for fp64 statistics"
    if call.size > LARGEST_KEY:
        return f"the kernels hold keys of up to {LARGEST_KEY} channels, these have {call.size}"
    return None


def hopper_refuses(call: Call) -> str | None:
    if call.dtype == torch.float16:
        return "float16 lacks the range: their products take scores and gradients divided by the count of tokens"
    if call.dtype != torch.bfloat16 or call.size not in (64, 128, 256) or call.length < 128:
        return "they take bfloat16, keys of 64, 128 or 256 channels, and rows of 128 tokens or more"
    if os.environ.get("CCQ_HOPPER") == "0":
        return "CCQ_HOPPER=0 turns them off"
    return gluon_refuses(call)


def gluon_refuses(call: Call) -> str | None:
    """The language is young, and tests/ops/test_compile.py met an assembler that leaves products out: only the version
    of Triton whose machine code was looked at is taken."""
    if arch(call.device).name != "hopper":
        return "they are made for Hopper GPUs"
    if not TRITON:
        return triton_refuses(call)
    import triton

    return None if triton.__version__.startswith("3.8.") else f"Triton 3.8 was checked, this is {triton.__version__}"


def fla_refuses(call: Call) -> str | None:
    if call.device.type != "cuda":
        return f"tensors on {call.device.type} are not on an NVIDIA GPU"
    if not FLA:
        return "fla is not installed (pip install 'ccq[gpu]')"
    if call.dtype == torch.float64:
        return "fla computes in fp32, and float64 asks for fp64 states"
    if call.delta and call.size > 256:
        return f"fla's delta rule holds keys of up to 256 channels, these have {call.size}"
    return None


def qla_refuses(call: Call) -> str | None:
    """As fla decides, which calls it."""
    if not QLA or os.environ.get("FLA_FLASH_QLA") == "0":
        return "flash-qla is not installed (pip install 'ccq[qla]'), or FLA_FLASH_QLA=0 turns it off"
    if not call.delta or call.size != 128 or call.dtype not in (torch.bfloat16, torch.float16):
        return "it takes the gated delta rule with heads of 128 channels, in bfloat16 and float16"
    return fla_refuses(call) or (None if arch(call.device).overlaps else "it needs Hopper or Blackwell")


def mesa_refuses(call: Call) -> str | None:
    if call.size > 128 or call.dtype not in (torch.bfloat16, torch.float16):
        return "they take bfloat16 and float16, and heads of up to 128 channels"
    return fla_refuses(call)


def compiler_refuses() -> str | None:
    return "a compiler fuses what plain PyTorch says by itself" if torch.compiler.is_compiling() else None


def fla_layers_refuse(call: Call) -> str | None:
    return compiler_refuses() or fla_refuses(call)


def passes_refuse(call: Call) -> str | None:
    return compiler_refuses() or triton_refuses(call)


def gluon_conv_refuses(call: Call) -> str | None:
    if call.width not in (2, 3, 4):
        return "they take widths of 2 to 4"
    return fla_layers_refuse(call) or gluon_refuses(call)


def unwatched_refuses(call: Call) -> str | None:
    return triton_refuses(call) if call.unwatched else "autograd, autocast, a compiler or a hook looks at the call"


def few_rows_refuse(call: Call) -> str | None:
    return unwatched_refuses(call) if 0 < call.rows <= ROWS else f"it takes from 1 to {ROWS} rows"


def flash_refuses(call: Call) -> str | None:
    if call.device.type != "cuda":
        return f"tensors on {call.device.type} are not on an NVIDIA GPU"
    if not VARLEN:
        return "torch before 2.10 has none for packed sequences"
    if call.dtype not in (torch.bfloat16, torch.float16) or call.size > 256 or call.size % 8:
        return "it takes bfloat16 and float16, and heads of up to 256 channels, a multiple of 8"
    return None


# What runs


@dataclass(frozen=True)
class Implementation:
    name: str
    what: str
    refuses: Callable[[Call], str | None] = lambda call: None
    backends: tuple[str, ...] = ("triton",)  # what a user asks for it by


TORCH = Implementation("torch", "plain PyTorch", backends=("reference", "chunk"))
REFERENCE = Implementation("reference", "the token loop, the definition; slow", backends=("reference",))
CHUNK = Implementation("chunk", "chunkwise PyTorch, any device", backends=("chunk",))
KERNELS = Implementation("triton", "fused kernels", triton_refuses)
HOPPER = Implementation("hopper", "fused kernels, the reads in Gluon; dk of a learned decay in Triton", hopper_refuses)
FLASH_QLA = Implementation("flash-qla", "Qwen's gated delta rule, through fla, for values of 128 channels", qla_refuses)
LAYERS = Implementation("fla", "fla's fused kernels", fla_layers_refuse)
PASSES = Implementation("passes", "one pass over memory each way", passes_refuse)
FEW_ROWS = Implementation("triton", "one launch for the few rows of a decode step", few_rows_refuse)

# slowest first; the first ones run everywhere
OPS: dict[str, tuple[Implementation, ...]] = {
    "clean_query": (REFERENCE, CHUNK, KERNELS, HOPPER),
    "sigma_q": (REFERENCE, CHUNK, KERNELS),
    "clean_query_step": (Implementation("torch", "plain PyTorch", backends=NAMES),),
    "gate": (TORCH, KERNELS),
    "recurrence": (CHUNK, Implementation("fla", "fla's chunkwise kernels", fla_refuses), FLASH_QLA),
    "mesa": (TORCH, Implementation("fla", "fla's chunkwise kernels, from 20 steps on", mesa_refuses)),
    "decode_step": (TORCH, KERNELS),
    "packed_attention": (TORCH, Implementation("flash", "flash attention", flash_refuses)),
    "conv": (TORCH, LAYERS, Implementation("gluon", "fla's kernels in Gluon", gluon_conv_refuses)),
    "conv_step": (TORCH, KERNELS),
    "decay": (TORCH, Implementation("triton", "one launch", unwatched_refuses)),
    "linear": (TORCH, FEW_ROWS),
    "norm": (TORCH, LAYERS),
    "add_norm": (TORCH, PASSES),
    "gated_norm": (TORCH, PASSES),
    "swiglu": (TORCH, PASSES, FEW_ROWS),
    "loss": (TORCH, LAYERS),
    "adamw": (TORCH, KERNELS),
}
# what these fall back to on a GPU is many times slower, so it is said; and a backend that cannot run them is an error
LOUD = frozenset({"clean_query", "sigma_q", "gate", "recurrence", "decode_step"})


def refusal(op: str, implementation: Implementation, call: Call, backend: str) -> str | None:
    """Why `backend` does not run this implementation, or None."""
    kernels = implementation.backends == ("triton",)
    if backend not in ("auto", *implementation.backends) and (kernels or op in LOUD):
        return f"backend={backend!r} was asked for"
    if not kernels:
        return None
    if op in PLAIN:
        return "ccq.ops.choose.PLAIN leaves them out"
    if backend == "auto" and call.device.type == "cpu":  # never the interpreter
        return "tensors on cpu are not on an NVIDIA GPU"
    return arch_refuses(call.device, op, implementation.name) or implementation.refuses(call)


def explain(op: str, call: Call, backend: str = "auto") -> tuple[str | None, dict[str, str]]:
    """What runs (None: nothing that answers to `backend`), and of each faster implementation why it does not."""
    why_not: dict[str, str] = {}
    for implementation in reversed(OPS[op]):
        why = refusal(op, implementation, call, backend)
        if why is None:
            return implementation.name, why_not
        why_not[implementation.name] = why
    return None, why_not


def choose(op: str, call: Call, backend: str = "auto") -> str:
    """The name of the implementation that runs `op` for such a call."""
    if torch.compiler.is_compiling():  # it traces the decision, and remembers it itself
        return _choose(op, call, backend)
    return _remembered(op, call, backend, PLAIN)


@functools.lru_cache(maxsize=4096)
def _remembered(op: str, call: Call, backend: str, plain: frozenset[str]) -> str:
    return _choose(op, call, backend)


def _choose(op: str, call: Call, backend: str) -> str:
    check_backend(backend)
    name, why_not = explain(op, call, backend)
    if name is None:
        why = why_not[next(x.name for x in OPS[op] if backend in x.backends)]
        raise BackendUnavailableError(
            f"backend={backend!r} cannot run {op} on {call.device} with {call.dtype}, key size {call.size}: {why}. "
            "backend='chunk' runs anywhere; backend='auto' picks the best that can run."
        )
    if op in LOUD and backend == "auto" and call.device.type == "cuda" and name in ("torch", "chunk"):
        _warn(op, call.device, next(why_not[x.name] for x in OPS[op] if x.name in why_not))
    return name


def _warn(op: str, device: torch.device, why: str) -> None:
    _warn_once(op, torch.cuda.get_device_name(device), why)


@functools.cache
def _warn_once(op: str, gpu: str, why: str) -> None:
    warnings.warn(
        f"ccq runs {op} on {gpu} through backend='chunk' (plain PyTorch, many times slower than kernels): {why}. "
        "`ccq doctor` says what to change.",
        BackendFallbackWarning,
        stacklevel=2,
    )


_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # said while compiling


def forget() -> None:
    """Decide, and warn, anew: something that a choice rests on has changed."""
    _remembered.cache_clear()
    _warn_once.cache_clear()


def check_backend(backend: str) -> None:
    one_of("backend", backend, (*NAMES, "auto"))


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise unless the argument called `name` is one of `known`."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}.{nearest(value, known)}")


@dataclass(frozen=True)
class BackendStatus:
    """One line of `ccq.backends()`."""

    name: str
    runs: bool
    chosen: bool  # by backend="auto"
    why: str

    def __str__(self) -> str:
        mark = "->" if self.chosen else "  "
        return f"{mark} {self.name:<10} {'runs' if self.runs else 'cannot run'}: {self.why}"


def backends(
    device: torch.device | str | None = None, dtype: torch.dtype | None = None, key_size: int = 128
) -> dict[str, BackendStatus]:
    """What each backend would do with tensors on `device` (the GPU if there is one), and what "auto" picks.

    >>> ccq.backends("cpu")["chunk"].chosen
    True
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    call = Call(device, dtype, key_size)
    best, _ = explain("clean_query", call)
    statuses = {}
    for implementation in OPS["clean_query"][: len(NAMES)]:
        name = implementation.name
        why = refusal("clean_query", implementation, call, name)
        statuses[name] = BackendStatus(name, why is None, name == best, why or implementation.what)
    return statuses
