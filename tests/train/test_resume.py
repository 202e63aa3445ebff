"""A run that is killed loses nothing: it goes on from the newest whole checkpoint, and ends with the same bits."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from train_helpers import assert_bit_equal, contents, log_of, names, small, start, write_shards

from ccq.data.batches import Batch, Steps, iterating
from ccq.train import RunError, loop
from ccq.train.checkpoint import Checkpoints
from ccq.train.loop import train

STEPS = 24


def config(**changes):
    return small("ccq-gated-deltanet", steps=STEPS, dtype="fp32", keep=2, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights and moments of a run that nothing happened to."""
    run = tmp_path_factory.mktemp("undisturbed")
    assert train(config(), run) == 0
    return contents(run / "checkpoints" / f"step-{STEPS:08d}")


def train_and_die(run, kill_at, where):
    """In a process of its own: note each step, and die at one of them."""
    take_step = loop.Trainer.step

    def step(trainer, batches):
        done = take_step(trainer, batches)
        number = trainer.progress["step"]
        with open(run / "steps.txt", "a") as file:
            file.write(f"{number}\n")
        if where == "step" and number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def die_before(owner, name):
        method = getattr(owner, name)

        def dying(self, *arguments, **options):
            if loop_step() >= kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *arguments, **options)

        setattr(owner, name, dying)

    def loop_step():
        return int((run / "steps.txt").read_text().split()[-1])

    loop.Trainer.step = step
    if where == "data":  # the tensors lie on disk, what says where they are does not
        die_before(FileSystemWriter, "finish")
    elif where == "seal":  # all of it does, but for the name
        die_before(Checkpoints, "_seal")
    return train(config(), run)


def killed(run, kill_at, where):
    """Run until it dies; the steps that it took."""
    taken = run / "steps.txt"
    taken.write_text("0\n")
    process = start(train_and_die, run, kill_at, where, output=run / "out.txt")
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, (run / "out.txt").read_text()
    return [int(line) for line in taken.read_text().split()][1:]


