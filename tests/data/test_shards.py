"""Shards on disk: what is written is read, and what is damaged or foreign is refused by name."""

import hashlib
import json
import pickle
import shutil

import numpy as np
import pytest
from data_helpers import EOS, write_shards
from hypothesis import given
from hypothesis import strategies as st

from ccq.data.shards import INDEX, ShardError, ShardWriter, TokenShards, token_dtype


def test_dtype_is_the_smallest_that_holds_the_vocabulary():
    assert [token_dtype(v).name for v in (32_000, 65_535, 65_536, 130_000)] == ["uint16", "uint16", "uint32", "uint32"]


@given(
    st.lists(st.lists(st.lists(st.integers(1, 69_999), max_size=9), min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_any_range_of_the_stream_is_read(tmp_path_factory, groups, wide, data):
    folder = tmp_path_factory.mktemp("shards")
    if not wide:
        groups = [[[i % 60_000 for i in document] for document in documents] for documents in groups]
    stream, ends = write_shards(folder, groups, vocab_size=70_000 if wide else 60_000)
    shards = TokenShards(folder)
    assert (shards.tokens, shards.documents) == (len(stream), len(ends))
    start = data.draw(st.integers(0, len(stream)))
    stop = data.draw(st.integers(start, len(stream)))
    tokens, found = shards.read(start, stop)
    assert tokens.tolist() == stream[start:stop].tolist()
    assert found.tolist() == [e - start for e in ends if start < e <= stop]
    assert all(tokens[e - 1] == EOS for e in found)


def test_read_refuses_what_is_outside(some_shards):
    shards = TokenShards(some_shards[0])
    with pytest.raises(IndexError, match=str(shards.tokens)):
        shards.read(0, shards.tokens + 1)


def test_checksum_is_that_of_the_file(some_shards):
    folder = some_shards[0]
    for entry in TokenShards(folder).index["shards"]:
        content = (folder / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["bytes"] == len(content)


def test_a_pickled_reader_carries_no_tokens(some_shards):
    folder, stream, _ = some_shards
    shards = TokenShards(folder)
    before = len(pickle.dumps(shards))
    shards.read(0, shards.tokens)
    pickled = pickle.dumps(shards)
    assert len(pickled) == before
    assert shards._maps, "the maps of the original stay"
    assert pickle.loads(pickled).read(3, 40)[0].tolist() == stream[3:40].tolist()


@pytest.mark.parametrize("at", [0, 10, -600, -100, -1])
def test_a_changed_byte_is_refused_by_name(some_shards, at):
    """In the tokens, in the ends, in the footer."""
    path = some_shards[0] / "shard-00002.bin"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardError, match=r"shard-00002.bin is damaged"):
        TokenShards(some_shards[0])


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_cut_shard_is_refused_by_name_without_reading_it(some_shards, size):
    path = some_shards[0] / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ShardError, match=r"shard-00000.bin is damaged: \d+ bytes"):
        TokenShards(some_shards[0], checksums=False)


def test_a_missing_shard_is_refused_by_name(some_shards):
    (some_shards[0] / "shard-00001.bin").unlink()
    with pytest.raises(ShardError, match=r"shard-00001.bin is missing"):
        TokenShards(some_shards[0])


@pytest.mark.parametrize(
    ("field", "other"), [("tokenizer", {"tokenizer": "f" * 64}), ("dtype", {"vocab_size": 70_000})]
)
def test_a_foreign_shard_is_refused_by_name(some_shards, tmp_path, field, other):
    write_shards(tmp_path / "other", [[[1, 2, 3]]], **other)
    shutil.copy(tmp_path / "other" / "shard-00000.bin", some_shards[0] / "shard-00001.bin")
    with pytest.raises(ShardError, match=rf"shard-00001.bin is not of this index: its {field}"):
        TokenShards(some_shards[0], checksums=False)


def test_no_damaged_or_unfinished_index_is_taken(some_shards, tmp_path):
    with pytest.raises(ShardError, match=r"index.json is missing: expected a folder made by `ccq data prepare`"):
        TokenShards(tmp_path)
    path = some_shards[0] / INDEX
    index = json.loads(path.read_text())
    for change, message in (
        ({"complete": False}, "unfinished"),
        ({"version": 99}, "has version 99"),
        ({"format": "?"}, "not an index"),
    ):
        path.write_text(json.dumps(index | change))
        with pytest.raises(ShardError, match=message):
            TokenShards(some_shards[0])
    path.write_text(json.dumps(index)[:-20])
    with pytest.raises(ShardError, match=r"index.json is damaged"):
        TokenShards(some_shards[0])


def test_an_unfinished_shard_has_no_name(tmp_path):
    writer = ShardWriter(tmp_path / "shard-00000.bin", "0" * 64, np.dtype("<u2"))
    writer.write(np.arange(5))
    assert [p.name for p in tmp_path.iterdir()] == ["shard-00000.bin.partial"]
    writer.close()
    assert not list(tmp_path.iterdir())
