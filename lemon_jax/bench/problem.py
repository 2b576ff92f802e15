"""What a template of a multiple-choice word problem makes: numbers, a wording and the slips people make."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random

NAMES = (
    "Asha",
    "Bruno",
    "Chen",
    "Dalia",
    "Emeka",
    "Freya",
    "Goran",
    "Hana",
    "Ivo",
    "Jamila",
    "Kofi",
    "Lucia",
)
GOODS = ("a jacket", "a lamp", "a bicycle", "a tent", "a radio", "a desk", "a kettle", "a violin", "a camera")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`slips`: results of likely mistakes, shown as wrong options; `unit`: how a value reads ("{} km")."""

    question: str
    answer: Fraction
    slips: tuple[Fraction, ...]
    unit: str = "{}"


Template = Callable[[Random], Problem]


def problem(question: str, answer: Fraction | int, *slips: Fraction | int, unit: str = "{}") -> Problem:
    """A Problem with its numbers made exact."""
    return Problem(question=question, answer=Fraction(answer), slips=tuple(map(Fraction, slips)), unit=unit)
