"""The page: the numbers of the files, said once more; produced from anything, and standing by itself."""

import dataclasses
import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_results import BENCHMARKS, alignment, evaluation, identity, named, origin, text_run, training_run

import ccq.report
from ccq import cli
from ccq.report import claims, html
from ccq.report.document import Columns, Figure
from ccq.report.systems import label_of

pytestmark = pytest.mark.xdist_group("report page")  # in one process: the page of everything is made once

PAPERS = ("configs", "lm", "niah", "longbench", "ablations", "layer", "training", "inference")


class Page(HTMLParser):
    """Tables by id, as rows of (label, [(text, small, classes, hover)]), and all that the page refers to."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.ids, self.links, self.tags, self.figures = {}, [], [], [], []
        self.table = self.cell = None
        self.small = 0
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [given[name] for name in ("href", "src", "xlink:href") if name in given]
        if tag == "figure":
            self.figures.append(given["id"])
        if tag == "table":
            self.table = self.tables[given["id"].removeprefix("table-")] = []
        elif tag == "tr" and self.table is not None:
            self.table.append([])
        elif tag in ("td", "th") and self.table is not None:
            self.cell = {
                "text": "",
                "small": "",
                "class": given.get("class", "").split(),
                "hover": given.get("title", ""),
            }
            self.table[-1].append(self.cell)
        elif tag == "span" and given.get("class") == "small":
            self.small = 1
        elif tag in ("sup", "style"):
            self.small = 2

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None
        if tag == "table":
            self.table = None
        if tag in ("sup", "style") or (tag == "span" and self.small == 1):
            self.small = 0

    def handle_data(self, data):
        if self.small != 2:
            self.words += data
        if self.cell is not None and self.small != 2:
            self.cell["small" if self.small else "text"] += data

    def block(self, name, title):
        """{label: cells} of the rows below the heading `title` of a table."""
        rows, inside = {}, False
        for row in self.tables[name]:
            if len(row) == 1:
                inside = row[0]["text"] == title
            elif inside:
                rows[row[0]["text"].strip()] = row[1:]
        return rows


@pytest.fixture(scope="session")
def page(report):
    return Page((report / "index.html").read_text())


def mean(everything, system, suite, score, seeds=(0, 1, 2)):
    files = [everything / f"{system}-nano-seed{seed}" / f"{suite}.json" for seed in seeds]
    return sum(json.loads(file.read_text())["scores"][score]["value"] for file in files) / len(seeds)


def columns_of(name):
    from ccq.report.paper import load

    return load().tables[name].columns


@pytest.mark.parametrize("name", ["lm", "niah", "longbench"])
def test_our_numbers_are_those_of_the_files(page, everything, name):
    rows = page.block(name, "Here, nano")
    for system in ("gla", "gla-unit", "gated-deltanet", "ccq-gla", "ccq-gated-deltanet"):
        for cell, column in zip(rows[label_of(system)], columns_of(name), strict=False):
            suite, _, score = column.where.partition(":")
            score = score.replace("*", "4096" if suite == "lm" else "8192")
            digits = 1 if name == "niah" else 2
            assert cell["text"] == f"{mean(everything, system, suite, score):.{digits}f}", (system, score)
            assert "95% over 3 seeds" in cell["hover"]
            assert "95% over samples, mean of the runs' bounds" in cell["hover"]
            assert "commit 1111111; NVIDIA H200; 2026-11-14" in cell["hover"]


@pytest.mark.parametrize("name", ["configs", "lm", "niah", "longbench", "ablations"])
def test_the_papers_numbers_are_on_the_page_as_printed(page, name):
    from ccq.report.paper import load, scale_label

    table = load().tables[name]
    for row in table.rows:
        cells = page.block(name, f"The paper, {scale_label(row.scale)}")[label_of(row.system)]
        assert [cell["text"] for cell in cells[: len(row.cells)]] == [cell.text for cell in row.cells]


def test_speed_numbers_are_those_of_the_files(page):
    rows = {row[0]["text"]: [cell["text"] for cell in row[1:]] for row in page.tables["inference"]}
    for result in json.loads((BENCHMARKS / "prefill_h200.json").read_text())["rows"]:
        assert rows[label_of(result["system"])][1].split(" ")[0] == f"{result['wall_ms']['median']:.0f}"
    for result in json.loads((BENCHMARKS / "decode_h200.json").read_text())["rows"]:
        cells = rows[label_of(result["system"])]
        assert cells[2] == (str(result["paper_tok_s"]) if result["paper_tok_s"] else "–")
        assert cells[3].split(" ")[0] == f"{result['generate_tok_s']:.0f}"
    heads = [cell["text"] for cell in page.tables["training"][0]]
    assert heads[1] == "tokens/s a GPU, paper (8 GPUs)"
    assert heads[2] == "here (one GPU)"


def rows_of(page, name):
    return {row[0]["text"].strip(): [cell["text"] for cell in row[1:]] for row in page.tables[name]}


def test_benchmarks_of_the_operator_are_those_of_the_files(page):
    op = rows_of(page, "op")
    for result in json.loads((BENCHMARKS / "op_h200.json").read_text())["rows"]:
        cells = op[f"batch {result['B']}, {result['T']:,} tokens"]
        at = {("ours", "forward"): 0, ("with gate", "forward"): 1, ("ours", "forward and backward"): 2}
        if (where := at.get((result["name"], result["pass"]))) is not None:
            assert cells[where] == f"{1e3 * result['ms']['median']:.0f}"
    decode = rows_of(page, "decode-op")
    for result in json.loads((BENCHMARKS / "decode_op_h200.json").read_text())["rows"]:
        system = {"gla": "gla", "gdn": "gated-deltanet"}[result["backbone"]]
        label = {"fla": f"{label_of(system)}, by fla", "ours": label_of(f"ccq-{system}")}.get(result["variant"])
        if label is not None:
            at = {1: 0, 8: 1, 32: 2, 128: 3}[result["B"]]
            assert decode[label][at].startswith(f"{1e3 * result['ms']['median']:.1f}")
    goals = rows_of(page, "goals")
    for name in ("operator_cpu", "data_prepare"):
        for goal in json.loads((BENCHMARKS / f"{name}.json").read_text())["goals"]:
            assert goals[goal["name"]][0] == f"{goal['value']:.3g}"
            assert goals[goal["name"]][2] == ("met" if goal["ok"] else "missed")


def test_training_speed_over_lengths_is_set_against_the_control(page):
    rows = rows_of(page, "lengths")
    assert rows["CCQ-GLA, 1.3B"] == ["46,000 (−4.2%)"] * 3
    assert rows["Unit-norm GLA, 1.3B"] == ["48,000"] * 3


def test_margins_are_means_over_layers_and_heads(page):
    [cells] = [cells for label, cells in rows_of(page, "margin").items() if label.startswith("CCQ-GLA, nano")]
    assert cells == ["0.500, its own", "0.250 → 0.275", "−0.050 → −0.025", "3.2 → 2.0", "1 of 4", "1 of 4"]


def test_bold_is_the_best_of_each_block(page):
    """Computed anew from the numbers on the page; in the paper's block also where its own bold is another."""
    for name in ("lm", "niah", "longbench"):
        for title in ("The paper, 1.3B", "Here, nano"):
            rows = page.block(name, title)
            if name != "niah":
                rows.pop("Transformer")
            for at, column in enumerate(columns_of(name)):
                cells = [row[at] for row in rows.values() if len(row) > at]
                values = [float(cell["text"]) for cell in cells if "missing" not in cell["class"]]
                top = min(values) if column.better == "lower" else max(values)
                bold = {float(cell["text"]) for cell in cells if "bold" in cell["class"]}
                assert bold == ({top} if len(set(values)) > 1 else set()), (name, title, column.heading)
    assert "bold" in page.block("longbench", "The paper, 1.3B")["GLA"][12]["class"]  # LCC


