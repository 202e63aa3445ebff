"""Which implementation runs, chosen in one place and said aloud."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from dataclasses import dataclass

import torch

from ccq.names import nearest

NAMES = ("reference", "chunk", "triton")
LARGEST_KEY = 256  # what the Triton kernels hold of a key


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name where it cannot run."""


class BackendFallbackWarning(UserWarning):
    """A GPU is there, and the operator still runs on a slower path."""


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


_WHAT = {
    "reference": "the token loop, the definition; slow",
    "chunk": "chunkwise PyTorch, any device",
    "triton": "fused kernels",
}


def triton_refuses(device: torch.device, dtype: torch.dtype, key_size: int) -> str | None:
    """Why the Triton kernels cannot take this call, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'ccq[gpu]')"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "the kernels are written and tested for NVIDIA GPUs only"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"the kernels need compute capability 8.0 or newer, this GPU has {major}.{minor}"
    elif device.type != "cpu" or not interpreted():
        return f"tensors on {device.type} are not on an NVIDIA GPU, and TRITON_INTERPRET=1 is not set"
    if dtype == torch.float64:
        return "the kernels compute in fp32, and float64 asks for fp64 statistics"
    if key_size > LARGEST_KEY:
        return f"the kernels hold keys of up to {LARGEST_KEY} channels, these have {key_size}"
    return None


def interpreted() -> bool:
    """Whether Triton interprets its kernels in Python, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_backend(backend: str) -> None:
    known = (*NAMES, "auto")
    if backend not in known:
        raise ValueError(f"backend: expected one of {', '.join(known)}, got {backend!r}.{nearest(backend, known)}")


@functools.cache
def resolve(backend: str, device: torch.device, dtype: torch.dtype, key_size: int) -> str:
    """The backend that runs `backend` here. Cached, so a fallback warns once for each reason."""
    check_backend(backend)
    if backend in ("reference", "chunk"):
        return backend
    refusal = triton_refuses(device, dtype, key_size)
    if refusal is None and (backend == "triton" or device.type == "cuda"):  # "auto" never picks the interpreter
        return "triton"
    if backend == "triton":
        raise BackendUnavailableError(
            f"backend='triton' cannot run on {device} with {dtype}, key size {key_size}: {refusal}. "
            "backend='chunk' runs anywhere; backend='auto' picks the best that can run."
        )
    if device.type == "cuda":
        warnings.warn(
            f"ccq runs on {torch.cuda.get_device_name(device)} through backend='chunk' (plain PyTorch, many times "
            f"slower than the Triton kernels): {refusal}. `ccq doctor` says what to change.",
            BackendFallbackWarning,
            stacklevel=2,
        )
    return "chunk"


def backends(
    device: torch.device | str | None = None, dtype: torch.dtype | None = None, key_size: int = 128
) -> dict[str, BackendStatus]:
    """What each backend would do with tensors on `device` (the GPU if there is one), and what "auto" picks.

    >>> ccq.backends("cpu")["chunk"].chosen
    True
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    refusal = triton_refuses(device, dtype, key_size)
    best = "triton" if refusal is None and device.type == "cuda" else "chunk"  # as `resolve` picks
    return {
        name: BackendStatus(
            name,
            runs=name != "triton" or refusal is None,
            chosen=name == best,
            why=refusal if name == "triton" and refusal else _WHAT[name],
        )
        for name in NAMES
    }
