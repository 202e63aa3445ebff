"""The tables of the README, from the result files:  python -m ccq.bench.table

A table stands between two comments that name it, and tests/test_docs.py fails when it is not what the files give.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
        "| cleaning alone, microseconds | forward | with the gate | forward and backward | composed from fla | floor |",
        "|---|---|---|---|---|---|",
    ]
    passes = ("forward", "forward and backward")
    for shape in dict.fromkeys((r["B"], r["T"]) for r in result["rows"]):
        here = {(r["name"], r["pass"]): r for r in result["rows"] if (r["B"], r["T"]) == shape}
        ours, gated, theirs = (
            [1e3 * here[name, p]["ms"]["median"] for p in passes] for name in ("ours", "with gate", "composed")
        )
        floors = [1e3 * here["ours", p]["floor_ms"] for p in passes]
        cells = [
            f"{ours[0]:.0f}",
            f"{gated[0]:.0f}",
            f"{ours[1]:.0f}",
            f"{theirs[0]:.0f}, {theirs[1]:.0f}",
            f"{floors[0]:.0f}, {floors[1]:.0f}",
        ]
        lines.append(f"| batch {shape[0]}, {shape[1]} tokens | {' | '.join(cells)} |")
    return "\n".join(lines)


def decode_op_table() -> str:
    """A layer's state update and read for one token, in CUDA-graph time."""
    result = json.loads((RESULTS / "decode_op_h200.json").read_text())
    rows = {(r["backbone"], r["variant"], r["B"]): r for r in result["rows"]}
    batches = sorted({r["B"] for r in result["rows"]})
    lines = [
        f"| one token of a layer, microseconds | {' | '.join(f'batch {b}' for b in batches)} |",
        "|---" * (len(batches) + 1) + "|",
    ]
    copy = result["ceilings"]["byte_per_s"]
    for backbone, name in NAMES.items():
        for variant, title in (("fla", "fla"), ("unit", "backbone by ccq"), ("ours", "**with CCQ**")):
            cells = []
            for batch in batches:
                row = rows[backbone, variant, batch]
                cell = f"{1e3 * row['ms']['median']:.1f}"
                if variant == "ours":
                    cell += f" ({row['ms']['median'] / rows[backbone, 'unit', batch]['ms']['median']:.2f})"
                cells.append(f"{cell}, {row['byte_per_s'] / copy:.0%}")
            lines.append(f"| {name}, {title} | {' | '.join(cells)} |")
    lines.append("")
    lines.append(
        f"In brackets: over the backbone. In percent: of the {copy / 1e12:.1f} TB/s at which this GPU copies, counting "
        "each state once in and once out. 6 heads of 256/512, bf16 inputs, fp32 states, none of them in the cache."
    )
    return "\n".join(lines)


def model_table() -> str:
    """Whole models: prefill, and decoding."""
    prefill, decode = (
        {r["system"]: r for r in json.loads((RESULTS / f"{name}_h200.json").read_text())["rows"]}
        for name in ("prefill", "decode")
    )
    result = json.loads((RESULTS / "decode_h200.json").read_text())
    lines = [
        "| 1.3B, batch 8 | 4K prefill, ms | paper | decode step, ms | tokens/s | `generate`, tokens/s | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, row in decode.items():
        first = prefill[system]
        lines.append(
            f"| {system} | {first['wall_ms']['median']:.0f} | {first['paper_ms'] or '-'} | "
            f"{row['step_ms']['median']:.2f} | {row['step_tok_s']:.0f} | {row['generate_tok_s']:.0f} | "
            f"{row['paper_tok_s'] or '-'} |"
        )
    lines.append("")
    lines.append(
        f"{result['gpu']}, bf16, random weights, torch {result['versions']['torch']}, fla "
        f"{result['versions']['fla-core']} ({result['note']}), commit {result['commit'][:7]}. The step is one CUDA "
        "graph; `generate` is what a user gets."
    )
    return "\n".join(lines)


TABLES = {
    "layer_h200": layer_table,
    "op_h200": op_table,
    "decode_op_h200": decode_op_table,
    "model_h200": model_table,
}


def filled(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """`text` with each table put between the comments that name it."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def main(path: Path = README) -> None:
    path.write_text(filled(path.read_text(), TABLES))


if __name__ == "__main__":
    main()
