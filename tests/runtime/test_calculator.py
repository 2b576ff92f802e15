from __future__ import annotations

import ast
import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemon_jax.runtime.tools.calculator import MAX_BITS, CalculatorError, evaluate, format_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3+4*2", "11"),
        ("(3+4)*2", "14"),
        ("10-5-2", "3"),
        ("12/3/2", "2"),
        ("-2^2", "-4"),
        ("2**-1", "0.5"),
        ("2^3^2", "512"),
        ("--3", "3"),
        ("2*-3+4", "-2"),
        ("+5", "5"),
        ("0.1+0.2", "0.3"),
        ("1,200 + 1,000,000.5", "1001200.5"),
        ("$20 + $1.90", "21.9"),
        ("20% * 50", "10"),
        ("100 - 15%", "99.85"),
        ("(10+5)%", "0.15"),
        ("6 × 7", "42"),
        ("6 x 7", "42"),
        ("84 ÷ 2", "42"),
        ("50 − 8", "42"),
        ("6 \\times 7", "42"),
        ("x = 6*7", "42"),
        ("X=6*7", "42"),
        ("total cost = 6*7 = 42", "42"),
        ("6*7 = 41", "42"),
        ("Expression: 6*7", "42"),
        ("`6*7`", "42"),
        ("```\n6*7\n```", "42"),
        ("\n 6*7\nso the answer is 43", "42"),
        ("[(1+2)*3]", "9"),
        (".5*4.", "2"),
        ("1e3+1", "1001"),
        ("0^0", "1"),
    ],
)
def test_values(text: str, expected: str) -> None:
    assert evaluate(text) == Fraction(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no expression"),
        ("x =", "no expression"),
        ("3+", "ends too early"),
        ("3 4", "no operator"),
        ("2(3+4)", "no operator"),
        ("17 % 5", "no operator"),
        ("(3", "not closed"),
        ("3)", "not opened"),
        ("()", "no number"),
        ("*3", "no number"),
        ("1/0", "division by zero"),
        ("0^-1", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("4^0.5", "no integer"),
        ("9^9^9", "too large"),
        ("2^-2000", "too large"),
        ("1,20+3", "no arithmetic"),
        ("1,2345", "no arithmetic"),
        ("a+b", "no arithmetic"),
        ("sqrt(4)", "no arithmetic"),
        ("√4", "no arithmetic"),
        ("3 dollars", "no arithmetic"),
        ("__import__('os')", "no arithmetic"),
        ("٣+4", "no arithmetic"),
        ("1" + "+1" * 300, "601 characters"),
    ],
)
def test_refusals_name_the_reason(text: str, reason: str) -> None:
    with pytest.raises(CalculatorError, match=reason):
        evaluate(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 500,
        "(" * 249 + "1" + ")" * 249,
        "-" * 499 + "1",
        "2^" * 249 + "1",
        "9" * 500,
        "*".join(["9^99"] * 90),
    ],
)
def test_hostile_shapes_end_at_once(text: str) -> None:
    started = time.perf_counter()
    try:
        value = evaluate(text)
        assert value.numerator.bit_length() <= MAX_BITS
    except CalculatorError:
        pass
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("39", "39"),
        ("-39", "-39"),
        ("78.20", "78.2"),
        ("-0.25", "-0.25"),
        ("0", "0"),
        ("100/3", "33.333333"),
        ("-2/3", "-0.666667"),
        ("1/3000000", "0.000000333333"),
        ("9999999999/10000000000", "0.9999999999"),
        ("29999999/30000000", "1"),
    ],
)
def test_format_number(value: str, text: str) -> None:
    assert format_number(Fraction(value)) == text


def _oracle(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_oracle(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _oracle(left), _oracle(right)
            return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b, ast.Div: a / b if b else a}[type(op)]
    raise AssertionError(node)


_TEXTS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " - "]), inner).map("".join),
        inner.map(lambda t: f"({t})"),
        inner.map(lambda t: f"-{t}"),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(_TEXTS)
def test_agrees_with_pythons_grammar(text: str) -> None:
    try:
        ours = evaluate(text)
    except CalculatorError as error:
        assert "division by zero" in str(error)  # noqa: PT017
        return
    assert ours == _oracle(ast.parse(text, mode="eval").body)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789+-*/^().,%$x= √eE\n", max_size=40))
def test_any_text_gives_a_fraction_or_a_calculator_error(text: str) -> None:
    with contextlib.suppress(CalculatorError):
        assert isinstance(evaluate(text), Fraction)
