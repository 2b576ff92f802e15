"""A worker that knows the gold is right in whatever style it answers; one that is always wrong never is."""

import os
from fractions import Fraction

import pytest

from lemon_jax.bench import LETTERS, generate, grade, load
from lemon_jax.numbers import format_number

NUMBER_STYLES = [
    "{a}", "The answer is {a}.", "Answer: {a}", "ANSWER: {a} apples", "We add 3 and 4.\n#### {a}",
    "**Answer: {a}** of 77",
    r"So $\boxed{{{a}}}$.", r"\[ \boxed{{{a}\text{{ items}}}} \]",
    "The final answer is ${a} for the 2 items.",
    "First 5 + 6 = 11.\nThen 11 - 2 = 9.\nAnswer = {a}", "## Answer\n\n{a}\n", "answer: {a} (3 x 4)",
    "<answer>{a}</answer>", "Answer: 7\nNo, wait.\nThe correct answer is {a}", "12 + 13 = 25, at last {a}",
    "Antwort: {a}",
    "The answer is {a}.0 at 9:15.", "The answer, after 3 steps, is {a}",
]  # fmt: skip
CHOICE_STYLES = [
    "{l}", "({l}) {t}", "{l}) {t}", "{l}. {t}", "Answer: {l}", "Answer: **{l}**", "The answer is {l}) {t}",
    "the answer is {s}",
    "The answer is ({l}).", r"$\boxed{{{l}}}$", r"\boxed{{\text{{{l}}}}}", "First 5 + 6 = 11.\n#### {l}",
    "Answer: {t} ({l})",
    "The correct option is {l}.", "Antwort: {l}", "{l} because the others are too large",
    "<answer>{l}</answer>",
    "Option A is a trap.\nSo the answer is option {l}, {t}", "Answer: A\nNo, wait.\nFinal answer: {l}",
    "**{l}) {t}**",
    "A train is fast.\n\nAnswer:\n{l}) {t}", "I choose {l}", "Therefore {l} is the correct answer.",
]  # fmt: skip


def tasks_of(bench, source):
    if source == "sample":
        return generate("choice" if bench == "aqua" else "number", 128, 5, split="test")
    if not os.environ.get("LEMON_DATA"):
        pytest.skip("LEMON_DATA names no folder with the official files")
    return load(bench).test


def replies(task, right):
    """One reply a style, with the gold or with another answer."""
    if task.kind == "number":
        answer = task.gold if right else format_number(Fraction(task.gold) + 1)
        return [style.format(a=answer) for style in NUMBER_STYLES]
    index = (LETTERS.index(task.gold) + (not right)) % len(task.options)
    letter, text = LETTERS[index], task.options[index]
    return [style.format(l=letter, s=letter.lower(), t=text) for style in CHOICE_STYLES]


@pytest.mark.parametrize("source", ["official", "sample"])
@pytest.mark.parametrize("bench", ["aqua", "multiarith"])
def test_oracle_scores_all_and_its_opposite_none(bench, source):
    assert len(NUMBER_STYLES) >= 12
    assert len(CHOICE_STYLES) >= 12
    for task in tasks_of(bench, source):
        for right in (True, False):
            for reply in replies(task, right):
                result = grade(task, reply)
                assert result.correct is right, (reply, result, task)
                assert not result.no_answer, (reply, task)
