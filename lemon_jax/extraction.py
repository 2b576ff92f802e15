"""The bench's reading of an answer, for the runtime's votes: what is counted is what is scored."""

from __future__ import annotations

from lemon_jax.bench import extract_choice, extract_number
from lemon_jax.runtime import Problem


def read_answer(problem: Problem, text: str) -> str | None:
    """The answer that `text` gives to `problem`, or None.

    A capital letter where the problem has options, else a number in canonical form ("39", "-0.25").
    """
    found = extract_choice(text, len(problem.options)) if problem.options else extract_number(text)
    return found.value
