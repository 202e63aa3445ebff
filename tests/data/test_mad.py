"""MAD's recall against a plain reading of its definition: who is asked what, and what the context says of it."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccq.data.batches import IGNORE
from ccq.data.mad import MAD, NOISE
from ccq.recipes import recipe
from ccq.train.data import train_source, valid_source

NOISY, FUZZY = {"vocab_size": 32}, {"vocab_size": 16, "noise": 0.0}


def samples(split, motif=1, length=128, count=50, first=0, **options):
    data = MAD(8, [(length, motif, first + count)], split=split, **options)
    batch = data.of(0, first + np.arange(count))
    return batch.input_ids.numpy(), batch.labels.numpy()


def whole(inputs, labels):
    """The tokens of a sample: its inputs, and the last value token, which is only asked for."""
    return [*inputs.tolist(), int(labels[-1])]


@given(st.integers(2, 40), st.integers(0, 2**40), st.sampled_from([0.0, 0.2, 0.8]), st.sampled_from([24, 32, 80]))
def test_of_pairs_exactly_the_values_of_keys_seen_before_are_asked_for(half, first, noise, vocab_size):
    inputs, labels = samples("test", 1, 2 * half, 4, first, noise=noise, vocab_size=vocab_size)
    plain = vocab_size - (NOISE if noise else 0)
    assert inputs.shape == labels.shape == (4, 2 * half - 1)
    for row, label in zip(inputs, labels, strict=True):
        tokens, value_of = whole(row, label), {}
        asked = [label[t] for t in range(1, len(label), 2)]
        assert all(x == IGNORE for x in asked)  # after a value comes a key, which nobody can know
        for at in range(0, len(tokens), 2):
            key, value = tokens[at : at + 2]
            if key >= plain:  # noise, in pairs
                assert noise
                assert plain <= value < vocab_size
                assert label[at] == IGNORE
                continue
            assert key < plain // 2 <= value < plain
            assert label[at] == (value if key in value_of else IGNORE)
            assert value_of.setdefault(key, value) == value  # the answer is what the context says
        assert label[-1] != IGNORE


def words(tokens, keys):
    """(key, value) words of a fuzzy sample and where they begin: a word ends where the other vocabulary begins."""
    found, at = [], 0
    while at < len(tokens):
        begin = at
        while at < len(tokens) and tokens[at] < keys:
            at += 1
        middle = at
        while at < len(tokens) and tokens[at] >= keys:
            at += 1
        found.append((begin, tuple(tokens[begin:middle]), tuple(tokens[middle:at])))
    return found


@pytest.mark.parametrize(("length", "vocab_size"), [(128, 16), (18, 16), (64, 32)])
def test_of_motifs_exactly_the_values_of_keys_seen_before_are_asked_for(length, vocab_size):
    keys, pad = (vocab_size - 1) // 2, vocab_size - 1
    inputs, labels = samples("test", 3, length, 300, vocab_size=vocab_size, noise=0.0)
    assert inputs.shape == (300, length)
    sizes = collections.Counter()
    for row, label in zip(inputs, labels, strict=True):
        tokens = whole(row, label)
        filled = tokens.count(pad)
        assert tokens[:filled] == [pad] * filled
        value_of, due = {}, [IGNORE] * filled
        for _, key, value in words(tokens[filled:], keys):
            assert len(key) == len(set(key)) == 3  # asked are the longest keys
            assert 1 <= len(value) == len(set(value)) <= 3
            due += [IGNORE] * 3 + [x if key in value_of else IGNORE for x in value]
            assert value_of.setdefault(key, value) == value
            sizes[len(value)] += 1
        assert label.tolist() == due[1:]
        assert label[-1] != IGNORE
    assert min(sizes.values()) > 0.25 * sizes.total()


def test_training_motifs_are_of_all_sizes_and_words_of_each_are_equally_likely():
    inputs, labels = samples("train", 3, count=4000, **FUZZY)
    assert np.array_equal(inputs[:, 1:], labels[:, :-1])  # every next token is trained on
    lengths, singles = collections.Counter(), collections.Counter()
    for row, label in zip(inputs, labels, strict=True):
        tokens = [x for x in whole(row, label) if x != 15]
        first = words(tokens, 7)[0]  # drawn before anything is known
        lengths[len(first[1]), len(first[2])] += 1
        singles[first[1][0]] += 1
    # of nine kinds, and of seven first tokens, each 4000 / 9 and 4000 / 7 within four deviations
    assert len(lengths) == 9
    assert all(abs(n - 4000 / 9) < 4 * np.sqrt(4000 * 8 / 81) for n in lengths.values())
    assert all(abs(n - 4000 / 7) < 4 * np.sqrt(4000 * 6 / 49) for n in singles.values())


@pytest.mark.parametrize("noise", [0.2, 0.8])
def test_so_many_pairs_are_noise_and_tokens_of_a_kind_are_equally_likely(noise):
    inputs, labels = samples("train", count=2000, noise=noise, **NOISY)
    assert np.array_equal(inputs[:, 1:], labels[:, :-1])
    pairs = inputs[:, :126].reshape(2000, 63, 2)
    noisy = pairs[:, :, 0] >= 16
    assert np.array_equal(noisy, pairs[:, :, 1] >= 16)
    expected = noise * 62 / 63  # one pair is spared
    assert abs(noisy.mean() - expected) < 4 * np.sqrt(noise * (1 - noise) / noisy.size)
    assert not noisy.all(1).any()
    for tokens, low, high in ((pairs[noisy], 16, 32), (pairs[~noisy][:, 0], 0, 8)):
        counts = np.bincount(tokens.ravel() - low, minlength=high - low)
        assert len(counts) == high - low
        assert np.abs(counts - tokens.size / (high - low)).max() < 5 * np.sqrt(tokens.size / (high - low))
    first = np.bincount(pairs[~noisy[:, 0], 0, 1] - 8)
    assert np.abs(first - first.mean()).max() < 5 * np.sqrt(first.mean())


def test_the_last_key_is_any_of_those_seen_alike():
    """Not of pairs: a key that came often is not asked for more often at the end."""
    inputs, _ = samples("test", count=4000, length=8, noise=0.0, vocab_size=4)  # two keys, three pairs before the last
    three = inputs[:, 0:6:2]
    twice = inputs[(three.sum(1) == 1)]  # 0 came twice, 1 once
    assert len(twice) > 1000
    assert abs((twice[:, 6] == 0).mean() - 0.5) < 4 * 0.5 / np.sqrt(len(twice))


@pytest.mark.parametrize(("motif", "options"), [(1, NOISY), (3, FUZZY)])
def test_a_sample_is_a_function_of_seed_split_and_index(motif, options):
    together = samples("test", motif, count=9, **options)
    for a, b in zip(together, samples("test", motif, count=1, first=7, **options), strict=True):
        assert np.array_equal(a[7], b[0])
    for other in ({"split": "valid"}, {"split": "test", "seed": 1}):
        assert not np.array_equal(together[0], samples(motif=motif, count=9, **options, **other)[0])


def test_recipes_are_the_published_baselines():
    for name, motif, vocabulary, noise in (("mad_noisy", 1, 32, 0.2), ("mad_fuzzy", 3, 16, 0.0)):
        config = recipe(f"ccq_gla_{name}")
        assert (config.data.slices, config.data.valid_slices) == (((128, motif, 12_800),), ((128, motif, 1280),))
        assert (config.data.batch, config.data.noise, config.model.vocab_size) == (128, noise, vocabulary)
        assert (config.steps, config.optimizer.betas, config.optimizer.clip) == (200 * 100, (0.9, 0.999), None)
        model = config.model
        assert (model.hidden_size, model.num_hidden_layers, model.intermediate_size) == (128, 2, 352)
        assert (model.num_heads, model.key_size, model.value_size) == (8, 16, 16)
        assert (train_source(config).split, valid_source(config).split) == ("train", "valid")
        assert train_source(config).noise == noise


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ((127, 1, 9), {}, "length must be even and at least 4, got 127"),
        ((16, 3, 9), {"noise": 0.0}, r"length must be at least 6 \* motif = 18, got 16"),
        ((128, 3, 9), {}, "noise must be 0 with motifs of 3 tokens, got 0.2"),
        ((128, 1, 9), {"noise": 1.0}, r"noise must lie in \[0, 1\), got 1.0"),
        ((128, 1, 9), {"vocab_size": 17}, "vocab_size=17 leaves no keys of 1 tokens"),
    ],
)
def test_errors_name_the_argument(kind, options, said):
    with pytest.raises(ValueError, match=said):
        MAD(8, [kind], **options)


def test_samples_are_pinned():
    """A change here would change every experiment with them."""
    assert samples("test", 1, 12, 2, noise=0.2)[0].tolist() == [
        [0, 13, 1, 13, 1, 13, 1, 13, 3, 13, 1],
        [6, 13, 4, 8, 17, 29, 4, 8, 4, 8, 6],
    ]
    assert samples("train", 3, 18, 2, **FUZZY)[0].tolist() == [
        [15, 15, 15, 15, 15, 3, 6, 8, 11, 3, 8, 0, 4, 5, 13, 3, 6, 8],
        [15, 15, 15, 15, 4, 0, 9, 12, 3, 8, 12, 5, 14, 13, 11, 4, 0, 9],
    ]
