"""Intervals and paired tests for accuracies; the ends of a series of steps."""

from math import ceil, comb, sqrt


def fifth(n: int) -> int:
    """How many of n steps the first fifth has, and the last: at least one.

    # In: 1, 10, 12   Out: 1, 2, 3
    """
    return max(1, ceil(n / 5))


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion k/n (Wilson 1927, JASA 22:209); (0, 1) when nothing was measured.

    Unlike p ± z·sqrt(p(1-p)/n) it stays inside [0, 1] and is not empty at k = 0 or k = n.
    """
    if not 0 <= k <= n:
        raise ValueError(f"k must lie in 0..n, got k={k}, n={n}")
    if n == 0:
        return 0.0, 1.0
    p, z2 = k / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At the ends the exact bounds are 0 and 1; rounding would leave 1e-17 there.
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact p of McNemar's test: b tasks only method 1 solved, c only method 2 (binomial, p = 1/2).

    Agreements carry no information and do not enter; p = 1 when the methods never disagree.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts must not be negative, got b={b}, c={c}")
    n = b + c
    tail = sum(comb(n, i) for i in range(min(b, c) + 1))  # exact integers: no underflow for large n
    return min(1.0, 2 * tail / 2**n)


def paired_bootstrap(
    b: int, c: int, n: int, *, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of the accuracy difference (b - c) / n of two methods on the same n tasks.

    b tasks only method 1 solved, c only method 2. The tasks are resampled with replacement, both
    methods' outcomes of a task together (Efron & Tibshirani 1993, chapters 8 and 13); (-1, 1) when nothing
    was measured.
    """
    if min(b, c) < 0 or b + c > n:
        raise ValueError(f"b and c must not be negative and add up to at most n, got b={b}, c={c}, n={n}")
    if n == 0:
        return -1.0, 1.0
    import numpy as np  # here, so that commands without statistics start without it

    # Of n tasks drawn with replacement only these counts matter, and they are multinomial: the same
    # distribution as drawing indices, without a table of resamples x n.
    counts = np.random.default_rng(seed).multinomial(n, [b / n, c / n, (n - b - c) / n], size=resamples)
    low, high = np.percentile((counts[:, 0] - counts[:, 1]) / n, [2.5, 97.5])
    return float(low), float(high)
