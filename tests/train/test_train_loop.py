"""What a run computes, logs and survives, in one process."""

import json
import math
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from train_helpers import EOS, SYSTEMS, contents, log_of, losses, names, small, steps_of, write_shards

from ccq.data.batches import IGNORE, Steps
from ccq.data.shards import TokenShards
from ccq.data.windows import TokenWindows
from ccq.train import RunError, loop, parallelize
from ccq.train import trainer as trainer_module
from ccq.train.checkpoint import Checkpoints
from ccq.train.data import train_source
from ccq.train.loop import Trainer, train
from ccq.train.monitor import sample, tokenizer_of
from ccq.train.optimizer import pure_decay
from ccq.train.world import join

CURVES = Path(__file__).with_name("curves.json")


@pytest.fixture(scope="module")
def world():
    with join("cpu") as world:
        yield world


@pytest.mark.parametrize("system", SYSTEMS)
def test_loss_curve_is_pinned(system, world):
    """python tests/train/test_train_loop.py writes the file anew."""
    got = [done.loss for done in steps_of(Trainer(curve_config(system), world), 20)]
    assert got == pytest.approx(json.loads(CURVES.read_text())[system], abs=1e-7, rel=0)
    assert sum(got[-5:]) / 5 < sum(got[:5]) / 5 - 0.1


def curve_config(system):
    return small(system, dtype="fp64", lr=1e-2, warmup=5, schedule="cosine")


def documents(count=12, seed=0, longest=40, vocabulary=64):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=rng).tolist()
    return [torch.randint(1, vocabulary, (n,), generator=rng).tolist() for n in lengths]


def separately(model, docs):
    """Sum of the losses of documents one by one, and how many tokens are scored: by the logits of whole sequences."""
    total, scored = 0.0, 0
    for number, document in enumerate(docs):
        tokens = [*([EOS] if number else []), *document, EOS]  # what precedes the first is not in the stream
        ids = torch.tensor([tokens])
        logits = model(ids).logits[0, :-1]
        total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        scored += len(tokens) - 1
    return total, scored


@pytest.mark.parametrize("system", ["transformer", "mamba2", "gla", "ccq-gla", "ccq-gated-deltanet"])
def test_packed_with_reset_equals_separate_documents(system, world, tmp_path):
    docs = documents()
    path = write_shards(tmp_path / "shards", [docs[:5], docs[5:]])
    tokens = sum(len(d) + 1 for d in docs) - 1
    trainer = Trainer(small(system, path=path, length=tokens, batch=1, reset=True), world)
    with torch.no_grad():
        total, scored = separately(trainer.model.eval(), docs)
    trainer.model.train()
    (done,) = steps_of(trainer, 1)
    assert done.scored == scored == tokens
    assert done.loss == pytest.approx(total / scored, abs=1e-12)

    mixed = Trainer(small(system, path=path, length=tokens, batch=1, reset=False), world)
    (other,) = steps_of(mixed, 1)
    assert abs(other.loss - done.loss) > 1e-6  # without the reset documents see each other


def test_accumulation_changes_nothing(world):
    """Micro-batches with different numbers of scored tokens, in a mean over all of them."""
    whole = Trainer(small("ccq-gla"), world)
    parts = Trainer(small("ccq-gla"), world)
    for a, b in zip(steps_of(whole, 5), steps_of(parts, 5, accumulate=4), strict=True):
        assert b.loss == pytest.approx(a.loss, abs=1e-12)
        assert b.norm == pytest.approx(a.norm, abs=1e-12)
    for name, x in whole.prepared.masters.items():
        torch.testing.assert_close(parts.prepared.masters[name], x, rtol=0, atol=1e-10, msg=name)


def test_the_gradient_is_clipped_and_its_norm_logged_unclipped(world):
    free, held = (Trainer(small("gla", clip=clip), world) for clip in (None, 1e-2))
    kept = {}

    def keep(optimizer):
        step = optimizer.step

        def noted():
            kept[optimizer] = [x.grad.clone() for g in optimizer.param_groups for x in g["params"]]
            return step()

        optimizer.step = noted

    keep(free.optimizer), keep(held.optimizer)
    (a,), (b,) = steps_of(free, 1), steps_of(held, 1)
    assert a.norm == b.norm > 1e-2
    full = torch.cat([g.flatten() for g in kept[free.optimizer]])
    clipped = torch.cat([g.flatten() for g in kept[held.optimizer]])
    assert a.norm == pytest.approx(full.norm().item(), rel=1e-12)
    torch.testing.assert_close(clipped, full * (1e-2 / a.norm), rtol=1e-12, atol=0)


