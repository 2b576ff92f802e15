"""Whether a reply is right."""

from dataclasses import dataclass
from fractions import Fraction

from lemon_jax.bench import gdesigner
from lemon_jax.bench.extract import Extraction, extract_choice, extract_number
from lemon_jax.bench.task import Task
from lemon_jax.errors import LemonError

EXTRACTORS = ("lemon", "gdesigner")


@dataclass(frozen=True, kw_only=True)
class Grade:
    """`no_answer` is counted apart from wrong: no answer never equals a gold, "0" included.

    `extractor` names the rule that read the answer: accuracies under two rules cannot be compared.
    """

    correct: bool
    answer: str | None
    fallback: bool
    no_answer: bool
    extractor: str = "lemon"


def grade(task: Task, text: str, extractor: str = "lemon") -> Grade:
    """Grade a reply: the exact number, or the gold's letter (even where two options have the same text).

    Under "gdesigner" the answer is read and compared as that family of systems does it, faults included.

    Raises:
        LemonError: unknown extractor.
        ValueError: a code task, which is graded by running its test.
    """
    if extractor not in EXTRACTORS:
        raise LemonError(f"extractor {extractor!r} is unknown, expected one of: {', '.join(EXTRACTORS)}")
    if task.kind == "code":
        raise ValueError(f"{task.id}: a code task is graded by running its test, not by reading its reply")
    if extractor == "gdesigner":
        found = gdesigner.extract(task, text)
        correct = gdesigner.equal(task, found.value)
    else:
        found = _found(task, text)
        correct = found.value is not None and _equal(task, found.value)
    return Grade(
        correct=correct,
        answer=found.value,
        fallback=found.fallback,
        no_answer=found.value is None,
        extractor=extractor,
    )


def _found(task: Task, text: str) -> Extraction:
    return extract_choice(text, len(task.options)) if task.kind == "choice" else extract_number(text)


def _equal(task: Task, value: str) -> bool:
    return value == task.gold if task.kind == "choice" else Fraction(value) == Fraction(task.gold)
