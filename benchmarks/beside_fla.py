"""Tables and a figure of what whole models cost, beside flash-linear-attention's own: speed, states, where time goes.

    python benchmarks/beside_fla.py            # print them
    python benchmarks/beside_fla.py --write    # put them into docs/performance.md, docs/kernels.md and docs/figures

They are made from `benchmarks/study/cost`, whose files say by which command, on which GPU and at which commit.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from profile_step import CLASSES, OWN

from ccq.bench.results import row_of
from ccq.bench.tables import label_of
from ccq.figures import BLUE, BROWN, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Figure, Panel, save

ROOT = Path(__file__).parent.parent
COST, FIGURE = ROOT / "benchmarks" / "study" / "cost", ROOT / "docs" / "figures" / "profile.png"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "kernels.md")
PLACE = re.compile(r"(<!-- beside fla: (?P<name>\w+) -->\n).*?(<!-- /beside fla -->)", re.DOTALL)
FAMILIES = {"GLA": ("fla-gla", "gla-unit", "ccq-gla"),
            "Gated DeltaNet": ("fla-gated-deltanet", "gated-deltanet", "ccq-gated-deltanet")}  # fmt: skip
HIGHER, LOWER = 1, -1
# what is measured: file, key, how it is written, and what is better
MEASURES = {
    "training, tokens/s": ("train_sums", "tokens_per_second", ",.0f", HIGHER),
    "training, peak GiB": ("train_sums", "peak_gib", ".1f", LOWER),
    "prefill of 8 x 4K, ms": ("prefill_fla", "wall_ms", ".1f", LOWER),
    "`generate`, batch 8, tokens/s": ("decode_fla", "generate_tok_s", ",.0f", HIGHER),
}
COLOURS = dict(zip(CLASSES, (GREY, BLUE, RED, ORANGE, GREEN, PURPLE, BROWN, SKY), strict=True))


def rows(name: str) -> list[dict]:
    found = json.loads((COST / f"{name}_h200.json").read_text())["rows"]
    for row in found:
        for kernel in row.get("kernels", ()):  # the covariance of a decode step was counted as recurrence at first
            kind = OWN.get(kernel["name"], kernel["class"])
            row["ms"][kernel["class"]] -= kernel["ms"]
            row["ms"][kind] += kernel["ms"]
    return found


def value(bench: str, key: str, **like) -> float:
    found = row_of(rows(bench), **like)
    assert found is not None, f"{bench} has no row {like}"
    return found[key]["median"] if isinstance(found[key], dict) else found[key]


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def models() -> str:
    """fla's models, ours without cleaning and ours with it."""
    lines = []
    for measure, (name, key, form, better) in MEASURES.items():
        for family, systems in FAMILIES.items():
            found = [value(name, key, system=system) for system in systems]
            ratio = found[2] / found[0]
            change = f"{100 * (ratio - 1):+.1f}%" if ratio < 2 else f"{ratio:.0f} times"
            met = "yes" if better * (ratio - 1) >= 0 else "no"
            lines.append([f"{family}: {measure}", *(f"{x:{form}}" for x in found), change, met])
    return table(["1.3B", "fla", "ours, unit q and k", "ours, CCQ", "CCQ over fla", "at least as good"], lines)


