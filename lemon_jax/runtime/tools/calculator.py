"""Exact arithmetic for an expression that a worker wrote: fractions in, a fraction out, never a guess.

Shunting-yard (Dijkstra 1961) over an own token list instead of Python's parser: no recursion, so
500 nested parentheses cost what 500 digits cost, and nothing but arithmetic can be expressed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from lemon_jax import numbers

MAX_LENGTH = 500  # characters of the expression
MAX_BITS = 4_096  # of a numerator or denominator, in every intermediate result
_MAX_EXPONENT = 1_024
_PLACES = 6

Value = TypeVar("Value", Fraction, float)
Token = Fraction | str
"""A number, or one of + - * / ^ neg % √ π ( )."""

_CHARACTERS = str.maketrans(
    {
        "×": "*",
        "·": "*",
        "⋅": "*",
        "∗": "*",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "−": "-",
        "‐": "-",
        "‑": "-",
        "⁻": "-",
        "˗": "-",
        "–": "-",
        "[": "(",
        "]": ")",
    }
    | {"\u00a0": " ", "\u202f": " ", "`": " "}
)
_WORDS = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("**", "^"))
_LABEL = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_ ]{0,40}[=:](?!=)")
_TOKEN = re.compile(
    r"\s*(?:[$£€]\s*(?=[0-9.]))?(?:"
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
    r"|\.[0-9]+)"
    r"|(?P<operator>[-+*/^()%√π])"
    r"|(?P<times>[xX](?=\s*[$£€]?[0-9.(])))"
)
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3, "^": 4, "√": 5}


class CalculatorError(ValueError):
    """The text is no expression the calculator takes; the message says where and why."""


def evaluate(expression: str) -> Fraction:
    """The exact value of `expression`.

    + - * / and their signs × ÷ − (x between numbers too), parentheses, decimals, integer powers (^ or
    **, -2^2 = -4, 2^3^2 = 2^9), "1,200", "$5", and a percent sign after a number or parenthesis
    (÷ 100, never modulo). A leading label ("x =") and what follows a later "=" are ignored, as are all
    lines after the first. Raises CalculatorError on anything else: names, division by zero, implicit
    multiplication, results beyond MAX_BITS.
    """
    return fold(to_rpn(_first_expression(expression)), _apply)


def format_number(value: Fraction) -> str:
    """ "39", "78.2"; rounded to six decimals (more for a value near zero) where no short decimal exists."""
    text = numbers.format_number(value)
    if "/" not in text and len(text.partition(".")[2]) <= 2 * _PLACES:
        return text
    places = _PLACES
    while 0 < abs(value) * 10 ** (places - _PLACES + 1) < 1 and places < 300:
        places += 1  # keep six significant digits of a small value
    return numbers.format_number(Fraction(round(value * 10**places), 10**places))


def _first_expression(text: str) -> str:
    """The first line that holds something, without label, fence and the part after "="."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("```"))
    line = next(lines, "")
    if len(line) > MAX_LENGTH:
        raise CalculatorError(f"an expression of {len(line)} characters; at most {MAX_LENGTH} are read")
    while label := _LABEL.match(line):
        line = line[label.end() :]
    return line.partition("=")[0]


def to_rpn(expression: str, *, surds: bool = False) -> list[Token]:
    """Reverse Polish form of `expression`; linear in its length.

    With `surds`, √ (prefix) and π are understood, and so is a multiplication that is not written:
    5(√3 + 1), 2π. Raises CalculatorError where the text is no expression.
    """
    output: list[Token] = []
    stack: list[str] = []
    after_operand = False
    for token in _tokens(expression):
        if token in ("√", "π") and not surds:
            raise CalculatorError(f"{token!r} is no arithmetic")
        starts_operand = isinstance(token, Fraction) or token in ("(", "√", "π")
        if starts_operand and after_operand:
            if not surds or isinstance(token, Fraction):
                raise CalculatorError(f"no operator before {_shown(token)}")
            _push_operator("*", output, stack)
        if isinstance(token, Fraction) or token == "π":
            output.append(token)
            after_operand = True
        elif token in ("(", "√"):
            stack.append(token)
            after_operand = False
        elif not after_operand:
            if token not in "+-":
                raise CalculatorError(f"no number before {token!r}")
            if token == "-":
                stack.append("neg")
        elif token == "%":
            output.append(token)
        elif token == ")":
            _close(output, stack)
        else:
            _push_operator(token, output, stack)
            after_operand = False
    if not after_operand:
        raise CalculatorError("the expression ends too early" if output or stack else "no expression")
    if "(" in stack:
        raise CalculatorError("a parenthesis is not closed")
    return output + stack[::-1]


def _tokens(text: str) -> list[Token]:
    for written, sign in _WORDS:
        text = text.replace(written, sign)
    text = text.translate(_CHARACTERS).rstrip()
    if len(text) > MAX_LENGTH:
        raise CalculatorError(f"an expression of {len(text)} characters; at most {MAX_LENGTH} are read")
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculatorError(f"{text[position:].strip()[:20]!r} is no arithmetic")
        number = match["number"]
        tokens.append(Fraction(number.replace(",", "")) if number else match["operator"] or "*")
        position = match.end()
    return tokens


def _shown(token: Token) -> str:
    return token if isinstance(token, str) else numbers.format_number(token)


def _push_operator(operator: str, output: list[Token], stack: list[str]) -> None:
    rank = _PRECEDENCE[operator]
    while stack and stack[-1] != "(":
        top = _PRECEDENCE[stack[-1]]
        if top < rank or (top == rank and operator == "^"):  # powers bind to the right
            break
        output.append(stack.pop())
    stack.append(operator)


def _close(output: list[Token], stack: list[str]) -> None:
    while stack and stack[-1] != "(":
        output.append(stack.pop())
    if not stack:
        raise CalculatorError("a parenthesis is closed that was not opened")
    stack.pop()


def fold(rpn: list[Token], apply: Callable[..., Value]) -> Value:
    """Evaluate reverse Polish form; `apply(operator, *operands)` gives the value of one operator.

    Operators take two operands, except neg, %, √ (one) and π (none).
    """
    values: list[Any] = []
    for token in rpn:
        if isinstance(token, Fraction):
            values.append(token)
            continue
        count = {"π": 0, "neg": 1, "%": 1, "√": 1}.get(token, 2)
        operands = values[len(values) - count :]
        del values[len(values) - count :]
        values.append(apply(token, *operands))
    (value,) = values
    return value


def _apply(operator: str, left: Fraction, right: Fraction = Fraction(0)) -> Fraction:
    if operator == "neg":
        return -left
    if operator == "^":
        return _bounded(_power(left, right))
    if operator == "/" and right == 0:
        raise CalculatorError("a division by zero")
    if operator == "%":
        return left / 100
    results = {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}
    return _bounded(results[operator](right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("a power with an exponent that is no integer")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > _MAX_EXPONENT or (bits - 1) * abs(exponent) > MAX_BITS:
        raise CalculatorError("a power too large to compute exactly")
    if base == 0 and exponent < 0:
        raise CalculatorError("a division by zero")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError(f"a result of more than {MAX_BITS} bits")
    return value
