"""One problem with its gold answer."""

from dataclasses import dataclass
from typing import Literal

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Kind = Literal["choice", "number"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem. `options` are the option texts without their letters, empty for a number task;
    `gold` is a letter ("B") or the exact number as text ("39", "-0.25", "1/3")."""

    id: str
    bench: str
    question: str
    options: tuple[str, ...] = ()
    gold: str
    kind: Kind

    def prompt(self) -> str:
        """What a worker and the policy read: the question, then one option a line as `A) text`."""
        options = (f"{letter}) {text}" for letter, text in zip(LETTERS, self.options, strict=False))
        return "\n".join([self.question, *options])
