"""One problem with its gold answer."""

from dataclasses import dataclass
from typing import Literal

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Kind = Literal["choice", "number", "code"]
Prices = tuple[float, ...]  # of a generated token at the capacities small, medium and large


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem. `options` are the option texts without their letters, empty but for a choice task;
    `gold` is a letter ("B"), the exact number as text ("39", "-0.25", "1/3") or, of a code task, a body
    that is known to pass; `subject` is the field of knowledge where the bench names one ("anatomy").

    Of a code task `question` is the beginning of the program, word for word: a solution is `question` + body.
    `test` is Python text that defines `check(candidate)`; it passes where `check(<entry_point>)` returns. It
    may call helper functions that `question` defines. Neither `test` nor `gold` is part of `prompt()`.

    `prices` are what its executions cost; None: the worker file's. Workers are not told of them.
    """

    id: str
    bench: str
    question: str
    options: tuple[str, ...] = ()
    gold: str
    kind: Kind
    subject: str = ""
    entry_point: str = ""
    test: str = ""
    prices: Prices | None = None

    @property
    def family(self) -> Literal["math", "knowledge", "code"]:
        """What kind of work it asks for: a value, facts, or a function."""
        if self.kind == "code":
            return "code"
        return "knowledge" if self.subject else "math"

    def prompt(self) -> str:
        """What a worker and the policy read: the question, then one option a line as `A) text`."""
        options = (f"{letter}) {text}" for letter, text in zip(LETTERS, self.options, strict=False))
        return "\n".join([self.question, *options])
