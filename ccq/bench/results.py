"""Where benchmarks write what they measure."""

from __future__ import annotations

import json
from pathlib import Path

from ccq.provenance import provenance

__all__ = ["RESULTS", "provenance", "write"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Wrote {path}")
