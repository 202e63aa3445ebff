"""Intervals against closed forms, and paired differences that find what is there and nothing else."""

import json
import math
import types

import numpy as np
import pytest
from helpers import pack

from ccq import cli
from ccq.evaluate import statistics
from ccq.evaluate.compare import compare, difference, paired
from ccq.report.claims import sample_difference


def rows_of(scores, group="g", **more):
    return [{"id": f"{group}/{n}", "group": group, "score": float(x), **more} for n, x in enumerate(scores)]


def write_run(folder, groups, aggregate="mean", suite="niah", hash_="h", quick=False, **more):
    folder.mkdir(parents=True)
    rows = [row for mine in groups.values() for row in mine]
    scores = {name: statistics.summary(mine, aggregate) for name, mine in groups.items()}
    if len(groups) > 1:
        scores["average"] = statistics.average(groups)
    samples = {"hash": hash_, "count": len(rows)}
    result = {"suite": suite, "scores": scores, "samples": samples, "quick_look": quick, **more}
    (folder / f"{suite}.json").write_text(json.dumps(result))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / f"{suite}.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("right", "n"), [(0, 10), (10, 10), (8, 10), (250, 500)])
def test_wilson_inverts_the_score_test(right, n):
    """Its ends are where |p - p0| = z sqrt(p0 (1 - p0) / n)."""
    for end in statistics.wilson(right, n):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(right / n - end) == pytest.approx(statistics.Z * math.sqrt(end * (1 - end) / n))
    assert statistics.wilson(0, 10)[0] == pytest.approx(0, abs=1e-12)
    assert statistics.wilson(10, 10)[1] == pytest.approx(1)


def test_bootstrap_of_many_samples_is_the_normal_interval():
    scores = np.random.default_rng(0).random(400)
    found = statistics.summary(rows_of(scores))
    half = 1.96 * 100 * scores.std() / 20
    assert found["method"] == "bootstrap"
    assert found["value"] == pytest.approx(100 * scores.mean())
    assert found["interval"] == pytest.approx([found["value"] - half, found["value"] + half], abs=0.25)
    assert statistics.summary(rows_of(scores))["interval"] == found["interval"]  # not drawn anew


def test_perplexity_weighs_tokens():
    rows = [{"id": "a", "score": 2.0, "weight": 2}, {"id": "b", "score": 30.0, "weight": 10}]
    assert statistics.summary(rows, "perplexity")["value"] == pytest.approx(math.exp(32 / 12))


def test_units_are_resampled_whole():
    rows = [{"id": f"{n}", "unit": n % 2, "score": float(n % 2)} for n in range(100)]
    found = statistics.summary(rows)["interval"]
    assert found == [0.0, 100.0]
    assert statistics.summary([{"id": "a", "score": 0.5}])["interval"] is None


def test_paired_differences_see_what_unpaired_ones_cannot():
    hard = np.random.default_rng(1).random(200)  # how hard each sample is: most of the spread
    found = paired(rows_of(hard), rows_of(np.clip(hard + 0.02, 0, 2)), "mean")
    assert found["difference"] == pytest.approx(2.0)
    assert found["interval"] == pytest.approx([2.0, 2.0])
    assert found["significant"]
    assert not paired(rows_of(hard), rows_of(hard), "mean")["significant"]
    assert paired(rows_of(hard), rows_of(hard), "mean")["p"] == 1.0


def test_chance_is_called_significant_about_one_time_in_twenty():
    rng = np.random.default_rng(2)
    pairs = [(rows_of(rng.random(40)), rows_of(rng.random(40))) for _ in range(80)]
    calls = [paired(one, two, "mean", seed)["significant"] for seed, (one, two) in enumerate(pairs)]
    assert 0 < sum(calls) <= 12  # 4 expected; more than 12 has p = 3e-4


@pytest.mark.parametrize("n", [6, 9])
def test_chance_is_called_significant_one_time_in_twenty_with_few_units_too(n):
    """Without Student's t it is 13 times in a hundred at 6 units."""
    rng = np.random.default_rng(3)
    calls = [
        paired(rows_of(rng.normal(size=n)), rows_of(rng.normal(size=n)), "mean")["significant"] for _ in range(800)
    ]
    assert 0.02 < np.mean(calls) < 0.08  # of 0.05, four deviations


@pytest.mark.parametrize(("n", "gained", "lost"), [(6, 0.3, 0.3), (20, 0.1, 0.1), (20, 0.4, 0.2), (100, 0.02, 0.02),
                                                   (100, 0.01, 0.04), (100, 0.3, 0.1), (500, 0.05, 0.03)])  # fmt: skip
