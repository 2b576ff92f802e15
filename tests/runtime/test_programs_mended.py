"""The program in a worker's reply."""

from __future__ import annotations

import warnings

import pytest

from lemon_jax.runtime.tools.programs import MAX_CODE, extract_code, extract_completion, name_answer


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("answer = 1", "answer = 1"),
        ("Here:\n```python\nanswer = 1\n```\nDone.", "answer = 1"),
        ("```\nanswer = 1\n```", "answer = 1"),
        ("```python\nanswer = 1\n```\nBetter:\n```py\nanswer = 2\n```", "answer = 2"),
        ("```python\nanswer = 1\n```\nIt prints\n```output\n1\n```", "answer = 1"),
        ("```python\nanswer = 1\n```\nand\n```python\nanswer = ", "answer = 1"),
        ("```python\nanswer = 1", "answer = 1"),
        ("answer = 1\n```", "answer = 1"),
        ("```python answer = 1```", "answer = 1"),
        ("- item\n  ```python\n  x = 1\n  if x:\n    answer = 2\n  ```", "x = 1\nif x:\n  answer = 2"),
        ("```Python\r\nanswer = 1\r\n```", "answer = 1"),
        ("", ""),
    ],
)
def test_extract_code(text: str, code: str) -> None:
    assert extract_code(text) == code


DOUBLE = 'def f(x):\n    """double\n\n    ```\n    f(1)\n    ```\n    """\n    return 2 * x'
PLAIN = "def f(x):\n    return 2 * x"
FRAMES = [
    *("FUNCTION", "\ufeffFUNCTION", "```python\nFUNCTION\n```", "Sure:\n````python\nFUNCTION\n````\nDone."),
    *("~~~python\nFUNCTION\n~~~", "```{.python}\nFUNCTION\n```"),
]


@pytest.mark.parametrize("function", [DOUBLE, PLAIN], ids=["fence in docstring", "plain"])
@pytest.mark.parametrize("frame", FRAMES)
def test_functions_are_found_in_every_kind_of_fence(function, frame):
    assert extract_completion(frame.replace("FUNCTION", function), "f").strip() == function


@pytest.mark.parametrize(
    "reply", ["~~~python\nanswer = 3\n~~~", "\ufeffanswer = 3", "```{.python}\nanswer = 3\n```"]
)
def test_programs_are_found_in_other_fences(reply):
    assert extract_code(reply) == "answer = 3"


def test_nobody_is_warned_of_what_a_worker_wrote():
    program = 'x = "\\d"'
    function = f"def f():\n    {program}"
    for action in ("always", "error"):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter(action)
            assert name_answer(program) == f"{program}\nanswer = x"
            assert extract_completion(f"{function}\n```\nf()\n```", "f") == function
        assert not heard


def test_what_is_too_long_to_run_is_not_parsed():
    assert name_answer("x = 1" + "\n" * (MAX_CODE - 5)).endswith("answer = x")
    assert name_answer(too_long := "x = 1" + "\n" * (MAX_CODE - 4)) == too_long