def test_footnotes_stand_below_the_table(page):
    assert "RBP, 1.3B: the paper prints CCQ-GLA 26.37 in bold; best is GLA 26.81." in page.words


def test_missing_rows_and_cells_are_said_to_be_missing(page):
    assert [cell["text"] for cell in page.block("lm", "Here, nano")["Mamba2"]] == ["not run"]
    assert page.block("niah", "The paper, 1.3B")["GLA"][11]["hover"] == "not in the paper"
    assert page.block("ablations", "Here, nano")["CCQ-Gated DeltaNet, uncentred"][0]["text"] == "not run"


def test_a_missing_score_of_a_row_is_said(tmp_path):
    evaluation(tmp_path / "r", "niah", {"niah_single_1/1024": (50.0, "mean")}, "gla-nano")
    ccq.report.write([tmp_path / "r"], tmp_path / "out")
    cells = Page((tmp_path / "out" / "index.html").read_text()).block("niah", "Here, nano")["GLA"]
    assert [cell["text"] for cell in cells] == ["50.0"] + ["missing"] * 10
    assert cells[0]["small"] == "29.9–70.1"  # Wilson, 10 of 20


def test_markdown_has_the_same_numbers(report, page):
    lines = (report / "report.md").read_text().splitlines()
    for name in PAPERS:
        for row in page.tables[name]:
            words = [cell["text"].strip() for cell in row]
            if len(words) < 3:
                continue
            plain = [re.sub(r"<su[bp]>.*?</su[bp]>|\*\*", "", line) for line in lines]
            wanted = [
                [part.strip().replace("`", "") for part in line.strip("|").split("|")] for line in plain if "|" in line
            ]
            assert words in wanted, words


