"""`ccq bench eval` measures on a GPU; what it counts is checked here, on a CPU."""

from __future__ import annotations

import json

import pytest
from test_engine import requests_of

from ccq.bench import eval as bench
from ccq.report.collect import collect


def test_everything_asked_is_answered_and_both_ways_agree(llama, tmp_path):
    asked = requests_of(count=12, contexts=4)
    row = bench.answer(llama, asked)
    assert row["requests"] == 12
    assert row["tokens"] == sum(len(asked.of(request)) for request in asked.requests)
    assert row["samples_per_second"] == pytest.approx(12 / row["seconds"])
    both = bench.both_ways(llama, asked, contexts=3)
    assert (both["contexts"], both["requests"], both["changed_answers"]) == (3, 9, 0)
    assert both["largest_difference"] < 1e-4
    assert bench.both_ways(llama, requests_of(count=4, contexts=4), contexts=3) is None  # nothing to share

    row |= {"system": "ccq-gla", "size": "500m", "suite": "lm", "dtype": "bfloat16", "both_ways": both}
    (tmp_path / "made.json").write_text(
        json.dumps({"commit": "abc", "date": "2026-01-01", "versions": {}, "rows": [row]})
    )
    [table] = bench.tables(collect([tmp_path]))
    assert [cell.text for cell in table.blocks[0].rows[0].cells][:2] == ["12", f"{row['tokens']:,}"]
    assert "0 of 3 likeliest answers change in bfloat16" in table.notes[0]


def test_a_changed_answer_is_counted(llama, monkeypatch):
    asked = requests_of(count=12, contexts=4)
    real = bench.Engine.run

    def run(self, *arguments):
        for request, row in real(self, *arguments):
            yield request, {"nll": [-1e3 if self.prefill == "shared" and request.id == "4" else sum(row["nll"])]}

    plain = {r.id: sum(row["nll"]) for r, row in bench.Engine(llama, prefill="plain").run(asked)}
    monkeypatch.setattr(bench.Engine, "run", run)
    changed = min(("0", "4", "8"), key=plain.get) != "4"  # "4" shares its context with "0" and "8"
    assert bench.both_ways(llama, asked, contexts=4)["changed_answers"] == int(changed)
