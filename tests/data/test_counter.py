"""Numbers from a key and a position: permutations that are permutations, and draws that look drawn."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccq.data.counter import bits, key_of, permute, uniform


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(st.integers(1, 2**50), st.integers(0, 2**64 - 1), st.data())
def test_permute_of_one_index_needs_no_other(size, key, data):
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = permute(np.array(index), size, key)
    assert together.min() >= 0
    assert together.max() < size
    assert together.tolist() == [permute(np.array([i]), size, key)[0] for i in index]
    assert len(set(together.tolist())) == len(set(index))


def test_permute_refuses_what_is_outside():
    with pytest.raises(IndexError, match="5"):
        permute(np.array([5]), 5, 0)


def chi_square(counts, expected):
    """Standardised: about N(0, 1) under the hypothesis."""
    statistic = np.sum((counts - expected) ** 2 / expected)
    freedom = counts.size - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


def test_all_permutations_are_equally_likely():
    size = 4
    orders = {order: n for n, order in enumerate(itertools.permutations(range(size)))}
    draws = 1000
    found = [orders[tuple(permute(np.arange(size), size, key_of("test", n)).tolist())] for n in range(draws)]
    counts = np.bincount(found, minlength=len(orders))
    assert abs(chi_square(counts, draws / len(orders))) < 4


def test_permute_leaves_no_trace_of_the_order():
    """Rank correlation of index and image, and of neighbours' images, within what chance allows."""
    n = 200_000
    image = permute(np.arange(n), n, 7)
    for a, b in ((np.arange(n), image), (image[:-1], image[1:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)


def test_bits_are_uniform_and_uncorrelated():
    draws = uniform(3, np.arange(2000), 50)
    counts, _ = np.histogram(draws, bins=100, range=(0, 1))
    assert abs(chi_square(counts, draws.size / 100)) < 4
    assert draws.min() > 0
    assert draws.max() < 1
    for a, b in ((draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:])):  # indices side by side, draws side by side
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


def test_values_are_pinned():
    """A change here would change the order of every run: raise the index version and say so if it must be."""
    assert key_of("windows", 0, 1) == 14266735950425745086
    assert bits(1, np.array([0, 5]), 2).tolist() == [
        [4031665331582148033, 1698884073758987670],
        [1837926744203766988, 15501022850581386198],
    ]
    assert permute(np.arange(10), 10, 3).tolist() == [4, 1, 9, 2, 6, 3, 5, 0, 8, 7]
