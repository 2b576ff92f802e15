"""The option nearest to a computed value: what turns a calculator's number into a choice."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from lemon_jax.numbers import parse_number
from lemon_jax.runtime.tools.calculator import CalculatorError, fold, to_rpn

_LABEL = re.compile(r"\s*\(?([A-Za-z])\s*[).:]\s*(.*)", re.DOTALL)
_LETTER = re.compile(
    r"(?:the\s+)?(?:(?:final|correct)\s+)?(?:answer|option|choice)?\s*(?:is)?\s*[:=]?\s*"
    r"(?:\(([A-Z])\)|([A-Z])\)(?:\s.*)?|([A-Z])[.:]?)\s*\.?",
    re.IGNORECASE | re.DOTALL,
)
_CURRENCY = re.compile(r"^(?:Rs\.?|USD|INR)\s*(?=[0-9.])", re.IGNORECASE)
_IRRATIONAL = re.compile(r"√|π|sqrt|\\pi|\bpi\b")
_UNIT = re.compile(r"\s+[A-Za-z][A-Za-z./ ]*$")


def nearest_option(value_text: str, options: Sequence[str]) -> str | None:
    """The letter of the option nearest to `value_text`; see `nearest`."""
    found = nearest(value_text, options)
    return found[0] if found else None


def nearest(value_text: str, options: Sequence[str]) -> tuple[str, float] | None:
    """`(letter, relative distance)` of the option nearest to `value_text`, or None if nothing compares.

    Options may carry their letters ("A)36", "(b) 5"); otherwise the first is A. In this order: a text that is
    itself a letter ("C", "Answer: (C)"), an option with the same text, then the smallest
    |value - option| / |value|, the first of equals. Where one side has a percent sign and the other has
    not, 0.25 and 25 both equal "25%". Surds and π are evaluated: "5(√3 + 1)". Options without a number
    ("None of these") are skipped.
    """
    letters, texts = _split(options)
    bare = value_text.replace("*", "").strip()  # bold marks around a letter
    if (match := _LETTER.fullmatch(bare)) and (letter := _group(match)) in letters:
        return letter, 0.0
    for letter, text in zip(letters, texts, strict=True):
        if _folded(text) and _folded(text) == _folded(_LABEL.sub(r"\2", value_text)):
            return letter, 0.0
    value = _number(value_text)
    if value is None:
        return None
    best: tuple[str, float] | None = None
    for letter, text in zip(letters, texts, strict=True):
        option = _number(text)
        if option is None:
            continue
        distance = _distance(value, option, percent="%" in value_text, option_percent="%" in text)
        if best is None or distance < best[1]:
            best = letter, distance
    return best


def _split(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Letters and texts. Labels count only if they are A, B, C, ... throughout."""
    expected = [chr(ord("A") + i) for i in range(len(options))]
    matches = [_LABEL.fullmatch(option) for option in options]
    if all(m and m[1].upper() == letter for m, letter in zip(matches, expected, strict=True)):
        return expected, [m[2] for m in matches if m]
    return expected, list(options)


def _group(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group).upper()


def _folded(text: str) -> str:
    return "".join(text.casefold().split())


def _distance(
    value: Fraction | float, option: Fraction | float, *, percent: bool, option_percent: bool
) -> float:
    """Relative to the value, so that it orders options as their absolute distance does."""
    pairs = [(value, option)]
    if option_percent and not percent:
        pairs.append((value, option / 100))
    if percent and not option_percent:
        pairs.append((value / 100, option))
    return min(_relative(v, o) for v, o in pairs)


def _relative(value: Fraction | float, option: Fraction | float) -> float:
    if value == option:
        return 0.0
    try:
        return abs(float(value) - float(option)) / (abs(float(value)) or 1.0)
    except OverflowError:
        return math.inf


def _number(text: str) -> Fraction | float | None:
    """The number an answer or option text stands for; a float where it has a root or π."""
    if _IRRATIONAL.search(text):
        return _surd(text)  # in "1/√2" the first number alone would be a wrong value
    number = parse_number(text)
    return _surd(text) if number is None else number


def _surd(text: str) -> float | None:
    plain = text.replace("\\sqrt", "√").replace("sqrt", "√").replace("\\pi", "π")
    plain = re.sub(r"\bpi\b", "π", plain).replace("{", "(").replace("}", ")").replace("%", " ")
    plain = _UNIT.sub("", _CURRENCY.sub("", plain.strip()))
    try:
        value = float(fold(to_rpn(plain, surds=True), _apply))  # an integer may be beyond every float
    except (CalculatorError, ArithmeticError):
        return None
    return value if math.isfinite(value) else None


def _apply(operator: str, left: float = 0.0, right: float = 0.0) -> float:
    left, right = float(left), float(right)
    if operator == "π":
        return math.pi
    if operator == "√":
        if left < 0:
            raise CalculatorError("the root of a negative number")
        return math.sqrt(left)
    if operator == "^":
        try:
            return math.pow(left, right)
        except ValueError as error:
            raise CalculatorError(str(error)) from error
    if operator == "/":
        return left / right
    return {"neg": -left, "%": left / 100, "+": left + right, "-": left - right, "*": left * right}[operator]
