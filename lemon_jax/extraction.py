"""The bench's reading of an answer, for the runtime's votes: what is counted is what is scored."""

from __future__ import annotations

from lemon_jax.bench import extract_choice, extract_number
from lemon_jax.runtime import Problem
from lemon_jax.runtime.tools import extract_completion


def read_answer(problem: Problem, text: str) -> str | None:
    """The answer that `text` gives to `problem`, or None.

    A capital letter where the problem has options, a program without blank lines and trailing spaces where it
    asks for a function, else a number in canonical form ("39", "-0.25").
    """
    if problem.entry_point:
        # Not parsed: what an untrusted program means is the sandbox's business.
        lines = extract_completion(text, problem.entry_point).split("\n")
        return "\n".join(line.rstrip() for line in lines if line.strip()) or None
    found = extract_choice(text, len(problem.options)) if problem.options else extract_number(text)
    return found.value
