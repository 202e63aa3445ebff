"""The page: the numbers of the files, said once more; produced from anything, and standing by itself."""

import functools
import html
import json
import operator
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_results import evaluation, named, rows_in, training_run

import ccq.report
from ccq import cli
from ccq.figures import FAMILIES, TONES, lines_of
from ccq.report import claims, figures
from ccq.report.collect import collect
from ccq.report.page import assemble, build, environment, without_unusable
from ccq.report.paper import load
from ccq.report.table import scale_label
from ccq.systems import SYSTEMS, Identity

pytestmark = pytest.mark.xdist_group("report page")  # in one process: the page of everything is made once


@pytest.fixture(scope="session")
def page(everything):
    return assemble(collect([everything]))


@pytest.fixture(scope="session")
def parsed(report):
    """What the page refers to, and its words."""
    text = (report / "index.html").read_text()
    links = re.findall(r'\s(?:xlink:href|href|src)="([^"]*)"', text)
    words = html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", "", text, flags=re.DOTALL))
    return SimpleNamespace(text=text, ids=re.findall(r'\sid="([^"]*)"', text), links=links, words=words)


def rows_of(table, title=None):
    """{label: cells}, of a block or of all that are shown."""
    blocks = [block for block in table.blocks if not block.folded and title in (None, block.title.split(" [")[0])]
    return {row.label.text.split(" [")[0].strip(): row.cells for block in blocks for row in block.rows}


def folded(table):
    return [row.label.text for block in table.blocks if block.folded for row in block.rows]


def texts(cells):
    return [cell.text for cell in cells]


def label(system):
    return SYSTEMS[system].label


def mean(everything, system, suite, score, seeds=(0, 1, 2)):
    files = [everything / f"{system}-nano-seed{seed}" / f"{suite}.json" for seed in seeds]
    return sum(json.loads(file.read_text())["scores"][score]["value"] for file in files) / len(seeds)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm", "niah", "longbench"])
def test_our_numbers_are_those_of_the_files(page, everything, name):
    rows = rows_of(page.tables[name], "Here, nano")
    for system in ("gla", "gla-unit", "gated-deltanet", "ccq-gla", "ccq-gated-deltanet"):
        for cell, column in zip(rows[label(system)], load().tables[name].columns, strict=False):
            suite, _, score = column.where.partition(":")
            score = score.replace("*", "4096" if suite == "lm" else "8192")
            digits = 1 if name == "niah" else 2
            assert cell.text == f"{mean(everything, system, suite, score):.{digits}f}", (system, score)
            assert "95% over 3 seeds" in cell.hover
            assert "95% over samples, mean of the runs' bounds" in cell.hover
            assert "commit 1111111; NVIDIA H200; 2026-11-14" in cell.hover


@pytest.mark.parametrize(("name", "table"), [("models", "configs"), *((n, n) for n in ("lm", "niah", "longbench"))])
def test_the_papers_numbers_are_on_the_page_as_printed(page, name, table):
    for (scale, system), cells in load().tables[table].rows.items():
        shown = rows_of(page.tables[name], f"The paper, {scale_label(scale)}")[label(system)]
        assert texts(shown)[: len(cells)] == [cell.text for cell in cells]


def test_speed_numbers_are_those_of_the_files(page):
    rows = rows_of(page.tables["inference"])
    for result in rows_in("prefill_h200"):
        assert rows[label(result["system"])][1].text.split(" ")[0] == f"{result['wall_ms']['median']:.0f}"
    for result in rows_in("decode_h200"):
        cells = texts(rows[label(result["system"])])
        assert cells[2] == (str(result["paper_tok_s"]) if result["paper_tok_s"] else "–")
        assert cells[3].split(" ")[0] == f"{result['generate_tok_s']:.0f}"


def test_speed_is_set_against_the_control(page):
    rows = rows_of(page.tables["lengths"])
    assert texts(rows["CCQ-GLA, 1.3B"]) == ["46,000 (−4.2%)"] * 3
    assert texts(rows["Unit-norm GLA, 1.3B"]) == ["48,000"] * 3


