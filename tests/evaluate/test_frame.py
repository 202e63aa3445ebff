"""Results that say where they come from, runs that go on where they were stopped, messages that name what is wrong."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from helpers import pack
from toys import LeakyLM, make_model
from transformers import GPT2Config, GPT2LMHeadModel

import ccq.evaluate as frame
from ccq import cli
from ccq.evaluate import EvaluationError, Options, check_fits, evaluate
from ccq.evaluate.engine import Engine
from ccq.evaluate.requests import Builder
from ccq.evaluate.results import Responses, model_hash, read_result, tokenizer_hash
from ccq.files import finite, locked
from ccq.pretrained import most_tokens
from ccq.tables import progress

LENGTH = {"lengths": (64, 128), "tasks": ("qasper", "code")}
SUITES = {
    "lm": {"max_lengths": (96,), "tasks": ("piqa", "wikitext")},
    "niah": {"lengths": (512,), "limit": 1, "sizing": "full"},
    "length": {"lengths": (64, 128)},
    "longbench": {"max_lengths": (768,), "limit": 1},
    "mqar": {"lengths": (64,), "limit": 2},
}


def length_options(out, data, **more):
    return Options(out=out, data=data, **{**LENGTH, **more})


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A from_pretrained folder, with a vocabulary that MQAR fits in."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_model("llama", vocabulary=8192).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_runs_and_says_where_its_numbers_come_from(model, tokenizer, data, tmp_path, suite):
    if suite == "mqar":
        model = make_model("llama" if "Llama" in type(model).__name__ else "gpt2", vocabulary=8192)
    result = evaluate(model, tokenizer, suite, Options(out=tmp_path, data=data, **SUITES[suite]), name="tiny")
    written = json.loads((tmp_path / f"{suite}.json").read_text())
    assert written == json.loads(json.dumps(result))
    for field in ("scores", "samples", "model", "tokenizer", "commit", "versions", "command", "seconds", "settings"):
        assert written[field], field
    assert written["model"]["hash"] == model_hash(model)
    assert written["tokenizer"]["hash"] == tokenizer_hash(tokenizer)
    assert written["samples_per_second"] > 0
    assert (written["quick_look"], written["limit"]) == ("limit" in SUITES[suite], SUITES[suite].get("limit"))
    rows = [json.loads(line) for line in (tmp_path / f"{suite}.jsonl").read_text().splitlines()]
    assert len(rows) == written["samples"]["count"]
    assert all({"id", "group", "prompt_hash", "output", "score"} <= row.keys() for row in rows)
    assert {row["group"] for row in rows} | {"average", "average/768"} >= written["scores"].keys()


class Killed(Exception):
    pass


def stop_after(monkeypatch, count):
    """Let the engine die after so many answers; return what it was asked in all."""
    asked = []
    real = Engine.run

    def run(self, requests, todo=None):
        for number, pair in enumerate(real(self, requests, todo)):
            if count is not None and number == count:
                raise Killed
            asked.append(pair[0].id)
            yield pair

    monkeypatch.setattr(Engine, "run", run)
    return asked


def test_a_killed_run_goes_on_where_it_was(llama, tokenizer, data, tmp_path, monkeypatch, capsys):
    whole = evaluate(llama, tokenizer, "length", length_options(tmp_path / "whole", data))
    options = length_options(tmp_path / "killed", data, batch_size=2)
    with monkeypatch.context() as patch:
        first = stop_after(patch, 7)
        with pytest.raises(Killed):
            evaluate(llama, tokenizer, "length", options)
    answers = tmp_path / "killed" / "responses" / "length.jsonl"
    lines = answers.read_text().splitlines()
    assert len(lines) == 1 + 7
    answers.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # and the last line was cut short
    assert not (tmp_path / "killed" / "length.json").exists()
    with monkeypatch.context() as patch:
        second = stop_after(patch, None)
        resumed = evaluate(llama, tokenizer, "length", options)
    assert "resumed, 6 of" in capsys.readouterr().out
    assert set(first[:6]).isdisjoint(second)
    assert len(set(first[:6]) | set(second)) == len(first[:6]) + len(second)
    for name, score in whole["scores"].items():
        assert resumed["scores"][name]["value"] == pytest.approx(score["value"], rel=1e-5)
    assert resumed["samples"] == whole["samples"]


def test_a_finished_run_is_not_run_again_unless_asked(llama, tokenizer, data, tmp_path, monkeypatch, capsys):
    options = length_options(tmp_path, data)
    first = evaluate(llama, tokenizer, "length", options)
    asked = stop_after(monkeypatch, None)
    assert evaluate(llama, tokenizer, "length", options) == json.loads(json.dumps(first))
    assert asked == []
    assert "already finished" in capsys.readouterr().out
    options.again = True
    again = evaluate(llama, tokenizer, "length", options)
    assert len(asked) == first["samples"]["requests"]
    assert again["scores"] == json.loads(json.dumps(first["scores"]))


def test_a_finished_result_gives_way_only_to_one_that_asks_more(llama, tokenizer, data, tmp_path):
    first = evaluate(llama, tokenizer, "length", length_options(tmp_path, data, limit=2))
    with pytest.raises(
        EvaluationError, match=r"length.json is a finished result with other settings \(corpora, lengths\)"
    ):
        evaluate(llama, tokenizer, "length", length_options(tmp_path, data, limit=2, lengths=(64, 96)))
    assert json.loads((tmp_path / "length.json").read_text()) == json.loads(json.dumps(first))
    more = evaluate(llama, tokenizer, "length", length_options(tmp_path, data, limit=3))
    assert more["samples"]["requests"] > first["samples"]["requests"]
    other = evaluate(llama, tokenizer, "length", length_options(tmp_path, data, lengths=(64, 96), again=True))
    assert other["settings"]["lengths"] == [64, 96]


def test_a_finished_result_stays_also_where_its_answers_are_gone_or_are_scored_again(llama, tokenizer, data, tmp_path):
    options = length_options(tmp_path, data)
    evaluate(llama, tokenizer, "length", options)
    before = (tmp_path / "length.json").read_bytes()
    evaluate(None, tokenizer, "length", length_options(tmp_path, data, limit=1, stage="requests"))
    with pytest.raises(EvaluationError, match=r"a finished result with other settings \(corpora, limit\)"):
        evaluate(None, tokenizer, "length", length_options(tmp_path, data, stage="metrics"))
    (tmp_path / "responses" / "length.jsonl").unlink()  # as results are handed on
    with pytest.raises(EvaluationError, match=r"a finished result with other settings \(corpora, limit\)"):
        evaluate(llama, tokenizer, "length", length_options(tmp_path, data, limit=1))
    (tmp_path / "responses" / "length.jsonl").unlink()
    with pytest.raises(EvaluationError, match=r"a finished result with other settings \(another model\)"):
        evaluate(make_model("gpt2"), tokenizer, "length", options)
    assert (tmp_path / "length.json").read_bytes() == before


@pytest.mark.parametrize("again", [False, True])
def test_a_file_of_something_else_stays(llama, tokenizer, data, tmp_path, again):
    (tmp_path / "length.json").write_text('{"kind": "lengths of rope"}')
    with pytest.raises(EvaluationError, match=r"length.json is not a result of `ccq eval`"):
        evaluate(llama, tokenizer, "length", length_options(tmp_path, data, again=again))
    assert (tmp_path / "length.json").read_text() == '{"kind": "lengths of rope"}'


def test_what_is_finished_stays_if_running_it_again_fails(llama, tokenizer, data, tmp_path):
    evaluate(llama, tokenizer, "length", length_options(tmp_path / "out", data))
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(EvaluationError, match="is missing"):
        evaluate(llama, tokenizer, "length", length_options(tmp_path / "out", tmp_path, again=True))
    assert {path: path.read_bytes() for path in before} == before


def test_more_of_the_same_asks_only_what_is_new(llama, tokenizer, data, tmp_path, monkeypatch):
    evaluate(llama, tokenizer, "length", length_options(tmp_path, data, limit=2))
    asked = stop_after(monkeypatch, None)
    result = evaluate(llama, tokenizer, "length", length_options(tmp_path, data, limit=3))
    assert len(asked) == 4  # one window more of two corpora at two lengths
    assert result["limit"] == 3


def test_a_quick_look_that_saw_all_is_none_once_it_is_asked_without_a_limit(
    llama, tokenizer, data, tmp_path, monkeypatch
):
    first = evaluate(llama, tokenizer, "length", length_options(tmp_path, data, limit=10_000))
    asked = stop_after(monkeypatch, None)
    second = evaluate(llama, tokenizer, "length", length_options(tmp_path, data))
    assert (first["quick_look"], second["quick_look"], asked) == (True, False, [])
    assert second["samples"] == first["samples"]
    assert json.loads((tmp_path / "length.json").read_text())["quick_look"] is False


def test_answers_of_another_model_are_refused(llama, tokenizer, data, tmp_path):
    evaluate(llama, tokenizer, "length", length_options(tmp_path, data))
    before = (tmp_path / "length.json").read_text()
    with pytest.raises(EvaluationError, match="another model: its hash was"):
        evaluate(make_model("gpt2"), tokenizer, "length", length_options(tmp_path, data))
    assert (tmp_path / "length.json").read_text() == before


def test_one_evaluation_of_a_suite_in_a_folder_at_a_time(llama, tokenizer, data, tmp_path, capsys):
    """Two would write their answers into one file."""
    length, niah = frame.named("length"), frame.named("niah")
    options = length_options(tmp_path, data, limit=1, answer_tokens=1, sizing="full")
    with locked(tmp_path / ".length.lock", ValueError):
        found = frame.run([length, niah], llama, tokenizer, options.but(tasks=None, lengths=(512,)), "tiny")
    assert list(found) == ["niah"]
    assert f"length of tiny: {tmp_path} is in use by another process" in capsys.readouterr().err
    assert frame.run([length], llama, tokenizer, options, "tiny")


def test_a_model_is_asked_all_that_it_can_take_and_no_more():
    """Of 11 tokens 10 are read and the last is only predicted; token 10 takes 11 embeddings."""
    builder = Builder()
    builder.add("a", "score", np.arange(11))
    asked = builder.done("length", {})
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 4}
    check_fits(GPT2LMHeadModel(GPT2Config(**sizes, n_positions=10, vocab_size=11)), asked)
    with pytest.raises(EvaluationError, match="10 tokens, and GPT2LMHeadModel has learned positions for 9"):
        check_fits(GPT2LMHeadModel(GPT2Config(**sizes, n_positions=9, vocab_size=11)), asked)
    with pytest.raises(EvaluationError, match="token 10 is asked of a model with 10 embeddings"):
        check_fits(GPT2LMHeadModel(GPT2Config(**sizes, n_positions=10, vocab_size=10)), asked)


def test_hashes_follow_what_they_are_of(llama, tokenizer):
    other = make_model("llama")
    assert model_hash(other) == model_hash(llama)
    with torch.no_grad():
        other.lm_head.weight[3, 3] += 1e-3
    assert model_hash(other) != model_hash(llama)


def test_progress_says_how_long_it_takes(capsys):
    with progress("niah", 4000, " tokens") as bar:
        bar.start_t -= 10
        bar.update(1000)
        bar.refresh()
    shown = capsys.readouterr().err
    assert "niah" in shown
    assert "<00:30" in shown


def test_damaged_answers_are_named(tmp_path):
    path = tmp_path / "out" / "responses" / "x.jsonl"
    path.parent.mkdir(parents=True)
    head = b'{"identity": {"model": {}}}\n'
    for content in (b"not json\n{}\n", head + b"\xff\n", head + b'{"id": 3}\n'):
        path.write_bytes(content)
        with pytest.raises(EvaluationError, match=r"x.jsonl is damaged .*--again"):
            Responses(path, {})
    (tmp_path / "mqar.json").write_bytes(b"\xff\xfe")  # cut short, or damaged: it is made again
    assert read_result(tmp_path, "mqar") is None
    (tmp_path / "mqar.json").write_text('{"suite": "mqar"}')
    with pytest.raises(EvaluationError, match=r"mqar.json is not a result of `ccq eval`"):
        read_result(tmp_path, "mqar")


def test_a_task_that_is_named_twice_counts_once(folder, tmp_path):
    parser = frame.make_parser()
    arguments = [str(folder), "--suite", "niah", "--tasks", "niah_book,niah_book", "--out", str(tmp_path)]
    assert frame.parse(parser, arguments)[2].tasks == ("niah_book",)


def test_what_results_call_a_model(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = [".", "--suite", "mqar", "--slices", "32x2x4", "--device", "cpu", "--out"]
    for more, name in (([], folder.name), (["--name", "mine"], "mine")):
        assert cli.main(["eval", *arguments, str(tmp_path / name), *more]) == 0
        assert json.loads((tmp_path / name / "mqar.json").read_text())["model"]["name"] == name


def test_samples_that_are_gone_are_written_again(folder, tmp_path, capsys):
    """`ccq compare` needs them; the answers are there, and the model is not asked again."""
    arguments = [
        "eval",
        str(folder),
        "--suite",
        "mqar",
        "--slices",
        "32x2x4",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(arguments) == 0
    before = (tmp_path / "mqar.jsonl").read_bytes()
    (tmp_path / "mqar.jsonl").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ccq.evaluate.engine.Engine.run", None)  # would raise
        assert cli.main(arguments) == 0
    assert (tmp_path / "mqar.jsonl").read_bytes() == before
    pack(tmp_path / "mqar.jsonl")  # as results that are kept for long are
    (tmp_path / "mqar.jsonl").unlink(missing_ok=True)
    capsys.readouterr()
    assert cli.main(arguments) == 0
    assert "already finished" in capsys.readouterr().out


# the command


def test_the_command_evaluates_a_folder(folder, data, tmp_path, capsys):
    arguments = ["eval", str(folder), "--suite", "length,mqar", "--lengths", "64", "--limit", "2"]
    assert cli.main([*arguments, "--data", str(data), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "length of tiny-llama, the first 2 only" in shown
    assert "qasper/64" in shown
    assert "64-16" in shown
    result = json.loads((tmp_path / "mqar.json").read_text())
    assert set(result["scores"]) == {"64-4", "64-8", "64-16", "average"}
    assert str(tmp_path) not in result["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nia"], "--suite: unknown suite 'nia'. Did you mean 'niah'?"),
        (["--lengths", "1k"], "expected whole numbers separated by commas, got '1k'"),
        (["--lengths", "64,0"], "expected numbers above 0, got '64,0'"),
        (["--limit", "0"], "--limit: expected one whole number above 0, got '0'"),
        (["--limit", "many"], "--limit: expected one whole number above 0, got 'many'"),
        (["--limit", "3,4"], "--limit: expected one whole number above 0, got '3,4'"),
        (["--suite", "length", "--tokens", "64,128"], "--tokens: expected one whole number above 0, got '64,128'"),
        (["--suite", "niah", "--answer-tokens", "24,"], "--answer-tokens: expected one whole number above 0"),
        (["--data", "/nowhere/at/all"], "--data: /nowhere/at/all is not a folder"),
        (["--suite", "lm,niah", "--tasks", "piqa"], "--tasks: expected one --suite"),
        (["--suite", "mqar", "--slices", "32x2x64,32x2x8"], "--slices: expected each LENGTHxPAIRS once, got"),
        (
            ["--suite", "lm", "--lengths", "64"],
            "--lengths: this option is for niah, length, mad, mqar, and --suite is lm",
        ),
        (
            ["--suite", "niah,length", "--max-length", "64"],
            "--max-length: this option is for lm, longbench, and --suite is niah",
        ),
        (["--suite", "lm,length", "--keys", "odd"], "--keys: this option is for niah, and --suite is lm, length"),
        (
            ["--slices", "32x4x256"],
            "--slices: this option is for mad, mqar, and --suite is lm, niah, length, longbench",
        ),
    ],
)
def test_bad_arguments_are_named(folder, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["eval", str(folder), "--out", str(tmp_path), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def run(folder, tmp_path, capsys, *arguments):
    code = cli.main(["eval", str(folder), "--out", str(tmp_path / "out"), *arguments])
    return code, capsys.readouterr().err


def test_an_unknown_task_names_the_nearest(data, tmp_path, capsys):
    """Before a model is looked for: there is none here."""
    code, error = run(tmp_path / "none", tmp_path, capsys, "--suite", "lm", "--data", str(data), "--tasks", "pika")
    assert (code, "lm has no 'pika'. Did you mean 'piqa'?" in error) == (1, True)


def test_a_folder_that_is_not_there_is_said_to_be_missing_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, error = run("runs/modle", tmp_path, capsys, "--suite", "mqar")
    assert code == 1
    assert error.startswith("ccq eval: there is no model 'runs/modle': it is not a folder here")


def test_a_suite_without_tasks_says_so(folder, tmp_path, capsys):
    code, error = run(folder, tmp_path, capsys, "--suite", "mqar", "--tasks", "foo")
    assert (code, "--tasks: mqar has no tasks to choose from, got foo" in error) == (1, True)


@pytest.mark.parametrize(
    ("device", "said"), [("cuda", "torch sees 0 GPUs"), ("cpuu", "expected cpu, cuda or cuda:N, got 'cpuu'")]
)
def test_a_device_that_is_not_there_is_not_told_as_a_damaged_model(folder, tmp_path, capsys, monkeypatch, device, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, error = run(folder, tmp_path, capsys, "--suite", "mqar", "--device", device)
    assert code == 1
    assert "ccq eval: --device: " in error
    assert said in error
    assert "could not be loaded" not in error


def test_a_missing_file_is_named_and_finished_results_are_kept(folder, data, tmp_path, capsys):
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    (copy / "PaulGrahamEssays.json").unlink()
    options = ("--lengths", "64", "--limit", "1", "--data", str(copy))
    code, error = run(folder, tmp_path, capsys, "--suite", "length,niah,mqar", *options)
    assert code == 1
    assert (tmp_path / "out" / "length.json").exists()
    assert (tmp_path / "out" / "mqar.json").exists()
    assert "niah" in error
    options = ("--lengths", "512", "--limit", "1", "--data", str(copy))
    _, error = run(folder, tmp_path, capsys, "--suite", "niah", *options)
    assert "PaulGrahamEssays.jsonl.zst is missing: expected" in error
    assert "text" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "0", "text": "a"}\n{"id": "1"', "is damaged after line 1"),
        ('{"id": "0", "body": "a"}\n', "line 1: expected JSON lines with the fields text, got id, body"),
        ("", "is empty: expected"),
        ("\n\n", "is empty: expected"),
        ("[1, 2]\n", "line 1: expected JSON lines with the fields text, got list"),
    ],
)
def test_a_damaged_file_is_named(folder, data, tmp_path, capsys, content, message):
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    (copy / "longdocs_qasper.jsonl").write_text(content)
    options = ("--suite", "length", "--tasks", "qasper", "--lengths", "64", "--data", str(copy))
    code, error = run(folder, tmp_path, capsys, *options)
    assert code == 1
    assert "longdocs_qasper.jsonl" in error
    assert message in error


def test_a_damaged_compressed_file_is_named(tmp_path):
    import zstandard

    from ccq.evaluate import sources

    file = tmp_path / "x.jsonl.zst"
    whole = zstandard.compress(b'{"text": "a"}\n' * 1000)
    file.write_bytes(whole + whole)  # in two frames, as parallel compressors write it
    assert len(sources.rows(file, ["text"])) == 2000
    for left in range(1, len(whole)):  # none of them is taken for a file of fewer rows
        file.write_bytes(whole + whole[:left])
        with pytest.raises(EvaluationError, match=r"x.jsonl.zst is damaged after line \d+ .*cut off.*fields text"):
            sources.rows(file, ["text"])
    file.write_bytes(b"garbage" + whole)
    with pytest.raises(EvaluationError, match=r"x.jsonl.zst is damaged after line 0 .*fields text"):
        sources.rows(file, ["text"])


def test_a_model_without_tokenizer(folder, data, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(folder / name, bare / name)
    options = ("--suite", "length,mqar", "--lengths", "64", "--limit", "1", "--data", str(data))
    code, error = run(bare, tmp_path, capsys, *options)
    assert code == 1
    assert "the suite length needs a tokenizer, and bare has none: give one with --tokenizer" in error
    assert (tmp_path / "out" / "mqar.json").exists()
    code, _ = run(bare, tmp_path, capsys, *options, "--tokenizer", str(folder))
    assert code == 0


def test_a_run_folder_is_told_from_a_model(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    code, error = run(tmp_path / "run", tmp_path, capsys, "--suite", "mqar")
    assert (code, "ccq export RUN_DIR OUT_DIR" in error) == (1, True)


def test_no_network_is_said(tokenizer, tmp_path, monkeypatch):
    from ccq.evaluate import longbench, sources

    def offline(task):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(sources, "longbench_archive", offline)
    with pytest.raises(EvaluationError, match=r"could not be loaded from the Hub .*give the data with --data DIR"):
        longbench.build(Options(out=tmp_path, max_lengths=(1024,), tasks=("lcc",)), tokenizer)


def test_without_a_network_the_hub_is_asked_once(tokenizer, tmp_path, monkeypatch):
    """Its library would ask for half a minute, for each file."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    from ccq.evaluate import length, niah

    asked = []

    class Unreachable:
        def head(self, address, **options):
            asked.append(address)
            raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "get_session", Unreachable)
    begun = time.monotonic()
    for suite, corpus, ships in ((length, "govreport", "book"), (length, "pg19", "book")):
        said = rf"the Hub or its cache \(OSError: Name or .*give the data with --data DIR, .* --tasks {ships}"
        with pytest.raises(EvaluationError, match=said):
            suite.build(Options(out=tmp_path, tasks=(corpus,), lengths=(512,)), tokenizer)
    with pytest.raises(EvaluationError, match="--tasks niah_book"):
        niah.essays(None)
    assert asked == [constants.ENDPOINT] * 3
    assert time.monotonic() - begun < 10  # a busy machine; asked again, it would be 75
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_learned_positions_cannot_be_passed(tokenizer, data, tmp_path):
    model = make_model("gpt2", positions=64)
    with pytest.raises(EvaluationError, match=r"learned positions for 64: it cannot take more\. Give --lengths"):
        evaluate(model, tokenizer, "length", length_options(tmp_path, data))


