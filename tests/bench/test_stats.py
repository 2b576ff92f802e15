import random
from math import comb

import pytest

from lemon_jax.bench import mcnemar_exact, paired_bootstrap, wilson


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    # (81, 263) is the worked example of Newcombe (1998), Statistics in Medicine 17:857, method 3.
    [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718), (15, 148, 0.0624, 0.1605)],
)
def test_wilson_against_published_values(k, n, low, high):
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_symmetric_and_bounded():
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low))
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 10)[1] == 1.0
    with pytest.raises(ValueError, match="k must lie"):
        wilson(3, 2)


@pytest.mark.parametrize(
    ("b", "c", "p"),
    # By hand: 2 · sum of the binomial tail / 2^n.
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (0, 5, 0.0625),
        (1, 9, 22 / 1024),
        (2, 8, 112 / 1024),
        (6, 16, 0.0524787902832031),
    ],
)
def test_mcnemar_against_known_values(b, c, p):
    assert mcnemar_exact(b, c) == pytest.approx(p, rel=1e-9)
    assert mcnemar_exact(c, b) == mcnemar_exact(b, c)


def test_mcnemar_of_many_tasks_neither_under_nor_overflows():
    assert 0 < mcnemar_exact(900, 1100) < 1e-4
    with pytest.raises(ValueError, match="negative"):
        mcnemar_exact(-1, 2)


def resampled(b, c, n, resamples, seed):
    """The bootstrap as it is told: draw n tasks with replacement, average their differences, sort."""
    rng = random.Random(seed)
    differences = [1] * b + [-1] * c + [0] * (n - b - c)
    means = sorted(sum(rng.choices(differences, k=n)) / n for _ in range(resamples))
    return means[round(0.025 * (resamples - 1))], means[round(0.975 * (resamples - 1))]


def exact_quantiles(b, c, n):
    """The 2.5 % and 97.5 % points of (B - C) / n over all outcomes of n draws, by enumeration."""
    weight = {}
    for i in range(n + 1):
        for j in range(n + 1 - i):
            ways = comb(n, i) * comb(n - i, j)
            mass = ways * b**i * c**j * (n - b - c) ** (n - i - j) / n**n
            weight[i - j] = weight.get(i - j, 0.0) + mass
    total, found = 0.0, []
    for value in sorted(weight):
        total += weight[value]
        if len(found) < 1 and total >= 0.025:
            found.append(value / n)
        if total >= 0.975:
            return found[0], value / n
    raise AssertionError


@pytest.mark.parametrize(("b", "c", "n"), [(5, 0, 10), (7, 2, 20), (3, 3, 15), (0, 9, 30)])
def test_the_bootstrap_against_all_outcomes(b, c, n):
    low, high = exact_quantiles(b, c, n)
    # 10,000 draws put a quantile of a lattice on its point, or on a neighbour where two share the mass.
    assert paired_bootstrap(b, c, n) == pytest.approx((low, high), abs=1 / n + 1e-9)
    assert paired_bootstrap(b, c, n, resamples=200_000) == pytest.approx((low, high), abs=1 / n + 1e-9)


@pytest.mark.parametrize(("b", "c", "n"), [(12, 5, 60), (40, 22, 254), (1, 0, 50)])
def test_the_bootstrap_against_resampling_task_by_task(b, c, n):
    assert paired_bootstrap(b, c, n) == pytest.approx(resampled(b, c, n, 4000, 1), abs=2 / n + 0.005)


def test_known_bootstrap_values():
    # Only wins: the number won is binomial(10, 1/2), whose 2.5 % and 97.5 % points are 2 and 8.
    assert paired_bootstrap(5, 0, 10) == (0.2, 0.8)
    # Large n: the normal interval 0.18 +- 1.96 * sqrt((0.62 - 0.18**2) / 1000), difference 400 - 220.
    assert paired_bootstrap(400, 220, 1000) == pytest.approx((0.1325, 0.2275), abs=0.004)
    assert paired_bootstrap(0, 0, 7) == (0.0, 0.0)
    assert paired_bootstrap(7, 0, 7) == (1.0, 1.0)
    assert paired_bootstrap(0, 0, 0) == (-1.0, 1.0)


def test_the_bootstrap_is_seeded_and_antisymmetric():
    assert paired_bootstrap(9, 4, 50) == paired_bootstrap(9, 4, 50)
    low, high = paired_bootstrap(9, 4, 50)
    assert paired_bootstrap(4, 9, 50, seed=3) == pytest.approx((-high, -low), abs=0.03)
    for b, c, n in ((-1, 0, 3), (0, -1, 3), (2, 2, 3)):
        with pytest.raises(ValueError, match="add up to at most n"):
            paired_bootstrap(b, c, n)
