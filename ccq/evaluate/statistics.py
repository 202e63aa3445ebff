"""Intervals for scores: Wilson for proportions, bootstrap over documents for the rest. Nothing here is drawn at random:
the same samples give the same interval on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

import numpy as np

from ccq.names import grouped

RESAMPLES = 2000
Z = 1.959963984540054  # 95%, two-sided
# Below this a difference has no interval: chance alone puts n units all on one side of zero, and with them every
# resample, with probability 2^(1 - n), which is above 5% up to n = 5.
LEAST_UNITS = 6


def wilson(right: float, n: int, z: float = Z) -> tuple[float, float]:
    """Wilson's interval of a proportion right/n: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    >>> [round(x, 4) for x in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if n == 0:
        return 0.0, 1.0
    p = right / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's t: of n values, the errors of their mean that make 95%, for n - 1.

    By its expansion about the normal one, 1e-3 off at 5 degrees of freedom; below, where that is no good, from tables.

    >>> [round(student(n), 2) for n in (2, 5, 10, 100)]
    [4.3, 2.57, 2.23, 1.98]
    """
    if freedom < 5:
        return {2: 4.303, 3: 3.182, 4: 2.776}[freedom]
    z, v = Z, 4 * freedom
    first, second = z**3 + z, (5 * z**5 + 16 * z**3 + 3 * z) / 6
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 6
    return z + first / v + second / v**2 + third / v**3


def by_group(rows: Iterable[dict]) -> dict[str, list[dict]]:
    return grouped(rows, itemgetter("group"))


def error_of_mean(values: Sequence[float]) -> float:
    n, middle = len(values), sum(values) / len(values)
    return math.sqrt(sum((x - middle) ** 2 for x in values) / (n - 1) / n)


def chance(values: Sequence[float]) -> float:
    """p of a mean so far from zero were it zero: both sides of Student's t with n - 1 degrees of freedom.

    With t = sqrt(n - 1) tan(a) its density is that of cos(a)^(n - 2) over angles.

    >>> round(chance([1.0, 2.0, 3.0]), 4)
    0.0742
    """
    error, freedom, middle = error_of_mean(values), len(values) - 1, abs(sum(values)) / len(values)
    if error == 0:
        return 1.0 if middle == 0 else 0.0
    first = math.atan(middle / error / math.sqrt(freedom))
    tail, whole = (np.cos(np.linspace(a, math.pi / 2, 2001)) ** (freedom - 1) * (math.pi / 2 - a) for a in (first, 0.0))
    return float(np.trapezoid(tail) / np.trapezoid(whole))


def holm(chances: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several tests survive Holm's correction: the k-th smallest p must be below level / (number - k + 1).

    >>> holm([0.04, 0.001, 0.03])
    [False, True, False]
    """
    survive = [False] * len(chances)
    for rank, at in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if chances[at] > level / (len(chances) - rank):
            break
        survive[at] = True
    return survive


def is_proportion(rows: Sequence[dict], aggregate: str) -> bool:
    """Whether a score is a share of samples, each right or wrong and drawn by itself."""
    return aggregate == "mean" and all(
        row["score"] in (0, 1) and "weight" not in row and "unit" not in row for row in rows
    )


def by_unit(rows: Sequence[dict]) -> dict[str, tuple[float, float]]:
    """Summed score and weight of each unit that is resampled: a document where the rows name one, else the row."""
    units: dict[str, list[float]] = {}
    for row in rows:
        pair = units.setdefault(str(row.get("unit", row["id"])), [0.0, 0.0])
        pair[0] += row["score"]
        pair[1] += row.get("weight", 1)
    return {name: (pair[0], pair[1]) for name, pair in units.items()}


def resampled(units: Sequence[tuple[float, float]], seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """[resamples, 2]: sums of score and weight over units drawn with replacement.

    The draws depend on the number of units and the seed alone, so two runs over the same units are paired.
    """
    table = np.asarray(units, dtype=np.float64).reshape(-1, 2)
    n = len(table)
    counts = np.random.Generator(np.random.Philox(key=[seed, n])).multinomial(n, np.full(n, 1 / n), size=resamples)
    return counts @ table


def redrawn(gained: int, lost: int, n: int, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Differences, in per cent, of two proportions over n samples of which the second has `gained` and `lost` some:
    resampled with half a sample more of each of the four kinds, as Agresti and Min (2005) add them.

    Without, 4 of 100 that are lost and none gained would be no chance (the sign test gives p = 0.125), and where none
    differs there would be no doubt at all.
    """
    total = n + 2
    chances = [(gained + 0.5) / total, (lost + 0.5) / total, (total - gained - lost - 1) / total]
    counts = np.random.Generator(np.random.Philox(key=[seed, n])).multinomial(total, chances, size=resamples)
    return 100 * (counts[:, 0] - counts[:, 1]) / total


def values(sums: np.ndarray, aggregate: str) -> np.ndarray:
    """What sums of score and weight [n, 2] say: 100 * mean, or exp(negative log-likelihood / weight)."""
    score, weight = sums.T
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return 100 * score / weight if aggregate == "mean" else np.exp(score / weight)


def value(units: Sequence[tuple[float, float]], aggregate: str) -> float:
    """The score of units together."""
    return float(values(np.reshape(units, (-1, 2)).sum(0, keepdims=True), aggregate)[0])


def percentiles(draws: np.ndarray) -> list[float]:
    """The 2.5% and 97.5% quantiles of a score over resampled units."""
    return np.nanquantile(draws, [0.025, 0.975]).tolist()


def summary(rows: Sequence[dict], aggregate: str = "mean") -> dict:
    """Score of a group of sample rows with its interval.

    Wilson where every score is 0 or 1, else bootstrap over units; a single unit has no spread to show: None.
    """
    units = list(by_unit(rows).values())
    proportion = is_proportion(rows, aggregate)
    interval = None
    if proportion:
        interval = [100 * x for x in wilson(sum(score for score, _ in units), len(rows))]
    elif len(units) > 1:
        interval = percentiles(values(resampled(units), aggregate))
    return {
        "value": value(units, aggregate),
        "interval": interval,
        "n": len(rows),
        "units": len(units),
        "aggregate": aggregate,
        "method": "wilson" if proportion else "bootstrap",
    }


def average(groups: Mapping[str, Sequence[dict]]) -> dict:
    """Unweighted mean of the mean scores of several groups, with a bootstrap inside each group.

    Groups of different sizes draw independently; equal sizes draw with a seed of their own each.
    """
    units = [list(by_unit(rows).values()) for rows in groups.values()]
    draws = np.mean([values(resampled(mine, seed), "mean") for seed, mine in enumerate(units)], axis=0)
    alone = min(map(len, units)) < 2  # a group with no spread to show
    return {
        "value": float(np.mean([value(mine, "mean") for mine in units])),
        "interval": None if alone else percentiles(draws),
        "n": sum(len(rows) for rows in groups.values()),
        "aggregate": "average",
        "method": "bootstrap",
        "of": list(groups),
    }
