"""The tables of docs/recall.md from what benchmarks/recall_seeds.py wrote, by the rules of that page.

python benchmarks/recall_page.py            # print them
python benchmarks/recall_page.py --write    # put them into docs/recall.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from study import HIGHER, Verdict, judge, show, table

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "recall.md", ROOT / "benchmarks" / "study"
PLACE = re.compile(r"(<!-- recall: (?P<name>\w+) -->\n).*?(<!-- /recall -->)", re.DOTALL)
ROUNDS = ("first", "controls", "rates", "long", "noise", "same")
HALF = 50  # per cent: a run that answers more has learned the task
DECAY, GDN = "gla-projected-decay", "gated-deltanet"
# of each round: {claim: (task, row, what it answers more than)}
CLAIMS: dict[str, dict[str, tuple[str, str, str]]] = {
    "first": {
        f"C{n + 1}": (task, row, "gla-unit")
        for n, (task, row) in enumerate(
            (task, row) for task in ("recall", "overwritten") for row in ("ccq-gla", "gla-projected", DECAY)
        )
    },
    "controls": {
        "R1": ("500 steps", DECAY, "gla-unit"),
        "R2": ("2000 steps", DECAY, "gla-unit"),
        "R3": ("500 steps", DECAY, "gla-other-head"),
        "R4": ("2000 steps", DECAY, "gla-other-head"),
        "R5": ("500 steps", DECAY, "ccq-gla-free-scale"),
        "R6": ("500 steps", DECAY, "ccq-gla-open"),
        "R7": ("500 steps", DECAY, "gla-mean-key"),
        "R8": ("500 steps", DECAY, "gla-current-key"),
        "R9": ("500 steps", DECAY, "gla-unit-equal-state"),
        "R10": ("500 steps", DECAY, "gla-projected"),
        "R11": ("500 steps", "gla-projected-twice", DECAY),
        "R12": ("500 steps", f"{GDN}-projected-decay", GDN),
        "R13": ("2000 steps", f"{GDN}-projected-decay", GDN),
    },
    "rates": {
        "T1": ("own rate", DECAY, "gla-unit"),
        "T2": ("own rate", "gla-projected", "gla-unit"),
        "T3": ("own rate", "ccq-gla-open", "gla-unit"),
        "T4": ("rate 1e-3", DECAY, "gla-unit"),
        "T5": ("rate 3e-3", DECAY, "gla-unit"),
    },
    "long": {
        "L1": ("2000 steps", DECAY, "gla-unit"),
        "L2": ("2000 steps", DECAY, "gla-other-head"),
        "L3": ("2000 steps", DECAY, "ccq-gla-free-scale"),
        "L4": ("2000 steps", DECAY, "gla-current-key"),
        "L5": ("2000 steps", DECAY, "gla-projected"),
        "L6": ("2000 steps", DECAY, "gla-unit-equal-state"),
    },
    "noise": {
        "N1": ("noise", DECAY, "gla-unit"),
        "N2": ("noise", DECAY, "gla-unit-equal-state"),
        "N3": ("noise", DECAY, "gla-other-head"),
        "N4": ("noise", DECAY, "gla-mean-key"),
        "N5": ("noise", DECAY, "gla-projected"),
        "N6": ("noise", "ccq-gla-free-scale", "gla-unit"),
    },
    "same": {
        "Q1": ("rate 5e-4", DECAY, "gla-unit"),
        "Q2": ("rate 5e-4", DECAY, "gla-unit-equal-state"),
        "Q3": ("rate 5e-4", DECAY, "gla-projected"),
    },
}


def tasks(name: str) -> dict[str, dict[str, dict]]:
    """{task: {row: its rate, how that was chosen, and per cent answered by seed}} of a round; empty: it was not run."""
    path = RESULTS / f"recall_{name}.json"
    return json.loads(path.read_text())["tasks"] if path.exists() else {}


def verdicts(name: str) -> dict[str, Verdict]:
    found = tasks(name)

    def answered(task: str, row: str) -> dict[int, float]:
        return {int(seed): x for seed, x in found.get(task, {}).get(row, {}).get("answered", {}).items()}

    pairs = {claim: (HIGHER, answered(task, a), answered(task, b)) for claim, (task, a, b) in CLAIMS[name].items()}
    return {verdict.name: verdict for verdict in judge(pairs)}


def rows_table(name: str) -> str:
    lines = []
    for task, rows in tasks(name).items():
        for row, x in rows.items():
            values = list(x["answered"].values())
            tried = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in x["search"].items()) or "given"
            learned = f"{sum(v > HALF for v in values)} of {len(values)}"
            mean = f"{sum(values) / len(values):.1f}"
            lines.append([task, f"`{row}`", x["rate"], mean, f"{min(values):.0f} to {max(values):.0f}", learned, tried])
    head = "| task | row | rate | answered, % | seeds | seeds above half | validation loss by rate |"
    return table(head, lines) if lines else "Not run."


def claims_table(name: str) -> str:
    lines = []
    for claim, v in verdicts(name).items():
        task, row, other = CLAIMS[name][claim]
        low, high = v.interval or (float("nan"), float("nan"))
        gain = f"{(low + high) / 2:+.1f} [{low:+.1f}, {high:+.1f}]" if v.interval else "-"
        p = "-" if v.p is None else "< 0.001" if v.p < 1e-3 else f"{v.p:.3f}"
        lines.append([claim, task, f"`{row}`", f"`{other}`", gain, p, v.verdict])
    return table("| claim | task | answers more | than | points, 95% interval | p | verdict |", lines)


def filled(text: str) -> str:
    """The page with its tables made anew."""
    made = {name: f"{rows_table(name)}\n\n{claims_table(name)}" for name in ROUNDS}
    return PLACE.sub(lambda place: f"{place[1]}{made[place['name']]}\n{place[3]}", text)


if __name__ == "__main__":
    show(PAGE, PLACE, filled)
