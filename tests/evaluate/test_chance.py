"""p of a mean over seeds, and which of many tests survive."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccq.evaluate.statistics import chance, holm
from ccq.report.results import seed_interval


def test_p_is_students():
    """In closed form for two degrees of freedom; else where the interval ends at zero it is 5%."""
    t = 2.0 / math.sqrt(1 / 3)
    assert chance([1.0, 2.0, 3.0]) == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-4)
    assert chance([-3.0, -2.0, -1.0]) == chance([1.0, 2.0, 3.0])
    for values in ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 7.0], [1.0, 5.0, 2.0, 4.0, 7.0, 3.0, 3.5]):
        low, _ = seed_interval(values)
        assert chance([x - low for x in values]) == pytest.approx(0.05, abs=5e-4)
    assert (chance([0.0] * 3), chance([1.0] * 3)) == (1.0, 0.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_each_by_itself_and_bonferroni(chances):
    survive = holm(chances)
    assert all(p <= 0.05 for p, kept in zip(chances, survive, strict=True) if kept)
    assert all(kept for p, kept in zip(chances, survive, strict=True) if p <= 0.05 / len(chances))
    assert all(p >= q for p, left in zip(chances, survive, strict=True) if not left
               for q, kept in zip(chances, survive, strict=True) if kept)  # fmt: skip
