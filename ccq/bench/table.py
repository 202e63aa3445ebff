"""The tables of the README, from the result files:  python -m ccq.bench.table

A table stands between two comments that name it, and tests/test_docs.py fails when it is not what the files give.
"""

from __future__ import annotations

import json
from pathlib import Path

from ccq.bench.results import RESULTS

README = RESULTS.parents[1] / "README.md"
COLUMNS = (("forward and backward", 4096), ("forward", 4096), ("forward", 8192))
NAMES = {"gla": "GLA", "gdn": "Gated DeltaNet"}


def layer_table() -> str:
    """A layer at the 1.3B shape with CCQ over the same with unit q and k, in CUDA-graph time, beside the paper's."""
    result = json.loads((RESULTS / "layer_h200.json").read_text())

    def row(backbone: str, variant: str, column: tuple) -> dict:
        wanted = (backbone, variant, *column)
        return next(r for r in result["rows"] if (r["backbone"], r["variant"], r["pass"], r["T"]) == wanted)

    lines = [
        "| layer with CCQ, over its backbone | forward and backward, 4K | forward, 4K | forward, 8K | peak memory |",
        "|---|---|---|---|---|",
    ]
    for backbone, name in NAMES.items():
        control = "unit" if backbone == "gla" else "fla"
        for variant, title in (("paper", "the paper"), ("composed", "composed from fla"), ("ours", "**ccq**")):
            cells = []
            for column in COLUMNS:
                if variant == "paper":
                    cells.append(
                        f"{row(backbone, 'ours', column)['paper_ms'] / row(backbone, 'fla', column)['paper_ms']:.2f}"
                    )
                    continue
                time, base = (row(backbone, v, column)["graph_ms"]["median"] for v in (variant, control))
                cells.append(f"{time / base:.2f} ({time:.2f} ms)")
            memory = "-"
            if variant != "paper":
                peaks = [row(backbone, v, COLUMNS[0])["peak_bytes"] for v in (variant, control)]
                memory = f"{peaks[0] / peaks[1]:.2f}"
            lines.append(f"| {name}, {title} | {' | '.join(cells)} | {memory} |")
    lines.append("")
    lines.append(
        f"{result['gpu']}, bf16, batch 1, hidden 2048, 6 heads of 256/512, torch {result['versions']['torch']}, Triton "
        f"{result['versions']['triton']}, fla {result['versions']['fla-core']} ({result['note']}), commit "
        f"{result['commit'][:7]}. CUDA-graph time; backbone with unit q and k; the paper's is wall clock over its GLA "
        "without them."
    )
    return "\n".join(lines)


def op_table() -> str:
    """The cleaning alone, in microseconds of CUDA-graph time."""
    result = json.loads((RESULTS / "op_h200.json").read_text())
    lines = [
        "| cleaning alone, microseconds | forward | forward and backward | composed from fla | floor |",
        "|---|---|---|---|---|",
    ]
    for shape in dict.fromkeys((r["B"], r["T"]) for r in result["rows"]):
        here = {(r["name"], r["pass"]): r for r in result["rows"] if (r["B"], r["T"]) == shape}
        passes = ("forward", "forward and backward")
        ours, theirs = ([1e3 * here[name, p]["ms"]["median"] for p in passes] for name in ("ours", "composed"))
        floors = [1e3 * here["ours", p]["floor_ms"] for p in passes]
        cells = [
            f"{ours[0]:.0f}",
            f"{ours[1]:.0f}",
            f"{theirs[0]:.0f}, {theirs[1]:.0f}",
            f"{floors[0]:.0f}, {floors[1]:.0f}",
        ]
        lines.append(f"| batch {shape[0]}, {shape[1]} tokens | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"layer_h200": layer_table, "op_h200": op_table}


def filled(text: str) -> str:
    """`text` with every named table put in."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def main(path: Path = README) -> None:
    path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
