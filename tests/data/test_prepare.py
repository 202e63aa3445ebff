"""Text into shards: the right tokens and borders, whatever the workers, and killed at any time."""

import contextlib
import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from ccq.data import DataError, prepare, shards, sources
from ccq.data.needles import Needles
from ccq.data.prepare import Preparation
from ccq.data.shards import INDEX, ShardError, TokenShards
from ccq.data.sources import Inputs
from ccq.data.tokenizer import load_tokenizer, tokenizer_hash


def content(folder):
    """{name: checksum} of all that a preparation leaves, and nothing else may be there."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def documents(folder):
    """The ids of every document, without its end-of-text."""
    stream = TokenShards(folder)
    tokens, ends = stream.read(0, stream.tokens)
    assert (tokens[ends - 1] == stream.eos_id).all()
    assert ends[-1] == len(tokens)
    return [part[:-1].tolist() for part in np.split(tokens, ends[:-1])]


@pytest.fixture
def what(corpus, tokenizer_folder):
    return Preparation(Inputs((corpus,)), tokenizer_folder, shard_tokens=2000)


@pytest.fixture
def small_pieces(monkeypatch):
    """Chunks of a few documents, and documents of several pieces."""
    monkeypatch.setattr(sources, "PIECE", 500)
    monkeypatch.setattr(prepare, "CHUNK", 700)


@pytest.fixture
def undisturbed(what, tmp_path, small_pieces):
    prepare.prepare(what, tmp_path / "undisturbed", workers=0)
    return content(tmp_path / "undisturbed")


def test_documents_are_those_of_the_tokenizer(what, tmp_path, texts, tokenizer_folder, small_pieces):
    """Each document's tokens against transformers on the whole text; end-of-text after each; empty ones left out."""
    index = prepare.prepare(what, tmp_path, workers=0)
    tokenizer = load_tokenizer(tokenizer_folder)
    expected = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in texts]
    assert documents(tmp_path) == expected
    assert all(0 not in ids for ids in expected)  # also "a<|endoftext|>b"
    assert index["tokens"] == sum(map(len, expected)) + len(texts)
    assert index["documents"] == len(texts)
    assert index["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert index["dtype"] == "uint16"
    assert (
        index["tokenizer"]["hash"]
        == tokenizer_hash(tokenizer)
        == tokenizer_hash(load_tokenizer(tmp_path / "tokenizer"))
    )
    assert len(index["shards"]) > 3
    for entry in index["shards"][:-1]:
        assert 2000 <= entry["tokens"] < 2000 + max(map(len, expected)) + 1
    assert json.loads((tmp_path / INDEX).read_text()) == index
    assert not shards.problems(tmp_path, index)


def test_large_vocabularies_take_four_bytes(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(70_000)}
    backend = Tokenizer(models.WordLevel({**words, "</s>": 70_000, "?": 70_001}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="?").save_pretrained(tmp_path / "t")
    (tmp_path / "d.txt").write_text("w3 w69999 w65536")
    index = prepare.prepare(Preparation(Inputs((tmp_path / "d.txt",)), tmp_path / "t"), tmp_path / "out", workers=0)
    assert index["dtype"] == "uint32"
    assert documents(tmp_path / "out") == [[3, 69_999, 65_536]]
    assert TokenShards(tmp_path / "out").eos_id == 70_000


@pytest.mark.parametrize("workers", [1, 3])
def test_parallel_equals_serial(what, undisturbed, tmp_path, workers):
    prepare.prepare(what, tmp_path / "parallel", workers=workers)
    assert content(tmp_path / "parallel") == undisturbed


def test_the_settings_of_cutting_do_not_matter(what, undisturbed, tmp_path, monkeypatch):
    for size in (50, 10**6):
        monkeypatch.setattr(prepare, "CHUNK", size)
        monkeypatch.setattr(sources, "PIECE", size)
        prepare.prepare(what, tmp_path / str(size), workers=0)
        assert content(tmp_path / str(size)) == undisturbed


def killed(call):
    """Run `call` in a fork that dies by SIGKILL."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 on fork with threads about; none holds a lock here
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            call()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(function, number, before):
    """`function`, that dies at its call with this number, before or after doing what it does."""
    calls = 0

    def wrapped(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number and before:
            die()
        result = function(*arguments, **options)
        if calls == number:
            die()
        return result

    return wrapped


@pytest.mark.parametrize(
    ("where", "number", "before"),
    [
        ("ShardWriter.write", 40, False),  # in the middle of a shard
        ("ShardWriter.finish", 1, False),  # the shard has its name, the index does not know it
        ("ShardWriter.finish", 2, False),
        ("write_json", 3, False),  # the index knows it
        ("os.replace", 5, True),  # an index is written and has no name yet
    ],
)
@pytest.mark.parametrize("needles", [None, Needles(0.2, length=(200, 600))])
def test_killed_and_resumed_is_undisturbed(what, tmp_path, small_pieces, monkeypatch, where, number, before, needles):
    what = Preparation(what.inputs, what.tokenizer, what.shard_tokens, needles=needles)
    whole = prepare.prepare(what, tmp_path / "undisturbed", workers=0)
    out = tmp_path / "out"
    holder, name = (os, "replace") if where == "os.replace" else (prepare, where)
    owner = getattr(holder, name.split(".")[0]) if "." in name else holder
    with monkeypatch.context() as patch:
        attribute = name.split(".")[-1]
        patch.setattr(owner, attribute, die_at_call(getattr(owner, attribute), number, before))
        killed(lambda: prepare.prepare(what, out, workers=0))
    finished = json.loads((out / INDEX).read_text())
    assert not finished["complete"]
    assert len(finished["shards"]) < len(whole["shards"])
    with pytest.raises(ShardError, match="is unfinished"):
        TokenShards(out)
    before_resuming = {entry["file"]: (out / entry["file"]).stat().st_mtime_ns for entry in finished["shards"]}
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Inputs, "pieces", lambda self, start, pieces=Inputs.pieces: read.append(start) or pieces(self, start)
        )
        prepare.prepare(what, out, workers=0)
    assert content(out) == content(tmp_path / "undisturbed")
    assert {name: (out / name).stat().st_mtime_ns for name in before_resuming} == before_resuming, "shards made again"
    assert (read[0] != sources.BEGINNING) == bool(finished["shards"]), "it must go on, not begin again"


def test_it_goes_on_from_every_shard(what, tmp_path, small_pieces, monkeypatch):
    """Also where a shard ends among the needle documents made of one document."""
    what = Preparation(what.inputs, what.tokenizer, shard_tokens=300, needles=Needles(0.4, length=(200, 600)))
    shard_count = len(prepare.prepare(what, tmp_path / "undisturbed", workers=0)["shards"])
    assert shard_count > 20
    out = tmp_path / "out"
    for count in range(1, shard_count - 1, 2):  # two shards, then killed; again and again in one folder
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "write_json", die_at_call(prepare.write_json, 2 + (count == 1), False))
            killed(lambda: prepare.prepare(what, out, workers=0))
        assert len(json.loads((out / INDEX).read_text())["shards"]) == count + 1
    prepare.prepare(what, out, workers=0)
    assert content(out) == content(tmp_path / "undisturbed")


def test_a_killed_command_leaves_no_processes_and_goes_on(what, corpus, tokenizer_folder, tmp_path, texts):
    """The real thing: `ccq data prepare` with workers, SIGKILL from outside, the same command again."""
    big = tmp_path / "big.jsonl"
    with open(big, "w") as file:
        for _ in range(12):
            file.write(corpus.read_text())
    out = tmp_path / "out"
    arguments = ["data", "prepare", str(big), "--tokenizer", str(tokenizer_folder), "--out", str(out)]
    arguments += ["--workers", "2", "--shard-tokens", "10K"]
    process = subprocess.Popen([sys.executable, "-m", "ccq", *arguments], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (out / "shard-00001.bin").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True).stdout, "they would outlive it"
    process.kill()
    process.wait()
    finished = json.loads((out / INDEX).read_text())
    assert not finished["complete"], "the machine was too quick: give it more text"
    whole = Preparation(Inputs((big,)), tokenizer_folder, shard_tokens=10_000)
    prepare.prepare(whole, out, workers=0)
    prepare.prepare(whole, tmp_path / "undisturbed", workers=0)
    assert content(out) == content(tmp_path / "undisturbed")


def test_a_finished_folder_is_left_alone(what, tmp_path):
    index = prepare.prepare(what, tmp_path, workers=0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")}
    assert prepare.prepare(what, tmp_path, workers=0) == index
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")} == before


def test_a_folder_of_something_else_is_refused_by_field(what, tmp_path, corpus, tokenizer_folder):
    prepare.prepare(what, tmp_path / "out", workers=0)
    other_tokenizer = tmp_path / "other"
    load_tokenizer(tokenizer_folder).train_new_from_iterator(["abc abd"], 300).save_pretrained(other_tokenizer)
    other_file = tmp_path / "corpus.jsonl"
    other_file.write_text('{"text": "other"}')
    for name, changed in (
        ("tokenizer hash", Preparation(what.inputs, other_tokenizer, 2000)),
        ("filter", Preparation(Inputs((corpus,), filter=("a-",)), tokenizer_folder, 2000)),
        ("files", Preparation(Inputs((other_file,)), tokenizer_folder, 2000)),
        ("shard_tokens", Preparation(what.inputs, tokenizer_folder, 3000)),
        ("needles", Preparation(what.inputs, tokenizer_folder, 2000, needles=Needles(0.1))),
    ):
        with pytest.raises(DataError, match=f"out was started with other settings, {name}: "):
            prepare.prepare(changed, tmp_path / "out", workers=0)
    more = Preparation(Inputs((*what.inputs.paths, other_file)), tokenizer_folder, 2000)
    with pytest.raises(DataError, match=r'settings, files: \[\], now \[\{"name": "corpus.jsonl", "bytes": 17\}\]'):
        prepare.prepare(more, tmp_path / "out", workers=0)


def test_resuming_refuses_a_damaged_shard_by_name(what, tmp_path):
    index = prepare.prepare(what, tmp_path, workers=0)
    path = tmp_path / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ShardError, match=r"shard-00001.bin is damaged"):
        prepare.prepare(what, tmp_path, workers=0)
    assert [p for p in shards.problems(tmp_path, index) if "shard-00001.bin is damaged" in p]
    (tmp_path / INDEX).unlink()
    with pytest.raises(FileExistsError, match=r"is not empty, it holds shard-00000.bin, .* this command began"):
        prepare.prepare(what, tmp_path, workers=0)


def test_a_folder_of_something_else_stays_as_it_is(what, tmp_path):
    """Such as a run, whose tokenizer it would replace."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"is not empty, it holds tokenizer: .* this command began. Choose another$"
    ):
        prepare.prepare(what, tmp_path, workers=0)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "tokenizer", "tokenizer.json"]
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_text() == "mine"


