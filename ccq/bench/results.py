"""Where a number comes from: what every result file says beside its numbers."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import ccq

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def provenance(command: str | None = None) -> dict:
    """Command, commit, versions, machine, date."""
    versions = {"ccq": ccq.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "fla-core"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    origin = {
        "command": command or shlex.join(["ccq", *without_out(sys.argv[1:])]),
        "commit": os.environ.get("CCQ_COMMIT") or git("rev-parse", "HEAD"),  # set where the code travels without git
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
    }
    if torch.cuda.is_available():
        origin["gpu"] = torch.cuda.get_device_name()
        origin["cuda"] = torch.version.cuda
    return origin


def without_out(arguments: list[str]) -> list[str]:
    """The arguments less where the result was to go, which is nobody else's path."""
    kept = list(arguments)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept


def git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Wrote {path}")