def test_markdown_can_be_had_alone(report, everything):
    assert ccq.report.markdown_of([everything]) == (report / "report.md").read_text()


def test_the_page_stands_by_itself(report, page):
    assert "script" not in page.tags
    assert "link" not in [tag for tag in page.tags if tag != "link"]
    outside = [link for link in page.links if not link.startswith(("#", "data:", "figures/"))]
    assert outside == []
    text = (report / "index.html").read_text()
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        elif link.startswith("figures/"):
            assert (report / link).exists()
    assert len(page.ids) == len(set(page.ids)), "an id twice"


def test_figures_are_files_too(report, page):
    names = {"picture", "training", "needles", "extrapolation", "recall", "overhead", "throughput", "alignment_depth",
             "alignment_tokens", "alignment_heads", "gates", "mqar_course", "mqar_state", "mqar_gate"}  # fmt: skip
    assert {figure.removeprefix("figure-") for figure in page.figures} == names
    for name in names:
        assert (report / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (report / "figures" / f"{name}.svg").read_text()


def test_the_first_screen_says_what_was_run_and_whether_it_helped(page):
    top = page.words[: page.words.index("Before you compare numbers")]
    assert "Curvature-Conditioned Query" in top
    assert "10 training runs: " in top
    tried = [row for row in page.tables["claims"][1:] if row[2]["text"] != "not run"]
    held = sum(row[3]["text"].endswith("holds") for row in tried)
    assert held >= 1
    counted = re.search(r"Of (\d+) claims about quality that were tried here, (\d+) holds?, (\d+) do(?:es)? not", top)
    assert counted
    quality = [v for v in claims.load() if v["kind"] in ("score", "recall")]
    says = {claim["says"] for claim in quality}
    mine = [row for row in tried if row[0]["text"] in says]
    assert int(counted[1]) == len(mine)
    assert int(counted[2]) == sum(row[3]["text"].endswith("holds") for row in mine)


@pytest.mark.parametrize("arguments", [[], ["empty"]])
def test_nothing_gives_a_page_that_says_so(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert cli.main(["report", *arguments, "-o", "out"]) == 0
    for name in ("index.html", "report.md"):
        assert "There is nothing here yet." in Path("out", name).read_text()
    assert "Of " not in Page(Path("out/index.html").read_text()).words.split("What was run here")[0].split("Did it")[1]


def test_a_path_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", str(tmp_path / "nowhere"), "-o", str(tmp_path)])
    assert "nowhere is not there" in capsys.readouterr().err


def test_damage_and_unfinished_runs_stand_on_the_page_beside_the_rest(tmp_path):
    source = tmp_path / "results"
    evaluation(source / "gla-nano", "niah", {"niah_single_1/1024": (50.0, "mean")}, "gla-nano")
    (source / "broken.json").write_text('{"suite": "lm", "sco')
    training_run(source / "gla_tiny", "gla_tiny", 0, logged=120)
    ccq.report.write([source], tmp_path / "out")
    text = Page((tmp_path / "out" / "index.html").read_text())
    assert "broken.json is damaged and left out" in text.words
    assert "gla_tiny is not finished: step 120 of 600." in text.words
    assert text.block("niah", "Here, nano")["GLA"][0]["text"] == "50.0"
    assert "120 of 600 steps" in (tmp_path / "out" / "report.md").read_text()


def test_any_part_of_a_result_may_be_missing(everything, tmp_path):
    """Files that are JSON, but not what they should be: the page is made, and a file that is left out is named."""
    from ccq.report import page
    from ccq.report.collect import collect

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
        for _ in range(9):
            content = json.loads(whole)
            place, depth = content, rng.randint(0, 4)
            while depth and isinstance(
                inner := place[key] if (key := pick(rng, place)) is not None else None, dict | list
            ):
                place, depth = inner, depth - 1
            key = pick(rng, place)
            if key is not None:
                if rng.random() < 0.5:
                    del place[key]
                else:
                    place[key] = rng.choice([None, "text", [], {}, -1])
            target.write_text(json.dumps(content))
            usable = page.without_unusable(collect([target]))
            built = page.assemble(usable)
            html.page(dataclasses.replace(built, parts=[p for p in built.parts if not isinstance(p, Figure | Columns)]))
            left_out += bool(usable.problems)
    assert left_out > 12


def damaged_gate(content):
    content["layers"] = content["layers"][:-1]


def damaged_goal(content):
    content["goals"][0]["name"] = [1]


def damaged_histogram(content):
    content["runs"][0]["test"]["slices"][0]["histogram"][0][0] = 10**30


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("analysis/gate_x.json", damaged_gate),
        ("bench/operator_cpu.json", damaged_goal),
        ("mqar_seeds.json", damaged_histogram),
    ],
)
def test_damage_that_shows_only_when_drawn_is_named(everything, tmp_path, name, damage):
    from ccq.report import write

    content = json.loads((everything / name).read_text())
    damage(content)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.json").write_text(json.dumps(content))
    evaluation(tmp_path / "results" / "good", "niah", {"niah_single_1/1024": (50.0, "mean")}, "gla-nano")
    write([tmp_path / "results"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "results/x.json lacks what it should have and is left out" in text
    assert "good/niah.json" in text


def test_a_log_that_cannot_be_drawn_is_named(everything, tmp_path):
    from ccq.report import page
    from ccq.report.collect import collect

    shutil.copytree(everything / "runs" / "ccq_gla_tiny", tmp_path / "run")
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 600, "lam": [0.1, 0.2], "lam_of_decay_alone": [0.1, 0.2]}) + "\n")
    [problem] = page.without_unusable(collect([tmp_path])).problems
    assert problem.startswith("run/config.json lacks what it should have")


