"""Results are told by what they hold; what is damaged, unfinished or mixed is said."""

import json

import pytest
from helpers import pack
from made_results import BENCHMARKS, alignment, evaluation, origin, text_run, training_run

from ccq.report.collect import collect
from ccq.report.page import build, without_unusable
from ccq.report.results import Results
from ccq.systems import Identity

ONE = {"niah_single_1/1024": (50.0, "mean")}


def test_kinds_are_told_by_content_not_by_name(tmp_path):
    evaluation(tmp_path / "a", "niah", ONE, "gla-nano")
    (tmp_path / "a" / "niah.json").rename(tmp_path / "a" / "anything.json")
    alignment(tmp_path / "deep" / "er" / "x.json", "SmolLM2-135M")
    for name in ("decode_h200", "decode_op_h200", "layer_h200", "op_h200", "operator_cpu", "prefill_h200"):
        (tmp_path / f"copy of {name}.json").write_text((BENCHMARKS / f"{name}.json").read_text())
    training_run(tmp_path / "run", "ccq_gla_tiny", 1, 600)
    (tmp_path / "other.json").write_text('{"rows": [], "versions": {}}')
    (tmp_path / "list.json").write_text("[1, 2]")
    found = collect([tmp_path])
    kinds = sorted((source.kind, source.detail) for source in found.sources)
    benches = [("bench", kind) for kind in ("decode", "decode-op", "layer", "op", "operator-cpu", "prefill")]
    assert kinds == [("analysis", "alignment"), *benches, ("eval", "niah"), ("run", "")]
    assert found.problems == found.unfinished == []
    assert len(found.ignored) == 2


def test_a_file_a_folder_and_the_same_again_count_once(tmp_path):
    evaluation(tmp_path, "niah", ONE, "gla-nano")
    assert len(collect([tmp_path, tmp_path / "niah.json", tmp_path]).sources) == 1


