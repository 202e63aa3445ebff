"""What README.md says in words is in the result files.

A sentence has `<!-- holds: EXPRESSION -->` beside it: its numbers are checked, its wording is free.
"""

import functools
import json
import re

from made_results import BENCHMARKS

from ccq.demo import TRAINED, TRIO
from ccq.evaluate.compare import compare
from ccq.files import read_text
from ccq.report.paper import load
from ccq.report.results import seed_interval

README = BENCHMARKS.parents[1] / "README.md"
NANO, GDN = BENCHMARKS / "nano" / "needles", "ccq_gated_deltanet"
ROWS = ("gla", "gla_unit", "ccq_gla", "ccq_gla_open", "gated_deltanet", GDN)


def layer(backbone, variant):
    """Milliseconds of a layer, forward and backward at 4K."""
    rows = json.loads((BENCHMARKS / "layer_h200.json").read_text())["rows"]
    return next(row["graph_ms"]["median"] for row in rows if (row["backbone"], row["variant"], row["pass"], row["T"])
                == (backbone, variant, "forward and backward", 4096))  # fmt: skip


@functools.cache
def log(run):
    return [json.loads(line) for line in read_text(NANO / run / "log.jsonl").splitlines()]


def last(run):
    """Validation perplexity at the end."""
    return [row["valid_perplexity"] for row in log(run) if "valid_perplexity" in row][-1]


def losses(run):
    return [(row["step"], row["loss"]) for row in log(run) if "loss" in row]


def begun(run):
    return [part["step"] for part in json.loads((NANO / run / "provenance.json").read_text())]


def commit(run):
    return json.loads((NANO / run / "provenance.json").read_text())[0]["commit"]


def third():
    return [path.name for path in NANO.glob("*-seed2")]


def runs(row):
    return [last(path.name) for path in sorted(NANO.glob(f"{row}-seed[0-9]"))]


def epochs():
    config = json.loads((NANO / "gla-seed2" / "config.json").read_text())
    read = config["steps"] * config["data"]["batch"] * config["data"]["length"]
    return read / json.loads((NANO / "gla-seed2" / "data.json").read_text())["tokens"]


def lower(row, *than):
    """How much lower it ends, with each seed."""
    return [other - own for name in than for own, other in zip(runs(row), runs(name), strict=True)]


def clear(row, than):
    return seed_interval(lower(row, than))[0] > 0


def gained():
    """By CCQ over Gated DeltaNet; a seed that was run twice is a mean."""
    own = runs(GDN)
    own[:2] = [(own[seed] + last(f"{GDN}-seed{seed}-repeat")) / 2 for seed in (0, 1)]
    return [other - x for x, other in zip(own, runs("gated_deltanet"), strict=True)]


@functools.cache
def needles(text="needles"):
    """{run: {setting: share found}}"""
    found = {path.parts[-3]: json.loads(path.read_text()) for path in (NANO.parent / text).glob("*/eval/niah.json")}
    return {run: {name: x["value"] for name, x in content["scores"].items()} for run, content in found.items()}


@functools.cache
def told_apart(run):
    """Settings in which CCQ and Gated DeltaNet differ by more than samples can tell: whether CCQ finds more."""
    names = f"gated_deltanet-{run.removesuffix('-repeat')}", f"{GDN}-{run}"
    rows = compare([NANO / name / "eval" for name in names], ["niah"])["suites"]["niah"]
    both = {name: row["differences"][0] for name, row in rows.items()}
    return {name: x["difference"] > 0 for name, x in both.items() if x["significant"]}


def moved():
    """{(file, setting): change} when cleaning is switched off."""
    found = {}
    for path in sorted(NANO.glob(f"{GDN}-seed*/intervene/*/intervene.json")):
        none, off = (row["suites"]["niah"] for row in json.loads(path.read_text())["rows"])
        found |= {(path, name): abs(off[name] - value) for name, value in none.items()}
    return found


def last_tokens():
    """Perplexity of the same 2,048 tokens by the length of what stands before them, of every model and corpus."""
    for path in NANO.parent.glob("*/*/eval/length.json"):
        scores = json.loads(path.read_text())["scores"]
        for corpus in {name.split("/")[0] for name in scores}:
            yield [scores[f"{corpus}/same/{length}"]["value"] for length in range(4096, 20_481, 2048)]


def test_what_the_readme_says_in_words_is_in_the_files():
    known = {"paper": load(), "GDN": GDN, "ROWS": ROWS, "TRAINED": TRAINED, "TRIO": TRIO} | {
        f.__name__: f for f in (layer, last, losses, begun, commit, third, runs, epochs, lower, clear, gained, needles,
                                told_apart, moved, last_tokens)}  # fmt: skip
    sentences = re.findall(r"<!-- holds: (.+?) -->", README.read_text())
    assert len(sentences) > 20
    for sentence in sentences:
        assert eval(sentence, known), sentence