def test_a_transformer_runs_past_its_context_with_a_warning(tokenizer, data, tmp_path):
    model = make_model("llama", positions=64)
    with pytest.warns(frame.ContextWarning, match="names 64: it runs past its context"):
        result = evaluate(model, tokenizer, "length", length_options(tmp_path, data))
    assert result["scores"]["qasper/128"]["value"] > 1


def test_a_foreign_tokenizer_is_noticed(tokenizer, data, tmp_path):
    with pytest.raises(EvaluationError, match=r"token \d+ is asked of a model with 300 embeddings"):
        evaluate(make_model("llama", vocabulary=300), tokenizer, "length", length_options(tmp_path, data))


def test_scoring_without_requests_is_refused(llama, tokenizer, data, tmp_path):
    with pytest.raises(EvaluationError, match=r"length.npz does not exist: make it with --stage requests"):
        evaluate(llama, tokenizer, "length", Options(out=tmp_path, stage="score"))
    evaluate(None, tokenizer, "length", length_options(tmp_path, data, stage="requests"))
    with pytest.raises(EvaluationError, match=r"length.jsonl does not exist: make it with --stage score"):
        evaluate(None, tokenizer, "length", length_options(tmp_path, data, stage="metrics"))
    (tmp_path / "requests" / "length.npz").write_bytes(b"PK nonsense")
    with pytest.raises(EvaluationError, match=r"length.npz is damaged"):
        evaluate(llama, tokenizer, "length", Options(out=tmp_path, stage="score"))


