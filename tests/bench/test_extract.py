import pytest

from lemon_jax.bench import Task, extract_choice, extract_number, grade


def number_task(gold):
    return Task(id="t", bench="b", question="?", gold=gold, kind="number")


def numbers(*rows):
    return pytest.mark.parametrize(("text", "value", "fallback"), rows)


def check_number(text, value, fallback):
    found = extract_number(text)
    assert (found.value, found.fallback) == (value, fallback)


@numbers(
    ("The answer is -5.", "-5", False),
    ("The answer is −5", "-5", False),
    ("−5", "-5", True),
    ("10 - 5 = 5", "5", True),
    ("range 3-5", "5", True),
    ("Answer: $-10", "-10", False),
    ("Answer: -$10", "-10", False),
    ("answer: 10 -5 = 5", "5", False),
    (r"\boxed{-3}", "-3", False),
)
def test_case_25_sign(text, value, fallback):
    check_number(text, value, fallback)


@pytest.mark.parametrize(
    ("gold", "reply"),
    [("11", "ANSWER: 711"), ("114200", "114201"), ("100", "10"), ("9007199254740993", "9007199254740992"),
     ("150", "15"), ("0.1", "Answer: 0.10000000000000001"), ("39", "Answer: 0.39")],
)  # fmt: skip
def test_case_26_near_misses_are_wrong(gold, reply):
    result = grade(number_task(gold), reply)
    assert not result.correct
    assert not result.no_answer
    assert grade(number_task(gold), f"Answer: {gold}").correct


@pytest.mark.parametrize(
    "reply", ["39", "39.0", "$39", "39%", "39 km/h", "39.", "**39**", "0039", r"$39.00\%$"]
)
def test_the_same_number_in_other_dress(reply):
    assert grade(number_task("39"), f"The answer is {reply}").correct
    assert grade(number_task("39"), reply).correct


@numbers(
    (r"The result is $\boxed{42}$.", "42", False),
    (r"\boxed{}", None, False),
    (r"\boxed{\text{C}}", None, False),
    (r"\boxed{\frac{1}{2}}", "0.5", False),
    (r"\boxed{1} and then \boxed{2}", "2", False),
    (r"\boxed{4", None, False),
    (r"\boxed{3} but then \boxed{4", "3", False),
    (r"12 + 5 \boxed{ }", None, False),
    (r"The answer is \boxed{42\text{ dollars}} for 2", "42", False),
    (r"\boxed{\boxed{7}}", "7", False),
    (r"\boxed{x^{2} = 9}", "2", False),
    (r"\boxed{1,000}", "1000", False),
)
def test_case_28_boxed(text, value, fallback):
    if text == r"\boxed{\text{C}}":
        assert extract_choice(text, 5).value == "C"
        assert extract_number(text).value is None
    else:
        check_number(text, value, fallback)


def test_case_28_deep_nesting():
    assert extract_number("2^{" * 1000).value == "2"
    assert extract_number(r"\boxed{" * 1000 + "8" + "}" * 1000).value == "8"
    assert extract_number(r"\boxed{" * 1000 + "8").value is None


@numbers(
    ("The answer is 30 dollars for the 2 items.", "30", False),
    ("answer: 12 (3 x 4)", "12", False),
    ("30 minutes, at 9:15", "30", True),
    ("The answer is 30 minutes, at 9:15", "30", False),
    ("**Answer: 7** Step 8 checks", "7", False),
    ("Answer: 3 × 4 = 12 and 5 more", "12", False),
    ("The answer is $5 + $3 = $8.", "8", False),
    ("<answer>42</answer> after 3 tries", "42", False),
    ("## Answer\n\n42\nThat took 3 steps", "42", False),
    ("The correct answer (in dollars) is 42. Step 3.", "42", False),
    ("Answer: 5\nNo, the answer is 6 of 7", "6", False),
    ("The answer is Rs. 450 for 2.", "450", False),
    ("the answer is not 5 but 6", "6", True),
)
def test_case_29_trailing_numbers(text, value, fallback):
    check_number(text, value, fallback)


@numbers(
    ("Q: a\n#### 8\n\nQ: b\n#### 39\n\nso\n#### 72", "72", False),
    ("#### 1,000", "1000", False),
    ("It is 5 + 3\n####", None, False),
    ("####\n", None, False),
    ("#### Step 1\n5 + 3 = 8\nThe answer is 8.\n#### Check 3", "8", False),
)
def test_case_31_hashes(text, value, fallback):
    check_number(text, value, fallback)