def test_damaged_files_are_named_and_the_rest_is_there(tmp_path):
    evaluation(tmp_path / "good", "niah", ONE, "gla-nano")
    content = (tmp_path / "good" / "niah.json").read_text()
    whole = json.loads(content)
    changes = {"scores": {"scores": {"niah_single_1/1024": "high"}}, "identity": {"identity": {"system": 1}},
               "suite": {"suite": [1]}, "hash": {"model": {"name": "gla-nano", "hash": [1]}}}  # fmt: skip
    bad = {name: json.dumps(whole | changed) for name, changed in changes.items()}
    bad |= {"cut": content[: len(content) // 2], "deep": "[" * 100_000 + "]" * 100_000, "bytes": "\udcff\udcfe\0"}
    bad["lacks"] = json.dumps({key: value for key, value in whole.items() if key != "model"})
    for name, text in bad.items():
        (tmp_path / f"{name}.json").write_text(text, errors="surrogateescape")
    found = without_unusable(collect([tmp_path]))
    assert [source.name for source in found.sources] == ["good/niah.json"]
    assert len(found.problems) == len(bad) == 8
    for name in bad:
        assert sum(f"{name}.json" in problem for problem in found.problems) == 1


def test_what_is_half_finished_is_said(tmp_path):
    training_run(tmp_path / "gla_tiny", "gla_tiny", 0, logged=250)
    with (tmp_path / "gla_tiny" / "log.jsonl").open("a") as file:
        file.write('{"step": 260, "lo')  # as a kill leaves it
    training_run(tmp_path / "fresh", "gla_tiny", 0, logged=0)
    answers = tmp_path / "eval" / "responses" / "niah.jsonl"
    answers.parent.mkdir(parents=True)
    answers.write_text('{"identity": {}}\n' + '{"key": "a"}\n' * 7)
    found = collect([tmp_path])
    assert found.problems == []
    assert sorted(found.unfinished) == [
        "fresh is not finished: step 0 of 600.",
        "gla_tiny is not finished: step 250 of 600.",
        "niah of eval is not finished: 7 answers, no scores.",
    ]


def test_a_packed_log_is_read_as_a_plain_one_and_a_damaged_line_of_it_named(tmp_path):
    training_run(tmp_path / "run", "gla_tiny", 0, logged=600)
    log = tmp_path / "run" / "log.jsonl"
    plain, lines = collect([tmp_path]).of("run")[0].records, log.read_text().splitlines()
    pack(log)
    assert collect([tmp_path]).of("run")[0].records == plain != []
    log.write_text("\n".join([lines[0], "{", *lines[2:]]) + "\n")
    found = collect([tmp_path])
    assert found.problems == ["run/log.jsonl: line 2 is damaged and left out."]
    assert found.of("run")[0].records == [plain[0], *plain[2:]]


def test_a_file_that_is_too_large_to_be_a_result_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("ccq.report.collect.LARGEST", 2**19)
    (tmp_path / "weights.json").write_text(json.dumps({"x": "a" * 2**20}))
    found = collect([tmp_path])
    assert (found.sources, found.ignored) == ([], [])
    assert found.problems[0].endswith("/weights.json is left out: it is larger than 0.5 MiB, as no result is.")


def test_mixed_commits_versions_samples_and_quick_looks_are_said(tmp_path):
    evaluation(tmp_path / "a", "niah", ONE, "gla-nano")
    evaluation(tmp_path / "b", "niah", ONE, "ccq-gla-nano", **origin("2" * 40, "0.2.0", dirty=True), limit=5,
               quick_look=True, samples={"hash": "other", "count": 1, "requests": 1})  # fmt: skip
    notices = " ".join(collect([tmp_path]).notices())
    assert "Results of 2 commits are mixed here: 1111111, 2222222." in notices
    assert "several versions of ccq are mixed here: 0.1.0, 0.2.0" in notices
    assert "These are quick looks, not whole suites: b/niah.json (first 5)" in notices
    assert "uncommitted changes: b/niah.json" in notices
    assert "niah: the models have different samples" in notices
    assert collect([tmp_path / "a"]).notices() == []


def row(source):
    return Identity(source.identity.system, source.identity.variant, source.identity.size)


def test_a_result_is_of_what_it_says(tmp_path):
    training_run(tmp_path / "first", "ccq_gated_deltanet_uncentred_tiny", 7, 600)
    told = json.loads((tmp_path / "first" / "config.json").read_text())["identity"]
    evaluation(tmp_path / "first" / "eval", "niah", ONE, "model")
    evaluation(tmp_path / "gla-nano-seed3", "niah", ONE, "gla-nano-seed3", identity=told)  # not what its names say
    found = {source.path.parent.name: source for source in collect([tmp_path]).of("eval")}
    system = Identity("ccq-gated-deltanet-uncentred", "", "tiny")
    told = {name: (row(s), s.seed, s.run is not None) for name, s in found.items()}
    assert told == {"eval": (system, 7, True), "gla-nano-seed3": (system, 7, False)}


def test_a_result_or_run_without_identity_is_named_and_left_out(tmp_path):
    text_run(tmp_path / "run", "ccq_gla_open_pico", 3, 30.0)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config["identity"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    evaluation(tmp_path / "other", "niah", ONE, "gla-nano-seed0", identity=None)
    found = collect([tmp_path])
    assert found.sources == []
    for name in ("run/config.json", "other/niah.json"):
        assert any(note.startswith(f"{name} is incomplete and left out") for note in found.notices())


def test_a_model_that_ships_is_not_the_run_of_its_name(tmp_path):
    """The shipped gla-pico has a convolution; a run called gla-pico need not."""
    text_run(tmp_path / "gla-pico", "gla_pico", 0, 30.0)
    told = json.loads((tmp_path / "gla-pico" / "config.json").read_text())["identity"]
    evaluation(tmp_path / "gla-pico" / "eval", "niah", ONE, "gla-pico", identity=told,
               model={"name": "gla-pico", "hash": "a" * 64})  # fmt: skip
    evaluation(tmp_path / "demo" / "gla-pico", "niah", {"niah_single_1/1024": (90.0, "mean")}, "gla-pico",
               model={"name": "gla-pico", "hash": "b" * 64})  # fmt: skip
    evaluation(tmp_path / "again", "length", {"code/4096": (9.0, "perplexity")}, "gla-pico", identity=told,
               model={"name": "gla-pico", "hash": "a" * 64})  # fmt: skip
    found = collect([tmp_path])
    told = {(s.path.parent.name, s.detail): (row(s), s.seed) for s in found.of("eval")}
    run, ships = Identity("gla", "", "pico"), Identity("gla", "convolution of 4", "pico")
    assert told == {("eval", "niah"): (run, 0), ("gla-pico", "niah"): (ships, 0), ("again", "length"): (run, 0)}
    results = Results(found)
    values = {s: results.estimate(s, "niah:niah_single_1/1024").value for s in results.rows("niah")}
    assert values == {run: 50.0, ships: 90.0}


def test_of_a_seed_only_equal_weights_and_declared_repeats_are_averaged(tmp_path):
    group = "niah_single_1/1024"
    for folder, value, weights, n in (("gla-nano-seed0", 80.0, "a", 20), ("gla-nano-seed0 again", 60.0, "a", 20),
                                      ("gla-nano-seed0-repeat1", 40.0, "b", 20), ("gla-nano-seed0 other", 0.0, "c", 10)
                                      ):  # fmt: skip
        model = {"name": folder.split()[0], "hash": weights}
        evaluation(tmp_path / folder, "niah", {group: (value, "mean")}, model["name"], n=n, model=model)
    estimate = Results(collect([tmp_path])).estimate(Identity("gla", "", "nano"), f"niah:{group}")
    assert estimate.by_seed == {0: 60.0}
    assert sorted(estimate.values) == [40.0, 60.0, 80.0]
    [note] = estimate.notes
    assert note == "gla-nano-seed0 other/niah.json, of the same seed, is left out: other weights, or another rate"


def test_a_seed_that_was_run_twice_counts_once_over_samples_too(tmp_path):
    group = "niah_single_1/1024"
    for name, value in (("seed0", 40.0), ("seed0-repeat", 60.0), ("seed1", 90.0)):
        model = {"name": f"gla-nano-{name}", "hash": name}
        evaluation(tmp_path / name, "niah", {group: (value, "mean")}, model["name"], n=100, model=model)
    estimate = Results(collect([tmp_path])).estimate(Identity("gla", "", "nano"), f"niah:{group}")
    assert estimate.value == 70
    low, high = ([record.interval[at] for record in estimate.records] for at in (0, 1))
    names = [source.path.parent.name for source in estimate.sources]
    weights = [0.5 if name == "seed1" else 0.25 for name in names]
    for at, bounds in enumerate((low, high)):
        assert estimate.over_samples[at] == pytest.approx(sum(w * b for w, b in zip(weights, bounds, strict=True)))


def test_sources_of_one_name_say_their_folder(tmp_path):
    for text in ("plain", "needles"):
        evaluation(tmp_path / text / "gla-nano-seed0" / "eval", "niah", ONE, "model")
    evaluation(tmp_path / "plain" / "gla-nano-seed1" / "eval", "niah", ONE, "model")
    names = ["gla-nano-seed1", "needles/gla-nano-seed0", "plain/gla-nano-seed0"]
    assert [source.name for source in collect([tmp_path]).sources] == [f"{name}/eval/niah.json" for name in names]


def test_of_an_evaluation_in_stages_it_is_said_where_the_model_answered(tmp_path):
    metrics = "ccq eval gla --stage metrics"
    evaluation(tmp_path / "old", "niah", ONE, "gla-nano-seed0", command=metrics, gpu=None, cpu="Some CPU", cores=2)
    stages = {"requests": {"command": "ccq eval gla --limit 9 --stage requests", "cpu": "Some CPU"},
              "score": {"command": "ccq eval gla --stage score", "gpu": "Some GPU", "commit": "beef" * 10}}  # fmt: skip
    evaluation(tmp_path / "new", "niah", ONE, "gla-nano-seed1", command=metrics, stages=stages)
    new, old = collect([tmp_path]).sources
    assert (old.hardware, old.commands) == ("metrics: Some CPU, 2 cores", metrics)
    assert (new.hardware, new.commit) == ("Some GPU", "beefbee")
    assert new.commands == "ccq eval gla --limit 9 --stage requests, then ccq eval gla --stage score"


def test_what_needles_rest_on_is_said(tmp_path):
    settings = {"settings": {"keys": "odd"}, "notes": ["the largest haystack that fits"]}
    evaluation(tmp_path / "gla-pico", "niah", ONE, "gla-pico", model={"name": "gla-pico", "hash": "a"}, **settings)
    for name, needles, words in (("needles", 0.11, ""), ("plain", 0.0, "trained on plain text")):
        text_run(tmp_path / name, "gla_nano", 0, 30.0, needles=needles, variant=words)
        evaluation(tmp_path / name / "eval", "niah", ONE, "model", **settings)
    found = collect([tmp_path])
    notes = [" ".join(found.notices()), " ".join(build(found).tables["niah"].notes)]
    for said in notes:
        assert "keys and values that never occur in training (`--keys odd`)" in said
        assert "Needles at pico, convolution of 4: 53% of the training tokens are needle documents" in said
        assert "Needles at nano: 11% of the training tokens are needle documents" in said
        assert "Needles at nano, trained on plain text: the training text has no needle documents." in said
    assert "Here: the largest haystack that fits." in notes[1]
    evaluation(tmp_path / "plain" / "gla-nano-seed1", "niah", ONE, "gla-nano-seed1")
    assert "Needle prompts by GLA, convolution of 4, pico, seed 0, GLA" in " ".join(collect([tmp_path]).notices())


def test_a_model_that_was_changed_at_inference_is_no_other_model(tmp_path):
    """It is asked other lengths, in a folder of its run, and its files say which run's they are."""
    run = tmp_path / "ccq_gla_pico_seed0"
    text_run(run, "ccq_gla_pico", 0, 30.0)
    quick = {"quick_look": True, "limit": 2}
    evaluation(run / "eval", "niah", {"niah_single_1/1024": (50.0, "mean")}, "model", **quick)
    for task in ("passkey", "others"):
        for name in ("none", "off"):
            evaluation(run / "intervene" / task / name, "niah", {"niah_single_1/4096": (50.0, "mean")},
                       f"model, lam {name}", samples={"hash": task, "count": 4, "requests": 4}, **quick)  # fmt: skip
    found = collect([tmp_path])
    assert not any("the same samples" in note for note in found.notices())
    assert "These are quick looks, not whole suites: ccq_gla_pico_seed0/eval/niah.json (first 2)." in found.notices()
    assert [source.name for source in found.of("eval")] == ["ccq_gla_pico_seed0/eval/niah.json"]


def test_the_newest_of_one_day_is_the_later(tmp_path):
    from ccq.bench.tables import find

    for number, hour in enumerate(("08", "20")):
        content = json.loads((BENCHMARKS / "decode_h200.json").read_text())
        (tmp_path / f"{number}.json").write_text(json.dumps(content | {"date": f"2026-11-14T{hour}:00:00+00:00"}))
    _, source = find(collect([tmp_path]).of("bench", "decode"), size="1.3b")
    assert source.path.name == "1.json"