def test_what_the_analysis_leaves_open_is_a_dash(tmp_path):
    """A model whose heads differ in size, and prompts without such tokens."""
    from ccq.report import page
    from ccq.report.collect import collect
    from ccq.report.docs import tables_of

    content = alignment(tmp_path / "a.json", "SmolLM2-135M")
    for part in content["points"]["projection"]["top"].values():
        part["of_isotropic_keys"] = [0.25, 0.5]
        for group in ("unique", "novel", "novel minus planted"):
            part[group] |= {"mean": None, "error_of_mean": None, "thirds": [None] * 3, "negative_layers": 0}
            part[group] |= {name: [None] * 4 for name in ("by_layer", "deviation_by_layer")}
            part[group]["by_head"] = [[None, None]] * 4
    (tmp_path / "a.json").write_text(json.dumps(content))
    document = page.build(collect([tmp_path]))
    row = tables_of(document.parts)["gap"].blocks[1].rows[0]
    assert [cell.text for cell in row.cells[:3]] == ["projection", "0.25, 0.50", "–"]


def test_changed_cleaning_stands_under_its_own_scores(tmp_path):
    from ccq.report import page
    from ccq.report.collect import collect
    from ccq.report.docs import tables_of

    for seed, suites in enumerate(({"niah": {"a": 1.0, "b": 2.0}}, {"niah": {"b": 3.0}, "length": {"c": 4.0}})):
        content = {"kind": "intervene", **named(f"ccq-gla-nano-seed{seed}"), "provenance": origin(),
                   "rows": [{"intervention": "none", "suites": suites}]}  # fmt: skip
        (tmp_path / f"{seed}.json").write_text(json.dumps(content))
    table = tables_of(page.build(collect([tmp_path])).parts)["intervene"]
    assert table.head == ["", "niah: a", "niah: b", "length: c"]
    shown = [[cell.text for cell in row.cells] for row in table.blocks[0].rows]
    assert shown == [["1.00", "2.00", "missing"], ["missing", "3.00", "4.00"]]
    for seed, lengths in enumerate(((512, 4096), (1024, 102400))):
        content["rows"][0]["suites"] = {"niah": {f"niah_single_1/{length}": 1.0 for length in lengths}}
        (tmp_path / f"{seed}.json").write_text(json.dumps(content))
    table = tables_of(page.build(collect([tmp_path])).parts)["intervene"]
    assert table.head[1:] == ["S1 512", "S1 1K", "S1 4K", "S1 100K"]
    assert len(table.blocks[0].rows) == 2  # they are of no run: whether of one model is not known


