"""Two ranks with FSDP2 compute what one computes, and go on from each other's checkpoints.

All of it runs in one pair of processes, whose results the tests look at.
"""

import dataclasses
import os
import re
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from train_helpers import contents, free_port, log_of, names, small, start

from ccq.data.batches import IGNORE, Steps
from ccq.train import RunError, loop
from ccq.train import trainer as trainer_module
from ccq.train.data import train_source
from ccq.train.export import export
from ccq.train.init import fill
from ccq.train.loop import Trainer, train
from ccq.train.world import join

pytestmark = pytest.mark.xdist_group("two ranks")  # in one process: what they share takes half a minute

SYSTEMS = ("gla", "ccq-gla", "gated-deltanet", "ccq-gated-deltanet")
STEPS = 10
RESUME = {name: {"system": "ccq-gated-deltanet", "steps": 12, "dtype": name} for name in ("fp64", "fp32")}
STOPS = (4, 9)  # one rank stops at the first of them, two go on to the second, one finishes


class Uneven:
    """A source in which each sequence has its own number of scored tokens, whatever rank it comes to."""

    def __init__(self, source):
        self.source, self.batch_size, self.vocab_size = source, source.batch_size, source.vocab_size

    def batch(self, step, rank=0, world=1):
        batch = self.source.batch(step, rank, world)
        labels = batch.input_ids.roll(-1, 1)
        length = labels.shape[1]
        for row, number in zip(labels, batch.window_ids.tolist(), strict=True):
            row[np.random.default_rng(number).permutation(length)[: 1 + number % (length - 1)]] = IGNORE
        return batch._replace(labels=labels)


def some_steps(config, world, accumulate=1, steps=STEPS, change=None):
    """Losses, gradient norms, scored tokens of this rank at each step, and the gradients of the first."""
    trainer = Trainer(config, world)
    if change is not None:
        change(trainer)
    first = {}
    norms = trainer_module.squared_norms

    def note(gradients):
        if not first:
            for name, x in trainer.prepared.trained.items():
                first[name] = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad.clone()
        return norms(gradients)

    trainer_module.squared_norms = note
    try:
        batches = iter(Steps(Uneven(train_source(config)), world.rank, world.size, accumulate))
        rows = []
        for _ in range(steps):
            here = next(batches)
            scored = sum(int((b.labels != IGNORE).sum()) for b in here)
            done = trainer.step(here)
            rows.append((done.loss, done.norm, scored))
    finally:
        trainer_module.squared_norms = norms
    return {"rows": rows, "gradients": first}


def cases():
    for system in SYSTEMS:
        yield system, small(system, dtype="fp64"), STEPS
    yield "fp32", small("ccq-gla", dtype="fp32"), STEPS
    frozen = small("ccq-gated-deltanet", dtype="fp64", rates=("gate=1e-2",))
    yield "frozen", dataclasses.replace(frozen, train="cleaner|q_proj"), 3
    yield "gates alone", dataclasses.replace(frozen, train="cleaner"), 3
    yield "checkpointed", small("ccq-gated-deltanet", dtype="fp64", activation_checkpointing=True), 3


def wrong_scale(trainer):
    """The mistake that Adam hides: gradients too large by the number of ranks."""
    from torch.distributed.fsdp import FSDPModule

    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1 / 2)


def watched(run, stop):
    """Train, noting the windows of each step, and send SIGTERM to this process after `stop` steps."""
    run.mkdir(exist_ok=True)
    take_step = loop.Trainer.step

    def step(trainer, batches):
        ids = torch.cat([batch.window_ids for batch in batches]).tolist()
        with open(run / f"windows-{trainer.world.size}-{trainer.world.rank}.txt", "a") as file:
            print(trainer.progress["step"], *ids, file=file)
        if trainer.progress["step"] + 1 == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(trainer, batches)

    loop.Trainer.step = step
    try:
        return train(small(**RESUME[run.name]), run)
    finally:
        loop.Trainer.step = take_step


def of_two(out, runs):
    """What each of the two processes does."""
    with join("cpu", timeout=300) as world:
        results = {}
        for name, config, steps in cases():
            results[name] = some_steps(config, world, 2, steps)
        results["wrong"] = some_steps(small("gla", dtype="fp64"), world, 2, steps=1, change=wrong_scale)
        results["sharded"] = shapes(world)
        results["init"] = {source.name: filled(source, world) for source in (out / "model", runs[0])}
        results["bf16"] = some_steps(small("ccq-gla", dtype="bf16"), world, steps=1)
        results["codes"] = [
            watched(run, STOPS[1] if world.rank == 1 else None) for run in runs
        ]  # one is told, both stop
        torch.save(results, out / f"rank-{world.rank}.pt")
        lose_a_rank(out, world)