def test_masters_take_what_the_copies_cannot(world, monkeypatch):
    """fp64 masters and fp32 copies, as fp32 and bf16 on a GPU: the masters get the gradients of all micro-batches."""
    ref = Trainer(small("ccq-gated-deltanet"), world)
    keep = parallelize.keep_masters
    monkeypatch.setattr(trainer_module, "parallelize", lambda model, *_: keep(model, torch.float32))
    trainer = Trainer(small("ccq-gated-deltanet"), world)
    prepared = trainer.prepared
    assert len(prepared.copies) == len(prepared.masters)
    assert {c.dtype for c, _ in prepared.copies} == {torch.float32}
    for a, b in zip(steps_of(ref, 8), steps_of(trainer, 8, accumulate=2), strict=True):
        assert b.loss == pytest.approx(a.loss, abs=1e-5)
        assert b.norm == pytest.approx(a.norm, rel=1e-4)
    for copy, master in prepared.copies:
        assert copy.grad is None
        assert torch.equal(copy, master.float())
        assert not torch.equal(copy.double(), master)  # they hold more than the copies


@pytest.mark.gpu
@pytest.mark.parametrize("system", ["gla", "ccq-gla", "ccq-gated-deltanet"])
def test_captured_steps_equal_launched_ones(system, tmp_path):
    """Losses, norms, gates and weights to the bit, with accumulation; a step that is not finite changes nothing."""
    path = write_shards(tmp_path / "shards", [documents(200, longest=60)])
    found = {}
    for capture in (True, False):
        config = small(
            system, steps=24, dtype="bf16", path=path, device="cuda", capture=capture, lr=1e-2, clip=0.1,
            length=64, batch=8, micro_batch=4, key_size=16, value_size=32, hidden_size=64,
        )  # fmt: skip
        with join("cuda") as world, loop.own_stream(world):
            trainer = Trainer(config, world)
            begin = {name: x.detach().clone() for name, x in trainer.prepared.masters.items()}
            batches, rows = iter(Steps(train_source(config), accumulate=2)), []
            for step in range(config.steps):
                trainer.gates.record(step % 3 == 0)
                done = trainer.step(next(batches))
                rows.append((done.loss, done.norm, trainer.gates.means(world)))
            masters = {name: x.detach().clone() for name, x in trainer.prepared.masters.items()}
            trainer.model.lm_head.weight.data[0] = float("nan")  # the copy that is computed with, until it is refreshed
            assert not trainer.step(next(batches)).ok
            trainer.prepared.refresh()
            assert all(torch.equal(x, masters[name]) for name, x in trainer.prepared.masters.items())
            assert trainer.step(next(batches)).ok
            assert len(trainer.graphs) == (capture and (1 if system == "gla" else 2))
        found[capture] = rows, masters
    assert found[True][0] == found[False][0]
    assert not any(torch.equal(x, begin[name]) for name, x in masters.items())  # all of them were trained
    assert all(torch.equal(x, found[False][1][name]) for name, x in found[True][1].items())


@pytest.mark.gpu
def test_bf16_on_one_gpu_trains_fp32_masters():
    config = small("ccq-gated-deltanet", dtype="bf16", device="cuda", lr=1e-2, key_size=16, value_size=32)
    with join("cuda") as world:
        trainer = Trainer(config, world)
        done = steps_of(trainer, 40)
        assert {x.dtype for x in trainer.prepared.masters.values()} == {torch.float32}
        kinds = {name.rsplit(".", 1)[1]: p.dtype for name, p in trainer.model.named_parameters()}
        assert kinds["weight"] == torch.bfloat16
        assert kinds["gate_bias"] == kinds["A_log"] == torch.float32
        assert done[-1].loss < done[0].loss - 0.1


# What may go wrong