def test_what_a_run_was_asked_with_its_cleaning_changed_is_one_row_and_no_model(tmp_path):
    from ccq.report import page
    from ccq.report.collect import collect
    from ccq.report.docs import tables_of

    run = tmp_path / "ccq_gla_nano_seed0"
    text_run(run, "ccq_gla_nano", 0, 30.0)
    evaluation(run / "eval", "niah", {"niah_single_1/4096": (50.0, "mean")}, "model")
    for part, task in (("passkey", "niah_single_1/4096"), ("others", "niah_single_2/4096")):
        rows = [
            {"intervention": name, "suites": {"niah": {task: value}}} for name, value in (("none", 50), ("off", 99))
        ]
        folder = run / "intervene" / part
        evaluation(folder / "off", "niah", {task: (99.0, "mean")}, "model, lam off")
        content = {"kind": "intervene", "identity": identity("model", folder), "model": {"name": "model"}, "rows": rows,
                   "provenance": origin()}  # fmt: skip
        (folder / "intervene.json").write_text(json.dumps(content))
    tables = tables_of(page.build(collect([tmp_path])).parts)
    shown = [[cell.text for cell in row.cells] for row in tables["intervene"].blocks[0].rows]
    assert shown == [["50.00", "50.00"], ["99.00", "99.00"]]
    needles = [row for block in tables["niah"].blocks if block.title.startswith("Here") for row in block.rows]
    assert not any("at inference" in row.label.text for row in needles)


def test_variants_of_one_system_are_drawn_apart():
    from ccq.report.figures import legend_of
    from ccq.report.systems import System

    variants = ("", "text plain", "text no-ruler", "convolution of 4", "lam 0.3")
    looks = [look for _, *look in legend_of([System("gated-deltanet", variant) for variant in variants])]
    assert len({colour for colour, *_ in looks}) == 1
    assert len(set(map(tuple, looks))) == len(variants)


def test_the_gates_figure_says_what_text_was_read(everything, tmp_path):
    from ccq.report import figures
    from ccq.report.collect import collect

    content = json.loads((everything / "analysis" / "gate_x.json").read_text())
    for text, told in (("filler", "on text (our filler),"), ("book.txt", "on text (the text book.txt),")):
        (tmp_path / "gate.json").write_text(json.dumps(content | {"settings": {"text": text}}))
        assert told in figures.gates(collect([tmp_path])).caption


def test_seeds_of_one_row_share_a_panel_of_gates(everything, tmp_path):
    """... and nothing else does: not another model of the same name, and not one with other layers."""
    from ccq.report import figures
    from ccq.report.collect import collect

    content = json.loads((everything / "analysis" / "gate_x.json").read_text())

    def titles():
        return [panel.title for panel in figures.gates(collect([tmp_path])).panels]

    for seed, name in enumerate(("ccq-gla-nano-seed0", "ccq-gla-nano-seed1", "unknown", "unknown")):
        (tmp_path / f"{seed}.json").write_text(json.dumps(content | named(name)))
    assert sorted(titles()) == ["CCQ-GLA, nano, 2 seeds", "unknown", "unknown"]
    with (tmp_path / "1.json").open("w") as file:
        lam = {place: [*rows, rows[-1]] for place, rows in content["lam"].items()}
        deeper = {"layers": [*content["layers"], 99], "lam": lam, **named("ccq-gla-nano-seed1")}
        json.dump(content | deeper, file)
    assert sorted(titles()) == ["CCQ-GLA, nano, seed 0", "CCQ-GLA, nano, seed 1", "unknown", "unknown"]


