"""The tables of docs/analysis.md, from the result files:  python -m ccq.analysis.table [--figures]

A table stands between two comments that name it; tests/analysis/test_analysis_docs.py fails when it is not what the
files give. With --figures the figures are drawn again too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ccq.bench.results import RESULTS
from ccq.bench.table import filled

PAGE = RESULTS.parents[1] / "docs" / "analysis.md"
FIGURES = PAGE.parent / "figures"
RUNS = ("smollm2_135m", "gemma_3_270m", "smollm2_135m_untrained")
# of the paper, on its own prompts, at the key projection
PAPER = (("Qwen3-4B-Instruct", 128, "-0.111", "36 of 36"), ("Gated DeltaNet 500M", 256, "-0.209", "21 of 21"))


def result(name: str) -> dict:
    return json.loads((RESULTS / f"alignment_{name}.json").read_text())


def signed(x: float) -> str:
    return f"{x:+.3f}"


def gap_table() -> str:
    lines = [
        "| model | keys | 16/K | gap | negative layers | gap by thirds of depth | all needle tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, size, gap, layers in PAPER:
        lines.append(f"| {name}, the paper | projection | {16 / size:.2f} | {gap} | {layers} | - | - |")
    for name in RUNS:
        found = result(name)
        for point, content in found["points"].items():
            part = content["top"]["16"]
            row = part["unique"]
            lines.append(
                f"| {found['model']['name']} | {point} | {part['of_isotropic_keys']:.2f} | {signed(row['mean'])} | "
                f"{row['negative_layers']} of {len(row['by_layer'])} | {', '.join(map(signed, row['thirds']))} | "
                f"{signed(part['needle']['mean'])} |"
            )
    return "\n".join(lines)


def control_table() -> str:
    lines = [
        "| model | keys | top | new thing, asked for | planted, not asked for | difference | "
        "layers where it is clearly below, above | filler around the needle | rare filler |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in RUNS:
        found = result(name)
        for point, content in found["points"].items():
            for part in content["top"].values():
                beyond = part["novel minus planted"]
                cells = [
                    found["model"]["name"],
                    point,
                    str(part["directions"][0]),
                    signed(part["novel"]["mean"]),
                    signed(part["planted"]["mean"]),
                    f"{signed(beyond['mean'])} ± {beyond['error_of_mean']:.3f}",
                    f"{beyond['clearly_negative_layers']}, {beyond['clearly_positive_layers']} of "
                    f"{len(beyond['by_layer'])}",
                    signed(part["near"]["mean"]),
                    signed(part["rare"]["mean"]),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"gap": gap_table, "control": control_table}


def main(page: Path = PAGE) -> None:
    page.write_text(filled(page.read_text(), TABLES))
    if "--figures" in sys.argv:
        from ccq.analysis import figures

        for name in RUNS:
            figures.alignment(result(name), FIGURES, f"alignment_{name}")


if __name__ == "__main__":
    main()
