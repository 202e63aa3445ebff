"""Which implementation runs, chosen in one place and said aloud."""

from __future__ import annotations

import difflib
import functools
import warnings
from dataclasses import dataclass

import torch

NAMES = ("reference", "chunk", "triton")


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


def nearest(name: object, known: tuple[str, ...]) -> str:
    """' Did you mean ...?' for a name that is not known."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def triton_refuses(device: torch.device, dtype: torch.dtype, key_size: int) -> str | None:
    """Why the Triton kernels cannot take this call, or None."""
    return "this version of ccq has no Triton kernels yet"


@functools.cache
def resolve(backend: str, device: torch.device, dtype: torch.dtype, key_size: int) -> str:
    """The backend that runs `backend` here. Cached, so a fallback warns once for each reason."""
    if backend in ("reference", "chunk"):
        return backend
    refusal = triton_refuses(device, dtype, key_size)
    if refusal is None:
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
    best = "chunk" if refusal else "triton"
    return {
        name: BackendStatus(
            name,
            runs=name != "triton" or refusal is None,
            chosen=name == best,
            why=refusal if name == "triton" and refusal else _WHAT[name],
        )
        for name in NAMES
    }