@pytest.mark.parametrize("suite", ["niah", "longbench", "length"])
def test_stages_equal_one_call(llama, tokenizer, data, tmp_path, suite):
    one, three = (Options(out=tmp_path / name, data=data, **SUITES[suite]) for name in ("one", "three"))
    whole = evaluate(llama, tokenizer, suite, one)
    three.stage = "requests"
    evaluate(None, tokenizer, suite, three)
    three.stage = "score"
    evaluate(llama, None, suite, three)
    three.stage, three.limit = "metrics", None
    staged = evaluate(None, tokenizer, suite, three)
    assert staged["limit"] == whole["limit"]
    assert staged["scores"] == whole["scores"]
    assert list(staged["stages"]) == ["requests", "score"]  # what was asked, and where it was answered
    assert all(origin["command"] and origin["versions"]["torch"] for origin in staged["stages"].values())
    assert "stages" not in whole
    assert (tmp_path / "one" / f"{suite}.jsonl").read_text() == (tmp_path / "three" / f"{suite}.jsonl").read_text()


def test_json_has_no_nan():
    cleaned = finite({"a": [float("nan"), 1.0, {"b": float("inf")}]})
    assert cleaned == {"a": [None, 1.0, {"b": None}]}
    assert frame.table({"suite": "x", "quick_look": False, "model": {"name": "m"}, "notes": ["n"], "limit": None,
                        "scores": {"g": {"value": None, "interval": None, "n": 1}}}).count("\n") == 2  # fmt: skip


def test_learned_positions_are_known_by_their_table():
    assert most_tokens(make_model("gpt2", positions=99)) == 99
    assert most_tokens(make_model("llama")) is None
    assert most_tokens(LeakyLM()) is None
