"""The program in a worker's reply."""

from __future__ import annotations

import pytest

from lemon_jax.runtime.tools.programs import extract_code


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
