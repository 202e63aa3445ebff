"""`ccq compare`: compare results of `ccq eval` with those of the first folder, by paired differences."""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ccq.evaluate import sources, statistics
from ccq.evaluate.requests import EvaluationError
from ccq.evaluate.statistics import LEAST_UNITS, Z, by_group, by_unit, percentiles, value
from ccq.files import read_json, replaceable, stored, write_json

HOW = ("sizing", "keys", "seed", "max_new_tokens", "vocabulary", "tokens")  # settings that decide what a score means


def read(run: Path) -> dict[str, tuple[dict, dict[str, list[dict]]]]:
    """{suite: (result, {group: sample rows})} of a folder that `ccq eval` wrote."""
    found = {}
    for path in sorted(run.glob("*.json")):
        result = read_json(path, EvaluationError, "a result of `ccq eval`")
        if isinstance(result, dict) and {"suite", "scores", "samples"} <= result.keys():
            found[result["suite"]] = (result, samples_of(path, result))
    if not found:
        raise EvaluationError(f"{run} has no results: expected a folder that `ccq eval --out` wrote")
    return found


def samples_of(path: Path, result: dict) -> dict[str, list[dict]]:
    """{group: sample rows} that lie beside a result."""
    lines = path.with_suffix(".jsonl")
    if stored(lines) is None:
        raise EvaluationError(f"{lines} is missing: it has the samples of {path}, which are compared")
    rows = sources.rows(lines, ["id", "group", "score"])
    if len(rows) != (count := result["samples"].get("count", len(rows))):
        raise EvaluationError(f"{lines} is cut off after line {len(rows)}: {path} has {count} samples")
    return by_group(rows)


@dataclass(frozen=True)
class Part:
    """A group of samples that two runs share."""

    samples: int
    units: int
    difference: float  # of their scores, second - first
    draws: np.ndarray  # the same over resampled units


def part(first: Sequence[dict], second: Sequence[dict], aggregate: str, seed: int) -> Part | None:
    """Units (documents, or samples) are drawn with replacement, the same ones for both; None without common samples:
    those of one name that were asked the same."""
    asked = [{(row["id"], row.get("prompt_hash")) for row in rows} for rows in (first, second)]
    common = {name for name, _ in asked[0] & asked[1]}
    one, two = (by_unit([row for row in rows if row["id"] in common]) for rows in (first, second))
    names = sorted(one)
    if not names:
        return None
    tables = [[units[name] for name in names] for units in (one, two)]
    difference = value(tables[1], aggregate) - value(tables[0], aggregate)
    if statistics.is_proportion([*first, *second], aggregate):
        changes = [two[name][0] - one[name][0] for name in names]
        draws = statistics.redrawn(changes.count(1), changes.count(-1), len(names), seed)
    else:
        before, after = (statistics.values(statistics.resampled(table, seed), aggregate) for table in tables)
        draws = after - before
    return Part(len(common), len(names), difference, draws)


def paired(first: Sequence[dict], second: Sequence[dict], aggregate: str, seed: int = 0) -> dict:
    """Difference second - first of a group's score over the samples both have, its 95% interval and its p."""
    found = part(first, second, aggregate, seed)
    return verdict([] if found is None else [found])


def difference(group: str, score: dict, first: dict[str, list[dict]], second: dict[str, list[dict]]) -> dict | None:
    """Of a score of a result; of an average over groups, an unweighted mean, each is resampled by itself."""
    if score["aggregate"] != "average":
        return paired(first[group], second[group], score["aggregate"])
    parts = [part(first.get(name, []), second.get(name, []), "mean", seed) for seed, name in enumerate(score["of"])]
    known = [found for found in parts if found is not None]
    return verdict(known) if len(known) == len(parts) else None


def verdict(parts: Sequence[Part]) -> dict:
    """Of the mean difference: its interval, and p, twice the smaller share of draws on one side of zero.

    Resamples of n units spread less than n units do, by sqrt((n - 1) / n), and few units know their own spread badly:
    the draws are widened by the inverse of the first and by Student's t over z. Where there are too few units, or one
    alone, whose resamples are all the same, there is neither interval nor p.
    """
    samples, units = sum(x.samples for x in parts), sum(x.units for x in parts)
    difference = float(np.mean([x.difference for x in parts])) if parts else None
    found = {"samples": samples, "units": units, "difference": difference}
    if difference is None or units < LEAST_UNITS or min(x.units for x in parts) < 2:
        return found | {"interval": None, "p": None, "significant": False}
    spread = np.mean([math.sqrt(x.units / (x.units - 1)) * (x.draws - x.difference) for x in parts], axis=0)
    draws = difference + statistics.student(units - len(parts)) / Z * spread
    low, high = percentiles(draws)
    beyond = min((draws <= 0).sum(), (draws >= 0).sum())
    p = min(1.0, 2 * (beyond + 1) / (len(draws) + 1))  # the sample itself counts as a draw: never 0
    return found | {"interval": [low, high], "p": float(p), "significant": low > 0 or high < 0}


