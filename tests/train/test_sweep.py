"""A sweep trains what the trainer trains, treats rows alike, loses no finished run, and counts what it says."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest
import torch
from train_helpers import small, start, work_that_errs

from ccq import cli
from ccq.model import CCQForCausalLM
from ccq.recipes import recipe
from ccq.train import RunError, sweep, sweep_runs
from ccq.train import config as configs
from ccq.train.config import model_config
from ccq.train.data import train_source, valid_source
from ccq.train.loop import Trainer
from ccq.train.monitor import validate
from ccq.train.recall import RecallData, RecallRun, state_bytes
from ccq.train.world import World

CPU = World(0, 1, torch.device("cpu"))
VALID = ((16, 2, 30), (24, 3, 20))


MAD = {"source": "mad", "noise": 0.2, "slices": ((32, 1, 64),), "valid_slices": ((32, 1, 30),),
       "recall_vocab_size": 32}  # fmt: skip


def together(config, steps=None):
    run = RecallRun(config, CPU.device, RecallData.of(config, CPU.device)).start()
    for step in range(config.steps if steps is None else steps):
        run.advance(step)
    return run


ZOOLOGY = {"base_conv_size": 3, "tie_word_embeddings": True, "clip": 0.5, "schedule": "cosine", "warmup": 2}
PLAIN = {"clip": None}


@pytest.mark.parametrize(
    ("system", "options", "data"),
    [
        ("transformer", ZOOLOGY, {}),
        ("mamba2", PLAIN, {}),
        ("ccq-gla", ZOOLOGY, {}),
        ("ccq-gated-deltanet", PLAIN, {}),
        ("gla-projected-decay", PLAIN, MAD),
        ("gla", PLAIN, MAD | {"slices": ((32, 3, 64),), "valid_slices": ((32, 3, 30),), "noise": 0.0}),
        ("gla", PLAIN, {"updates": 2}),
    ],
    ids=["transformer", "mamba2", "ccq-gla", "ccq-gated-deltanet", "noisy", "fuzzy", "overwritten"],
)
def test_it_trains_what_the_trainer_trains(system, options, data):
    config = small(system, steps=8, lr=1e-2, valid_slices=VALID, **options)
    for name, value in data.items():
        setattr(config.data, name, value)
    trainer, source = Trainer(config, CPU), train_source(config)
    done = [trainer.step([source.batch(step)]) for step in range(8)]
    run = together(config)
    np.testing.assert_allclose(run.losses, [d.loss for d in done], rtol=1e-12)
    np.testing.assert_allclose(run.norms, [d.norm for d in done], rtol=1e-12)
    for (name, a), b in zip(trainer.model.named_parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)
    run.look()
    found = validate(trainer.model, config, CPU, valid_source(config))
    source = valid_source(config)
    asked = [int((source.of(i, np.arange(s.samples)).labels >= 0).sum()) for i, s in enumerate(source.slices)]
    got = [n / m for n, m in zip(run.valid_right.tolist(), asked, strict=True)]
    assert got == [found[f"valid_accuracy_{s.length}x{s.pairs}"] for s in source.slices]
    if config.model.clean:
        assert run.lams.shape == (8, 1 if config.model.base_conv_size else 2)
        assert run.lams[0].tolist() == pytest.approx([config.model.gate_init] * run.lams.shape[1])


def test_ties_of_half_precision_decide_no_answer(monkeypatch):
    """Each key is asked for the token that the weights, in fp64, answer: all answers are right."""
    config = small("gla", steps=1, dtype="bf16", valid_slices=((16, 4, 500),))
    model, source = Trainer(config, CPU).model, valid_source(config)
    batches = list(source.in_order(8, 0, 1, None))
    for _, batch in batches:
        hidden = model.model(batch.input_ids, use_cache=False).last_hidden_state.double()
        answers = (hidden @ model.lm_head.weight.double().mT).argmax(-1)
        batch.labels[:] = torch.where(batch.labels >= 0, answers, batch.labels)
    monkeypatch.setattr(source, "in_order", lambda *given: batches)
    assert validate(model, config, CPU, source)["valid_accuracy"] == 1


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    config = small("gla", steps=3, lr=1e-2)
    run = together(config, steps=1)
    with torch.no_grad():
        run.model.model.norm.weight[0] = float("nan")
    before = {name: x.detach().clone() for name, x in run.model.named_parameters()}
    run.advance(1)
    assert int(run.skipped) == 1
    for name, x in run.model.named_parameters():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        run.model.model.norm.weight[0] = 1.0
    run.advance(2)
    assert (int(run.skipped), int(run.at)) == (1, 3)
    assert not torch.equal(run.model.lm_head.weight, before["lm_head.weight"])
    assert run.losses[[0, 2]].isfinite().all()


# the rows


@pytest.mark.parametrize("size", ["mqar", "mqar64", "mqar256"])
def test_rows_are_zoologys_models_and_differ_in_what_their_name_says(size):
    made = {row: configs.flat(recipe(f"{row}_{size}")) for row in sweep.TASKS["mqar"].rows["rows"]}
    width = {"mqar": 128, "mqar64": 64, "mqar256": 256}[size]
    of_training = {name: value for name, value in made["gla"].items() if not name.startswith(("model.", "identity."))}
    for row, fields in made.items():
        assert {name: fields[name] for name in of_training} == of_training, row  # equal treatment
        assert (fields["model.hidden_size"], fields["model.num_hidden_layers"]) == (width, 2)
        assert fields["model.intermediate_size"] is None
        assert fields["model.base_conv_size"] == (None if row == "mamba2" else 3)
        assert fields["model.tie_word_embeddings"]

    def differ(a, b):
        return {name.removeprefix("model.") for name in made["gla"]
                if made[a][name] != made[b][name] and not name.startswith("identity.")}  # fmt: skip

    assert differ("gla", "gla_unit") == {"unit_qk"}
    assert differ("gla", "ccq_gla") == {"clean"}
    assert differ("gated_deltanet", "ccq_gated_deltanet") == {"clean"}
    assert differ("gla_unit", "gla_current_key") == {"current_key_read"}
    assert differ("gla_unit", "gla_unit_equal_state") == {"key_size"}
    for row, field in {"open": "gate_init", "no_decay": "decay_gate_bias", "stats": "normalize",
                       "uncentred": "centred", "fixed_lam": "fixed_lam"}.items():  # fmt: skip
        assert differ("ccq_gla", f"ccq_gla_{row}") == {field}

    def state(row, **options):
        with torch.device("meta"):
            model = CCQForCausalLM(model_config(dataclasses.replace(recipe(f"{row}_{size}").model, **options)))
        return sum(state_bytes(layer.mixer) for layer in model.model.blocks())

    assert state("gla_unit_equal_state") == pytest.approx(state("ccq_gla"), rel=0.03)
    assert state("ccq_gla") > 1.4 * state("gla_unit")
    assert state("retnet", rotary=True) == state("retnet")
    options = recipe(f"transformer_{size}").model  # one layer of attention, of keys and values; one of a convolution
    assert state("transformer") == 4 * options.hidden_size * (2 * 256 + 2)
    rows = sweep.TASKS["mqar"].rows
    assert set(rows["seeds"]) < set(rows["rows"]) < set(sweep.KNOWN)
    assert pytest.approx([1e-3, 10**-2.5, 1e-2, 10**-1.5], rel=1e-3) == sweep.TASKS["mqar"].rates


def test_the_rate_is_chosen_on_validation_samples():
    def run(row, lr, valid, test, repeat=0, **more):
        scores = {"valid": {"accuracy": valid}, "test": {"accuracy": test}}
        return {"row": row, "lr": lr, "repeat": repeat, **scores, **more}

    runs = [run("a", 1e-3, 0.5, 0.9), run("a", 1e-2, 0.6, 0.1), run("b", 1e-2, 0.4, 0.4), run("b", 1e-3, 0.4, 0.3),
            run("b", 1e-1, 0.99, 0.99, repeat=1)]  # fmt: skip
    assert sweep.best_of(runs) == {"a": (1e-2, None), "b": (1e-3, None)}
    lucky = [run("a", 1e-3, 0.8, 0), run("a", 1e-3, 0.8, 0), run("a", 1e-2, 0.85, 0), run("a", 1e-2, 0.1, 0)]
    assert sweep.best_of(lucky) == {"a": (1e-3, None)}  # the mean over seeds, not the best of them
    grid = [run("a", lr, valid, 0, decay=decay) for lr, decay, valid in
            ((1e-3, 0.0, 0.5), (1e-3, 0.1, 0.7), (1e-2, 0.0, 0.7), (1e-2, 0.1, 0.2))]  # fmt: skip
    assert sweep.best_of(grid) == {"a": (1e-3, 0.1)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"chosen": {"gla": 0.01, "gla_unit', "mqar_rows.json is damaged"),
        ("[]", "mqar_rows.json is damaged"),
        ('{"chosen": {"gla": "much"}, "missing": []}', "mqar_rows.json is damaged"),
        ('{"chosen": {}, "missing": []}', "lacks runs of gla to choose its rate among"),
        (1e-3, "lacks runs of gla to choose its rate among"),  # chosen among the rates that were finished
    ],
)
def test_a_rate_is_not_taken_from_a_choice_that_was_not_made(content, said, tmp_path):
    path = tmp_path / "mqar_rows.json"

    def write(*missing):
        names = [sweep_runs.Spec(row, "mqar", lr, 0, 4, repeat).name for row, lr, repeat in missing]
        path.write_text(json.dumps({"chosen": {"gla": 0.01, "gla_unit": 0.001}, "missing": names}))

    if isinstance(content, str):
        path.write_text(content)
    else:
        write(("gla", content, 0))
    with pytest.raises(RunError, match=said):
        sweep.read_chosen(path, ["gla"], "mqar")
    write(("gla_unit", 1e-3, 0), ("gla", 1e-2, 1))  # of another row, and a run that is only repeated
    assert sweep.read_chosen(path, ["gla"], "mqar") == {"gla": (0.01, None)}


def test_rates_of_another_width_are_not_taken(tmp_path):
    path = tmp_path / "mqar_rows.json"
    path.write_text(json.dumps({"size": "mqar64", "chosen": {"gla": 0.01}, "missing": []}))
    assert sweep.read_chosen(path, ["gla"], "mqar64") == {"gla": (0.01, None)}
    with pytest.raises(RunError, match="has rates chosen at mqar64, not at mqar: run `--tier rows --size mqar`"):
        sweep.read_chosen(path, ["gla"], "mqar")
    given = ["mqar", "--tier", "seeds", "--out", str(tmp_path), "--device", "cpu"]
    assert cli.main(["sweep", *given, "--rows", "gla", "--size", "mqar"]) == 1


def test_two_rates_have_two_names():
    names = {sweep_runs.Spec("gla", "mqar", lr, 0, 4).name for lr in (1e-3, 0.0010049, 0.00316, 0.0031623)}
    assert len(names) == 4
    assert sweep_runs.Spec("gla", "mqar", 0.00316, 0, 4).name == "gla-mqar-lr3.16e-03-seed0-steps4-r0"  # as in files


# the command

TOY = [
    "mqar", "--device", "cpu", "--workers", "0", "--steps", "4", "--test-samples", "10", "--set", "dtype=fp32",
    "--set", "model.hidden_size=16", "--set", "model.vocab_size=64", "--set", "data.batch=8",
    "--set", "data.slices=[[16,2,64],[24,3,64]]", "--set", "data.valid_slices=[[16,2,8],[24,3,8]]",
]  # fmt: skip
ROWS = ["--tier", "rows", "--rows", "gla_unit,ccq_gla", "--rates", "0.00316", "0.01"]


def what_counts(run):
    return {name: value for name, value in run.items() if name not in ("date", "seconds", "step_ms", "side_by_side")}


def test_both_tiers_and_what_their_files_say(tmp_path, capsys):
    assert cli.main(["sweep", *TOY, *ROWS, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "mqar_rows.json").read_text())
    assert content["kind"] == "mqar_sweep"
    assert content["missing"] == content["failed"] == []
    assert content["protocol"]["steps"] == 4
    runs = content["runs"]
    assert len(runs) == 2 * 2 + 2
    plain, repeats = runs[0], [run for run in runs if run["row"] == "ccq_gla" and run["lr"] == 0.00316]
    assert len(repeats) == 3
    keys = ("valid", "test", "curve", "gate", "tokens")
    assert all(repeats[0][key] == again[key] for again in repeats for key in keys)  # on a CPU nothing is random
    for run in runs:
        for part, samples in (("valid", 8), ("test", 10)):
            for row, (length, pairs) in zip(run[part]["slices"], ((16, 2), (24, 3)), strict=True):
                assert (row["length"], row["pairs"], row["asked"]) == (length, pairs, pairs * samples)
                assert row["accuracy"] == pytest.approx(row["right"] / row["asked"], abs=1e-6)
        for row in run["test"]["slices"]:
            assert sum(n for _, n in row["histogram"]) == 10
            assert sum(r * n for r, n in row["histogram"]) == row["right"]
        assert run["curve"]["valid_step"] == [0, 1, 2, 3, 4]
        assert run["parameters"]["embeddings"] == 64 * 16
        told = {"system": run["row"].replace("_", "-"), "size": "width 16", "seed": 0, "repeat": run["repeat"]}
        assert run["identity"] | told == run["identity"]
        assert run["identity"]["tokens"] == 4 * 8  # samples
    changes = (("data.batch", 8), ("data.slices", ((16, 2, 64), (24, 3, 64))), ("model.vocab_size", 64))
    source = train_source(sweep_runs.Spec("gla", "mqar", 1e-3, 0, 4, changes=changes).config())
    assert plain["tokens"] == sum(source.batch(step).input_ids.numel() for step in range(4))
    assert plain["scored"] == sum(int((source.batch(step).labels >= 0).sum()) for step in range(4))
    assert plain["gate"] is None
    assert repeats[0]["gate"]["lam"][0][0] == pytest.approx(0.01, rel=0.1)
    assert repeats[0]["gate"]["of_decay_alone"][0] > 0.01
    assert repeats[0]["covariance_bytes"] == 4 * 2 * (32 * 32 + 32) + 8
    assert repeats[0]["state_bytes"] - plain["state_bytes"] == repeats[0]["covariance_bytes"]

    more = ["--tier", "seeds", "--rows", "gla_unit,ccq_gla", "--seeds", "1", "2", "--out", str(tmp_path)]
    assert cli.main(["sweep", *TOY, *more]) == 0
    seeds = json.loads((tmp_path / "mqar_seeds.json").read_text())
    assert [(run["row"], run["seed"]) for run in seeds["runs"]] == [
        ("gla_unit", 1), ("gla_unit", 2), ("ccq_gla", 1), ("ccq_gla", 2),
    ]  # fmt: skip
    assert all(run["lr"] == content["chosen"][run["row"]] for run in seeds["runs"])
    assert "0 of them finished before" in capsys.readouterr().out


MAD_TOY = [
    "mad", "--device", "cpu", "--workers", "0", "--steps", "4", "--test-samples", "10", "--set", "dtype=fp32",
    "--set", "model.hidden_size=16", "--set", "model.key_size=8", "--set", "model.value_size=8",
    "--set", "data.batch=8", "--set", "data.slices=[[32,1,64]]", "--set", "data.valid_slices=[[32,1,8]]",
]  # fmt: skip


def test_the_grid_of_mad_is_of_rates_and_decays_and_other_seeds_get_the_best_of_it(tmp_path):
    assert (sweep.TASKS["mad"].rates, sweep.TASKS["mad"].decays) == ([1e-4, 5e-4, 1e-3], [0.0, 0.1])
    rows = ["--rows", "gla_projected,gla_projected", "--out", str(tmp_path)]  # named twice, trained once
    assert cli.main(["sweep", *MAD_TOY, *rows, "--rates", "0.001", "0.1", "--tier", "rows"]) == 0
    content = json.loads((tmp_path / "mad_rows.json").read_text())
    grid = {(run["lr"], run["decay"]): run for run in content["runs"]}
    assert set(grid) == {(lr, decay) for lr in (1e-3, 0.1) for decay in (0.0, 0.1)}
    assert (content["kind"], content["size"]) == ("mad_sweep", "mad-noisy")
    assert (content["protocol"]["noise"], content["protocol"]["decays"]) == (0.2, [0.0, 0.1])
    test = valid_source(sweep_runs.Spec("gla", "mad-noisy", 1e-3, 0, 4, changes=(
        ("data.valid_slices", ((32, 1, 10),)),)).config())  # fmt: skip
    test.split = "test"
    asked = int((test.of(0, np.arange(10)).labels >= 0).sum())
    for run in grid.values():
        (part,) = run["test"]["slices"]
        assert (part["length"], part["motif"], part["samples"], part["asked"]) == (32, 1, 10, asked)
        assert run["scored"] == run["tokens"] == 4 * 8 * 31  # every next token is trained on
        assert run["identity"]["system"] == "gla-projected"
    assert grid[0.1, 0.0]["curve"] != grid[0.1, 0.1]["curve"]
    best = max(grid, key=lambda at: (grid[at]["valid"]["accuracy"], -at[0], -at[1]))
    assert (content["chosen"]["gla_projected"], content["chosen_decay"]["gla_projected"]) == best
    assert cli.main(["sweep", *MAD_TOY, *rows, "--tier", "seeds", "--seeds", "1", "2"]) == 0
    seeds = json.loads((tmp_path / "mad_seeds.json").read_text())
    assert [(run["seed"], run["lr"], run["decay"]) for run in seeds["runs"]] == [(1, *best), (2, *best)]
    more = ["--tier", "rows", "--set", "optimizer.weight_decay=0.2"]
    assert cli.main(["sweep", *MAD_TOY, *rows, *more]) == 1


def test_the_time_of_a_step_leaves_out_validation_and_an_estimate_comes_after_the_first(tmp_path, monkeypatch, capsys):
    """By a clock that only training and validation move: a step takes 1 s, a look 100 s."""
    clock = [0.0]
    monkeypatch.setattr(sweep_runs.time, "perf_counter", lambda: clock[0])

    def taking(seconds, method):
        def wrapped(run, *args):
            clock[0] += seconds
            return method(run, *args)

        return wrapped

    monkeypatch.setattr(RecallRun, "advance", taking(1, RecallRun.advance))
    monkeypatch.setattr(RecallRun, "look", taking(100, RecallRun.look))
    rows = ["--tier", "rows", "--rows", "gla,gla_unit", "--rates", "0.01", "--out", str(tmp_path)]
    assert cli.main(["sweep", *TOY, *rows]) == 0
    said = capsys.readouterr().out
    assert "gla: step 1 of 4, about 6:44 to go; all 2 rows about 13:28" in said  # 4 steps, 4 further looks
    assert "gla: step 2 of 4" in said  # more than 20 s after the first line
    assert "1000.00 ms a step of 1, without validation" in said
    run = json.loads((tmp_path / "mqar_rows.json").read_text())["runs"][0]
    assert (run["step_ms"], run["seconds"]) == (1000, 504)


def test_test_samples_are_of_the_vocabulary_that_is_trained_on(tmp_path, monkeypatch):
    seen = []
    made = sweep_runs.test_data

    def test_data(*arguments):
        seen.extend(made(*arguments))
        return made(*arguments)

    monkeypatch.setattr(sweep_runs, "test_data", test_data)
    more = ["--set", "data.recall_vocab_size=30", "--rows", "gla", "--rates", "0.01", "--tier", "rows"]
    assert cli.main(["sweep", *TOY, *more, "--out", str(tmp_path)]) == 0
    assert {len(x.inputs) for x in seen} == {10}
    assert max(int(max(x.inputs.max(), x.answers.max())) for x in seen) < 30
    assert json.loads((tmp_path / "mqar_rows.json").read_text())["protocol"]["vocab_size"] == 30


def test_finished_runs_are_not_mixed_with_others_of_more_test_samples(tmp_path, capsys):
    rows = ["--rows", "gla", "--tier", "rows", "--out", str(tmp_path)]
    assert cli.main(["sweep", *TOY, *rows, "--rates", "0.01"]) == 0
    before = (tmp_path / "mqar_rows.json").read_bytes()
    assert cli.main(["sweep", *TOY, *rows, "--rates", "0.01", "0.001", "--test-samples", "20"]) == 1
    said = capsys.readouterr().err
    assert "--test-samples: " in said
    assert "was tested on 10 of each slice, asked for 20" in said
    assert (tmp_path / "mqar_rows.json").read_bytes() == before


def test_a_file_keeps_the_runs_of_earlier_calls(tmp_path, capsys):
    def call(*arguments):
        return cli.main(["sweep", *TOY, "--out", str(tmp_path), "--tier", *arguments])

    def content(tier):
        return json.loads((tmp_path / f"mqar_{tier}.json").read_text())

    assert call("rows", "--rows", "gla", "--rates", "0.01", "0.001") == 0
    first = content("rows")
    assert call("rows", "--rows", "gla_unit", "--rates", "0.003", "--minutes", "0") == 1
    assert call("rows", "--rows", "gla", "--rates", "0.01") == 0  # what others miss is not its fault
    found = content("rows")
    assert found["runs"] == first["runs"]
    assert [sweep_runs.Spec.row_of(name) for name in found["missing"]] == ["gla_unit"]
    assert call("rows", "--rows", "gla_unit", "--rates", "0.003") == 0
    found = content("rows")
    assert [(run["row"], run["lr"]) for run in found["runs"]] == [("gla", 0.01), ("gla", 0.001), ("gla_unit", 0.003)]
    assert (found["missing"], found["protocol"]["rates"]) == ([], [0.001, 0.003, 0.01])
    assert found["chosen"] == first["chosen"] | {"gla_unit": 0.003}

    for row in ("gla", "gla_unit"):
        assert call("seeds", "--rows", row, "--seeds", "1") == 0
    assert [run["row"] for run in content("seeds")["runs"]] == ["gla", "gla_unit"]
    assert content("seeds")["chosen"] == found["chosen"]

    capsys.readouterr()
    for other in (["--steps", "3"], ["--set", "model.num_hidden_layers=1"], ["--set", "data.batch=4"]):
        before = (tmp_path / "mqar_rows.json").read_bytes()
        assert call("rows", "--rows", "gla", "--rates", "0.01", *other) == 1
        assert "mqar_rows.json has runs with other settings" in capsys.readouterr().err
        assert (tmp_path / "mqar_rows.json").read_bytes() == before
    (tmp_path / "mqar_rows.json").write_bytes(before[:-100])
    assert call("rows", "--rows", "gla", "--rates", "0.01") == 1
    assert "mqar_rows.json is damaged" in capsys.readouterr().err
    assert call("rows", "--rows", "gla", "--rates", "0.01", "--force") == 0
    assert [run["lr"] for run in content("rows")["runs"]] == [0.01]


def test_a_folder_of_something_else_is_refused(tmp_path, capsys):
    line = ["sweep", *TOY, "--rows", "gla", "--rates", "0.01", "--tier", "rows", "--out", str(tmp_path / "x")]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("mine")
    assert cli.main(line) == 1
    assert "x is not empty, it holds notes.txt: expected" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["notes.txt"]
    assert cli.main([*line, "--minutes", "0", "--force"]) == 1  # nothing is trained
    assert cli.main(line) == 0  # it is ours now


def run_toy(out):
    return cli.main(["sweep", *TOY, *ROWS, "--out", str(out)])


def killed_after_one_run(out):
    """The process dies as soon as the first run is written: whoever watches from outside may look too late."""
    write = sweep_runs.write_atomically

    def last(path, content):
        write(path, content)
        os.kill(os.getpid(), signal.SIGKILL)

    sweep_runs.write_atomically = last
    run_toy(out)


def test_killed_it_goes_on_with_the_runs_that_are_missing(tmp_path, capsys):
    process = start(killed_after_one_run, tmp_path / "killed", output=tmp_path / "output")
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()
    runs = tmp_path / "killed" / "runs"
    finished = {p.name: p.read_text() for p in runs.iterdir() if p.suffix == ".json"}
    assert len(finished) == 1
    assert run_toy(tmp_path / "killed") == 0
    assert "1 of them finished before" in capsys.readouterr().out
    for name, text in finished.items():
        assert (runs / name).read_text() == text
    assert run_toy(tmp_path / "whole") == 0
    killed, whole = (json.loads((tmp_path / x / "mqar_rows.json").read_text()) for x in ("killed", "whole"))
    assert [what_counts(run) for run in killed["runs"]] == [what_counts(run) for run in whole["runs"]]


def test_a_row_that_fails_or_dies_does_not_take_the_others_with_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sweep_runs, "work", work_that_errs)
    rows = ["--tier", "rows", "--rows", "gla,gla_unit,ccq_gla", "--rates", "0.01", "--workers", "2"]
    assert cli.main(["sweep", *TOY, *rows, "--out", str(tmp_path)]) == 1
    content = json.loads((tmp_path / "mqar_rows.json").read_text())
    assert [run["row"] for run in content["runs"]] == ["ccq_gla"]
    assert {x["row"]: x["error"] for x in content["failed"]} == {
        "gla": "RuntimeError: the kernel errs", "gla_unit": "its process died: was memory short?",
    }  # fmt: skip
    assert len(content["missing"]) == 2
    assert "the same command resumes them" in capfd.readouterr().out


def test_when_the_time_is_up_what_is_finished_is_there(tmp_path):
    assert cli.main(["sweep", *TOY, *ROWS, "--minutes", "0", "--out", str(tmp_path)]) == 1
    content = json.loads((tmp_path / "mqar_rows.json").read_text())
    assert (content["runs"], len(content["missing"])) == ([], 6)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--tier rows --rows glaa", "there is no 'glaa'. Did you mean 'gla'?"),
        ("--tier seeds", "mqar_rows.json is missing"),
        ("--tier rows --set data.batches=3", "--set data.batches: a recipe has no such field"),
        ("--tier rows --set steps", "expected FIELD=JSON, got 'steps'"),
        (
            "--tier rows --set optimizer.lr=0.1",
            "--set optimizer.lr: the runs of a sweep differ in it, give it with --rates",
        ),
        ("--tier rows --set seed=3", "give it with --seeds"),
        ("--tier rows --set steps=3", "give it with --steps"),
        ("--tier rows --set init=runs/a", "--set init: a sweep trains its task from random weights"),
        ("--tier rows --set data.source=tokens", "--set data.source: a sweep trains its task"),
        ("--tier rows --rates 1e-3 nan", "optimizer.lr: expected a finite number, got nan"),
        ("--tier rows --seeds 0 99999999999999999999", "seed: expected a whole number of 64 bits"),
        ("--tier seeds --rates 1e-2", "--rates, --decays: `--tier seeds` takes what `--tier rows` chose"),
        ("--tier rows --set data.noise=0.8", "data.noise: this is for --data.source mad, here it is mqar"),
        ("--tier rows --steps 0", "--steps: expected at least 1, got 0"),
        ("--tier rows --workers -1", "--workers: expected at least 0, got -1"),
        ("--tier rows --test-samples 0", "--test-samples: expected at least 1, got 0"),
        ("--tier rows --size mad-noisy", "--size: expected one of mqar, mqar64, mqar256, mqar-overwrite, got"),
    ],
)
def test_mistakes_are_named(line, said, tmp_path, capsys):
    assert cli.main(["sweep", "mqar", "--workers", "0", *line.split(), "--out", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("row", sweep.TASKS["mqar"].rows["rows"])
def test_captured_steps_are_the_steps(row):
    device = torch.device("cuda")
    made, fresh = [], {}
    for capture in (True, False):
        config = recipe(f"{row}_mqar")
        config.steps, config.data.batch = 8, 32
        config.data.slices = ((64, 4, 200), (128, 8, 200), (256, 64, 200))
        config.data.valid_slices = ((64, 4, 50),)
        run = RecallRun(config, device, RecallData.of(config, device))
        torch.cuda.synchronize()
        fresh = {name: x.detach().clone() for name, x in run.trainer.prepared.masters.items()}
        torch.cuda.synchronize()
        run.start(capture)
        assert run.captured == capture
        for name, x in run.trainer.prepared.masters.items():
            assert torch.equal(x, fresh[name]), name  # warming up left nothing behind
        for step in range(8):
            run.advance(step)
        run.look()
        run.wait()
        made.append(run)
    captured, plain = made
    trainer, source = Trainer(plain.config, World(0, 1, device)), train_source(plain.config)
    truth = torch.tensor([trainer.step([source.batch(step)]).loss for step in range(8)], dtype=torch.float64)
    # the same kernels on the same numbers; a later step may differ where sums have no fixed order, by roundings of bf16
    torch.testing.assert_close(captured.losses[:2], plain.losses[:2], rtol=1e-6, atol=0)
    torch.testing.assert_close(captured.losses, plain.losses, rtol=1e-3, atol=0)
    torch.testing.assert_close(plain.losses.cpu(), truth, rtol=2e-3, atol=0)  # logits of all positions, in other chunks
    assert int(captured.skipped) == int(plain.skipped) == 0
    assert int(captured.at) == int(plain.at) == 8
    assert captured.lams.isfinite().all()
    masters = plain.trainer.prepared.masters
    for name, x in captured.trainer.prepared.masters.items():
        assert (x - masters[name]).norm() <= 2e-2 * masters[name].norm(), name
        assert not torch.equal(x, fresh[name]), name
