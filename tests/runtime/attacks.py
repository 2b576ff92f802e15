"""Attacks on the sandbox: texts to run in it, each with what it tries.

`attack_texts/` holds them: an `escape` defines `attempt()`, true if it got out; a `fake` is a completion
that never computes its answers and wants to pass; an `exhaust` wants to outlive its limits, or to take more
than they allow. A section starts with "=== name | tags": "uses NAME" puts a piece of `shared.txt` in front,
"naive" claims that it does pass where candidate and test share a process (test_attacks.py checks that).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["fake", "escape", "exhaust"]

PROMPT = 'def f(x):\n    """Twice x."""\n'
TEST = """
def check(candidate):
    import random
    assert candidate(2) == 4
    assert candidate("ab") == "abab"
    assert candidate([1]) == [1, 1]
    assert abs(candidate(0.25) - 0.5) < 1e-9
    number = random.randrange(10**6)
    assert candidate(number) == 2 * number
    assert isinstance(candidate(3), int)
"""
HONEST = "    return x * 2\n"

_TEXTS = Path(__file__).with_name("attack_texts")


@dataclass(frozen=True, kw_only=True)
class Attack:
    name: str
    kind: Kind
    code: str
    naive: bool = False

    @property
    def candidate(self) -> str:
        """A completion: an escape answers right if it got out."""
        if self.kind != "escape":
            return self.code
        return f"{self.code}\n{_ATTEMPT}\ndef f(x): return x * 2 if out else None\n"

    @property
    def program(self) -> str:
        """A worker's program, of an escape."""
        return f"{self.code}\n{_ATTEMPT}\nanswer = 'out' if out else 'held'\n"


_ATTEMPT = "try: out = attempt()\nexcept BaseException: out = False"


def _sections(name: str) -> Iterator[tuple[str, list[str], str]]:
    text = (_TEXTS / f"{name}.txt").read_text(encoding="utf-8")
    for section in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        head, _, code = section.partition("\n")
        title, _, tags = head.partition(" | ")
        yield title, tags.split(", ") if tags else [], code


def _attacks(kind: Kind) -> list[Attack]:
    shared = {title: code for title, _, code in _sections("shared")}
    found = []
    for title, tags, code in _sections(f"{kind}s"):
        pieces = [shared[tag.removeprefix("uses ")] for tag in tags if tag != "naive"]
        found.append(Attack(name=title, kind=kind, code="".join([*pieces, code]), naive="naive" in tags))
    return found


FAKES = _attacks("fake")
ESCAPES = _attacks("escape")
EXHAUSTS = [
    *_attacks("exhaust"),
    Attack(name="nested source", kind="exhaust", code=f"def f(x): return {'(' * 20_000}x{')' * 20_000}"),
    Attack(name="nested signs", kind="exhaust", code=f"def f(x): return {'-' * 50_000}x"),
    Attack(name="long source", kind="exhaust", code=f"def f(x): return x\n{'#' * 100_000}"),
]
ATTACKS = [*FAKES, *ESCAPES, *EXHAUSTS]
