from fractions import Fraction

import pytest
from cpu_time import at_most
from hypothesis import given
from hypothesis import strategies as st

from lemon_jax.numbers import format_number, numbers_in, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$78.20", "78.20"), ("1/4", "1/4"), ("20%", "20"), ("12 km/h", "12"), ("1,200", "1200"),
        ("Rs. 450", "450"),
        ("Rs.450", "450"), ("Rs 7925", "7925"), ("3:5", "3/5"), ("69 : 91", "69/91"), ("750m", "750"),
        ("60°", "60"),
        ("25 cm²", "25"), ("2 1/2", "5/2"), ("33 1/3%", "100/3"), ("2½", "5/2"), ("½", "1/2"),
        ("1,20,000", "120000"),
        ("-5", "-5"), ("−5", "-5"), ("- 5", "-5"), ("+30", "30"), ("-$5", "-5"), ("$-5", "-5"),
        ("x = 5", "5"),
        ("3 × 10^5", "300000"), ("1e3", "1000"), ("3 million", "3000000"), (".5", "1/2"), ("$.75", "3/4"),
        (r"\frac{3}{4}", "3/4"), (r"\$1{,}000", "1000"), ("１２", "12"), ("1\u202f200", "1200"),
        ("1/2.", "1/2"),
        ("1 hour 20 min", "1"),
    ],
)  # fmt: skip
def test_parse_number_of_option_texts(text, value):
    assert parse_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    ["5(√3 + 1)", "7(√3 – 1)", "10π", "20*pi", "x + 5", "2x + 1", "5x", "13x/24", "4^5", "3-5", "√2",
     "1:2:3", "8:05 PM",
     "None of these", "I and II only", "x2/y2 units", "5/0", "", "M + 3N / 8", "9" * 5000],
)  # fmt: skip
def test_expressions_and_texts_are_no_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("10 - 5 = 5", [10, 5, 5]), ("range 3-5", [3, 5]), ("COVID-19", [19]), ("(8) -3", [8, 3]),
        ("it is -5.", [-5]),
        ("= - 5", [-5]), ("- 5 apples\n- 6 pears", [5, 6]), ("minus 5", [-5]), ("10 minus 5", [10, 5]),
        ("30 minutes, at 9:15", [30]), ("3,5", [3, 5]), ("1,234,567.5", [Fraction("1234567.5")]),
        ("x2 and H2O", []),
        ("Step 3: 5 and 6", [3, 5, 6]), ("1.2.3", [Fraction("1.2"), 3]),
    ],
)  # fmt: skip
def test_numbers_in_prose(text, values):
    assert list(numbers_in(text)) == values


@given(st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=10**6))
def test_format_and_parse_are_inverse(value):
    assert parse_number(format_number(value)) == value
    assert numbers_in(f"it is {format_number(value)} km") == (value,)


@given(st.text(alphabet="0123456789.,/:-+−$%eE^x×{}\\frac ½٣²()\n", max_size=60))
def test_no_text_crashes(text):
    numbers_in(text)
    parse_number(text)


@pytest.mark.parametrize(
    "piece",
    ["1,", "1,00,", "1:", "1/", "- ", "9", "1 1/", "\\frac{", "1e", "½", "$", "1.", "1x10^", "minus "],
)
def test_time_is_linear_on_hostile_texts(piece):
    text = (piece * 100_000).encode()[:100_000].decode(errors="ignore")
    with at_most(0.5):
        numbers_in(text)