def test_the_difference_of_proportions_is_in_its_interval_19_times_in_20(n, gained, lost):
    counts = np.random.default_rng(5).multinomial(n, [gained, lost, 1 - gained - lost], size=1500).tolist()
    found = {}
    for up, down, same in counts:
        if (up, down) not in found:
            one, two = [0.0] * up + [1.0] * (down + same), [1.0] * up + [0.0] * down + [1.0] * same
            found[up, down] = paired(rows_of(one), rows_of(two), "mean")["interval"]
    inside = [low <= 100 * (gained - lost) <= high for low, high in (found[up, down] for up, down, _ in counts)]
    assert np.mean(inside) > 0.93


def test_right_and_wrong_are_compared_by_what_changed():
    """Four lost of 100 and none gained is chance one time in eight, by the sign test; six is not."""
    right = np.ones(100)
    for lost, called in ((0, False), (4, False), (6, True)):
        wrong = np.where(np.arange(100) < lost, 0.0, 1.0)
        found = paired(rows_of(right), rows_of(wrong), "mean")
        assert found["difference"] == pytest.approx(-lost)
        assert found["significant"] == called == (found["p"] < 0.05)
        low, high = found["interval"]
        assert -100 <= low < -lost < high, "there is some doubt, also where none differs"
        again = paired(rows_of(wrong), rows_of(right), "mean")
        assert again["interval"] == pytest.approx([-high, -low], abs=1.5)
        assert again["p"] == pytest.approx(found["p"], abs=0.03)


def test_an_average_of_right_and_wrong_is_no_surer_than_its_parts():
    """Four lost in one of three groups: as likely chance as in that group alone."""
    right, wrong = np.ones(100), np.where(np.arange(100) < 4, 0.0, 1.0)
    first = {name: rows_of(right, name) for name in "abc"}
    average = statistics.average(first)
    found = difference("average", average, first, first | {"b": rows_of(wrong, "b")})
    assert found["difference"] == pytest.approx(-4 / 3)
    assert not found["significant"]
    assert difference("average", average, first, first)["interval"][1] > 0


def test_all_against_none_stays_within_what_is_possible():
    found = paired(rows_of([0.0] * 100), rows_of([1.0] * 100), "mean")
    assert 90 < found["interval"][0] < found["interval"][1] <= 100
    assert 0 < found["p"] < 0.01


def test_the_interval_of_few_units_is_students():
    rng = np.random.default_rng(4)
    one, two = rng.normal(size=(2, 8))
    found = paired(rows_of(one), rows_of(two), "mean")
    half = 100 * 2.365 * (two - one).std(ddof=1) / math.sqrt(8)  # t of 7 degrees of freedom
    assert (found["interval"][1] - found["interval"][0]) / 2 == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize("freedom", [*range(2, 31), 40, 400])
