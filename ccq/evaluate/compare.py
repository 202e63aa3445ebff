"""`ccq compare`: results of `ccq eval` side by side, with paired bootstrap differences from the first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ccq.evaluate.errors import EvaluationError
from ccq.evaluate.results import write_json
from ccq.evaluate.statistics import by_unit, resampled, value, values


def read(run: Path) -> dict[str, tuple[dict, dict[str, list[dict]]]]:
    """{suite: (result, {group: sample rows})} of a folder that `ccq eval` wrote."""
    found = {}
    for path in sorted(run.glob("*.json")):
        try:
            result = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise EvaluationError(f"{path} is damaged ({error}): expected a result of `ccq eval`") from error
        if not isinstance(result, dict) or not {"suite", "scores", "samples"} <= result.keys():
            continue
        lines = path.with_suffix(".jsonl")
        if not lines.exists():
            raise EvaluationError(f"{lines} is missing: the samples of {path} are what is compared")
        groups: dict[str, list[dict]] = {}
        for line in lines.read_text().splitlines():
            row = json.loads(line)
            groups.setdefault(row["group"], []).append(row)
        found[result["suite"]] = (result, groups)
    if not found:
        raise EvaluationError(f"{run} has no results: expected a folder that `ccq eval --out` wrote")
    return found


def paired(first: Sequence[dict], second: Sequence[dict], aggregate: str, seed: int = 0) -> dict:
    """Difference second - first of a group's score over the samples both have, its 95% interval and its p.

    Units (documents, or samples) are drawn with replacement, the same ones for both.
    """
    common = {row["id"] for row in first} & {row["id"] for row in second}
    one, two = (by_unit([row for row in rows if row["id"] in common]) for rows in (first, second))
    names = sorted(one)
    if not names:
        return {"samples": 0, "difference": None, "interval": None, "p": None, "significant": False}
    tables = [[units[name] for name in names] for units in (one, two)]
    points = [score(table, aggregate) for table in tables]
    draws = [values(resampled(table, seed), aggregate) for table in tables]
    return {"samples": len(common), "units": len(names)} | verdict(points[1] - points[0], draws[1] - draws[0])


def score(units: Sequence[tuple[float, float]], aggregate: str) -> float:
    return value(sum(total for total, _ in units), sum(weight for _, weight in units), aggregate)


def verdict(difference: float, draws: np.ndarray) -> dict:
    """The interval of the draws, and p: twice the smaller share of them on one side of zero."""
    low, high = np.nanquantile(draws, [0.025, 0.975])
    p = min(1.0, 2 * min((draws <= 0).mean(), (draws >= 0).mean()))
    return {
        "difference": float(difference),
        "interval": [float(low), float(high)],
        "p": float(p),
        "significant": bool(low > 0 or high < 0),
    }


def paired_average(groups: Sequence[str], first: dict[str, list[dict]], second: dict[str, list[dict]]) -> dict | None:
    """Difference of an unweighted mean over groups, each resampled by itself."""
    if not all(group in first and group in second for group in groups):
        return None
    total, draws, count = 0.0, np.zeros(1), 0
    for seed, group in enumerate(groups):
        one, two = (by_unit(rows[group]) for rows in (first, second))
        names = sorted(one.keys() & two.keys())
        if not names:
            return None
        count += len(names)
        tables = [[units[name] for name in names] for units in (one, two)]
        points = [score(table, "mean") for table in tables]
        total += (points[1] - points[0]) / len(groups)
        resamples = [values(resampled(table, seed), "mean") for table in tables]
        draws = draws + (resamples[1] - resamples[0]) / len(groups)
    return {"samples": count} | verdict(total, draws)


def compare(runs: Sequence[Path], suites: Sequence[str] | None = None) -> dict:
    """{suite: {group: {"values": a run each, "differences": each from the first}}}, and what does not match."""
    read_runs = [read(run) for run in runs]
    shared = [suite for suite in read_runs[0] if all(suite in run for run in read_runs)]
    shared = [suite for suite in shared if suites is None or suite in suites]
    if not shared:
        raise EvaluationError(f"no suite is in all of {', '.join(str(run) for run in runs)}")
    table: dict[str, dict] = {}
    notes = []
    for suite in shared:
        results = [run[suite][0] for run in read_runs]
        if len({result["samples"]["hash"] for result in results}) > 1:
            notes.append(f"{suite}: the runs were not asked the same; samples are paired by name")
        if any(result["quick_look"] for result in results):
            notes.append(f"{suite}: a quick look (--limit), not the whole suite")
        table[suite] = {}
        for group, score in results[0]["scores"].items():
            if not all(group in result["scores"] for result in results):
                continue
            differences = []
            for run in read_runs[1:]:
                one, two = read_runs[0][suite][1], run[suite][1]
                if score["aggregate"] == "average":
                    differences.append(paired_average(score["of"], one, two))
                else:
                    differences.append(paired(one[group], two[group], score["aggregate"]))
            row = {"values": [result["scores"][group]["value"] for result in results], "differences": differences}
            table[suite][group] = row | {"better": "lower" if score["aggregate"] == "perplexity" else "higher"}
    return {"runs": [str(run) for run in runs], "suites": table, "notes": notes}


def shown(result: dict) -> str:
    """One table: scores of each run, and the differences from the first; * where the 95% interval leaves out zero."""
    names = [Path(run).name for run in result["runs"]]
    lines = []
    for suite, groups in result["suites"].items():
        rows = [[suite, *names, *(f"{name} - {names[0]}" for name in names[1:])]]
        for group, scores in groups.items():
            cells = [group, *("-" if x is None else f"{x:.2f}" for x in scores["values"])]
            for found in scores["differences"]:
                if found is None or found["difference"] is None:
                    cells.append("-")
                else:
                    low, high = found["interval"]
                    mark = "*" if found["significant"] else " "
                    cells.append(f"{found['difference']:+.2f}{mark} [{low:+.2f}, {high:+.2f}]")
            rows.append(cells)
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines.append("")
    lines += [f"note: {note}" for note in result["notes"]]
    lines.append("* the 95% interval of the paired difference leaves out zero (bootstrap; not corrected for many rows)")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `ccq eval --out` wrote")
    parser.add_argument("--suite", type=lambda text: text.split(","), help="only these suites")
    parser.add_argument("--out", type=Path, help="write the table as JSON too")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        parser.error("RUN: two folders or more are compared, got one")
    try:
        result = compare(arguments.runs, arguments.suite)
    except EvaluationError as error:
        print(f"ccq compare: {error}", file=sys.stderr)
        return 1
    print(shown(result))
    if arguments.out:
        write_json(arguments.out, result)
        print(f"Wrote {arguments.out}")
    return 0
