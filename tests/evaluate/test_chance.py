"""p of a mean over seeds, and which of many tests survive."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccq.evaluate.statistics import average, chance, holm, redrawn, resampled, summary
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


def test_holm_steps_down():
    """Each that survives leaves one test fewer to correct for; one that does not ends it."""
    assert holm([0.04, 0.01, 0.02]) == [True, True, True]  # 0.05 / 1, / 3, / 2
    assert holm([0.04, 0.01, 0.03]) == [False, True, False]


def test_an_average_with_a_group_of_one_unit_has_no_interval():
    rows = [{"id": str(n), "score": n % 3} for n in range(9)]
    assert average({"a": rows, "b": rows})["interval"] is not None
    assert average({"a": rows, "b": rows[:1]})["interval"] is None


def test_right_and_wrong_of_one_document_are_no_samples_of_their_own():
    rows = [{"id": str(n), "score": n % 2, "unit": n // 4} for n in range(40)]
    assert summary(rows)["method"] == "bootstrap"
    assert summary([{"id": row["id"], "score": row["score"]} for row in rows])["method"] == "wilson"


def test_resamples_depend_on_their_seed_and_on_nothing_else():
    units = [(float(n % 3), 1.0) for n in range(40)]
    for draw in (lambda seed: resampled(units, seed), lambda seed: redrawn(9, 4, 40, seed)):
        assert np.array_equal(draw(1), draw(1))
        first, second = (draw(seed).reshape(2000, -1)[:, 0] for seed in (0, 1))
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


def test_groups_of_an_average_go_up_and_down_apart():
    """Of two groups of one size the interval of the mean is narrower by the root of two, not as wide as of one."""
    rows = [{"id": str(n), "score": n % 7} for n in range(200)]
    widths = [np.diff(average(dict.fromkeys(names, rows))["interval"])[0] for names in ("a", "ab", "abcd")]
    assert widths[0] / widths[1] == pytest.approx(2**0.5, rel=0.08)
    assert widths[0] / widths[2] == pytest.approx(2, rel=0.08)
