import pytest

from lemon_jax.bench import mcnemar_exact, wilson


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