def test_bold_is_the_best_of_each_block_and_no_tie(page):
    """Computed anew from the numbers that are shown; in the paper's block also where its own bold is another."""
    ties = 0
    for name in ("lm", "niah", "longbench"):
        for title in ("The paper, 1.3B", "Here, nano"):
            rows = rows_of(page.tables[name], title)
            if name != "niah":
                rows.pop("Transformer")
            for at, column in enumerate(load().tables[name].columns):
                cells = [cells[at] for cells in rows.values() if cells[at].kind != "missing"]
                values = [float(cell.text) for cell in cells]
                top = min(values) if column.better == "lower" else max(values)
                alone = values.count(top) == 1 < len(values)
                ties += not alone
                assert [v for v, c in zip(values, cells, strict=True) if c.bold] == ([top] if alone else [])
    assert ties
    assert rows_of(page.tables["longbench"], "The paper, 1.3B")["GLA"][12].bold  # LCC


def test_what_was_not_run_is_folded_away_and_says_so(page, tmp_path):
    assert "Mamba2, nano" in folded(page.tables["lm"])
    assert "CCQ-Gated DeltaNet, uncentred, nano" in folded(page.tables["ablations"])
    assert not any("not run" in cell.text for cells in rows_of(page.tables["lm"]).values() for cell in cells)
    for name, group in (("gla", "niah_single_1/1024"), ("ccq-gla", "niah_single_3/8192")):
        evaluation(tmp_path / name, "niah", {group: (50.0, "mean")}, f"{name}-nano")
    table = build(collect([tmp_path])).tables["niah"]
    assert table.head[1:] == ["S1\u00a01K\u00a0↑", "S3\u00a08K\u00a0↑"]  # nobody ran others
    cells = rows_of(table, "Here, nano")["GLA"]
    assert texts(cells) == ["50.0", "not run"]
    assert cells[0].small == "29.9–70.1"  # Wilson, 10 of 20
    assert rows_of(table, "The paper, 1.3B")["GLA"][1].hover == "not in the paper"
    assert any("left out: S1 2K, S1 4K" in note for note in table.notes)
    claimed = build(collect([tmp_path])).tables["claims"]
    assert {row.cells[2].text for block in claimed.blocks for row in block.rows if block.folded} == {claims.NOT_RUN}


def test_html_and_markdown_have_every_cell(page, parsed):
    lines = page.markdown().splitlines()
    for table in page.tables.values():
        for block in table.blocks:
            for row in block.rows:
                words = [re.sub(r" ?\[[\d–]+\]\(#source-\d+\)", "", cell.text) for cell in (row.label, *row.cells)]
                assert all(word.replace("`", "").replace("**", "") in parsed.words for word in words)
                assert any(all(word in line for word in words) for line in lines), words


def test_the_same_results_give_the_same_page(everything, tmp_path):
    for name in ("a", "b"):
        build(collect([everything / "bench"])).write(tmp_path / name)
    assert (tmp_path / "a" / "index.html").read_bytes() == (tmp_path / "b" / "index.html").read_bytes()


# -- the page by itself ------------------------------------------------------------------------------------------------


def test_the_page_stands_by_itself(report, parsed):
    assert "<script" not in parsed.text
    assert [link for link in parsed.links if not link.startswith(("#", "data:", "figures/"))] == []
    assert "@import" not in parsed.text
    assert not re.search(r"url\((?!#)", parsed.text)
    for link in parsed.links:
        inside = link[1:] in parsed.ids if link.startswith("#") else link.startswith("data:")
        assert inside or (report / link).exists(), link
    assert len(parsed.ids) == len(set(parsed.ids)), "an id twice"


def test_figures_are_files_too(report, parsed, page):
    assert {name.removeprefix("figure-") for name in parsed.ids if name.startswith("figure-")} == set(page.figures)
    assert set(page.figures) == {"perplexity", "needles", "recall", "overhead", "extrapolation", "training",
                                 "alignment_depth", "alignment_histogram", "alignment_heads", "gates"}  # fmt: skip
    assert {path.name for path in (report / "figures").iterdir()} == {f"{name}.png" for name in page.figures}


def test_what_the_reader_came_for_stands_first(page, parsed):
    """A picture a question, whether it helped, the verdicts; then tables."""
    order = [name for name in parsed.ids if name.startswith(("figure-", "table-")) or name in ("help", "claims")]
    assert order[:7] == ["figure-perplexity", "figure-needles", "figure-recall", "figure-overhead", "help", "claims",
                         "table-claims"]  # fmt: skip
    says = {claim["says"].removeprefix("... ") for claim in claims.load() if claim["kind"] == "score"}
    rows = [row for block in page.tables["claims"].blocks if not block.folded for row in block.rows]
    quality = [row for row in rows if any(row.label.text.endswith(words) for words in says)]
    held = [row for row in quality if row.cells[2].text == claims.HOLDS]
    assert f"Of {len(quality)} claims about quality that we tested, {len(held)} are supported" in parsed.words
    survive = sum(", survives Holm's correction" in row.cells[2].small for row in held)
    assert f"Of {len(held)} supported claims, {survive or 'none'} survive" in parsed.words
    assert "Repeats of a seed are averaged" in parsed.words


