"""The order of training: every token a target once an epoch, whatever the ranks, and the same for the same seed."""

import collections
import itertools

import numpy as np
import pytest
import torch
from data_helpers import EOS, write_shards
from hypothesis import given
from hypothesis import strategies as st

from ccq.data.batches import IGNORE, Steps, loader
from ccq.data.shards import ShardError, TokenShards
from ccq.data.windows import TokenWindows


def targets(batch, length):
    """Which tokens of the stream a batch scores, by position, checked against its labels and inputs."""
    labels = batch.labels.reshape(-1, length)
    for window, row in zip(batch.window_ids.tolist(), labels, strict=True):
        for t in torch.nonzero(row != IGNORE).flatten().tolist():
            yield window * length + t + 1


@pytest.mark.parametrize("length", [1, 7, 64, 10_000])
@pytest.mark.parametrize("batch_size", [1, 6])
@pytest.mark.parametrize("reset", [False, True])
def test_every_token_is_a_target_once_an_epoch(some_shards, length, batch_size, reset):
    folder, stream, _ = some_shards
    data = TokenWindows(TokenShards(folder), length, batch_size, seed=3, reset=reset)
    seen: collections.Counter = collections.Counter()
    for step in range(data.windows):  # batch_size epochs, all of them whole
        batch = data.batch(step)
        flat = dict(zip(targets(batch, length), batch.labels[batch.labels != IGNORE].tolist(), strict=True))
        assert all(stream[position] == label for position, label in flat.items())
        seen.update(targets(batch, length))
    assert set(seen) == set(range(1, len(stream)))  # the first token of the stream is no target
    assert set(seen.values()) == {batch_size}


@pytest.mark.parametrize("reset", [False, True])
def test_inputs_and_labels_are_the_stream(some_shards, reset):
    folder, stream, _ = some_shards
    L = 16
    data = TokenWindows(folder, L, batch_size=4, reset=reset)
    for step in range(30):
        batch = data.batch(step)
        assert batch.input_ids.shape == ((1, 64) if reset else (4, 16))
        for w, inputs, labels in zip(
            batch.window_ids.tolist(), batch.input_ids.view(4, L), batch.labels.view(4, L), strict=True
        ):
            expected = stream[w * L : w * L + L + 1]
            n = len(expected) - 1
            assert inputs[:n].tolist() == expected[:-1].tolist()
            assert labels[:n].tolist() == expected[1:].tolist()
            assert (inputs[n:] == EOS).all()
            assert (labels[n:] == IGNORE).all()


@given(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 10**6), st.integers(0, 2**32))
def test_ranks_share_the_global_batch_in_order(some_shards_once, length, world, step, seed):
    data = TokenWindows(some_shards_once, length, batch_size=12, seed=seed)
    whole = data.batch(step)
    parts = [data.batch(step, rank, world) for rank in range(world)]
    for name in ("input_ids", "labels", "window_ids"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))


@pytest.fixture(scope="module")
def some_shards_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(1)
    write_shards(folder, [[rng.integers(1, 99, size=9).tolist() for _ in range(30)] for _ in range(2)])
    return TokenShards(folder)


def test_epochs_differ_and_runs_with_one_seed_do_not(some_shards_once):
    def epoch(seed, number):
        data = TokenWindows(some_shards_once, 4, batch_size=1, seed=seed)
        first = number * data.windows
        return [data.plan(first + i)[1][0] for i in range(data.windows)]

    assert epoch(0, 0) == epoch(0, 0)
    assert sorted(epoch(0, 0)) == sorted(epoch(0, 1)) == list(range(len(epoch(0, 0))))
    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    n = len(orders[0])
    for a in range(9):
        for b in range(a):  # not shifts or neighbours of each other: about one window in n keeps its place
            assert np.mean(np.array(orders[a]) == np.array(orders[b])) < 6 / n


def test_the_remainder_of_an_epoch_shares_a_batch_with_the_next(some_shards_once):
    data = TokenWindows(some_shards_once, 16, batch_size=7)
    n = data.windows
    assert n % 7
    ids = np.concatenate([data.plan(step)[1] for step in range(n)]).reshape(7, n)  # 7 epochs
    for epoch in ids:
        assert sorted(epoch.tolist()) == list(range(n))


def test_the_order_is_pinned(some_shards_once):
    """A change here breaks the resuming of every run."""
    data = TokenWindows(some_shards_once, 16, batch_size=8, seed=1)
    assert data.windows == 38
    assert [data.plan(step)[1].tolist() for step in (0, 4, 10**9)] == [
        [1, 24, 19, 36, 12, 23, 27, 21],
        [8, 2, 29, 10, 7, 3, 10, 3],
        [10, 14, 0, 18, 32, 8, 20, 1],
    ]