def poison(monkeypatch, steps, what):
    """Make the loss, or one gradient, not finite at these steps."""
    compute = trainer_module.call
    count = {"calls": 0}

    def call(model, batch, device):
        number = count["calls"]
        count["calls"] += 1
        out = compute(model, batch, device)
        if number not in steps:
            return out
        if what == "loss":
            return SimpleNamespace(loss=out.loss * math.nan, scored=out.scored)
        weight = model.model.norm.weight
        handle = weight.register_hook(lambda g: handle.remove() or g * math.inf)
        return out

    monkeypatch.setattr(trainer_module, "call", call)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped(world, monkeypatch, what):
    poison(monkeypatch, {3}, what)
    trainer = Trainer(small("gla"), world)
    batches = iter(Steps(train_source(trainer.config)))
    for number in range(5):
        before = [x.clone() for x in tensors(trainer)]
        done = trainer.step(next(batches))
        same = [torch.equal(a, b) for a, b in zip(before, tensors(trainer), strict=True)]
        assert done.ok == (number != 3)
        assert math.isfinite(done.loss) == (number != 3 or what == "gradient")
        assert math.isfinite(done.norm) == (number != 3)
        assert all(same) if number == 3 else not any(same)
    assert trainer.progress == {"step": 5, "skipped": 1, "in_a_row": 0}


def tensors(trainer):
    state = trainer.state()
    return [*state["model"].values(), *(x for moments in state["optimizer"].values() for x in moments.values())]


def test_a_few_such_steps_in_a_row_stop_the_run(tmp_path, monkeypatch, capsys):
    poison(monkeypatch, {6, 8, *range(12, 20)}, "loss")
    with pytest.raises(RunError, match=r"3 steps in a row were not finite.*is .*step-00000010\.") as stopped:
        train(small("gla", patience=3), tmp_path)
    assert "loss nan" in str(stopped.value)
    assert "step 7 skipped" in capsys.readouterr().out
    rows = log_of(tmp_path)  # valid JSON, though there were NaNs
    assert [row["step"] for row in rows if "skipped" in row] == [7, 9, 13, 14, 15]
    assert names(tmp_path)[-1] == 10
    monkeypatch.undo()
    assert train(small("gla", patience=3), tmp_path) == 0
    assert "20 steps, 2 skipped" in capsys.readouterr().out