def filled(source, world):
    """All weights that a run begins with, and how many of them this rank read out of safetensors."""
    request, read = HuggingFaceStorageReader._process_read_request, []

    def count(self, file, item, planner):
        read.append(item.lengths.numel())
        return request(self, file, item, planner)

    HuggingFaceStorageReader._process_read_request = count
    try:
        trainer = Trainer(small(**RESUME["fp64"], seed=1), world)
        fill(str(source), trainer.prepared.masters, world, print)
    finally:
        HuggingFaceStorageReader._process_read_request = request
    masters = {name: x.detach() for name, x in trainer.prepared.masters.items()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in masters.items()}, sum(read)


def lose_a_rank(out, world):
    """Rank 1 dies in the middle of a run; rank 0 notes what it says then."""
    take_step = loop.Trainer.step

    def step(trainer, batches):
        if world.rank == 1 and trainer.progress["step"] == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(trainer, batches)

    loop.Trainer.step = step
    try:
        train(small("gla"), out / "lost")
    except RunError as error:
        (out / "lost.txt").write_text(str(error))
    os._exit(0)  # there is nobody left to part from


def shapes(world):
    """How many elements of the weights this rank holds, of how many, and the dtypes they are computed with."""
    config = small("ccq-gated-deltanet", dtype="fp32")
    prepared = Trainer(config, world).prepared
    local = sum(x.to_local().numel() for x in prepared.masters.values() if isinstance(x, DTensor))
    whole = sum(x.numel() for x in prepared.masters.values() if isinstance(x, DTensor))
    return local, whole, [n for n, x in prepared.masters.items() if not isinstance(x, DTensor)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Results of both ranks, and the folder of runs that one, two, and again one of them trained."""
    out = tmp_path_factory.mktemp("two")
    runs = [out / name for name in RESUME]
    assert [watched(run, STOPS[0]) for run in runs] == [128 + signal.SIGTERM] * 2
    export(runs[0], out / "model")
    port = free_port()
    processes = [start(of_two, out, runs, rank=r, world=2, port=port, output=out / f"{r}.txt") for r in (0, 1)]
    for rank, process in enumerate(processes):
        process.join(400)  # seconds, where others keep the cores busy
        assert process.exitcode == (-signal.SIGKILL if rank else 0), (out / f"{rank}.txt").read_text()
    results = [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert [watched(run, None) for run in runs] == [0, 0]
    return results, out


@pytest.fixture(scope="module")
def alone():
    with join("cpu") as world:
        results = {name: some_steps(config, world, steps=steps) for name, config, steps in cases()}
        return {**results, "still": some_steps(small("gla", lr=0.0), world)}


def test_ranks_score_different_numbers_of_tokens(pair):
    (first, second), _ = pair
    for name in SYSTEMS:
        counts = [(a[2], b[2]) for a, b in zip(first[name]["rows"], second[name]["rows"], strict=True)]
        assert all(a != b for a, b in counts[:3])
        assert len({a + b for a, b in counts}) > 5


@pytest.mark.parametrize("name", [*SYSTEMS, "checkpointed", "frozen", "gates alone"])
def test_two_ranks_compute_what_one_computes(pair, alone, name):
    (first, second), _ = pair
    one = alone[name]
    for two in (first[name], second[name]):  # all ranks know all of it
        for (loss, _, _), (ref_loss, _, _) in zip(two["rows"], one["rows"], strict=True):
            assert loss == pytest.approx(ref_loss, abs=1e-9, rel=0)
        assert two["rows"][0][1] == pytest.approx(one["rows"][0][1], abs=1e-10, rel=0)
        assert two["gradients"].keys() == one["gradients"].keys()
        for parameter, gradient in one["gradients"].items():
            assert (two["gradients"][parameter] - gradient).abs().max() <= 1e-10, parameter
            assert gradient.abs().max() > 1e-6 or "gate" in parameter, parameter  # else nothing is compared
    still = alone["still"]["rows"]  # the weights do move: equal losses are not those of the first weights
    assert name != "gla" or abs(one["rows"][-1][0] - still[-1][0]) > 1e-3


def test_in_fp32_too(pair, alone):
    (first, _), _ = pair
    for two, one in zip(first["fp32"]["rows"], alone["fp32"]["rows"], strict=True):
        assert two[0] == pytest.approx(one[0], abs=1e-5)
        assert two[1] == pytest.approx(one[1], rel=1e-4)


def test_gradients_scaled_by_the_ranks_do_not_pass(pair, alone):
    (first, _), _ = pair
    wrong, right = first["wrong"], alone["gla"]
    assert wrong["rows"][0][0] == pytest.approx(right["rows"][0][0], abs=1e-9)  # the loss does not tell
    assert abs(wrong["rows"][0][1] - right["rows"][0][1]) > 1e-3
    assert max((wrong["gradients"][n] - g).abs().max() for n, g in right["gradients"].items()) > 1e-4


def test_each_rank_holds_its_half(pair):
    (first, second), _ = pair
    (a, total, whole), (b, _, _) = first["sharded"], second["sharded"]
    assert a + b == total
    assert 0.4 < a / total < 0.6
    kept = {name.rsplit(".", 1)[1] for name in whole}
    assert kept == {"gate_weight", "gate_bias", "A_log", "dt_bias"}  # what stays in fp32


@pytest.mark.parametrize("source", ["model", "fp64"])
def test_each_rank_reads_its_own_part_of_the_weights_that_a_run_begins_with(pair, source):
    results, out = pair
    there = load_file(out / "model" / "model.safetensors")
    for rank in results:
        weights, read = rank["init"][source]
        assert weights.keys() == there.keys()
        assert all(torch.equal(x, there[name]) for name, x in weights.items())
        assert source != "model" or 0.4 < read / sum(x.numel() for x in there.values()) < 0.65


def test_gradients_of_bf16_layers_are_summed_over_ranks_in_fp32(pair):
    """Sums of two numbers in bf16: in bf16 they would be rounded once more."""
    (first, _), _ = pair
    gradients = first["bf16"]["gradients"]
    rounded = {name: (g == g.bfloat16().float()).double().mean().item() for name, g in gradients.items()}
    assert gradients["model.layers.0.mixer.q_proj.weight"].dtype == torch.float32
    assert max(rounded.values()) < 0.9, rounded


@pytest.mark.parametrize(("dtype", "rounding"), [("fp64", 1e-9), ("fp32", 1e-5)])
def test_one_two_one_sees_the_same_windows_and_ends_with_the_same_weights(pair, tmp_path, dtype, rounding):
    """But for the order in which the ranks' gradients are added up: what docs/training.md says of resuming."""
    (first, second), out = pair
    run = out / dtype
    assert first["codes"] == second["codes"] == [128 + signal.SIGTERM] * 2
    seen = {}
    for size, rank in ((1, 0), (2, 0), (2, 1)):
        for line in (run / f"windows-{size}-{rank}.txt").read_text().splitlines():
            step, *ids = map(int, line.split())
            seen.setdefault(step, []).extend(ids)
    config = small(**RESUME[dtype])
    source = train_source(config)
    assert dict(sorted(seen.items())) == {step: source.batch(step).window_ids.tolist() for step in range(config.steps)}
    assert [row["step"] for row in log_of(run)] == [5, 10, 12]

    train(config, tmp_path)
    ref = contents(tmp_path / "checkpoints" / f"step-{config.steps:08d}")
    got = contents(run / "checkpoints" / f"step-{config.steps:08d}")
    assert ref.keys() == got.keys()
    for name, x in ref.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=rounding, msg=name)
    assert not all(torch.equal(got[name], x) for name, x in ref.items())  # to the bit it is not the same
    assert STOPS[1] in names(run)  # two ranks saved it, one loaded it


def test_a_lost_rank_is_said_and_the_checkpoint_stays(pair, capsys):
    _, out = pair
    said = (out / "lost.txt").read_text()
    assert said.startswith("another rank does not answer (")
    assert "The last good checkpoint is" in said
    left = int(re.search(r"step-(\d+)\. Start again", said)[1])
    assert left in (5, 10)  # that of step 10 may have been on its way
    assert train(small("gla"), out / "lost") == 0
    assert f"resumed at step {left}" in capsys.readouterr().out


def test_ranks_must_divide_the_batch():
    from ccq.train.data import accumulation

    config = small(batch=6, micro_batch=2)
    assert accumulation(config, 1) == 3
    assert accumulation(config, 3) == 1
    assert accumulation(small(batch=2, micro_batch=8), 2) == 1
    with pytest.raises(RunError, match=r"data.batch: 6 sequences cannot be shared by 4 ranks"):
        accumulation(config, 4)
    with pytest.raises(RunError, match=r"runtime.micro_batch: expected a divisor of the 6 sequences"):
        accumulation(small(batch=6, micro_batch=4), 1)