def compare(runs: Sequence[Path], suites: Sequence[str] | None = None) -> dict:
    """{suite: {group: {"values": a run each, "differences": each from the first}}}, and what does not match."""
    read_runs = [read(run) for run in runs]
    shared = [suite for suite in suites or read_runs[0] if all(suite in run for run in read_runs)]
    if lacking := [suite for suite in suites or () if suite not in shared]:
        raise EvaluationError(f"--suite: not all of the folders have {', '.join(lacking)}")
    if not shared:
        raise EvaluationError(f"no suite is in all of {', '.join(str(run) for run in runs)}")
    table: dict[str, dict] = {}
    notes = []
    for suite in shared:
        results = [run[suite][0] for run in read_runs]
        if len({result["samples"]["hash"] for result in results}) > 1:
            tokenizers = len({str(result.get("tokenizer")) for result in results})
            which = "samples that both have" if tokenizers == 1 else "samples of one name, as tokenizers differ"
            notes.append(f"{suite}: the runs differ in samples: scores are over all of a run, differences over {which}")
            for run in read_runs if tokenizers > 1 else ():  # prompts are hashed as tokens: settings tell instead
                told = {name: run[suite][0].get("settings", {}).get(name) for name in HOW}
                if suite == "length":  # a perplexity per token: those of other tokens are not comparable
                    told["tokenizer"] = run[suite][0].get("tokenizer")
                for row in itertools.chain(*run[suite][1].values()):
                    row["prompt_hash"] = str(told)
        if any(result["quick_look"] for result in results):
            notes.append(f"{suite}: a quick look (--limit), not the whole suite")
        table[suite] = {}
        one, *others = (run[suite][1] for run in read_runs)
        for group, score in results[0]["scores"].items():
            if all(group in result["scores"] for result in results):
                table[suite][group] = {
                    "values": [result["scores"][group]["value"] for result in results],
                    "differences": [difference(group, score, one, two) for two in others],
                    "better": "lower" if score["aggregate"] == "perplexity" else "higher",
                }
    return {"runs": [str(run) for run in runs], "suites": table, "notes": notes}


def short_names(runs: Sequence[str]) -> list[str]:
    """The shortest part of the paths that tells them apart, without what they all end with.

    >>> short_names(["runs/gla/eval", "runs/ccq-gla/eval"]), short_names(["a/x", "a/y/x"]), short_names(["x", "x"])
    (['gla', 'ccq-gla'], ['a', 'y'], ['x', 'x'])
    """
    paths = [Path(os.path.abspath(run)).parts for run in runs]
    if len(set(paths)) < len(paths):
        return [path[-1] for path in paths]
    while len({path[-1] for path in paths}) == 1:
        paths = [path[:-1] for path in paths]
    width = 1
    while len({path[-width:] for path in paths}) < len(paths):
        width += 1
    return ["/".join(path[-width:]) for path in paths]


def shown(result: dict) -> str:
    """One table: scores of each run, and the differences from the first; * where the 95% interval excludes zero."""
    names = short_names(result["runs"])
    lines: list[str] = []
    for suite, groups in result["suites"].items():
        rows = [[suite, *names, *(f"{name} - {names[0]}" for name in names[1:])]]
        for group, scores in groups.items():
            points = ("-" if x is None else f"{x:.2f}" for x in scores["values"])
            rows.append([group, *points, *map(told, scores["differences"])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.append("")
    lines += [f"note: {note}" for note in result["notes"]]
    if any("too few" in line for line in lines):
        lines.append(f"too few: an interval takes {LEAST_UNITS} documents or samples that both runs have")
    lines.append("* the 95% interval of the paired difference excludes zero (not corrected for many rows)")
    return "\n".join(lines)


def told(found: dict | None) -> str:
    if found is None or found["difference"] is None:
        return "-"
    if found["interval"] is None:
        return f"{found['difference']:+.2f}  too few ({found['units']})"
    low, high = found["interval"]
    return f"{found['difference']:+.2f}{'*' if found['significant'] else ' '} [{low:+.2f}, {high:+.2f}]"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq compare", description=(__doc__ or "").splitlines()[0])
    folders = "folders written by `ccq eval --out`; the first is the baseline"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=folders)
    parser.add_argument("--suite", type=lambda text: text.split(","), help="only these suites, separated by commas")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        parser.error("RUN: expected at least two folders, got one")
    if arguments.out:
        replaceable(arguments.out, runs=[str(run) for run in arguments.runs])
    result = compare(arguments.runs, arguments.suite)
    print(shown(result))
    if arguments.out:
        write_json(arguments.out, result)
        print(f"Wrote {arguments.out}")
    return 0