@pytest.mark.parametrize("arguments", [[], ["empty"]])
def test_nothing_gives_a_page_that_says_so(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert cli.main(["report", *arguments, "-o", "out"]) == 1
    assert "no result" in capsys.readouterr().err
    for name in ("index.html", "report.md"):
        assert "No result was found." in Path("out", name).read_text()


def test_text_of_results_cannot_become_markup(tmp_path):
    evaluation(tmp_path / "r", "niah", {"niah_single_1/1024": (50.0, "mean")}, "<script>alert(1)</script>")
    assert "<script" not in build(collect([tmp_path])).html


# -- damage ------------------------------------------------------------------------------------------------------------


def test_damage_and_unfinished_runs_stand_on_the_page_beside_the_rest(tmp_path):
    evaluation(tmp_path / "gla-nano", "niah", {"niah_single_1/1024": (50.0, "mean")}, "gla-nano")
    (tmp_path / "broken.json").write_text('{"suite": "lm", "sco')
    training_run(tmp_path / "gla_tiny", "gla_tiny", 0, logged=120)
    page = build(collect([tmp_path]))
    text = page.markdown()
    assert "broken.json is damaged and left out" in text
    assert "gla_tiny is not finished: step 120 of 600." in text
    assert rows_of(page.tables["niah"], "Here, nano")["GLA"][0].text == "50.0"
    assert rows_of(page.tables["models"], "Here, tiny")["GLA"][5].small == "120 done"


def test_any_part_of_a_result_may_be_missing(everything, tmp_path, monkeypatch):
    """Files that are JSON, but not what they should be: the page is made, and a file that is left out is named."""
    # lines that cannot be drawn: the tests below
    monkeypatch.setitem(environment().filters, "svg", lambda *panel: "")
    files = ["ccq-gla-nano-seed0/niah.json", "ccq-gla-nano-seed0/length.json", "runs/ccq_gla_tiny/config.json",
             *(f"analysis/{name}.json" for name in ("alignment_smollm", "gate_x", "intervene")),
             "mqar_seeds.json",
             *(f"bench/{name}_h200.json" for name in ("layer", "prefill", "decode", "train"))]  # fmt: skip
    shutil.copytree(everything / "runs" / "ccq_gla_tiny", tmp_path / "run")
    rng = random.Random(0)
    left_out = 0
    for name in files:
        whole = (everything / name).read_text()
        target = tmp_path / "run" / "config.json" if "config" in name else tmp_path / "x.json"
        for _ in range(4):
            content = json.loads(whole)
            place, depth = content, rng.randint(0, 4)
            while depth and (key := pick(rng, place)) is not None and isinstance(place[key], dict | list):
                place, depth = place[key], depth - 1
            if (key := pick(rng, place)) is not None:
                if rng.random() < 0.5:
                    del place[key]
                else:
                    place[key] = rng.choice([None, "text", [], {}, -1])
            target.write_text(json.dumps(content))
            usable = without_unusable(collect([target]))
            assert assemble(usable).html
            left_out += bool(usable.problems)
    assert left_out > 3


def pick(rng, place):
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    return rng.choice(keys) if keys else None


HISTOGRAM = ("runs", 0, "test", "slices", 0, "histogram", 0, 0)


@pytest.mark.parametrize(("name", "place", "value"), [
    ("analysis/gate_x", ("layers",), [0]), ("mqar_seeds", HISTOGRAM, 10**30),
])  # fmt: skip
def test_damage_that_shows_only_when_drawn_is_named(everything, tmp_path, name, place, value):
    content = json.loads((everything / f"{name}.json").read_text())
    functools.reduce(operator.getitem, place[:-1], content)[place[-1]] = value
    evaluation(tmp_path / "results" / "good", "niah", {"niah_single_1/1024": (50.0, "mean")}, "gla-nano")
    (tmp_path / "results" / "x.json").write_text(json.dumps(content))
    text = build(collect([tmp_path / "results"])).markdown()
    assert "results/x.json is incomplete and left out" in text
    assert "good/niah.json" in text


def test_a_log_that_cannot_be_drawn_is_named(everything, tmp_path):
    shutil.copytree(everything / "runs" / "ccq_gla_tiny", tmp_path / "run")
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 600, "lam": [0.1, 0.2], "lam_of_decay_alone": [0.1, 0.2]}) + "\n")
    [problem] = without_unusable(collect([tmp_path])).problems
    assert problem.startswith("run/config.json is incomplete")


