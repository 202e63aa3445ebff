"""The paper's numbers, and the notes where it disagrees with itself."""

import re

import pytest
from made_results import rows_in
from scripts import script

from ccq.bench import tables as benches
from ccq.report.paper import leader, load, numbers_of
from ccq.systems import SYSTEMS

TABLES = load().tables
kernels = script("benchmarks/bench_kernels.py")
MEAN_ERROR = 0.0101  # a mean of cells rounded to 0.01, itself rounded


def test_the_columns_whose_bold_is_wrong_are_noted_and_no_other():
    wrong = []
    for table in TABLES.values():
        for scale in table.scales if table.bold != "none" else ():
            rows = {s: cells for s, cells in table.of(scale).items() if table.counts(s)}
            for at, column in enumerate(table.columns):
                values = {system: cells[at].value for system, cells in rows.items()}
                top = (min if column.better == "lower" else max)(values.values())
                best = [system for system, value in values.items() if value == top]
                bold = [system for system, cells in table.of(scale).items() if cells[at].bold]
                if bold != best:
                    has, top = (f"{SYSTEMS[s].label} {values[s]}" for s in (bold[0], best[0]))
                    wrong.append(f"{column.heading}, {scale.upper()}: the paper prints {has} in bold; best is {top}.")
    assert wrong == [note for table in TABLES.values() for note in table.notes if "in bold" in note]
    assert len(wrong) == 2


def test_means_are_those_of_their_cells():
    parts = {"lm": ("PIQA", "BoolQ"), "longbench": ("NQA", "RBP")}
    for name, (first, last) in parts.items():
        headings = [column.heading for column in TABLES[name].columns]
        within = slice(headings.index(first), headings.index(last) + 1)
        for cells in TABLES[name].rows.values():
            values = [cell.value for cell in cells[within]]
            assert cells[headings.index("Avg.")].value == pytest.approx(sum(values) / len(values), abs=MEAN_ERROR)


def test_what_the_notes_quote_is_in_the_cells():
    quoted, quote = 0, re.compile(r"(\w+ \w+|\w+): ([\d.]+) against ([\d.]+) \((.+?)\)")
    for table in TABLES.values():
        for note in table.notes:
            for heading, one, two, difference in quote.findall(note):
                cells = {table.cell(*row, heading).text for row in table.rows}
                assert {one, two} <= cells
                assert f"{float(one) - float(two):+.2f}".replace("-", "−") == difference
                quoted += 1
    assert quoted == 5
    steps = {float(c.text) * 5 % 1 for (_, s), cells in TABLES["ablations"].rows.items() for c in cells[3:]
             if s != "ccq-gated-deltanet-fixed-lam"}  # fmt: skip
    assert max(min(x, 1 - x) for x in steps) < 1e-6  # multiples of 0.2
    assert TABLES["ablations"].cell("1.3b", "ccq-gated-deltanet-fixed-lam", "S2 4K").text == "84.3"


def test_tables_that_share_cells_agree():
    """The ablations quote the language and needle tables."""
    for system in ("gated-deltanet", "ccq-gated-deltanet"):
        for column in TABLES["ablations"].columns:
            other = TABLES["lm" if column.where.startswith("lm:") else "niah"]
            one, two = (table.cell("1.3b", system, column.heading).text for table in (TABLES["ablations"], other))
            assert one == two


def test_benchmarks_quote_the_same_numbers():
    for file, at, key in (("prefill_h200", 0, "paper_ms"), ("decode_h200", 1, "paper_tok_s")):
        for row in rows_in(file):
            assert next(iter(numbers_of("inference", row["system"])[at:]), None) == row[key]
    for row in rows_in("layer_h200"):
        system = benches.LAYERS.get((row["backbone"], row["variant"]), "")
        assert TABLES["layer"].value("1.3b", system, kernels.heading(row["pass"], row["T"])) == row["paper_ms"]
    for row in rows_in("train_h200"):
        assert row["paper"] in (None, numbers_of("training", row["system"]))


def test_one_gpu_or_eight_is_said_of_every_speed_table():
    told = {name: TABLES[name].where_run.rpartition("; ")[2] for name in ("layer", "inference", "training")}
    assert told == {"layer": "one GPU", "inference": "one GPU", "training": "8 GPUs"}


def test_facts_are_shown_as_they_are_printed():
    assert [str(load().facts[name]) for name in ("lam_retrieval", "gap_qwen3")] == ["0.40", "−0.111"]


def test_one_leads_and_none_of_several_that_are_equal():
    assert leader({"a": 1.0, "b": 2.0, "c": None}, "higher") == "b"
    assert leader({"a": 1.0, "b": 2.0}, "lower") == "a"
    assert leader({"a": 1.0, "b": 2.0, "c": 2.0}, "higher") is None
    assert leader({"a": 0.0, "b": None}, "higher") is None  # nor does one alone
    assert leader({"a": 1.0, "b": 2.0}, "") is None
