"""A worker that knows the gold is right in whatever style it answers; one that is always wrong never is.

Every gold of every numeric and choice bench is tried in every style that holds no option text, and in two
that do; the other styles take turns, as does the wrong answer's.
"""

import os
import re
from fractions import Fraction
from functools import cache

import pytest

from lemon_jax.bench import LETTERS, Task, generate, grade, load
from lemon_jax.numbers import format_number

NUMBER_STYLES = [
    "{a}", "The answer is {a}.", "Answer: {a}", "ANSWER: {a} apples", "We add 3 and 4.\n#### {a}",
    "**Answer: {a}** of 77",
    r"So $\boxed{{{a}}}$.", r"\[ \boxed{{{a}\text{{ items}}}} \]",
    "The final answer is ${a} for the 2 items.", "the answer is {a}", "so the answer is {g} km/h",
    "First 5 + 6 = 11.\nThen 11 - 2 = 9.\nAnswer = {a}", "## Answer\n\n{a}\n", "answer: {a} (3 x 4)",
    "<answer>{a}</answer>", "Answer: 7\nNo, wait.\nThe correct answer is {a}", "12 + 13 = 25, at last {a}",
    "Antwort: {a}", "#### {g}", "The total is 3 more than 4.\nAnswer: ${g}",
    "The answer is {a}.0 at 9:15.", "The answer, after 3 steps, is {a}",
]  # fmt: skip
LETTER_STYLES = [
    "{l}", "Answer: {l}", "Answer: **{l}**", "the answer is {s}", "The answer is ({l}).", r"$\boxed{{{l}}}$",
    r"\boxed{{\text{{{l}}}}}", "First 5 + 6 = 11.\n#### {l}", "The correct option is {l}.", "Antwort: {l}",
    "{l} because the others are too large", "<answer>{l}</answer>",
    "Answer: A\nNo, wait.\nFinal answer: {l}", "I choose {l}", "Therefore {l} is the correct answer.",
    "**{l}**", "The answer is {l}, as 3 of the 4 others are too large.",
]  # fmt: skip
TEXT_STYLES = [
    "{l}) {t}", "A train is fast.\n\nAnswer:\n{l}) {t}", "The answer is {l}) {t}", "**{l}) {t}**",
    "({l}) {t}", "{l}. {t}",
]  # fmt: skip
# Styles in which a text that names letters itself ("A and D") cannot be told from the choice.
FREE_STYLES = ["Answer: {t} ({l})", "Option A is a trap.\nSo the answer is option {l}, {t}"]
NAMES_A_LETTER = re.compile(r"(?<![A-Za-z])(?:[B-Z]|A(?! [a-z]))(?![A-Za-z])|\([a-z]\)|^[a-z]$")
BENCHES = [
    ("gsm8k", "full"), ("svamp", "lemon"), ("multiarith", "lemon"), ("aqua", "full"), ("mmlu", "full"),
    ("mmlu", "lemon"),
]  # fmt: skip


def official(bench, protocol):
    if not os.environ.get("LEMON_DATA"):
        pytest.skip("LEMON_DATA names no folder with the official files")
    data = load(bench, protocol=protocol)
    return (*data.train, *data.test)


def number_replies(answer, styles):
    grouped = f"{int(answer):,}" if Fraction(answer).denominator == 1 else answer
    return [style.format(a=answer, g=grouped) for style in styles]


@cache
def letter_replies(letter):
    return [style.format(l=letter, s=letter.lower()) for style in LETTER_STYLES]


def choice_replies(letter, text, i):
    """All replies with the letter alone; of those with the text the first two and one of the others."""
    others = TEXT_STYLES[2:] if NAMES_A_LETTER.search(text) else [*TEXT_STYLES[2:], *FREE_STYLES]
    styles = [*TEXT_STYLES[:2], others[i % len(others)]]
    return letter_replies(letter) + [style.format(l=letter, t=text) for style in styles]


def replies(task, i, right):
    """What a worker replies that knows the gold, or one that gives another answer, in one of the styles."""
    if task.kind == "number":
        answer = task.gold if right else format_number(Fraction(task.gold) + 1)
        made = number_replies(answer, NUMBER_STYLES)
    else:
        index = (LETTERS.index(task.gold) + (not right)) % len(task.options)
        made = choice_replies(LETTERS[index], task.options[index], i)
    return made if right else [made[i % len(made)]]


@cache  # many tasks have the same gold: equal replies are graded once
def verdict(kind, n_options, gold, reply):
    task = Task(id="t", bench="b", question="?", options=("",) * n_options, gold=gold, kind=kind)
    result = grade(task, reply)
    return result.correct, result.no_answer


@pytest.mark.parametrize(("bench", "protocol"), BENCHES)
def test_the_oracle_scores_all_and_its_opposite_none(bench, protocol):
    for i, task in enumerate(official(bench, protocol)):
        for right in (True, False):
            for reply in replies(task, i, right):
                found = verdict(task.kind, len(task.options), task.gold, reply)
                assert found[0] is right, (reply, task)
                assert not found[1] or not right, (reply, task)


@pytest.mark.parametrize("kind", ["choice", "number"])
def test_the_same_on_made_up_tasks(kind):
    for i, task in enumerate(generate(kind, 128, 5, split="test")):
        for right in (True, False):
            for reply in replies(task, i, right):
                result = grade(task, reply)
                assert result.correct is right, (reply, result, task)
                assert not result.no_answer, (reply, task)


@pytest.mark.parametrize("bench", ["aqua"])
def test_options_of_aqua_in_every_style(bench):
    """Its texts are formulas: the free styles are read too."""
    for task in official(bench, "full"):
        text = task.options[LETTERS.index(task.gold)]
        for style in (*LETTER_STYLES, *TEXT_STYLES, *FREE_STYLES):
            reply = style.format(l=task.gold, s=task.gold.lower(), t=text)
            assert grade(task, reply).correct, (reply, task)


def test_there_are_more_than_twelve_styles():
    assert len(set(NUMBER_STYLES)) > 12
    assert len({*LETTER_STYLES, *TEXT_STYLES[:2]}) > 12
