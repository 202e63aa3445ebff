"""The paper's numbers, and the footnotes where it disagrees with itself."""

import dataclasses
import json

import pytest
from made_results import BENCHMARKS

from ccq.report import paper as papers
from ccq.report.paper import Cell, best, footnotes, leaders


@pytest.fixture
def paper():
    return papers.load()


def changed(paper, name, scale, system, heading, cell):
    """The paper with another cell."""
    table = paper.tables[name]
    rows = []
    for row in table.rows:
        if (row.scale, row.system) == (scale, system):
            cells = list(row.cells)
            cells[table.at(heading)] = cell
            row = dataclasses.replace(row, cells=tuple(cells))
        rows.append(row)
    return dataclasses.replace(paper, tables=paper.tables | {name: dataclasses.replace(table, rows=tuple(rows))})


def test_the_two_columns_whose_bold_is_wrong_are_found_and_no_other(paper):
    told = [note for name in paper.tables for note in footnotes(paper, name) if "in bold" in note]
    assert told == [
        "LCC, 1.3B: the paper prints Gated DeltaNet 24.62 in bold; best is GLA 25.26.",
        "RBP, 1.3B: the paper prints CCQ-GLA 26.37 in bold; best is GLA 26.81.",
    ]


def test_text_that_its_table_does_not_bear_out_is_found(paper):
    told = " ".join(note for name in paper.tables for note in footnotes(paper, name))
    assert "RBP: GLA has 26.81, CCQ-GLA 26.37" in told
    assert "Wiki ppl: 18.01 against 17.98 (+0.03)" in told
    assert "TRC: 39.5 against 24.75 (+14.75); TQA: 26.09 against 22.85 (+3.24)" in told
    assert "is 84.3, while all other S-NIAH accuracies are multiples of 0.2" in told
    assert len([note for name in paper.tables for note in footnotes(paper, name)]) == 8


@pytest.mark.parametrize(
    ("name", "scale", "system", "heading", "cell", "told"),
    [
        ("niah", "1.3b", "ccq-gla", "S2 8K", Cell("50.0", True), "best is CCQ-Gated DeltaNet 58.4"),
        ("lm", "1.3b", "transformer", "Avg.", Cell("55.60"), "Avg., 1.3B Transformer: the paper prints 55.60"),
        ("lm", "1.3b", "gla", "Wiki ppl", Cell("18.90"), "-1.98"),
        ("niah", "1.3b", "gated-deltanet", "S3 4K", Cell("6.4"), "+40.20"),
    ],
)
def test_a_cell_that_were_otherwise_would_be_told(paper, name, scale, system, heading, cell, told):
    other = changed(paper, name, scale, system, heading, cell)
    new = set(footnotes(other, name)) - set(footnotes(paper, name))
    assert any(told in note for note in new), new


def test_a_tie_is_bold_in_both_rows(paper):
    both = changed(paper, "niah", "1.3b", "transformer", "S3 1K", Cell("94.4", True))
    assert not [note for note in footnotes(both, "niah") if "in bold" in note]
    one = changed(paper, "niah", "1.3b", "transformer", "S3 1K", Cell("94.4"))
    assert "best is CCQ-GLA 94.4, Transformer 94.4." in footnotes(one, "niah")[0]


def test_the_transformer_is_bold_in_the_needle_table_only(paper):
    assert not [r for r in paper.tables["lm"].rows if r.system == "transformer" and any(c.bold for c in r.cells)]
    assert paper.tables["niah"].cell("1.3b", "transformer", "S3 4K").bold


def test_tables_that_share_cells_agree(paper):
    """The ablations quote the language and needle tables."""
    ablations, lm, niah = (paper.tables[name] for name in ("ablations", "lm", "niah"))
    for system in ("gated-deltanet", "ccq-gated-deltanet"):
        for column in ablations.columns:
            other = lm if column.where.startswith("lm:") else niah
            assert (
                ablations.cell("1.3b", system, column.heading).text == other.cell("1.3b", system, column.heading).text
            )


def test_benchmarks_quote_the_same_numbers(paper):
    from ccq.bench.train import PAPER

    for system, (rate, memory) in PAPER.items():
        row = [paper.tables["training"].value("1.3b", system.replace("_", "-"), c.heading)
               for c in paper.tables["training"].columns]  # fmt: skip
        assert row == [rate, memory]
    inference = paper.tables["inference"]
    for file, column, key in (("prefill_h200", "4K prefill, ms", "paper_ms"),
                              ("decode_h200", "decode, tokens/s", "paper_tok_s")):  # fmt: skip
        for row in json.loads((BENCHMARKS / f"{file}.json").read_text())["rows"]:
            assert inference.value("1.3b", row["system"], column) == row[key]
    layer = paper.tables["layer"]
    names = {("gla", "fla"): "gla", ("gla", "ours"): "ccq-gla", ("gdn", "fla"): "gated-deltanet",
             ("gdn", "ours"): "ccq-gated-deltanet"}  # fmt: skip
    for row in json.loads((BENCHMARKS / "layer_h200.json").read_text())["rows"]:
        if (row["backbone"], row["variant"]) in names:
            heading = f"{row['pass']}, {row['T'] // 1024}K"
            assert layer.value("1.3b", names[row["backbone"], row["variant"]], heading) == row["paper_ms"]


def test_one_gpu_or_eight_is_said_of_every_speed_table(paper):
    assert {name: paper.tables[name].gpus for name in ("layer", "inference", "training")} == {
        "layer": 1, "inference": 1, "training": 8,
    }  # fmt: skip


def test_best_counts_ties_and_leaves_out_what_is_not_known():
    assert best({"a": 1.0, "b": 2.0, "c": 2.0, "d": None}, "higher") == {"b", "c"}
    assert best({"a": 1.0, "b": 2.0}, "lower") == {"a"}
    assert best({"a": None}, "higher") == set()
    assert leaders({"a": 0.0, "b": 0.0, "c": None}, "higher") == set()  # all the same: nothing leads
    assert leaders({"a": 0.0, "b": None}, "higher") == set()  # nor does one alone
    assert leaders({"a": 0.0, "b": 1.0}, "higher") == {"b"}