def test_the_first_step_of_a_process_is_a_sign_of_life_with_an_estimate(tmp_path, monkeypatch, capsys):
    train(small("gla", steps=4, checkpoint_every=2), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    begun, resumed = capsys.readouterr().out, train(small("gla", steps=4, checkpoint_every=2), tmp_path)
    for out, step in ((begun, 1), (capsys.readouterr().out, 3)):
        lines = [line for line in out.splitlines() if line.startswith("step ") and " left" in line]
        assert re.fullmatch(rf"step {step}: loss \d\.\d+ in \d+\.\d s; 0:0\d left at this pace", lines[0])
    assert resumed == 0


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    """A limit on the size of files stands for it: writing fails in the middle of one."""
    begin = Checkpoints.save
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(self, step, state, wait=False):
        if step == 10:
            self.wait()  # for that of step 5
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        begin(self, step, state, wait)

    monkeypatch.setattr(Checkpoints, "save", save)
    try:
        with pytest.raises(RunError, match=r"checkpoints: step 10 could not be written") as failed:
            train(small("gla"), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(failed.value).endswith("step-00000005.")
    assert "File too large" in str(failed.value)
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    monkeypatch.undo()
    assert train(small("gla"), tmp_path) == 0
    assert "resumed at step 5" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file"):
        train(small(), tmp_path / "file" / "run")


def test_a_missing_shard_is_named_before_and_in_a_run(tmp_path, monkeypatch):
    path = write_shards(tmp_path / "shards", [documents(), documents(seed=1)])
    config = small("gla", path=path)
    read = TokenShards.read
    count = {"calls": 0}

    def vanishing(self, *arguments):
        count["calls"] += 1
        if count["calls"] > 60:
            raise FileNotFoundError(2, "No such file or directory", str(path / "shard-00001.bin"))
        return read(self, *arguments)

    monkeypatch.setattr(TokenShards, "read", vanishing)
    with pytest.raises(RunError, match=r"shard-00001.bin.*The last good checkpoint is .*step-00000005\."):
        train(config, tmp_path / "run")
    monkeypatch.undo()
    (path / "shard-00001.bin").unlink()
    with pytest.raises(RunError, match=r"shard-00001.bin is missing"):
        train(config, tmp_path / "run")
    with pytest.raises(RunError, match=r"data.path: expected a folder"):
        train(small("gla", source="tokens"), tmp_path / "other")
    assert not (tmp_path / "other" / "config.json").exists()  # nothing is claimed for a run that cannot be


def test_other_data_under_the_same_name_are_refused(tmp_path):
    path = write_shards(tmp_path / "shards", [documents()])
    train(small("gla", path=path, steps=5), tmp_path / "run")
    moved = path.rename(tmp_path / "moved")
    write_shards(path, [documents(seed=1)])
    with pytest.raises(RunError, match=r"data.path: the tokens in .* are not those that the run began with"):
        train(small("gla", path=path, steps=5), tmp_path / "run")
    assert train(small("gla", path=moved, steps=5), tmp_path / "run") == 0


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path):
    path = write_shards(tmp_path / "shards", [documents(vocabulary=100)], vocab_size=100)
    with pytest.raises(RunError, match=r"data.path: .* vocabulary of 100, but model.vocab_size is 64"):
        train(small("gla", path=path), tmp_path / "run")


def test_recall_samples_may_use_a_part_of_the_vocabulary(world):
    config = small("gla", recall_vocab_size=30)
    assert train_source(config).batch(0).input_ids.max() < 30
    with pytest.raises(RunError, match=r"data.recall_vocab_size: expected up to 64, got 65"):
        train_source(small("gla", recall_vocab_size=65))


# What one sees


def test_the_gate_is_logged_beside_the_curve_of_decay_alone(tmp_path):
    config = small("ccq-gla", steps=10, lr=0.3, weight_decay=0.5, log_every=1)
    trained = []
    step = Trainer.step

    def note(trainer, batches):
        lam = [p.detach().sigmoid().mean().item() for n, p in trainer.model.named_parameters() if "gate_bias" in n]
        trained.append(lam)
        return step(trainer, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", note)
        train(config, tmp_path)
    rows = log_of(tmp_path)
    assert [row["lam_of_decay_alone"] for row in rows] == pytest.approx(pure_decay(config)[1:].tolist())
    assert rows[0]["lam"] == pytest.approx([0.01, 0.01])  # W is zero: lam is sigmoid of the bias
    assert rows[0]["lam"] == pytest.approx(trained[0])
    assert len(rows[-1]["lam"]) == 2
    assert rows[-1]["lam"] != pytest.approx([0.01, 0.01], rel=0.1)
    train(small("gla", steps=5), tmp_path / "plain")
    assert "lam" not in log_of(tmp_path / "plain")[0]


def test_recall_is_validated_by_kind_of_sample(tmp_path):
    slices = ((16, 2, 20), (24, 3, 12))
    config = small("gated-deltanet", steps=10, valid_slices=slices, validate_every=5, micro_batch=8)
    train(config, tmp_path)
    rows = [row for row in log_of(tmp_path) if "valid_loss" in row]
    assert [row["step"] for row in rows] == [5, 10]
    model = loaded(config, tmp_path)
    from ccq.data.mqar import MQAR

    right, asked, total, by_slice = 0, 0, 0.0, {}
    source = MQAR(8, slices, seed=0, split="valid", vocab_size=64)
    for kind, batch in source.in_order(1):
        slice_ = source.slices[kind]
        with torch.no_grad():
            logits = model(batch.input_ids).logits
        scored = batch.labels != IGNORE
        hits = (logits.argmax(-1) == batch.labels)[scored]
        total += F.cross_entropy(logits[scored], batch.labels[scored], reduction="sum").item()
        by_slice.setdefault(f"valid_accuracy_{slice_.length}x{slice_.pairs}", []).extend(hits.tolist())
        right, asked = right + int(hits.sum()), asked + len(hits)
    assert rows[-1]["valid_accuracy"] == pytest.approx(right / asked)
    assert rows[-1]["valid_loss"] == pytest.approx(total / asked, abs=1e-12)
    for name, hits in by_slice.items():
        assert rows[-1][name] == pytest.approx(sum(hits) / len(hits))


def loaded(config, run):
    """The model of the last checkpoint, by its tensors."""
    from ccq.model import CCQForCausalLM
    from ccq.train.config import model_config

    weights = contents(run / "checkpoints" / f"step-{config.steps:08d}")
    model = CCQForCausalLM(model_config(config.model)).double()
    model.load_state_dict({n.removeprefix("model/"): x for n, x in weights.items() if n.startswith("model/")})
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from ccq.data.sources import Inputs
    from ccq.data.tokenizer import train_tokenizer

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the query reads the memory and the memory answers the query. " * 20)
    return train_tokenizer(Inputs((path,)), vocab_size=270)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory, tokenizer):
    """A run on text, with all that one may look at; (config, folder)."""
    folder = tmp_path_factory.mktemp("text-run")
    text = "the memory answers the query and reads the memory."
    docs = [tokenizer(text[:n])["input_ids"] for n in range(10, 50, 3)]
    for name, part in (("train", docs[::2]), ("valid", docs[1::2])):
        write_shards(folder / name, [part], vocab_size=300, tokenizer=tokenizer)
    config = small(
        "ccq-gated-deltanet", steps=10, path=folder / "train", valid_path=str(folder / "valid"), vocab_size=300,
        validate_every=5, sample_every=5, sample_prompt="the", sample_tokens=12, tensorboard=True, micro_batch=4,
    )  # fmt: skip
    assert train(config, folder / "run") == 0
    return config, folder / "run"


def test_perplexity_of_validation(text_run):
    config, run = text_run
    model = loaded(config, run)
    total, scored = 0.0, 0
    windows = TokenWindows(config.data.valid_path, config.data.length, 1)
    for number in range(windows.windows):
        batch = windows.of(0, [number])
        with torch.no_grad():
            logits = model(batch.input_ids).logits[0]
        total += F.cross_entropy(logits, batch.labels[0], reduction="sum", ignore_index=IGNORE).item()
        scored += int((batch.labels != IGNORE).sum())
    rows = [row for row in log_of(run) if "valid_perplexity" in row]
    assert [row["step"] for row in rows] == [5, 10]
    assert rows[-1]["valid_loss"] == pytest.approx(total / scored, abs=1e-12)
    assert rows[-1]["valid_perplexity"] == pytest.approx(math.exp(total / scored))


def test_samples_begin_with_the_prompt(text_run):
    _, run = text_run
    samples = [row["sample"] for row in log_of(run) if "sample" in row]
    assert len(samples) == 2
    assert all(text.startswith("the") for text in samples)


def test_a_sample_is_drawn_by_its_step(text_run, world):
    """The same weights say the same again at a step, and something else at another."""
    config, run = text_run
    model = loaded(config, run)
    said = [sample(model, config, world, tokenizer_of(run), step) for step in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_tensorboard_has_what_the_log_has(text_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, run = text_run
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [5, 10]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses(run), rel=1e-6)
    assert {"lam/layer_0", "lam/layer_1", "lam/decay_alone", "valid_perplexity"} <= set(events.Tags()["scalars"])


def test_export_is_the_model_with_its_tokenizer(text_run, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ccq import cli

    config, run = text_run
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("the memory", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(config, run)(ids).logits)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert cli.main(["export", str(run), str(tmp_path / "five"), "--step", "5"]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "six"), "--step", "6"]) == 1
    assert "holds no checkpoint of step 6; it has step 10, 5" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), str(tmp_path / "no")]) == 1


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("I/O error"), KeyboardInterrupt])
def test_an_export_that_fails_leaves_what_was_there(text_run, tmp_path, capsys, monkeypatch, error):
    """Nothing where nothing was, and of an export before all of it: scripts take a folder for a finished one."""
    from ccq import cli

    def fail(*_, **__):
        raise error

    def attempt(out):
        with monkeypatch.context() as broken:
            broken.setattr("transformers.modeling_utils.safe_save_file", fail)
            return cli.main(["export", str(text_run[1]), str(out)])

    expected = 130 if error is KeyboardInterrupt else 1
    assert attempt(tmp_path / "new") == expected
    assert not list(tmp_path.iterdir())
    assert cli.main(["export", str(text_run[1]), str(tmp_path / "old"), "--step", "5"]) == 0
    before = files_of(tmp_path)
    assert attempt(tmp_path / "old") == expected
    assert files_of(tmp_path) == before
    said = capsys.readouterr().err
    assert error is KeyboardInterrupt or f"{tmp_path / 'old'} could not be written: {type(error).__name__}: " in said


