"""Verdicts on the answers of code tasks, which are run; those that are read are tested with the bench."""

from __future__ import annotations

import asyncio

import pytest

from lemon_jax.bench import Task, generate, grade
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.train.grading import Grader

DOUBLE = Task(
    id="double",
    bench="humaneval",
    question='def double(x):\n    """Twice x."""\n',
    gold="    return 2 * x\n",
    kind="code",
    entry_point="double",
    test="def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n",
)


def verdict(text: str, task: Task = DOUBLE, **settings):
    return asyncio.run(Grader(**settings).grade(task, text))


@pytest.mark.parametrize(
    ("text", "correct", "answer", "no_answer"),
    [
        (DOUBLE.gold, True, "PASSED", False),
        ("Here it is:\n```python\ndef double(x):\n    return x + x\n```\nGood luck!", True, "PASSED", False),
        ("```python\ndef double(x):\n    return x * x\n```", False, "FAILED", False),
        ("```python\ndef twice(x):\n    return x + x\n```", False, "MISSING_ENTRY", True),
        ("", False, "FAILED", True),
    ],
)
def test_a_function_is_judged_by_its_test(text, correct, answer, no_answer):
    found = verdict(text)
    assert (found.correct, found.answer, found.no_answer) == (correct, answer, no_answer)


def test_a_test_that_does_not_run_is_no_verdict():
    broken = Task(
        **(vars(DOUBLE) | {"test": "def check(candidate):\n    assert candidate(lambda: 1) == 6\n"})
    )
    with pytest.raises(LemonError, match="double: TEST_ERROR"):
        verdict(DOUBLE.gold, broken)


def test_an_unknown_level_of_isolation():
    with pytest.raises(LemonError, match="isolation"):
        verdict(DOUBLE.gold, accept_isolation="a promise")


@pytest.mark.parametrize("extractor", ["lemon", "gdesigner"])
def test_other_answers_are_read_by_the_named_rule(extractor):
    task = generate("number", 1, seed=0)[0]
    text = f"The answer is {task.gold}"
    assert verdict(text, task, extractor=extractor) == grade(task, text, extractor)


def test_the_rule_of_the_other_family_hears_this_projects_roles():
    """Their rule knows "The answer is C"; of "Answer: C" it would read an A on every MMLU question."""
    grader = Grader.of("gdesigner")
    for bench, kind, gold, options, reply in (
        ("mmlu", "choice", "C", ("w", "x", "y", "z"), "Rome fell in 476.\nAnswer: C"),
        ("mmlu", "choice", "C", ("w", "x", "y", "z"), "**Answer:** C"),
        ("aqua", "choice", "C", ("1", "2", "3", "4", "5"), "It is 3.\nAnswer: C"),
        ("gsm8k", "number", "12", (), "3 x 4\nAnswer: 12"),
    ):
        task = Task(id="t", bench=bench, question="?", options=options, gold=gold, kind=kind)
        assert asyncio.run(grader.grade(task, reply)).correct, reply
    task = Task(id="t", bench="mmlu", question="?", options=("w", "x"), gold="B", kind="choice")
    assert not asyncio.run(grader.grade(task, "No Answer: B here")).correct  # their rule as it is


def test_equal_programs_are_one_vote():
    plain = read_answer(DOUBLE, "```python\ndef double(x):\n\n    return 2 * x  \n```")
    assert plain == read_answer(DOUBLE, "Sure.\n```\ndef double(x):\n    return 2 * x\n```")
    assert plain != read_answer(DOUBLE, "```python\ndef double(x):\n    return x * 2\n```")
    assert read_answer(DOUBLE, "  \n") is None
