"""Where benchmarks write what they measure."""

from __future__ import annotations

from pathlib import Path

from ccq.files import write_json
from ccq.provenance import provenance

__all__ = ["RESULTS", "provenance", "write"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def write(path: Path, content: dict) -> None:
    write_json(path, content)
    print(f"Wrote {path}")
