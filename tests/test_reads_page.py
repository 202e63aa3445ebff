"""docs/reads.md: its numbers are those of the study's files, of the package's steps and of closed forms."""

import json
import re
from pathlib import Path

import pytest
import torch
from scripts import script

from ccq import figures
from ccq.files import read_text

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reads.md").read_text()


GDN = "gated-deltanet"
GAINS = script("benchmarks/read_gains.py")


def log(run):
    path = ROOT / "benchmarks" / "study" / run / "log.jsonl"
    return [json.loads(line) for line in read_text(path).splitlines()]


def angle(row, seed=0):
    last = [line["angle"] for line in log(f"{row}-seed{seed}") if "angle" in line][-1]
    return sum(last) / len(last)


def last_perplexity(run):
    return [line["valid_perplexity"] for line in log(run) if "valid_perplexity" in line][-1]


def perplexity(row, seed=0):
    return last_perplexity(f"{row}-seed{seed}")


def early(row):
    """After 25M tokens, at the rate that was chosen."""
    return round(last_perplexity(f"sweep/{row}-2e-3"), 1)


def gain(read, total):
    """What a read of the figure leaves at the largest eigenvalue."""
    return float(GAINS.READS[read][2](GAINS.spectrum(total))[0])


def ratio(file, value, of, over, **where):
    """Of two rows of a benchmark, rounded as the page does."""
    rows = json.loads((ROOT / "benchmarks" / "study" / "cost" / f"{file}_h200.json").read_text())["rows"]

    def median(which):
        (row,) = [row for row in rows if all(row[key] == x for key, x in {**where, **which}.items())]
        return row[value]["median"]

    return round(median(of) / median(over), 2)


def op(batch, which):
    return ratio("op", "ms", {"name": "projected, decayed"}, {"name": "with gate"}, B=batch, **{"pass": which})


def decode(backbone, batch):
    return ratio("decode_op", "ms", {"variant": "projected"}, {"variant": "ours"}, B=batch, backbone=backbone)


def trained(system, control, value, file="train"):
    """What a system adds to its control, in per cent."""
    path = ROOT / "benchmarks" / "study" / "cost" / f"{file}_h200.json"
    rows = {row["system"]: row for row in json.loads(path.read_text())["rows"]}
    return round(100 * (rows[system][value] / rows[control][value] - 1), 1)


def on_cpu(read):
    rows = json.loads((ROOT / "benchmarks" / "study" / "cost" / "reads_cpu.json").read_text())["rows"]
    return [round(row["over_scaled"], 2) for row in rows if row["name"] == read]


def layer(backbone, variant):
    where = {"T": 4096, "pass": "forward and backward", "backbone": backbone}
    control = {"variant": "unit" if backbone == "gla" else "fla"}
    return ratio(f"layer_{backbone}", "graph_ms", {"variant": variant}, control, **where)


def test_numbers_on_the_page_hold():
    sentences = re.findall(r"<!-- holds: (.+?) -->", PAGE)
    assert len(sentences) >= 6
    for sentence in sentences:
        assert eval(sentence, globals()), sentence
    assert len(PAGE.splitlines()) <= 300


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_gains_are_those_of_a_matrix(lam):
    """Sigma written out in a turned basis, in which the query has its components."""
    values = GAINS.spectrum(0.9)
    size = len(values)
    turn = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    sigma, q = turn @ torch.diag(values) @ turn.T, turn @ torch.full((size,), size**-0.5, dtype=torch.float64)
    y = sigma @ q
    for step, along in (("scaled", 1.0), ("projected", (q @ y) / (y @ y))):
        expected = turn.T @ (q - lam * along * y) * size**0.5
        torch.testing.assert_close(GAINS.gains(values, step, lam), expected, rtol=1e-6, atol=1e-6)
    solved = torch.linalg.solve(sigma + 0.02 * torch.eye(size), q)
    torch.testing.assert_close(GAINS.ridge(values), turn.T @ (0.02 * solved) * size**0.5)


def test_systems_and_options_of_the_page_are_there():
    from ccq.model import CCQConfig
    from ccq.systems import SYSTEMS

    table = PAGE[PAGE.index("| read | q_clean") :].partition("\n\n")[0]
    for name in re.findall(r"`((?:gla|ccq|gated|mesa)[\w-]*)`", PAGE):
        assert name in SYSTEMS or name.startswith("ccq-*"), name
    for option in re.findall(r"`(\w+=[^`,]+)`", table):
        alone = option.startswith(("clean", "mixer", "cg_steps"))
        eval(f"CCQConfig({option})" if alone else f"CCQConfig(clean=True, {option})")
    assert CCQConfig(clean=True, covariance_decay="learned").covariance_decay == "learned"


def test_the_figure_can_be_drawn_again(tmp_path):
    assert figures.save(GAINS.figure(), tmp_path / "reads.png").stat().st_size > 10_000