# -- how it looks ------------------------------------------------------------------------------------------------------


def test_a_family_has_one_colour_and_each_system_and_variant_its_own_line():
    variants = ("", "trained on plain text", "convolution of 4")
    for family in {system.family for system in SYSTEMS.values()}:
        mine = [Identity(s.name) for s in SYSTEMS.values() if s.family == family]
        lines = lines_of([*mine, *(Identity(system.system, variant) for variant in variants for system in mine[:3])])
        assert {line["color"] for line in lines.values()} <= set(TONES[FAMILIES[family]])
        looks = {(line["ls"], line["color"]) for line in lines.values()}  # told apart without their markers
        assert len(looks) == len(lines) == len(mine) + 2 * len(mine[:3])


def test_the_gates_figure_says_what_text_was_read(everything, tmp_path):
    content = json.loads((everything / "analysis" / "gate_x.json").read_text())
    for text, told in (("filler", "on text (our filler),"), ("book.txt", "on text (the text book.txt),")):
        (tmp_path / "gate.json").write_text(json.dumps(content | {"settings": {"text": text}}))
        assert told in figures.gates(collect([tmp_path]), load()).caption


def test_seeds_of_one_row_share_a_panel_of_gates(everything, tmp_path):
    """... and nothing else does: not another model of the same name, and not one with other layers."""
    content = json.loads((everything / "analysis" / "gate_x.json").read_text())

    def titles():
        return sorted(panel.title for panel in figures.gates(collect([tmp_path]), load()).panels)

    for number, name in enumerate(("ccq-gla-nano-seed0", "ccq-gla-nano-seed1", "unknown", "unknown")):
        (tmp_path / f"{number}.json").write_text(json.dumps(content | named(name)))
    assert titles() == ["CCQ-GLA, nano, 2 seeds", "unknown", "unknown"]
    lam = {place: [*rows, rows[-1]] for place, rows in content["lam"].items()}
    deeper = {"layers": [*content["layers"], 99], "lam": lam, **named("ccq-gla-nano-seed1")}
    (tmp_path / "1.json").write_text(json.dumps(content | deeper))
    assert titles() == ["CCQ-GLA, nano, seed 0", "CCQ-GLA, nano, seed 1", "unknown", "unknown"]


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return sum(w * (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4)
               for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True))  # fmt: skip


def contrast(one, two):
    bright, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_in_light_and_dark(scheme):
    style = Path(ccq.report.__file__).with_name("style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
    colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", blocks[0 if scheme == "light" else 1]))
    for text in ("text", "soft", "link"):
        for ground in ("page", "raised", "ours"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in ("ink", "blue", "sky", "green", "orange", "red", "purple", "grey"):
        assert contrast(colours[line], colours["page"]) >= 3, line


def test_results_of_the_real_commands_are_read(tmp_path):
    """`ccq train` and `ccq eval` themselves, on a tiny model."""
    from ccq.evaluate import Options, evaluate
    from ccq.train.export import as_exported

    run = tmp_path / "ccq_gla_tiny"
    small = ["--steps", "4", "--runtime.log-every", "2", "--runtime.no-tensorboard", "--data.batch", "4",
             "--runtime.micro-batch", "4", "--seed", "3"]  # fmt: skip
    assert cli.main(["train", "ccq_gla_tiny", "--run-dir", str(run), *small]) == 0
    options = Options(out=run / "eval", slices=((32, 4, 9), (32, 8, 9)), limit=2)
    result = evaluate(as_exported(run)[0], None, "mqar", options, "model")
    page = build(collect([tmp_path]))
    cells = rows_of(page.tables["recall"], "Here, tiny")["CCQ-GLA"]
    assert texts(cells) == [f"{result['scores'][n]['value']:.2f}" for n in ("32-4", "32-8", "average")]
    assert "seed 3" in cells[0].hover
    assert texts(rows_of(page.tables["models"], "Here, tiny")["CCQ-GLA"])[3:6] == ["3", "0.01", "4"]
    assert "eval/mqar.json (first 2)" in page.markdown()
