"""`ccq doctor`: what this machine has, which backend runs on it, why nothing faster does, and what to change.

`look` gathers the facts, `diagnose` judges them and touches nothing, so that tests can feed it made-up machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import ccq
from ccq.errors import UserError
from ccq.files import read_toml
from ccq.names import grouped
from ccq.ops.choose import OPS, Call, arch_of, explain
from ccq.provenance import version_of

# package: the distributions that provide it
PACKAGES = {
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"),
    "fla-core": ("fla-core",),
    "flash-linear-attention": ("flash-linear-attention",),
    "flash-qla": ("flash-qla",),
    "transformers": ("transformers",),
}
OURS = r"CCQ_|(TRITON_INTERPRET|CUDA_VISIBLE_DEVICES)$"  # variables of the environment
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
FINDINGS = read_toml(Path(__file__).with_suffix(".toml"))  # {name: level, what, cure}


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True)
class Environment:
    """The facts about a machine that the diagnosis rests on."""

    python: str
    platform: str
    torch: str
    build: str | None  # what torch was built for, "CUDA 13.0" or "ROCm 7.0"; None: CPU only
    packages: Mapping[str, str | None]  # versions, None where not installed
    gpus: tuple[Gpu, ...] = ()  # those that torch sees
    driver: str | None = None  # NVIDIA's
    complaint: str | None = None  # what torch said when it was asked for a GPU
    variables: Mapping[str, str] = field(default_factory=dict)
    cpu_bf16_kills: bool = False


@dataclass(frozen=True)
class Finding:
    level: str  # "error": numbers can be wrong; "warning": something is slow or will fail
    what: str
    cure: str


@functools.cache
def cpu_bf16_kills() -> bool:
    """Whether a product in bf16 ends a process, which only another process can tell. It takes some seconds."""
    probe = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode < 0


class DeviceError(UserError, ValueError):
    """A device that is not there, or that cannot compute what is asked of it."""


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str, option: str = "--device") -> None:
    """DeviceError where `name` is no device, or one that torch does not see."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"{option}: expected cpu, cuda or cuda:N, got {name!r}") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise DeviceError(f"{option}: {name!r} is not available: torch sees {count} GPUs (`ccq doctor` says why)")


def runnable(parser: argparse.ArgumentParser, device: str | None, dtype: str) -> tuple[str, str]:
    """The device and the dtype to run a model with, of what a command was given; the parser says what cannot run."""
    device = device or best_device()
    try:
        check_device(device)
        check_cpu_bf16(device, dtype)
    except ValueError as error:
        parser.error(str(error))
    # checkpoints are bf16, to be small, and CPUs are slow in it where they can compute it at all
    return device, "float32" if dtype == "auto" and device == "cpu" else dtype


def check_cpu_bf16(device: str, dtype: str) -> None:
    """DeviceError where a model in `dtype` would kill the process."""
    asked = device == "cpu" and dtype in ("bf16", "bfloat16") and torch.backends.mkldnn.enabled
    if asked and cpu_bf16_kills():
        what, cure = FINDINGS["cpu_bf16"]["what"], FINDINGS["cpu_bf16"]["cure"]
        raise DeviceError(f"{what[:1].lower()}{what[1:].rstrip('.')}: {cure}")


def look() -> Environment:
    """The machine this runs on."""
    with warnings.catch_warnings(record=True) as caught:  # torch tells of an old driver in a warning
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    gpus = []
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        memory = round(properties.total_memory / 2**30, 1)
        gpus.append(Gpu(properties.name, (properties.major, properties.minor), memory))
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        torch=torch.__version__,
        build=next((f"{name} {version}" for name, version in builds.items() if version), None),
        packages={name: next(filter(None, map(version_of, names)), None) for name, names in PACKAGES.items()},
        gpus=tuple(gpus),
        driver=nvidia_driver(),
        complaint=str(caught[0].message) if caught else None,
        variables={name: value for name, value in sorted(os.environ.items()) if re.match(OURS, name)},
        cpu_bf16_kills=cpu_bf16_kills(),
    )


