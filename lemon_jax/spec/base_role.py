"""What a base role is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tool = Literal["none", "calculator", "program", "nearest_option", "majority_vote"]
Family = Literal["math", "knowledge", "code"]  # what a task asks for: a value, facts, a function


@dataclass(frozen=True, kw_only=True)
class BaseRole:
    """One entry of the library."""

    name: str  # the identifier a spec writes, e.g. "equation_writer"
    title: str  # the default agent name, e.g. "Equation writer"
    default_duty: str  # one sentence; what rolling a duty back to the base role restores
    llm: bool = True  # False: a tool alone, which costs no worker call
    tool: Tool = "none"  # what the reply (or, for a tool alone, the dependencies' answers) is handed to
    prompt: str = ""  # fixed system prompt with worked examples; the duty is written behind it
    cue: str = ""  # last line of the user message, where the reply begins
    sees_options: bool = True  # whether the options of a choice task are shown to this role
    max_tokens: int = 0  # upper bound of one reply; a capacity may lower it
    stop: tuple[str, ...] = ()