@given(st.integers(1, 50), st.integers(1, 5), st.integers(0, 100))
def test_borders_are_where_documents_begin(some_shards_once, length, batch_size, step):
    data = TokenWindows(some_shards_once, length, batch_size, reset=True)
    batch = data.batch(step)
    cu = batch.cu_seqlens.tolist()
    assert cu[0] == 0
    assert cu[-1] == batch.input_ids.numel() == batch_size * length
    assert all(a < b for a, b in itertools.pairwise(cu))
    inputs, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    # here end-of-text occurs at the end of documents only, so borders are: windows, and inputs that are end-of-text
    scored = [p for p in range(len(inputs)) if labels[p] != IGNORE]
    expected = {p for p in scored if inputs[p] == EOS} | {w * length for w in range(batch_size)} | {len(inputs)}
    assert set(cu) == expected


def test_packed_with_reset_is_separate_documents(tmp_path):
    """Whatever a causal model computes, each document sees end-of-text and itself, and scores itself and its end."""
    documents = [[5, 6, 7], [], [8], [9, 10, 11, 12]]
    write_shards(tmp_path, [documents[:2], documents[2:]])
    batch = TokenWindows(tmp_path, 11, batch_size=1, reset=True).batch(0)
    cu = batch.cu_seqlens.tolist()
    got = [(batch.input_ids[0, a:b].tolist(), batch.labels[0, a:b].tolist()) for a, b in itertools.pairwise(cu)]
    separate = [([EOS, *d], [*d, EOS]) for d in documents]
    separate[0] = ([5, 6, 7], [6, 7, EOS])  # nothing precedes the stream
    assert got == separate


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_sees_every_target_once_and_ranks_keep_step(some_shards, world):
    folder, stream, _ = some_shards
    data = TokenWindows(folder, 16, batch_size=12)
    runs = [list(data.in_order(5, rank, world)) for rank in range(world)]
    assert len({len(run) for run in runs}) == 1
    assert {tuple(b.input_ids.shape) for run in runs for _, b in run} == {(5, 16)}
    seen = [t for run in runs for _, batch in run for t in targets(batch, 16)]
    assert sorted(seen) == list(range(1, len(stream)))
    first = [w for _, b in data.in_order(5, most=7) for w in b.window_ids.tolist()]
    assert first == [*range(7), -1, -1, -1]
    more = [b.window_ids.tolist() for _, b in data.in_order(5, most=10_000)]  # than there are
    assert more == [b.window_ids.tolist() for _, b in data.in_order(5)]


def test_errors_name_the_argument(some_shards, tmp_path):
    folder = some_shards[0]
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        TokenWindows(folder, 0, 4)
    data = TokenWindows(folder, 8, 4)
    with pytest.raises(ValueError, match=r"batch_size=4 must be a multiple of .* 3"):
        data.batch(0, 0, 3)
    with pytest.raises(ValueError, match="rank must lie in"):
        data.batch(0, 2, 2)
    with pytest.raises(ValueError, match="step must be at least 0"):
        data.batch(-1)
    write_shards(tmp_path / "one", [[[]]])
    with pytest.raises(ShardError, match="holds 1 tokens"):
        TokenWindows(tmp_path / "one", 8, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_resumes_from_the_step(some_shards, workers):
    data = TokenWindows(some_shards[0], 8, 4)
    before = torch.get_rng_state()

    def ids(iterator, count):
        return [[b.window_ids.tolist() for b in next(iterator)] for _ in range(count)]

    iterator = iter(loader(Steps(data, rank=1, world=2, accumulate=2), workers))
    first, rest = ids(iterator, 3), ids(iterator, 4)
    assert first + rest == [[data.plan(s)[1][2:3].tolist(), data.plan(s)[1][3:4].tolist()] for s in range(7)]
    assert ids(iter(loader(Steps(data, rank=1, world=2, accumulate=2, step=3), workers)), 4) == rest
    assert torch.equal(before, torch.get_rng_state()), "loading data must not move the model's random numbers"


def test_steps_reshard(some_shards):
    """1 -> 2 -> 1 ranks, and accumulation in place of ranks, see the same windows in the same order."""
    data = TokenWindows(some_shards[0], 8, 4)

    def ids(step, world, accumulate):
        ranks = [next(iter(Steps(data, rank, world, accumulate, step))) for rank in range(world)]
        return [w for batches in ranks for b in batches for w in b.window_ids.tolist()]

    for step in range(5):
        assert ids(step, 1, 1) == ids(step, 2, 1) == ids(step, 1, 4) == ids(step, 2, 2) == data.plan(step)[1].tolist()
    with pytest.raises(ValueError, match="batch_size=4"):
        Steps(data, 0, 2, accumulate=4)
    with pytest.raises(ValueError, match="workers must be 0 or 1"):
        loader(Steps(data), workers=2)