def test_a_second_process_is_refused(what, tmp_path):
    tmp_path.mkdir(exist_ok=True)
    with prepare.locked(tmp_path / ".lock", DataError), pytest.raises(DataError, match="in use by another process"):
        prepare.prepare(what, tmp_path, workers=0)


def test_what_goes_wrong_in_a_worker_is_an_error_and_not_a_wait(what, tmp_path, small_pieces, monkeypatch):
    def encode(self, texts):
        raise MemoryError("no more")

    monkeypatch.setattr(prepare.Encoder, "__call__", encode)
    with pytest.raises(MemoryError, match="no more"):
        prepare.prepare(what, tmp_path, workers=2)
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_keeps_what_is_finished(what, tmp_path, small_pieces, undisturbed, monkeypatch):
    out, calls, put = tmp_path / "out", 0, shards.ShardWriter._put

    def full(self, content):
        nonlocal calls
        calls += 1
        if calls == 60:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        put(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "_put", full)
        with pytest.raises(OSError, match="No space left on device"):
            prepare.prepare(what, out, workers=0)
    assert len(json.loads((out / INDEX).read_text())["shards"]) > 0
    assert not list(out.glob("*.partial"))
    prepare.prepare(what, out, workers=0)
    assert content(out) == undisturbed


def test_skip_and_max_tokens_part_the_documents(what, tmp_path, corpus, tokenizer_folder):
    """The first of a stream held out, and the rest: together all."""
    prepare.prepare(what, tmp_path / "all", workers=0)
    first = Preparation(Inputs((corpus,)), tokenizer_folder, max_tokens=1500)
    index = prepare.prepare(first, tmp_path / "first", workers=0)
    assert index["complete"]
    rest = Preparation(Inputs((corpus,)), tokenizer_folder, skip=index["documents"])
    prepare.prepare(rest, tmp_path / "rest", workers=0)
    everything = documents(tmp_path / "all")
    assert documents(tmp_path / "first") + documents(tmp_path / "rest") == everything
    assert 1500 <= index["tokens"] < 1500 + len(everything[index["documents"] - 1]) + 1


