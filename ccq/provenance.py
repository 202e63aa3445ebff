"""Where a number comes from: what every result file, and the folder of every run, says beside its numbers."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ccq

PACKAGES = (
    "triton", "fla-core", "transformers", "tokenizers", "lm_eval", "nltk", "wonderwords", "rouge", "datasets", "numpy",
)  # fmt: skip


def provenance(command: str | None = None) -> dict:
    """Command, commit, versions, machine, date; `command` where it is not that of this process."""
    versions = {"ccq": ccq.__version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: version for name in PACKAGES if (version := version_of(name)) is not None}
    told = os.environ.get("CCQ_COMMIT", "")  # set where the code travels without git: `git describe --always --dirty`
    commit: str | None
    dirty: bool | None  # None: not known
    if told:
        commit, dirty = told.removesuffix("-dirty"), told.endswith("-dirty")
    elif git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        commit = dirty = None  # the repository around an installed package is someone else's
    else:
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
        dirty = None if changes is None else bool(changes)
    origin: dict[str, Any] = {
        "command": command or command_of(sys.argv),
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
    }
    if torch.cuda.is_available():
        origin |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    else:
        origin |= {"cpu": cpu(), "cores": os.cpu_count()}
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        origin["processes"] = processes
    return origin


def command_of(argv: Sequence[str]) -> str:
    """What was typed, less where the result was to go and which folders of this machine it was read from.

    >>> command_of(["/venv/bin/ccq", "eval", "/models/gla", "--data=../lm eval", "--out", "x"])
    "ccq eval gla '--data=lm eval'"
    >>> command_of(["benchmarks/sweep.py", "--tier", "a"])
    'python sweep.py --tier a'
    """
    program = Path(argv[0]).name
    words = list(argv[1:])
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    words = [re.sub(r"(^|=)(?:/|~|\.\.)(?:.*/)?([^/]+)/?$", r"\1\2", word) for word in words]
    script = program.endswith(".py") and program != "__main__.py"
    return shlex.join([*(("python", program) if script else ("ccq",)), *words])


def version_of(distribution: str) -> str | None:
    """None where it is not installed; read from its metadata, for importing it could fail or be slow."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