def test_students_quantile(freedom):
    """P(|T| < t) = 95%, by summing the density."""
    x = np.linspace(-60, 60, 1_200_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    beyond = 4e-4 if freedom < 5 else 2e-4  # what lies past 60, and the digits of tables
    assert density[np.abs(x) < statistics.student(freedom)].sum() * 1e-4 == pytest.approx(0.95, abs=beyond)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_units_have_no_interval_and_the_table_says_so(n, tmp_path, capsys):
    """All on one side of zero, as chance alone has five one time in sixteen; windows of a document are one unit."""
    runs = []
    for name, loss in (("gla", 3.0), ("ccq-gla", 2.0)):
        rows = [{"id": f"a/{w}/{d}", "group": "a", "unit": d, "score": loss, "weight": 1}
                for w in range(9) for d in range(n)]  # fmt: skip
        runs.append(write_run(tmp_path / name, {"a": rows}, "perplexity", "length"))
    table = compare(runs)["suites"]["length"]["a"]["differences"][0]
    assert table == {"samples": 9 * n, "units": n, "difference": pytest.approx(math.exp(2) - math.exp(3)),
                     "interval": None, "p": None, "significant": False}  # fmt: skip
    assert cli.main(["compare", *map(str, runs)]) == 0
    shown = capsys.readouterr().out
    assert f"-12.70  too few ({n})" in shown
    assert "takes 6 documents" in shown
    assert sample_difference(*map(source_of, runs), "a") is None


def source_of(run):
    """A result as the report has it."""
    (path,) = run.glob("*.json")
    return types.SimpleNamespace(path=path, content=json.loads(path.read_text()))


def test_an_average_takes_two_units_of_each_group_and_six_in_all():
    def groups(*sizes, shift=0.0):
        return {str(k): rows_of(np.arange(n) / 10 + shift, str(k)) for k, n in enumerate(sizes)}

    for sizes, enough in (((1, 30), False), ((2, 3), False), ((2, 4), True), ((3, 3, 3), True)):
        first, second = groups(*sizes), groups(*sizes, shift=0.1)
        found = difference("average", statistics.average(first), first, second)
        assert found["difference"] == pytest.approx(10)
        assert (found["interval"] is not None) == (found["p"] is not None) == found["significant"] == enough


def test_p_is_never_zero():
    found = paired(rows_of([0.0] * 50), rows_of([1.0] * 50), "mean")
    assert found["p"] == pytest.approx(2 / (statistics.RESAMPLES + 1))


def test_samples_are_paired_by_name():
    first = rows_of([1, 0, 1, 1])
    second = list(reversed(rows_of([1, 1, 1, 1])))[:3]
    found = paired(first, second, "mean")
    assert found["samples"] == 3
    assert found["difference"] == pytest.approx(100 / 3)


def test_the_table_has_every_score_and_says_what_differs(tmp_path, capsys):
    first = write_run(tmp_path / "gla", {"a": rows_of([0, 0, 1, 0] * 20, "a"), "b": rows_of([1] * 40, "b")})
    groups = {"a": rows_of([1, 0, 1, 0] * 20, "a"), "b": rows_of([1] * 40, "b")}
    second = write_run(tmp_path / "ccq-gla", groups, hash_="other", quick=True)
    assert cli.main(["compare", str(first), str(second), "--out", str(tmp_path / "table.json")]) == 0
    shown = capsys.readouterr().out
    assert "+25.00*" in shown
    assert "+0.00 " in shown
    assert "+12.50*" in shown  # the average
    assert "the runs differ in samples" in shown
    assert "quick look" in shown
    table = json.loads((tmp_path / "table.json").read_text())["suites"]["niah"]
    assert table["a"]["values"] == [25.0, 50.0]
    assert not table["b"]["differences"][0]["significant"]


def test_only_what_both_were_asked_is_compared(tmp_path, capsys):
    """Recall of two vocabularies has samples of the same names: as a difference of models it would be significant."""
    none, all_ = ([{**row, "prompt_hash": f"{kind}{row['id']}"} for row in rows_of([score] * 40)]
                  for kind, score in (("8192 ", 0), ("256 ", 1)))  # fmt: skip
    first = write_run(tmp_path / "one", {"g": none})
    second = write_run(tmp_path / "two", {"g": all_}, hash_="other")
    mixed = write_run(tmp_path / "mixed", {"g": [*none[:10], *all_[10:]]}, hash_="mixed")
    assert cli.main(["compare", str(first), str(second)]) == 0
    shown = capsys.readouterr().out
    assert "scores are over all of a run, differences over samples that both have" in shown
    assert shown.splitlines()[1].split() == ["g", "0.00", "100.00", "-"]
    (found,) = compare([first, mixed])["suites"]["niah"]["g"]["differences"]
    assert (found["samples"], found["difference"]) == (10, 0)


def test_with_two_tokenizers_settings_tell_what_was_asked_the_same(tmp_path):
    def asked(name, sizing, score):
        rows = [{**row, "prompt_hash": f"{name}{row['id']}"} for row in rows_of([score] * 40)]
        more = {"tokenizer": {"hash": name}, "settings": {"sizing": sizing, "max_length": len(name)}}
        return write_run(tmp_path / name, {"g": rows}, hash_=name, **more)

    runs = [asked("gpt", "ruler", 0), asked("llama", "ruler", 1), asked("qwen", "full", 1)]
    table = compare(runs)
    alike, other = table["suites"]["niah"]["g"]["differences"]
    assert alike["difference"] == 100
    assert alike["significant"]
    assert other["samples"] == 0
    assert table["notes"] == [
        "niah: the runs differ in samples: scores are over all of a run, differences over samples of one name, as "
        "tokenizers differ"
    ]


def test_perplexities_of_two_tokenizers_are_not_subtracted(tmp_path):
    """They are per token; those of `lm` are per word."""
    found = {}
    for suite in ("length", "lm"):
        runs = []
        for name in ("one", "two"):
            rows = [{**row, "prompt_hash": f"{name}{row['id']}"} for row in rows_of([1, 0] * 20)]
            more = {"tokenizer": {"hash": name}, "settings": {}}
            runs.append(write_run(tmp_path / suite / name, {"g": rows}, suite=suite, hash_=name, **more))
        found[suite] = compare(runs)["suites"][suite]["g"]["differences"][0]["samples"]
    assert found == {"length": 0, "lm": 40}


def test_a_suite_that_a_folder_lacks_is_named(tmp_path, capsys):
    runs = [write_run(tmp_path / name, {"a": rows_of([1, 0] * 5, "a")}) for name in ("one", "two")]
    assert cli.main(["compare", *map(str, runs), "--suite", "niah,mqar"]) == 1
    assert "--suite: not all of the folders have mqar" in capsys.readouterr().err


def test_a_table_replaces_an_older_one_of_the_same_runs_and_nothing_else(tmp_path, capsys):
    runs = [write_run(tmp_path / name, {"a": rows_of([1, 0] * 5, "a")}) for name in ("one", "two", "three")]
    result, table = runs[0] / "niah.json", tmp_path / "table.json"
    before = result.read_bytes()
    for out, others, code in ((table, runs[:2], 0), (table, runs[:2], 0), (table, runs, 1), (result, runs, 1)):
        assert cli.main(["compare", *map(str, others), "--out", str(out)]) == code
        assert code == 0 or f"{out} holds something else, which stays" in capsys.readouterr().err
    assert result.read_bytes() == before
    assert len(json.loads(table.read_text())["runs"]) == 2


def test_lower_is_better_for_perplexity(tmp_path):
    runs = []
    for name, loss in (("one", 3.0), ("two", 2.9)):
        rows = [{"id": f"a/{n}", "group": "a", "unit": n, "score": loss * (9 + n), "weight": 9 + n} for n in range(30)]
        runs.append(write_run(tmp_path / name, {"a": rows}, "perplexity", "length"))
    row = compare(runs)["suites"]["length"]["a"]
    assert row["better"] == "lower"
    assert row["differences"][0]["difference"] == pytest.approx(math.exp(2.9) - math.exp(3.0))
    assert row["differences"][0]["significant"]


def test_folders_without_results_are_named(tmp_path, capsys):
    run = write_run(tmp_path / "run", {"a": rows_of([1, 0])})
    other = write_run(tmp_path / "other", {"a": rows_of([1, 0])}, suite="lm")
    (tmp_path / "empty").mkdir()
    assert cli.main(["compare", str(run), str(tmp_path / "empty")]) == 1
    assert "empty has no results: expected a folder" in capsys.readouterr().err
    assert cli.main(["compare", str(run), str(other)]) == 1
    assert "no suite is in all of" in capsys.readouterr().err
    (run / "niah.jsonl").unlink()
    assert cli.main(["compare", str(run), str(run)]) == 1
    assert "niah.jsonl is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["compare", str(run)])


def test_lines_end_where_json_lines_do(tmp_path):
    """U+2028, U+2029 and U+0085 stand in JSON as they are; str.splitlines() would cut there."""
    runs = [
        write_run(tmp_path / name, {"a": rows_of(scores, "a", output="one\u2028two\u2029three\u0085four")})
        for name, scores in (("one", [0, 1] * 5), ("two", [1, 1] * 5))
    ]
    assert "\u2028" in (runs[0] / "niah.jsonl").read_text(encoding="utf-8")
    assert compare(runs)["suites"]["niah"]["a"]["differences"][0]["difference"] == 50
    low, high = sample_difference(*map(source_of, runs), "a")
    assert low < 50 < high


def test_samples_are_read_the_same_where_they_are_packed(tmp_path):
    runs = [write_run(tmp_path / name, {"a": rows_of([0, 1] * n, "a")}) for name, n in (("one", 9), ("two", 7))]
    plain = compare(runs), sample_difference(*map(source_of, runs), "a")
    for run in runs:
        pack(run / "niah.jsonl")
    assert (compare(runs), sample_difference(*map(source_of, runs), "a")) == plain


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (lambda text: text[:-30], "niah.jsonl is damaged after line 9 ("),
        (lambda text: "".join(text.splitlines(keepends=True)[:7]), "niah.jsonl is cut off after line 7: "),
        (lambda text: text.replace('"group": "a", ', "", 1), "niah.jsonl, line 1: expected JSON lines with the fields"),
    ],
    ids=["in a line", "between lines", "a field"],
)
def test_damaged_samples_are_named_by_file_and_line(tmp_path, capsys, keep, said):
    run, other = (write_run(tmp_path / name, {"a": rows_of([1, 0] * 5, "a")}) for name in ("run", "other"))
    lines = run / "niah.jsonl"
    lines.write_text(keep(lines.read_text()))
    assert cli.main(["compare", str(other), str(run)]) == 1
    assert said in capsys.readouterr().err


def test_runs_are_called_by_what_tells_them_apart(tmp_path, capsys):
    runs = [write_run(tmp_path / name / "eval", {"a": rows_of([1, 0] * 5, "a")}) for name in ("gla", "ccq-gla")]
    assert cli.main(["compare", *map(str, runs)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["niah", "gla", "ccq-gla", "ccq-gla", "-", "gla"]


def test_runs_of_the_evaluation_can_be_compared(model, tokenizer, data, tmp_path):
    from ccq.evaluate import Options, evaluate

    for name in ("one", "two"):
        options = Options(out=tmp_path / name, data=data, lengths=(64,), tasks=("qasper",))
        evaluate(model, tokenizer, "length", options, name)
    table = compare([tmp_path / "one", tmp_path / "two"])
    (row,) = table["suites"]["length"].values()
    assert row["differences"][0]["difference"] == 0
    assert not row["differences"][0]["significant"]
    assert table["notes"] == []
