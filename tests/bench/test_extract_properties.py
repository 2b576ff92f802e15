"""What holds of every reply: no crash, answers in range, a marked answer is found, the time is linear."""

import string
from fractions import Fraction

import pytest
from cpu_time import at_most
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lemon_jax.bench import LETTERS, Task, extract_choice, extract_number, grade
from lemon_jax.numbers import format_number

# Reasoning with everything that looks like an answer, except the words and signs that announce one.
PLAIN_WORDS = st.text(alphabet=string.ascii_letters + string.digits + " .,:+-*/=()$%\n", max_size=120).filter(
    lambda text: "ans" not in text.lower()
)
HOSTILE = st.text(alphabet="answer is:#\\boxed{}()ABCDEF0123./,-=$%*\n ½−：", max_size=120)
NUMBERS = st.integers(-(10**12), 10**12) | st.decimals(
    min_value=-1000, max_value=1000, places=3, allow_nan=False
)
MARKS = ["The answer is {}.", "Answer: {}", "#### {}", r"\boxed{{{}}}", "**Answer: {}**", "answer = {}"]


def task(kind, gold, n_options=0):
    return Task(id="t", bench="b", question="?", options=("x",) * n_options, gold=gold, kind=kind)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=200) | HOSTILE)
@example("\\boxed{" * 50)
@example("9" * 5000)
@example("1/" * 100)
@example("½" * 100)
def test_no_reply_crashes_and_answers_are_canonical(text):
    number = extract_number(text)
    assert number.value is None or format_number(Fraction(number.value)) == number.value
    for n_options in (1, 4, 5, 26):
        choice = extract_choice(text, n_options)
        assert choice.value is None or choice.value in LETTERS[:n_options]
        assert not (choice.value is None and choice.fallback)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.text(max_size=100) | HOSTILE, st.sampled_from([4, 5]))
def test_a_letter_is_taken_only_if_it_is_an_option(text, n_options):
    narrow, wide = extract_choice(text, n_options), extract_choice(text, 26)
    if narrow.value is not None and wide.value is not None and wide.value in LETTERS[:n_options]:
        assert narrow.value == wide.value


@settings(deadline=None, max_examples=60, derandomize=True)
@given(PLAIN_WORDS, NUMBERS, st.sampled_from(MARKS))
def test_a_number_after_a_marker_is_found_whatever_came_before(words, number, mark):
    gold = format_number(Fraction(str(number)))
    reply = f"{words}\n{mark.format(gold)}"
    result = grade(task("number", gold), reply)
    assert (result.correct, result.fallback) == (True, False), reply
    assert not grade(task("number", format_number(Fraction(gold) + 1)), reply).correct


@settings(deadline=None, max_examples=60, derandomize=True)
@given(PLAIN_WORDS, st.sampled_from("ABCD"), st.sampled_from(MARKS))
def test_a_letter_after_a_marker_is_found_whatever_came_before(words, letter, mark):
    reply = f"{words}\n{mark.format(letter)}"
    result = grade(task("choice", letter, 4), reply)
    assert (result.correct, result.fallback) == (True, False), reply


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.sampled_from("EFGHJKLMNOPQRSTUVWXYZ"), st.sampled_from(MARKS))
def test_a_letter_that_is_no_option_is_no_answer(letter, mark):
    assert grade(task("choice", "A", 4), mark.format(letter)).no_answer


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.integers(1, 10**9), st.sampled_from([" apples", "%", " km/h", ".0", ".", " dollars for the 2 items"])
)
def test_dress_does_not_change_the_number(number, dress):
    for shown in (str(number), f"{number:,}", f"${number}"):
        assert grade(task("number", str(number)), f"The answer is {shown}{dress}").correct


PIECES = [
    "answer ", "answer is ", "Answer: A, ", "####", "#### \n", r"\boxed{", r"\boxed{}", "{", "}", "(A) ",
    "\n", "option ", "answer " + " " * 50, "1 + ", "= 1 ", "C is ", "*_", "answer: 1 + ", "A and ", " \n",
    "1/", "1,", "1.", "½", "-", "$", "1:2", r"\frac{1}", "A) ", "I choose ", "1e", "x10^", " : ",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_time_is_linear_on_hostile_replies(piece):
    text = (piece * 100_000)[:100_000]
    for extract in (extract_number, lambda t: extract_choice(t, 5)):
        with at_most(0.5):
            extract(text)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4))
def test_no_mixture_of_them_takes_long(pieces):
    text = ("".join(pieces) * 5000)[:5000]
    with at_most(0.2):  # quadratic time would take seconds
        extract_number(text)
        extract_choice(text, 4)