def test_an_export_replaces_the_one_before_and_nothing_else(text_run, tmp_path):
    from ccq import cli

    out = tmp_path / "out"
    assert cli.main(["export", str(text_run[1]), str(out), "--step", "5"]) == 0
    (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")  # transformers cuts large ones
    (out / "model.safetensors.index.json").write_text("{}")
    (out / "README.md").write_text("mine")
    (out / "adapter_model.safetensors").write_bytes(b"mine too")
    (tmp_path / "out" / ".partial").mkdir()  # of a process that was killed
    (tmp_path / "out" / ".partial" / "config.json").write_text("{")
    assert cli.main(["export", str(text_run[1]), str(out)]) == 0
    assert cli.main(["export", str(text_run[1]), str(tmp_path / "fresh")]) == 0
    found, fresh = files_of(out), files_of(tmp_path / "fresh")
    assert found.pop(Path("README.md")) == b"mine"
    assert b"trust_remote_code=True" in fresh.pop(Path("README.md"))
    assert found.pop(Path("adapter_model.safetensors")) == b"mine too"
    assert found == fresh
    assert {path.name for path in tmp_path.iterdir()} == {"out", "fresh"}


def test_an_export_onto_a_file_is_refused(text_run, tmp_path, capsys):
    from ccq import cli

    (tmp_path / "afile").write_text("mine")
    assert cli.main(["export", str(text_run[1]), str(tmp_path / "afile")]) == 1
    output = capsys.readouterr()
    assert "afile is a file: expected a folder" in output.err
    assert "Wrote" not in output.out
    assert files_of(tmp_path) == {Path("afile"): b"mine"}


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_no_export_into_a_run(text_run, tmp_path, capsys, force):
    """It would replace config.json, and the run could be neither trained nor exported any more."""
    from ccq import cli

    other = tmp_path / "other"
    assert train(small("gla", steps=1), other) == 0
    for target in (text_run[1], other):
        before = files_of(target)
        assert cli.main(["export", str(text_run[1]), str(target), *force]) == 1
        assert f"{target} is a run of `ccq train`, which is not overwritten" in capsys.readouterr().err
        assert files_of(target) == before


def test_an_export_takes_the_place_of_another_model_only_if_told_so(text_run, tmp_path, capsys):
    from ccq import cli

    run, out = tmp_path / "run", tmp_path / "out"
    assert train(small("gla", steps=1, seed=1), run) == 0  # of recall: without a tokenizer
    assert cli.main(["export", str(text_run[1]), str(out)]) == 0
    (out / "adapter_config.json").write_text("{}")
    (out / "ccq_adapter.json").write_text("{}")  # with it, ccq.load would load the model that it names
    (out / "README.md").write_text("the card of the other model")
    (out / "pytorch_model.bin").write_bytes(b"older")
    (out / "notes.txt").write_text("mine")
    (out / "eval").mkdir()
    before = files_of(out)
    assert cli.main(["export", str(run), str(out)]) == 1
    said = capsys.readouterr().err
    assert f"{out} is not empty, it holds README.md, adapter_config.json, ccq_adapter.json, config.json and " in said
    assert "an older export of this run" in said
    assert "--force" in said
    assert files_of(out) == before
    assert cli.main(["export", str(run), str(out), "--force"]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "fresh")]) == 0
    found = files_of(out)
    assert found.pop(Path("notes.txt")) == b"mine"
    assert found == files_of(tmp_path / "fresh")
    assert (out / "eval").is_dir()
    moved = run.rename(tmp_path / "moved")
    assert cli.main(["export", str(moved), str(out)]) == 0  # the same run, wherever it lies


def test_validation_tokens_of_another_tokenizer_are_refused(tmp_path):
    for name, tokenizer in (("train", "a" * 64), ("valid", "b" * 64), ("same", "a" * 64)):
        write_shards(tmp_path / name, [[[1, 2, 3] * 20]], hash_=tokenizer)
    told = r"data.valid_path: .*valid is of another tokenizer than .*train"
    with pytest.raises(RunError, match=told):
        train(small(steps=2, path=tmp_path / "train", valid_path=str(tmp_path / "valid")), tmp_path / "run")
    assert train(small(steps=2, path=tmp_path / "train", valid_path=str(tmp_path / "same")), tmp_path / "run") == 0


if __name__ == "__main__":
    with join("cpu") as alone:
        curves = {s: [d.loss for d in steps_of(Trainer(curve_config(s), alone), 20)] for s in SYSTEMS}
    CURVES.write_text(json.dumps(curves, indent=1) + "\n")