@pytest.mark.parametrize("where", ["step", "data", "seal"])
def test_killed_it_ends_with_the_same_bits(tmp_path, undisturbed, where):
    rng = random.Random(where)
    kills = {  # from 11 on the checkpoint of step 5 is there: that of step 10 has waited for it
        "step": sorted(rng.sample(range(11, STEPS), 3)),
        "data": [11],
        "seal": [16],
    }[where]
    have: list[int] = []
    for kill_at in kills:
        steps = killed(tmp_path, kill_at, where)
        before = have[-1] if have else 0
        assert steps[0] == before + 1  # from the newest checkpoint, not from the start
        assert steps == list(range(before + 1, steps[-1] + 1))
        assert (f"resumed at step {before}\n" in (tmp_path / "out.txt").read_text()) == (before > 0)
        have = names(tmp_path)
        # what may be lost is the checkpoint that was being written, no more
        assert have[-1] >= 5 * ((steps[-1] - 1) // 5) - 5
        assert have[-1] > 0
    assert train(config(), tmp_path) == 0
    assert log_of(tmp_path)[-1]["step"] == STEPS
    assert_bit_equal(contents(tmp_path / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    logged = [row["step"] for row in log_of(tmp_path)]
    assert logged == [5, 10, 15, 20, STEPS]  # nothing twice, and nothing of what is not computed again is lost


def stop_at(monkeypatch, at, number=signal.SIGTERM):
    """Send this process a signal in the middle of a step."""
    take_step = loop.Trainer.step

    def step(trainer, batches):
        if trainer.progress["step"] == at:
            os.kill(os.getpid(), number)
        return take_step(trainer, batches)

    monkeypatch.setattr(loop.Trainer, "step", step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves(tmp_path, undisturbed, monkeypatch, capsys, number):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop_at(monkeypatch, 7, number)
    assert train(config(), tmp_path) == 128 + number
    assert f"stopped by {number.name} at step 8" in capsys.readouterr().out
    assert names(tmp_path)[-1] == 8
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    monkeypatch.undo()
    assert train(config(), tmp_path) == 0
    assert "resumed at step 8" in capsys.readouterr().out
    assert_bit_equal(contents(tmp_path / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_of_a_run_saves_too(tmp_path, undisturbed, monkeypatch, capsys, number):
    """As `timeout`, torchrun and a scheduler send it: the worker that makes batches hears it as well."""
    take_step = loop.Trainer.step

    def step(trainer, batches):
        if trainer.progress["step"] == 7:
            (worker,) = multiprocessing.active_children()
            subprocess.run([sys.executable, "-c", f"import os; os.kill({worker.pid}, {number.value})"], check=True)
            time.sleep(0.5)  # torch raises here where it dies of that; a signal from its parent would end it quietly
            os.kill(os.getpid(), number)
        return take_step(trainer, batches)

    monkeypatch.setattr(loop.Trainer, "step", step)
    run = config()
    run.runtime.workers = 1
    assert train(run, tmp_path) == 128 + number
    assert names(tmp_path)[-1] == 8
    assert not multiprocessing.active_children()
    monkeypatch.undo()
    assert train(config(), tmp_path) == 0
    assert_bit_equal(contents(tmp_path / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)


def test_a_run_that_fails_ends_its_worker(tmp_path, monkeypatch):
    """While its exception is at hand: Python would wait for a process that does not hear a SIGTERM."""
    run = config()
    run.runtime.workers = 1

    def fail(*_):
        assert len(multiprocessing.active_children()) == 1
        raise KeyError("here")

    monkeypatch.setattr(loop.Trainer, "step", fail)
    with pytest.raises(KeyError) as failed:
        train(run, tmp_path)
    assert failed.value.__traceback__ is not None
    assert not multiprocessing.active_children()


def test_a_worker_in_the_middle_of_a_batch_is_not_waited_for():
    class Slow:
        batch_size = 1

        def batch(self, step, rank, world):
            time.sleep(600 if step else 0)
            return Batch(*torch.zeros(2, 1, 1, dtype=torch.long), None, torch.zeros(1, dtype=torch.long))

    with iterating(Steps(Slow()), workers=1) as batches:
        next(batches)
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not multiprocessing.active_children()


def test_a_finished_run_says_so_and_stays_as_it_is(tmp_path, capsys):
    run = small(steps=5)
    assert train(run, tmp_path) == 0
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")}
    capsys.readouterr()
    assert train(run, tmp_path) == 0
    assert "is finished: 5 steps" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")} == files


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped with checkpoints of steps 10 and 12."""
    run = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 11)
        train(config(), run)
    assert names(run) == [10, 12]
    return run


def truncate(checkpoint):
    file = next(checkpoint.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)
    return file.name


def scramble(checkpoint):
    """A file of the right size and wrong content."""
    file = checkpoint / ".metadata"
    file.write_bytes(b"\0" * file.stat().st_size)
    return "step-"


def flip(checkpoint):
    """One bit, in the middle of the weights: the size stays."""
    file = next(checkpoint.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"{file.name} is not what was written"


def lose(name):
    def lost(checkpoint):
        (checkpoint / name).unlink()
        return name

    return lost


@pytest.mark.parametrize(
    "damage",
    [truncate, flip, lose(".metadata"), lose("complete.json"), scramble],
    ids=["truncated", "bit flipped", "no metadata", "no marker", "scrambled"],
)
def test_the_checkpoint_before_a_damaged_one_is_taken(tmp_path, undisturbed, stopped, capsys, damage):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    said = damage(run / "checkpoints" / "step-00000012")
    assert train(config(), run) == 0
    out = capsys.readouterr().out
    assert "step-00000012 is damaged" in out
    assert said in out
    assert "resumed at step 10" in out
    assert_bit_equal(contents(run / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_last_checkpoint_is_made_anew(tmp_path, undisturbed, stopped, capsys, damage):
    """The run is not finished then, and what is in the way of the new one goes."""
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    assert train(config(), run) == 0
    damage(run / "checkpoints" / f"step-{STEPS:08d}")
    assert train(config(), run) == 0
    assert "resumed at step 20" in capsys.readouterr().out
    assert_bit_equal(contents(run / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)


def test_checkpoints_of_versions_without_checksums_are_loaded(tmp_path, undisturbed, stopped, capsys):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for marker in run.glob("checkpoints/*/complete.json"):
        said = json.loads(marker.read_text())
        assert said.pop("sha256").keys() == said["files"].keys()
        marker.write_text(json.dumps(said))
    assert train(config(), run) == 0
    assert "resumed at step 12" in capsys.readouterr().out
    assert_bit_equal(contents(run / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)


def test_a_cut_provenance_is_told_and_does_not_stop_the_run(tmp_path, stopped, capsys):
    for content in ('[{"step": 0, "comm', '{"step": 0}', "[{}]"):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(stopped, run)
        (run / "provenance.json").write_text(content)
        assert train(config(), run) == 0
        assert "provenance.json is damaged and started anew" in capsys.readouterr().out
        assert [part["step"] for part in json.loads((run / "provenance.json").read_text())] == [12]


def train_on_a_small_disk(run, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # Python ignores the signal and gets the error
    try:
        train(config(), run)
    except RunError as error:
        print(error)
        return 1
    return 0


@pytest.mark.parametrize(("limit", "file"), [(20_000, "__0_0.distcp"), (300, "config.json")])
def test_a_full_disk_names_the_file(tmp_path, limit, file):
    process = start(train_on_a_small_disk, tmp_path / "run", limit, output=tmp_path / "out.txt")
    process.join(120)
    said = (tmp_path / "out.txt").read_text()
    assert process.exitcode == 1, said
    assert file in said.splitlines()[-1]
    assert "File too large" in said.splitlines()[-1]
    assert not list(tmp_path.rglob("*.partial"))


def test_nothing_but_damaged_checkpoints_is_no_reason_to_start_over(tmp_path, stopped):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    for step in names(run):
        truncate(run / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(RunError, match=r"every checkpoint in .* is damaged"):
        train(config(), run)


def test_the_last_few_checkpoints_are_kept(tmp_path):
    train(small(steps=9, checkpoint_every=2, keep=3), tmp_path)
    assert names(tmp_path) == [6, 8, 9]


def test_a_checkpoint_is_what_was_saved_though_training_goes_on(tmp_path, monkeypatch):
    """It is written in the background; what is written must not change meanwhile."""
    write = FileSystemWriter.write_data
    weights = {}
    take_step = loop.Trainer.step

    def slow(self, *arguments):
        time.sleep(0.3)
        return write(self, *arguments)

    def step(trainer, batches):
        done = take_step(trainer, batches)
        weights[trainer.progress["step"]] = {n: x.detach().clone() for n, x in trainer.prepared.masters.items()}
        return done

    monkeypatch.setattr(FileSystemWriter, "write_data", slow)
    monkeypatch.setattr(loop.Trainer, "step", step)
    train(small(steps=9, keep=9), tmp_path)
    saved = contents(tmp_path / "checkpoints" / "step-00000005")
    for name, x in weights[5].items():
        assert torch.equal(saved[f"model/{name}"], x)
        assert not torch.equal(weights[6][name], x)


def test_a_second_process_is_refused(tmp_path):
    process = start(hold_lock, tmp_path)
    while not (tmp_path / "held").exists():
        assert process.is_alive()
        time.sleep(0.05)
    with pytest.raises(RunError, match=f"in use by another process: process {process.pid} on "):
        train(small(steps=5), tmp_path)
    os.kill(process.pid, signal.SIGKILL)  # a dead process holds nothing
    process.join()
    assert train(small(steps=5), tmp_path) == 0


def hold_lock(run):
    from ccq.train.folder import locked

    with locked(run):
        (run / "held").touch()
        time.sleep(60)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lr": 2e-3}, "optimizer.lr: the run has 0.001, asked for 0.002"),
        ({"seed": 1}, "seed: the run has 0, asked for 1"),
        ({"schedule": "cosine", "steps": STEPS + 1}, "optimizer.schedule: the run has 'constant', asked for 'cosine'"),
        ({"gate_init": 0.1}, "model.gate_init"),
        ({"slices": ((16, 2, 301), (24, 3, 300))}, "data.slices"),
        ({"dtype": "fp64"}, "dtype"),
    ],
)
def test_another_config_is_refused_by_the_field(tmp_path, changes, field):
    (tmp_path / "config.json").write_text(json.dumps(asdict(config())))
    options = {"steps": STEPS, "dtype": "fp32", "keep": 2, **changes}
    with pytest.raises(RunError, match="holds another run") as refused:
        train(small("ccq-gated-deltanet", **options), tmp_path)
    assert field in str(refused.value)
    assert str(refused.value).count("the run has") == 1


@pytest.mark.parametrize("name", ["log.jsonl", "provenance.json"])
def test_what_is_no_run_is_not_written_over(tmp_path, name):
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(RunError, match=f"holds {name} and no config.json: choose another --run-dir"):
        train(config(), tmp_path)
    assert (tmp_path / name).read_text() == "mine\n"
    assert {path.name for path in tmp_path.iterdir()} == {name, "lock"}


def test_a_damaged_log_stops_no_run(tmp_path):
    train(small(steps=2), tmp_path)
    with (tmp_path / "log.jsonl").open("ab") as log:
        log.write(b"\xff\xfe\n")  # what a full disk may leave
    shutil.rmtree(max((tmp_path / "checkpoints").glob("step-*")))
    assert train(small(steps=2), tmp_path) == 0
    assert log_of(tmp_path)[-1]["step"] == 2


def test_a_run_with_a_constant_rate_can_be_extended(tmp_path, undisturbed, stopped, capsys):
    """It ends as if it had been that long from the start."""
    half = small("ccq-gated-deltanet", steps=STEPS // 2, dtype="fp32", keep=2)
    assert train(half, tmp_path) == 0
    assert train(config(), tmp_path) == 0
    assert_bit_equal(contents(tmp_path / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == STEPS
    with pytest.raises(RunError, match=f"steps: the run is at step {STEPS}, asked for {STEPS // 2}"):
        train(half, tmp_path)


def test_a_run_with_a_cosine_cannot_be_extended_and_says_what_can(tmp_path):
    train(small(steps=2, schedule="cosine"), tmp_path)
    with pytest.raises(RunError, match=r"steps: the run has 2, asked for 4\. .*cosine .*--init"):
        train(small(steps=4, schedule="cosine"), tmp_path)


def test_other_data_is_refused_and_said_as_it_is(tmp_path):
    for name, tokens in (("train", [1, 2, 3]), ("valid", [4, 5]), ("other", [6, 7])):
        write_shards(tmp_path / name, [[tokens * 20]])

    def begin(run, valid):
        path = None if valid is None else str(tmp_path / valid)
        return train(small(steps=2, path=tmp_path / "train", valid_path=path), tmp_path / run)

    assert begin("run", "valid") == 0
    said = json.loads((tmp_path / "run" / "data.json").read_text())
    index = json.loads((tmp_path / "train" / "index.json").read_text())
    assert (said["tokens"], said["needle_tokens"]) == (index["tokens"], index["needle_tokens"]) == (61, 0)
    assert begin("bare", None) == 0
    for run, valid, said in (
        ("run", None, "data.valid_path: the run began with tokens, got none"),
        ("run", "other", r"data.valid_path: the tokens in .*other are not those that the run began with"),
        ("bare", "valid", r"data.valid_path: the run began without, got .*valid"),
    ):
        with pytest.raises(RunError, match=said):
            begin(run, valid)
    for content in ("{", '{"path": null}', "[]"):
        (tmp_path / "run" / "data.json").write_text(content)
        with pytest.raises(RunError, match=r"run/data.json is damaged"):
            begin("run", "valid")


def asdict(config):
    import dataclasses

    return dataclasses.asdict(config)


def test_how_it_runs_may_change(tmp_path, undisturbed, stopped):
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    assert train(config(workers=1, log_every=3, checkpoint_every=7), run) == 0
    assert_bit_equal(contents(run / "checkpoints" / f"step-{STEPS:08d}"), undisturbed)
