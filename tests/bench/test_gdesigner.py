"""The family's rule of reading answers, with its faults; and that every grade names its rule."""

import pytest
from cpu_time import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from lemon_jax.bench import EXTRACTORS, Task, grade
from lemon_jax.bench.gdesigner import extract
from lemon_jax.errors import LemonError


def task(bench, gold="0"):
    n_options = {"aqua": 5, "mmlu": 4}.get(bench, 0)
    kind = "choice" if n_options else "number"
    return Task(id="t", bench=bench, question="?", options=("x",) * n_options, gold=gold, kind=kind)


def answer(bench, text):
    return grade(task(bench), text, "gdesigner").answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42", "42"),
        ("The answer is 42.", "42"),
        ("First the answer is 3. Then The answer is 4", "4"),
        (r"So \boxed{7} of 9", "7"),
        (r"$\boxed 7$ of 9", "7"),
        ("12 + 5 = 17", "17"),
        # faults
        ("", "0"),
        ("twenty", "0"),
        ("The answer is twenty", "0"),
        ("The answer is -5", "5"),
        ("The answer is 1,200", "200"),
        ("The answer is 2.50", "50"),
        ("The answer is 0.5", "2"),
        ("The answer is 30 dollars for the 2 items.", "2"),
        ("The answer is 42\n3 apples are left", "423"),
        ("The answer is 5 6", "56"),
        (r"The result is $\boxed{42}$. Step 3", "42"),
        (r"\boxed{\frac{1}{2}}", "2"),
        (r"\boxed{4", "4"),
        (r"\boxed{3} and The answer is 8", "8"),
        ("Answer: 12 (3 x 4)", "4"),
        ("30 minutes, at 9:15", "15"),
        ("The answer is .", None),  # their code stops here
        ("boxed", None),
    ],
)
def test_number(text, value):
    assert answer("gsm8k", text) == value
    assert answer("svamp", text) == answer("multiarith", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is B", "B"),
        ("The answer is B.", "B"),
        (r"\boxed{C}", "C"),
        # faults
        ("E) None of These", "T"),
        ("C. Option A is a trap", "A"),
        ("The answer is B) 3/4 of A", "A"),
        ("The total is five", "T"),
        ("the answer is d", None),
        ("", None),
        ("The answer is F", "F"),
    ],
)
def test_letter_of_aqua(text, value):
    assert answer("aqua", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("B", "B"),
        ("The answer is: B, since", "B"),
        ("the answer is Option C", "C"),
        # faults
        ("The best is B", "T"),
        ("(A) 5", "("),
        ("a", "a"),
        ("The answer is (B)", "("),
        ("The answer is A. No, the answer is B", "A"),
        ("", None),
        ("The answer is ", None),
    ],
)
def test_letter_of_mmlu(text, value):
    assert answer("mmlu", text) == value


def test_a_reply_without_an_answer_is_right_where_the_gold_is_zero():
    for text in ("", "twenty", "I do not know"):
        family = grade(task("gsm8k", gold="0"), text, "gdesigner")
        assert (family.correct, family.no_answer) == (True, False)
        ours = grade(task("gsm8k", gold="0"), text)
        assert (ours.correct, ours.no_answer) == (False, True)


def test_numbers_are_compared_as_floats():
    assert grade(task("gsm8k", "9007199254740993"), "The answer is 9007199254740992", "gdesigner").correct
    assert not grade(task("gsm8k", "9007199254740993"), "The answer is 9007199254740992").correct
    assert not grade(task("gsm8k", "-5"), "The answer is -5", "gdesigner").correct
    assert not grade(task("gsm8k", "1/3"), "The answer is 1/3", "gdesigner").correct


def test_every_grade_names_its_rule():
    assert {grade(task("aqua", "B"), "The answer is B", name).extractor for name in EXTRACTORS} == {
        "lemon",
        "gdesigner",
    }
    assert grade(task("aqua", "B"), "B").extractor == "lemon"
    with pytest.raises(LemonError, match="extractor 'ours' is unknown, expected one of: lemon, gdesigner"):
        grade(task("aqua"), "B", "ours")
    code = Task(id="c", bench="humaneval", question="def f():", gold="return 1", kind="code")
    for name in EXTRACTORS:
        with pytest.raises(ValueError, match="c: a code task is graded by running its test"):
            grade(code, "return 1", name)


def test_fallback_says_that_nothing_announced_the_answer():
    assert extract(task("gsm8k"), "5 apples").fallback
    assert extract(task("mmlu"), "B").fallback
    assert not extract(task("gsm8k"), "The answer is 5").fallback
    assert not extract(task("aqua"), r"\boxed{B}").fallback
    assert not extract(task("mmlu"), "answer is B").fallback


PIECES = ["The answer is ", "answer is", "boxed", "{", "}", "\\frac", "\\sqrt", "\\text{ ", "=", "0.5", " .",
          "/", "12", "-", "A", "Option", "\n", "$", ":"]  # fmt: skip


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=60))
def test_no_reply_crashes(text):
    for bench in ("gsm8k", "aqua", "mmlu"):
        value = answer(bench, text)
        assert value is None or (value.isdigit() if bench == "gsm8k" else len(value) == 1)


@pytest.mark.parametrize("piece", [*PIECES, "1", "\\boxed{", "The answer is {", "1.", "\\text{ 1"])
def test_time_is_linear(piece):
    text = (piece * 100_000)[:100_000]
    with at_most(0.5):
        for bench in ("gsm8k", "aqua", "mmlu"):
            grade(task(bench), text, "gdesigner")