CHOICES = [
    ("(A) 21%", "A"),
    ("Answer: B) 3/4", "B"),
    ("The answer is E) None of These", "E"),
    ("E) None of These", "E"),
    ("C because A is wrong", "C"),
    ("the answer is d", "D"),
    ("I think a car is fast", None),
    ("A and C", None),
    ("F", None),
    ("Answer: F", None),
    ("Antwort: C", "C"),
    ("Answer: **D**", "D"),
    ("C. Option A is a trap", "C"),
    ("The total is 5", None),
    ("The answer is a car", None),
    ("The answer is a and c", None),
    ("Answer: A or C", None),
    ("Answer: A/B", None),
    ("Answer: AB", None),
    ("E.g. 5 km", None),
    ("A is twice as old as B.\nSo it takes 5.", None),
    ("A train goes.\nSo it is (B) 12.", "B"),
    ("A) 5\nB) 6\nC) 7", None),
    ("A) 5\nB) 6\nC) 7\n\nB", "B"),
    (r"\boxed{\text{C}}", "C"),
    (r"$\boxed{B}$", "B"),
    (r"\boxed{}", None),
    ("Answer: A\nWait.\nAnswer: C", "C"),
    ("The answer is 12, so option (C).", "C"),
    ("The correct option is B.", "B"),
    ("Therefore option C is the correct answer.", "C"),
    ("<answer>C</answer>", "C"),
    ("Answer: x = 5, so (C)", "C"),
    ("", None),
    ("P(A) = 1/2", None),
    ("Answer: K/8 (B)", "B"),
    ("Answer: a - b (C)", "C"),
    ("the answer is d - 5 km", "D"),
    ("Answer: I, II and III (E)", "E"),
    ("The answer is option A, M + N / 8", "A"),
    ("Answer: A, C", None),
    (r"So, the answer is \(B\).", "B"),
]


CHOICES += [
    ("The answer is option C, A large city", "C"),
    ("The answer is B, I think", "B"),
    ("The answer is C, A", None),
    ("The answer is C, A and B", None),
    ("The answer is D) Only I is correct.", "D"),
    ("D. Only I is correct", "D"),
    ("The answer is A. F is correct", None),
]


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_case_32_choice_letters(text, letter):
    assert extract_choice(text, 5).value == letter


def test_choice_fallback_is_flagged():
    assert extract_choice("A train goes.\nSo it is (B) 12.", 5).fallback
    assert not extract_choice("Answer: B", 5).fallback
    assert not extract_choice("B", 5).fallback
    assert extract_choice("D", 4).value == "D"
    assert extract_choice("Answer: E", 4).value is None
    assert extract_choice("The answer is E) None of these", 4).value is None
    assert extract_choice("D", 3).value is None


@pytest.mark.parametrize("reply", ["", "twenty", " \n", "I do not know.", "####", r"\boxed{}", "9" * 5000])
def test_case_34_no_answer_is_not_zero(reply):
    result = grade(number_task("0"), reply)
    assert (result.correct, result.answer, result.no_answer) == (False, None, True)
    wrong = grade(number_task("0"), "Answer: 1")
    assert (wrong.correct, wrong.no_answer) == (False, False)
    assert grade(number_task("0"), "Answer: 0").correct


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("The answer is 15. A common wrong answer is 12.", "15"),
        ("Answer: 15\nIncorrect answer: 12", "15"),
        ("Answer: 15\nNot the answer: 12", "15"),
        ("Answer: 15\nThat is not the final answer: 12", "15"),
        ("Answer: - 5", "-5"),
        (r"\boxed{- 3}", "-3"),
        ("Answer:\n- 5 apples", "5"),  # a bullet
        ("Answer: \u20115", "-5"),
        ("Answer: \u20105", "-5"),
        ("Answer: \u207b5", "-5"),
        ("Answer: \u02d75", "-5"),
        (r"\boxed{1\,000}", "1000"),
        (r"\boxed{1\,000\,000}", "1000000"),
        ("Die Antwort lautet 7 für 2", "7"),
    ],
)
def test_signs_groups_and_answers_that_are_not_meant(reply, value):
    found = extract_number(reply)
    assert (found.value, found.fallback) == (value, False)


@pytest.mark.parametrize(
    "joint", ["; ", " | ", ", or possibly ", " or perhaps ", " as well as ", "和", "、", " или "]
)
def test_two_letters_are_no_answer_however_they_are_joined(joint):
    assert extract_choice(f"Answer: A{joint}C", 5).value is None
    assert extract_choice(f"Answer: A{joint}A", 5).value == "A"


@pytest.mark.parametrize("reply", ["Answer: (A)(C)", "Answer: A (or C)"])
def test_two_letters_in_brackets_are_no_answer(reply):
    assert extract_choice(reply, 5).value is None


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("The answer is B. The incorrect answer is A.", "B"),
        ("Answer: B\nWrong answer: A", "B"),
        ("The correct answer is B, the incorrect answer is A", "B"),
        ("The answer is 'B'.", "B"),
        ("Answer: <D>", "D"),
        ("Answer: Ｃ", "C"),
        ("（C）", "C"),
        ("Answer: \u200bC", "C"),
        ("Die Antwort lautet C", "C"),
        ("La respuesta es la C", "C"),
        ("La respuesta correcta es la opción C", "C"),
        ("答案选C", "C"),
        ("正确答案是选项C", "C"),
    ],
)
def test_letters_in_quotes_other_widths_and_languages(reply, letter):
    assert extract_choice(reply, 5).value == letter