def pick(rng, place):
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    return rng.choice(keys) if keys else None


def test_text_of_results_cannot_become_markup(tmp_path):
    evaluation(tmp_path / "r", "niah", {"niah_single_1/1024": (50.0, "mean")}, "<script>alert(1)</script>")
    ccq.report.write([tmp_path / "r"], tmp_path / "out")
    assert "<script" not in (tmp_path / "out" / "index.html").read_text()


def test_the_same_results_give_the_same_page(everything, report, tmp_path):
    shutil.copytree(everything / "bench", tmp_path / "bench")
    for name in ("a", "b"):
        ccq.report.write([tmp_path / "bench"], tmp_path / name)
    assert (tmp_path / "a" / "index.html").read_bytes() == (tmp_path / "b" / "index.html").read_bytes()


def test_results_of_the_real_commands_are_read(tmp_path):
    """`ccq train` and `ccq eval` themselves, on a tiny model."""
    from ccq.evaluate import Options, evaluate
    from ccq.train.export import load_weights

    run = tmp_path / "ccq_gla_tiny"
    small = ["--steps", "4", "--runtime.log-every", "2", "--runtime.no-tensorboard", "--data.batch", "4",
             "--runtime.micro-batch", "4", "--seed", "3"]  # fmt: skip
    assert cli.main(["train", "ccq_gla_tiny", "--run-dir", str(run), *small]) == 0
    options = Options(out=run / "eval", slices=((32, 4, 9), (32, 8, 9)), limit=2)
    result = evaluate(load_weights(run)[0], None, "mqar", options, "model")
    ccq.report.write([tmp_path], tmp_path / "out")
    page = Page((tmp_path / "out" / "index.html").read_text())
    cells = page.block("recall", "Here, tiny")["CCQ-GLA"]
    assert [cell["text"] for cell in cells] == [
        f"{result['scores'][n]['value']:.2f}" for n in ("32-4", "32-8", "average")
    ]
    assert "seed 3" in cells[0]["hover"]
    assert page.block("configs", "Here")["CCQ-GLA, tiny, seed 3"][2]["small"].startswith("4 of 4 steps")
    assert "eval/mqar.json (first 2)" in page.words


# -- how it looks ------------------------------------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return sum(w * (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4)
               for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True))  # fmt: skip


def contrast(one, two):
    bright, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_in_light_and_dark(scheme):
    blocks = re.findall(r":root \{(.*?)\}", html.STYLE.read_text(), flags=re.DOTALL)
    colours = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", blocks[0 if scheme == "light" else 1]))
    for text in ("text", "soft", "link"):
        for ground in ("page", "raised", "ours"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in ("ink", "blue", "sky", "green", "orange", "red", "purple", "grey"):
        assert contrast(colours[line], colours["page"]) >= 3, line


def test_lines_differ_in_more_than_colour():
    from ccq.report.figures import LINES, VARIANTS

    assert len(set((LINES | VARIANTS).values())) == len(LINES | VARIANTS)
    assert len({(line, marker) for _, line, marker in LINES.values()}) >= len(LINES) - 2
    for with_ccq, without in (("ccq-gla", "gla"), ("ccq-gla", "gla-unit"), ("ccq-gated-deltanet", "gated-deltanet")):
        assert LINES[with_ccq][1:] != LINES[without][1:]


def test_the_picture_is_what_the_operator_computes():
    """Its q_clean is the package's, and the needle's rank goes from worse to first."""
    import torch

    from ccq import clean_query
    from ccq.report.figures import example

    found = example(lam=1.0)
    keys = torch.from_numpy(found["keys"])[None, :, None]
    q = torch.from_numpy(found["q"]).expand(len(found["keys"]), 2)[None, :, None]
    q_clean, _, _ = clean_query(q, keys, torch.ones(1, len(found["keys"]), 1, dtype=torch.float64), normalize="none")
    assert torch.allclose(q_clean[0, -1, 0], torch.from_numpy(found["q_clean"]), atol=1e-9)
    assert found["before"].argmax() != len(keys[0]) - 1
    assert found["after"].argmax() == len(keys[0]) - 1
