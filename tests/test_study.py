"""What docs/study.md says of its runs is in their files."""

import json
import re
from pathlib import Path

import pytest

from ccq.files import read_text

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "study"
ROW = re.compile(r"^\| `(?P<row>[\w-]+)` \| (?P<rate>[\de-]+) \| (?P<perplexity>[\d.]+) \| (?P<needles>[\d.]+) \| "
                 r"(?P<angle>[\d.]*)°? ?\|$", re.MULTILINE)  # fmt: skip
TOLD = [match.groupdict() for match in ROW.finditer((ROOT / "docs" / "study.md").read_text())]


def log(run: Path) -> list[dict]:
    return [json.loads(line) for line in read_text(run / "log.jsonl").splitlines()]


def perplexity(run: Path) -> float:
    return [row["valid_perplexity"] for row in log(run) if "valid_perplexity" in row][-1]


def test_every_run_that_is_kept_is_in_the_table():
    assert {told["row"] for told in TOLD} == {
        json.loads((run / "config.json").read_text())["identity"]["system"] for run in RUNS.glob("*-seed*")
    }


@pytest.mark.parametrize("told", TOLD, ids=lambda told: told["row"])
def test_a_row_of_the_table_is_what_its_files_say(told):
    recipe = told["row"].replace("-", "_")
    run = RUNS / f"{recipe}-seed0"
    config = json.loads((run / "config.json").read_text())
    assert config["identity"]["tokens"] == pytest.approx(100e6, rel=1e-3)
    assert config["optimizer"]["lr"] == float(told["rate"])
    assert f"{perplexity(run):.2f}" == told["perplexity"]
    scores = [score["value"] for score in json.loads((run / "eval" / "niah.json").read_text())["scores"].values()]
    assert len(scores) == 12
    assert f"{sum(scores) / 12:.1f}" == told["needles"]
    angles = [row for row in log(run) if "loss" in row][-1].get("angle")
    assert told["angle"] == ("" if angles is None else f"{sum(angles) / len(angles):.2f}")
    rates = {path.name.rpartition(f"{recipe}-")[2]: perplexity(path) for path in RUNS.glob(f"sweep/{recipe}-[0-9]*")}
    assert sorted(map(float, rates)) == [1e-3, 2e-3, 4e-3]
    assert min(rates, key=rates.get) == told["rate"]