def test_filter_and_dataset(what, tmp_path, corpus, tokenizer_folder, texts):
    kept = Preparation(Inputs((corpus,), filter=("b-",)), tokenizer_folder)
    prepare.prepare(what, tmp_path / "all", workers=0)
    prepare.prepare(kept, tmp_path / "kept", workers=0)
    assert documents(tmp_path / "kept") == documents(tmp_path / "all")[1::2]
    hub = Preparation(Inputs(dataset=str(corpus.parent)), tokenizer_folder)
    prepare.prepare(hub, tmp_path / "hub", workers=0)
    assert documents(tmp_path / "hub") == documents(tmp_path / "all")
    none = Preparation(Inputs((corpus,), filter=("z",)), tokenizer_folder)
    with pytest.raises(DataError, match="no document is left to prepare after the filter"):
        prepare.prepare(none, tmp_path / "none", workers=0)


def test_needle_documents_are_counted_and_the_rest_is_unchanged(what, tmp_path, small_pieces):
    plain = prepare.prepare(what, tmp_path / "plain", workers=0)
    mixed = Preparation(what.inputs, what.tokenizer, what.shard_tokens, needles=Needles(0.3, length=(200, 600)))
    index = prepare.prepare(mixed, tmp_path / "mixed", workers=0)
    prepare.prepare(mixed, tmp_path / "parallel", workers=2)
    assert content(tmp_path / "mixed") == content(tmp_path / "parallel")
    assert index["settings"]["needles"]["share"] == 0.3
    assert index["settings"]["needles"]["wonderwords"]
    assert 0.25 < index["needle_tokens"] / index["tokens"] < 0.45
    assert index["tokens"] - index["needle_tokens"] == plain["tokens"]
    assert index["documents"] - index["needle_documents"] == plain["documents"]
    texts = iter(documents(tmp_path / "mixed"))
    assert all(any(document == other for other in texts) for document in documents(tmp_path / "plain"))  # in order


def test_a_folder_inside_the_text_is_refused(tmp_path, tokenizer_folder, monkeypatch):
    """Its index would be read as text by the next call."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path / "texts")
    inside = Preparation(Inputs((Path("."),)), tokenizer_folder)
    for out in ("shards", "."):
        with pytest.raises(DataError, match=rf"^{re.escape(out)} lies in \., and would be read with it"):
            prepare.prepare(inside, out, workers=0)
    assert prepare.prepare(inside, tmp_path / "shards", workers=0)["documents"] == 1


def test_errors_name_the_argument(what, tmp_path, corpus):
    with pytest.raises(DataError, match="workers must be at least 0, got -1"):
        prepare.prepare(what, tmp_path, workers=-1)
    with pytest.raises(DataError, match="shard_tokens must be at least 1, got 0"):
        prepare.prepare(Preparation(what.inputs, what.tokenizer, 0), tmp_path, workers=0)
