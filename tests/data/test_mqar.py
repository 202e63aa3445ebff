"""Recall data against closed forms and against a plain reading of zoology's generator."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ccq.data.batches import IGNORE
from ccq.data.mqar import (
    MQAR,
    OVERWRITTEN_TEST,
    POWER_A,
    TEST,
    TRAIN,
    distinct,
    make_samples,
)
from ccq.data.recall import Slice
from ccq.recipes import recipe


def naive(rng, count, length, pairs, vocab_size, power_a):
    """The task as its paper has it, one sample at a time with numpy's own choice."""
    space = (length - 2 * pairs) // 2
    p = np.arange(1, space + 1) ** (power_a - 1.0)
    for _ in range(count):
        keys = rng.choice(np.arange(1, vocab_size // 2), size=pairs, replace=False)
        values = rng.choice(np.arange(vocab_size // 2, vocab_size), size=pairs, replace=False)
        gaps = rng.choice(space, size=pairs, replace=False, p=p / p.sum())
        yield keys, values, gaps


def parse(inputs, labels, pairs):
    """(keys, values, gaps) of a sample, from its tokens alone."""
    keys, values = inputs[0 : 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
    asked = {int(inputs[t]): t for t in np.flatnonzero(labels != IGNORE)}
    return keys, values, np.array([(asked[int(k)] - 2 * pairs) // 2 for k in keys])


@given(st.integers(1, 12), st.integers(0, 10), st.integers(0, 2**40))
def test_every_query_was_stored_with_its_value(pairs, room, index):
    length = 4 * pairs + 2 * room
    inputs, labels = make_samples(np.arange(index, index + 8), length, pairs, key=1, vocab_size=128)
    assert inputs.shape == labels.shape == (8, length)
    assert inputs.min() >= 0
    assert inputs.max() < 128
    for row, label in zip(inputs, labels, strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys.tolist())) == len(set(values.tolist())) == pairs
        assert keys.min() >= 1
        assert keys.max() < 64 <= values.min()
        asked = np.flatnonzero(label != IGNORE)
        assert len(asked) == pairs  # each key is asked for once, and there is no other label
        assert sorted(row[asked].tolist()) == sorted(keys.tolist())
        stored = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [stored[k] for k in row[asked].tolist()] == label[asked].tolist()
        assert asked.min() >= 2 * pairs
        assert (asked % 2 == 0).all()


@given(st.integers(1, 12), st.data(), st.integers(0, 2**40))
def test_of_a_key_that_is_overwritten_the_last_value_is_asked_for(pairs, data, index):
    updates = data.draw(st.integers(0, pairs))
    length = 4 * pairs + 2 * updates + data.draw(st.sampled_from([0, 6]))
    indices = np.arange(index, index + 8)
    inputs, labels = make_samples(indices, length, pairs, key=1, vocab_size=128, updates=updates)
    plain, _ = make_samples(indices, length, pairs, key=1, vocab_size=128)
    assert np.array_equal(inputs[:, : 2 * pairs], plain[:, : 2 * pairs])  # before that, the same sample
    context = 2 * (pairs + updates)
    for row, label in zip(inputs, labels, strict=True):
        stored, overwritten = {}, 0
        for key, value in row[:context].reshape(-1, 2).tolist():
            assert key < 64 <= value
            assert stored.get(key) != value  # another one, each time
            overwritten += key in stored
            stored[key] = value
        assert (overwritten, len(stored)) == (updates, pairs)
        asked = np.flatnonzero(label != IGNORE)
        assert sorted(row[asked].tolist()) == sorted(stored)
        assert [stored[k] for k in row[asked].tolist()] == label[asked].tolist()
        assert asked.min() >= context


def test_which_keys_are_overwritten_and_with_what_is_uniform():
    inputs, _ = make_samples(np.arange(20_000), 16, 3, key=4, vocab_size=64, updates=1)
    which = (inputs[:, 0:6:2] == inputs[:, 6:7]).argmax(1)
    assert np.abs(np.bincount(which) - 20_000 / 3).max() < 4 * np.sqrt(20_000 * 2 / 9)
    old = np.take_along_axis(inputs[:, 1:6:2], which[:, None], 1)[:, 0]
    assert uniform_enough((inputs[:, 7] - old) % 32, 1, 32)  # any but the old one


def test_a_sample_is_a_function_of_its_index():
    index = np.array([7, 10**9, 3])
    together = make_samples(index, 64, 8, key=5)
    for i, n in enumerate(index):
        alone = make_samples(np.array([n]), 64, 8, key=5)
        for a, b in zip(together, alone, strict=True):
            assert np.array_equal(a[i], b[0])
    assert not np.array_equal(together[0], make_samples(index, 64, 8, key=6)[0])


def two_sample(a, b):
    """Standardised chi-square of two histograms with equal totals: about N(0, 1) where both come from one law."""
    used = a + b > 0
    statistic = np.sum((a - b)[used] ** 2 / (a + b)[used])
    freedom = used.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (32, 7)])
def test_gaps_follow_zoologys_law(length, pairs):
    """Each pair's gap, and the joint law of the first two, against numpy's weighted choice without replacement."""
    count, space = 8000, (length - 2 * pairs) // 2
    inputs, labels = make_samples(np.arange(count), length, pairs, key=2, vocab_size=128)
    ours = np.array([parse(x, y, pairs)[2] for x, y in zip(inputs, labels, strict=True)])
    rng = np.random.RandomState(0)
    theirs = np.array([gaps for _, _, gaps in naive(rng, count, length, pairs, 128, 0.01)])
    for i in range(pairs):
        a, b = (np.bincount(g[:, i], minlength=space) for g in (ours, theirs))
        assert abs(two_sample(a, b)) < 4, f"pair {i}"
    a, b = (np.bincount(g[:, 0] * space + g[:, 1], minlength=space**2) for g in (ours, theirs))
    assert abs(two_sample(a, b)) < 4
    p = np.arange(1, space + 1) ** (0.01 - 1.0)  # the first pair's gap in closed form
    expected = count * p / p.sum()
    chi = np.sum((np.bincount(ours[:, 0], minlength=space) - expected) ** 2 / expected)
    assert abs(chi - (space - 1)) < 4 * np.sqrt(2 * (space - 1))


def uniform_enough(tokens, low, high):
    """Whether a chi-square test takes them for uniform over [low, high)."""
    assert tokens.min() >= low
    assert tokens.max() < high
    expected = tokens.size / (high - low)
    statistic = np.sum((np.bincount(tokens - low, minlength=high - low) - expected) ** 2 / expected)
    freedom = high - low - 1
    return abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_keys_values_and_noise_are_uniform():
    inputs, labels = make_samples(np.arange(20_000), 32, 3, key=4, vocab_size=64)
    for position in (0, 2, 4):
        assert uniform_enough(inputs[:, position], 1, 32)
        assert uniform_enough(inputs[:, position + 1], 32, 64)
    noise = inputs[:, 6:][labels[:, 6:] == IGNORE]  # keys may stand there by chance, and 0 too, as in zoology
    assert uniform_enough(noise, 0, 64)


def test_distinct_is_a_shuffle():
    draws = distinct(9, np.arange(24_000), 4, 4)
    orders = collections.Counter(map(tuple, draws.tolist()))
    assert len(orders) == 24
    assert abs(sum((n - 1000) ** 2 / 1000 for n in orders.values()) - 23) < 4 * np.sqrt(46)


def test_settings_are_zoologys():
    assert TRAIN == ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000))
    assert [s[:2] for s in TEST] == [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
    assert {s.samples for s in TEST} == {1000}
    assert [s[:2] for s in OVERWRITTEN_TEST] == [
        (64, 4), (64, 9), (128, 16), (256, 36), (512, 64), (1024, 144), (2048, 256),
    ]  # fmt: skip
    config = recipe("gla_mqar_overwrite")
    assert [s[:2] for s in config.data.slices] == [(64, 4), (128, 9), (256, 16), (256, 25), (256, 36)]
    assert [s[2] for s in config.data.slices] == [s.samples for s in TRAIN]
    assert config.data.updates == 4
    for name, asked in (("gla_mqar", TEST), ("gla_mqar_overwrite", OVERWRITTEN_TEST)):
        assert recipe(name).data.valid_slices == tuple((*s[:2], 256) for s in asked)
    data = MQAR()
    assert (data.batch_size, data.vocab_size, POWER_A) == (256, 8192, 0.01)


SLICES = ((16, 2, 40), (24, 3, 25), (24, 6, 10))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_is_one_slice_and_samples_are_seen_equally_often(shuffle):
    data = MQAR(8, SLICES, vocab_size=64, shuffle=shuffle)
    assert data.steps_per_epoch == 5 + 3 + 1
    seen = collections.Counter()
    epochs = 20
    for step in range(epochs * data.steps_per_epoch):
        number, indices = data.plan(step)
        seen.update((number, int(i)) for i in indices)
        batch = data.batch(step)
        assert batch.input_ids.shape == (8, SLICES[number][0])
        assert ((batch.labels != IGNORE).sum(1) == SLICES[number][1]).all()
        assert batch.window_ids.tolist() == [sum(s[2] for s in SLICES[:number]) + i for i in indices]
    for number, (_, _, samples) in enumerate(SLICES):
        counts = [seen[number, i] for i in range(samples)]
        assert max(counts) - min(counts) <= 1
    orders = [tuple(data.plan(e * 9 + i)[0] for i in range(9)) for e in range(epochs)]
    assert {tuple(sorted(o)) for o in orders} == {(0, 0, 0, 0, 0, 1, 1, 1, 2)}
    assert len(set(orders)) == 1 if not shuffle else len(set(orders)) > epochs // 2


def test_batches_of_an_epoch_are_rounded_and_slices_of_one_length_drawn_apart():
    data = MQAR(8, [(64, 4, 13), (64, 8, 11)], vocab_size=8192)
    assert data.batches == [2, 1]
    one, two = (data.of(number, np.arange(11)).input_ids[:, 0] for number in (0, 1))
    assert (one != two).all()


def test_ranks_share_the_global_batch_and_seeds_and_splits_differ():
    data = MQAR(8, SLICES, vocab_size=64, seed=3)
    for step in range(5):
        whole = data.batch(step)
        for world in (2, 4):
            parts = [data.batch(step, rank, world) for rank in range(world)]
            assert torch.equal(torch.cat([p.input_ids for p in parts]), whole.input_ids)
            assert torch.equal(torch.cat([p.labels for p in parts]), whole.labels)
    again, seed, split = (
        MQAR(8, SLICES, vocab_size=64, **o) for o in ({"seed": 3}, {"seed": 4}, {"seed": 3, "split": "test"})
    )
    assert torch.equal(again.of(0, np.arange(8)).input_ids, data.of(0, np.arange(8)).input_ids)
    for other in (seed, split):
        assert not torch.equal(other.of(0, np.arange(8)).input_ids, data.of(0, np.arange(8)).input_ids)


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_sees_every_sample_once(world):
    data = MQAR(8, SLICES, vocab_size=64, split="test")
    runs = [list(data.in_order(4, rank, world)) for rank in range(world)]
    assert len({len(run) for run in runs}) == 1
    ids = [i for run in runs for _, batch in run for i in batch.window_ids.tolist() if i >= 0]
    assert sorted(ids) == list(range(75))
    for kind, batch in (pair for run in runs for pair in run):
        slice_ = data.slices[kind]
        assert batch.input_ids.shape == (4, slice_.length)
        assert ((batch.labels != IGNORE).sum(1) == slice_.pairs * (batch.window_ids >= 0)).all()


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="length=14, pairs=4"):
        MQAR(8, [Slice(14, 4, 10)])
    with pytest.raises(ValueError, match="length=16, pairs=4, updates=1"):
        MQAR(8, [Slice(16, 4, 10)], updates=1)
    with pytest.raises(ValueError, match="updates must lie between 0 and pairs=4, got 5"):
        MQAR(8, [Slice(64, 4, 10)], updates=5)
    with pytest.raises(ValueError, match="vocab_size must exceed length=64, got 64"):
        MQAR(8, [Slice(64, 4, 10)], vocab_size=64)
    with pytest.raises(ValueError, match="split must be one of train, valid, test, got 'dev'"):
        MQAR(split="dev")


def test_samples_are_pinned():
    """A change here would change every recall experiment."""
    inputs, labels = make_samples(np.array([0, 9]), 12, 2, key=1, vocab_size=32)
    assert inputs.tolist() == [[14, 16, 2, 25, 6, 1, 14, 11, 2, 4, 17, 16], [13, 25, 3, 17, 13, 11, 3, 7, 24, 9, 9, 29]]
    assert labels.tolist() == [
        [IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, 16, IGNORE, 25, IGNORE, IGNORE, IGNORE],
        [IGNORE, IGNORE, IGNORE, IGNORE, 25, IGNORE, 17, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE],
    ]