def heads() -> str:
    """16 heads of 128 channels: a layer, and training."""
    lines = []
    for family, backbone, alone in (("GLA", "gla", "unit"), ("Gated DeltaNet", "gdn", "fla")):
        at = {"backbone": backbone, "T": 4096, "pass": "forward and backward"}
        unit, ours = (value("layer128", "graph_ms", variant=variant, **at) for variant in (alone, "ours"))
        lines.append([f"{family}: a layer, both passes, 4K, ms", f"{unit:.2f}", f"{ours:.2f}", f"{ours / unit:.3f}"])
    speed, peak = (
        [value("train128", key, system=system) for system in FAMILIES["Gated DeltaNet"]]
        for key in ("tokens_per_second", "peak_gib")
    )
    head = f"Gated DeltaNet: training, tokens/s (fla's own: {speed[0]:,.0f})"
    lines.append([head, *(f"{x:,.0f}" for x in speed[1:]), f"{speed[2] / speed[1]:.3f}"])
    head = f"Gated DeltaNet: training, peak GiB (fla's own: {peak[0]:.1f})"
    lines.append([head, *(f"{x:.1f}" for x in peak[1:]), f"{peak[2] / peak[1]:.3f}"])
    return table(["1.3B, 16 heads of 128", "without CCQ", "with CCQ", "ratio"], lines)


def states() -> str:
    """The shipped models, decoding with fp32 and bf16 states."""
    found = json.loads((COST / "half_states.json").read_text())["rows"]
    lines = []
    for full, half in zip(found[::2], found[1::2], strict=True):
        first, last = ([f"{row['perplexity'][part]:.2f}" for row in (full, half)] for part in (0, -1))
        sizes = [f"{row['state_bytes'] / 2**10:.0f}" for row in (full, half)]
        same = f"{100 * half['same_best_token']:.1f}%"
        lines.append([f"`{full['model']}`", *(", ".join(pair) for pair in (sizes, first, last)), same])
    part = found[0]["tokens"] // 4 // len(found[0]["perplexity"])
    head = ["fp32, bf16", "state, KiB", f"perplexity of the first {part} tokens", f"of the last {part} of 2,048"]
    return table([*head, "same best token"], lines)


def profile() -> str:
    """Milliseconds by class of kernel: a table for each kind of step."""
    made = []
    for part, name, digits in (
        ("train", "a training step", 1),
        ("prefill", "a prefill", 1),
        ("decode", "a decode step", 2),
    ):
        shown = [row for row in rows("profile_1b") if row["part"] == part]
        lines = [["by wall clock", *(f"{row['wall_ms']:.{digits}f}" for row in shown)]]
        for kind in CLASSES:
            if any(row["ms"][kind] for row in shown):
                lines.append([kind, *(f"{row['ms'][kind]:.{digits}f}" for row in shown)])
        lines.append(["launches", *(f"{row['launches']:,.0f}" for row in shown)])
        made.append(table([f"{name}, ms", *(label_of(row["system"]) for row in shown)], lines))
    return "\n\n".join(made)


def figure() -> Figure:
    def panel(part: str, title: str) -> Panel:
        shown = [row for row in rows("profile_1b") if row["part"] == part][::-1]

        def draw(axes) -> None:
            left = [0.0] * len(shown)
            for kind in CLASSES:
                widths = [row["ms"][kind] for row in shown]
                axes.barh(
                    [label_of(row["system"]) for row in shown], widths, left=left, color=COLOURS[kind], height=0.6
                )
                left = [a + b for a, b in zip(left, widths, strict=True)]
            axes.set(xlabel="ms")
            axes.grid(axis="y", visible=False)

        return Panel(title, draw)

    panels = [panel("train", "a training step"), panel("prefill", "a prefill"), panel("decode", "a decode step")]
    legend = {kind: {"color": colour, "lw": 6} for kind, colour in COLOURS.items()}
    return Figure("profile", "Where the time goes", "", panels, legend, 1, (7.2, 1.75))


def filled(text: str) -> str:
    """A page with its tables made anew."""
    made = {"models": models, "heads": heads, "profile": profile, "states": states}
    return PLACE.sub(lambda place: f"{place[1]}{made[place['name']]()}\n{place[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        text = filled(page.read_text())
        if "--write" in sys.argv[1:]:
            page.write_text(text)
        else:
            print("\n\n".join(match[0] for match in PLACE.finditer(text)))
    if "--write" in sys.argv[1:]:
        print(f"Wrote {save(figure(), FIGURE)}")