def nvidia_driver(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver where that costs nothing to know, and whether there is one at all elsewhere."""
    try:
        version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", proc.read_text())
        return version[0] if version else "of unknown version"
    except OSError:
        return "of unknown version" if shutil.which("nvidia-smi") else None


def release(version: str) -> tuple[int, ...]:
    """The numbers at the front: "3.8.0rc1+git12" gives (3, 8, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()


def diagnose(env: Environment) -> list[Finding]:
    """Everything known to be wrong with such a machine, errors first."""
    triton, core, whole = (env.packages.get(name) or "" for name in ("triton", "fla-core", "flash-linear-attention"))
    has = release(triton)
    nvidia = bool(env.gpus) and (env.build or "").startswith("CUDA")  # ROCm's capability 9.x is no Hopper
    hopper = nvidia and any(arch_of(gpu.capability).name == "hopper" for gpu in env.gpus)
    wrong = hopper and (3, 4) <= has < (3, 8)
    applies = {
        "old_triton_on_hopper": wrong and has < (3, 7, 1),
        "newer_triton_on_hopper": wrong and has >= (3, 7, 1),
        "cpu_bf16": env.cpu_bf16_kills,
        "no_triton": nvidia and not triton,
        "fla_without_triton": (core or whole) and not triton,
        "old_triton": nvidia and triton and has < (3, 8) and not wrong,
        "new_triton_on_hopper": hopper and has[:2] > (3, 8),
        "two_versions_of_fla": core and whole and core != whole,
        "torch_for_the_cpu": env.driver and env.build is None,
        "no_gpu_seen": env.driver and env.build is not None and not env.gpus,
        "old_python": release(env.python) < (3, 11),
        "interpreted": env.gpus and env.variables.get("TRITON_INTERPRET", "0") != "0",
        "checked": env.gpus and env.variables.get("CCQ_CHECK") == "1",
        "no_hopper_kernels": hopper and env.variables.get("CCQ_HOPPER") == "0",
    }
    told = vars(env) | {"triton": triton, "core": core, "whole": whole, "newest": max(core, whole, key=release)}
    told["complaint"] = f": {env.complaint}" if env.complaint else "."
    found = [known for name, known in FINDINGS.items() if applies[name]]
    return [Finding(x["level"], x["what"].format(**told), x["cure"].format(**told)) for x in found]


def choices(env: Environment) -> list[dict[str, Any]]:
    """What backend="auto" runs for each operation, device and dtype, and why the faster ones cannot."""
    rows = []
    for operation, implementations in OPS.items():
        for device in ("cpu", "cuda") if env.gpus else ("cpu",):
            for dtype in DTYPES:
                call = Call(torch.device(device), dtype, size=128, length=4096, delta=True, rows=1, unwatched=True)
                name, why_not = explain(operation, call)
                (what,) = (x.what for x in implementations if x.name == name)
                rows.append({"operation": operation, "device": device, "dtype": str(dtype).removeprefix("torch."),
                             "backend": name, "what": what, "why_not": why_not})  # fmt: skip
    return rows


def report(env: Environment, rows: Sequence[dict[str, Any]], findings: Sequence[Finding]) -> str:
    """All of it as text that can be pasted into an issue."""
    facts = {
        "ccq": ccq.__version__,
        "Python": env.python,
        "platform": env.platform,
        "torch": f"{env.torch}, built for {env.build or 'the CPU only'}",
        **{name: version or "not installed" for name, version in env.packages.items()},
        "NVIDIA driver": env.driver or "none found",
    }
    for index, gpu in enumerate(env.gpus):
        major, minor = gpu.capability
        facts[f"GPU {index}"] = f"{gpu.name}, compute capability {major}.{minor}, {gpu.memory_gib:g} GiB"
    if not env.gpus:
        facts["GPU"] = "none that torch sees"
    facts["environment"] = " ".join(f"{name}={value}" for name, value in env.variables.items()) or "no CCQ_* is set"
    lines = [f"{name:<24}{value}" for name, value in facts.items()]

    lines += ["", 'What runs with backend="auto":']
    alike = grouped(rows, itemgetter("operation", "device", "backend", "what"))
    for (operation, device, name, what), of in alike.items():
        lines.append(f"  {operation:<17} {device:<5} {', '.join(row['dtype'] for row in of):<28} {name:<10} {what}")
    reasons = [(name, row["device"], why, row["operation"]) for row in rows for name, why in row["why_not"].items()]
    for (name, device, why), of_reason in grouped(dict.fromkeys(reasons), itemgetter(0, 1, 2)).items():
        lines.append(f"  not {name} on {device} for {', '.join(operation for *_, operation in of_reason)}: {why}")

    lines.append("")
    for finding in findings:
        lines += [f"{finding.level.upper()}: {finding.what}", f"  cure: {finding.cure}"]
    errors = sum(finding.level == "error" for finding in findings)
    if errors:
        lines.append("Results of this machine can be WRONG until the errors above are cured.")
    elif not findings:
        lines.append("No known problem.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ccq doctor",
        description="What runs on this machine, why nothing faster does, and what to change.",
        epilog="The exit code is 1 if numbers can be wrong on this machine. Warnings leave it at 0.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    env = look()
    rows, findings = choices(env), diagnose(env)
    if args.json:
        told = {"environment": dataclasses.asdict(env), "findings": list(map(dataclasses.asdict, findings))}
        print(json.dumps({"ccq": ccq.__version__, **told, "backends": rows}, indent=2))
    else:
        print(report(env, rows, findings))
    return int(any(finding.level == "error" for finding in findings))
