"""What README.md and some pages of docs/ say in words is in the result files.

A sentence has `<!-- holds: EXPRESSION -->` beside it: its numbers are checked, its wording is free.
"""

import functools
import json
import re
from statistics import mean

import pytest
from made_results import BENCHMARKS
from scripts import script

from ccq.evaluate.compare import compare
from ccq.files import read_text
from ccq.model import CCQConfig
from ccq.model.info import info
from ccq.report.paper import load
from ccq.report.results import seed_interval

ROOT = BENCHMARKS.parents[1]
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("findings", "performance", "kernels")))
STUDY, BESIDE = script("benchmarks/study.py"), script("benchmarks/beside_fla.py")
RECALL = script("benchmarks/recall_page.py")
ELEMENTWISE = "norms and elementwise"
GD = "gated-deltanet"
NANO, GDN = BENCHMARKS / "nano" / "needles", "ccq_gated_deltanet"
ROWS = ("gla", "gla_unit", "ccq_gla", "ccq_gla_open", "gated_deltanet", GDN)


def layer(backbone, variant):
    """Milliseconds of a layer, forward and backward at 4K."""
    rows = json.loads((BENCHMARKS / "layer_h200.json").read_text())["rows"]
    return next(row["graph_ms"]["median"] for row in rows if (row["backbone"], row["variant"], row["pass"], row["T"])
                == (backbone, variant, "forward and backward", 4096))  # fmt: skip


def measured(bench, system, **where):
    rows = json.loads((BENCHMARKS / f"{bench}_h200.json").read_text())["rows"]
    (row,) = [row for row in rows if row["system"] == system and all(row[key] == x for key, x in where.items())]
    return row


def trained(system):
    """Tokens a second at 1.3B."""
    return measured("train", system, length=4096)["tokens_per_second"]


def of_fla(bench, system, what="tokens_per_second"):
    """Of a measurement at 1.3B that fla's own models were in too."""
    return BESIDE.value(bench, what, system=system)


def op_now(batch):
    """Milliseconds of the operator with its gate, forward at 4K."""
    return BESIDE.value("op_again", "ms", name="with gate", B=batch, **{"pass": "forward"})


def layer_128(backbone, variant):
    """Milliseconds of a layer with heads of 128, both passes at 4K."""
    at = {"backbone": backbone, "variant": variant, "T": 4096, "pass": "forward and backward"}
    return BESIDE.value("layer128", "graph_ms", **at)


def least_ms(system):
    """Milliseconds to read the weights of a 1.3B model in bf16, and 8 states in and out, at the speed of a copy."""
    model = info(CCQConfig.preset(f"{system}-1.3b"), 4096)
    traffic = 2 * (model.body + model.embedding / 2) + 2 * 8 * model.state_bytes
    return 1e3 * traffic / json.loads((BESIDE.COST / "op_fla_h200.json").read_text())["ceilings"]["byte_per_s"]


def spent(system, kind=None, part="train"):
    """Milliseconds of a step at 1.3B by wall clock, or of a class of kernels in it."""
    (row,) = [row for row in BESIDE.rows("profile_1b") if (row["system"], row["part"]) == (system, part)]
    return row["wall_ms"] if kind is None else row["ms"][kind]


def decoded(system):
    """Tokens a second of a graph step at 1.3B, batch 8."""
    return measured("decode", system)["step_tok_s"]


def state_mib(system):
    """Of a sequence at 1.3B."""
    return round(info(CCQConfig.preset(f"{system}-1.3b"), 4096).state_bytes / 2**20)


def at_4k(scores):
    return mean(scores[f"niah_single_{task}/4096"] for task in (1, 2, 3))


def found_at_4k(row):
    return round(mean(at_4k(needles()[f"{row}-seed{seed}"]) for seed in (0, 1, 2)))


def studied(row):
    """In the study: perplexity, the mean of three seeds, and needles at 4K, the mean of those that were asked."""
    found = [STUDY.Run(STUDY.RUNS / f"{row}-seed{seed}") for seed in (0, 1, 2)]
    asked = [at_4k(scores) for x in found if (scores := x.scores("niah")) is not None]
    assert len(asked) == 2
    return round(mean(x.perplexity() for x in found), 2), round(mean(asked))


def study_interval(claim):
    (verdict,) = [verdict for verdict in STUDY.judge(STUDY.pairs(STUDY.runs())) if verdict.name == claim]
    low, high = verdict.interval
    return round((low + high) / 2, 2), round(low, 2), round(high, 2)


def recalled(name, claim):
    """In a round of docs/recall.md: points, and the verdict."""
    verdict = RECALL.verdicts(name)[claim]
    return round(mean(verdict.differences.values()), 1), verdict.verdict


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_in_words_is_in_the_files(page):
    sentences = re.findall(r"<!-- holds: (.+?) -->", page.read_text())
    assert len(sentences) >= 3
    for sentence in sentences:
        assert eval(sentence, globals() | {"paper": load()}), sentence


@pytest.mark.parametrize("page", BESIDE.PAGES, ids=lambda page: page.name)
def test_tables_beside_fla_are_made_from_the_files(page):
    text = page.read_text()
    assert BESIDE.PLACE.search(text)
    assert BESIDE.filled(text) == text


def test_the_readme_is_short():
    assert len(PAGES[0].read_text().splitlines()) < 130
