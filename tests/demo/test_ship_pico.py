"""What the cards, the docs and the demo say of the models that ship is what their result files hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ccq import demo, shipped

ROOT = Path(__file__).parent.parent.parent
NAMES = tuple(demo.TRIO)


@pytest.fixture(scope="module")
def told() -> dict[str, dict]:
    return {name: json.loads((shipped.HERE / name / "results.json").read_text(encoding="utf-8")) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_card_is_what_the_results_give(ship, told, name):
    assert (shipped.HERE / name / "README.md").read_text(encoding="utf-8") == ship.card(name, told)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_card_is_one_that_ccq_takes(told, name):
    """Options were renamed since the models were trained."""
    from ccq.train.command import parse, recipe_parser

    card = (shipped.HERE / name / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^    ccq train (.*)$", card, flags=re.MULTILINE)
    assert command is not None
    parser = recipe_parser("train", "")
    parser.add_argument("--run-dir")
    _, config = parse(parser, command[1].split())
    assert (config.steps, config.runtime.log_every) == (told[name]["steps"], 50)


def test_the_three_are_trained_alike_and_small(ship, told):
    for key in ship.SAME:
        assert len({json.dumps(fact[key]) for fact in told.values()}) == 1, key
    assert {(fact["commit"], fact["conv_size"]) for fact in told.values()} == {("0ab9102", 4)}
    assert sum(path.stat().st_size for path in shipped.HERE.rglob("*") if path.is_file()) < 40e6


def test_docs_have_the_numbers_of_the_cards(told):
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name, fact in told.items():
        scores = fact["evaluation"]["niah"]["scores"]
        found = [f"{scores[f'niah_single_2/{n}']['value']:.0f}" for n in (512, 1024, 2048, 4096)]
        row = f"| [{name}](../ccq/shipped/{name}/README.md) | {' | '.join(found)} | {fact['valid_perplexity']:.2f} |"
        assert row in page


def results(found: dict[str, list[float]], width: float = 10.0) -> dict[str, dict]:
    """Made up: per cent found by each model, the same intervals around all."""

    def scores(values):
        return {
            f"niah_single_1/{512 * 2**at}": {"value": value, "interval": [value - width / 2, value + width / 2]}
            for at, value in enumerate(values)
        }

    return {name: {"evaluation": {"niah": {"scores": scores(values)}}} for name, values in found.items()}


def test_a_model_that_finds_nothing_is_named_and_no_other(ship):
    text = ship.found(results({"a": [0.0, 4.0], "b": [90.0, 50.0], "c": [96.0, 10.0]}))
    assert "**a did not learn to retrieve**" in text
    assert "may be chance" in text
    assert re.search(r"b and c overlap in all but 1 of 2 rows: niah_single_1/1024\.", text)
    alike = ship.found(results({"a": [99.0, 60.0], "b": [90.0, 55.0]}))
    assert "did not learn" not in alike
    assert "overlap in all 2 rows" in alike


def test_lowest_counts_rows(ship):
    def of(*values):
        scores = {f"pg19/{n}": {"value": value} for n, value in zip((512, 1024, 2048), values, strict=True)}
        return {"evaluation": {"length": {"scores": scores | {"pg19/same/512": {"value": 0.0}}}}}

    assert ship.lowest({"a": of(3.0, 2.0, 1.0), "b": of(2.0, 3.0, 0.5)}).endswith("of 3 rows: a 1, b 2.")


def test_the_demo_says_on_the_page_and_below_its_tables_which_model_found_nothing(tmp_path, monkeypatch):
    settings = demo.Settings(out=tmp_path)
    steps = [demo.Step(name, "", 0) for name in (*NAMES, "gla_tiny-seed0")]

    def score(**values):
        for name in NAMES:
            (tmp_path / name).mkdir(exist_ok=True)
            scores = {"niah_book/512": {"value": values.get(name.replace("-", "_"), 50.0)}}
            (tmp_path / name / "niah.json").write_text(json.dumps({"scores": scores}))
        return " ".join(demo.notes(settings, steps))

    text = score(gla_unit_pico=0.0)
    assert "gla-unit-pico found no needle at all" in text
    assert "they were trained on this task" in text
    assert "found no needle" not in score()
    assert "found no needle" not in score(gla_pico=0.0, gla_unit_pico=0.0, ccq_gla_pico=0.0)
