"""What an agent is told: its role and duty as the system message; the task and its inputs as the user's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lemon_jax.backends import Message
from lemon_jax.spec import ROLES, Agent

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Problem(Protocol):
    """What the runtime needs of a task; any object with these attributes will do."""

    @property
    def question(self) -> str: ...

    @property
    def options(self) -> Sequence[str]:
        """Option texts without their letters; empty where the task has no options."""
        ...

    @property
    def entry_point(self) -> str:
        """The name of the function that is asked for; empty where none is."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextProblem:
    """A problem given as plain text, as on the command line."""

    question: str
    options: tuple[str, ...] = ()
    entry_point: str = ""


@dataclass(frozen=True, kw_only=True)
class Input:
    """The output of one dependency, as its reader receives it."""

    agent_id: str
    name: str
    text: str


def block_tag(text: str) -> str:
    """A delimiter that `text` cannot contain, derived from `text` alone.

    It depends on nothing but the content, so equal calls stay equal (and cacheable), and an agent
    cannot close its own block: it would have to write the hash of what it writes.
    """
    salt = 0
    while True:
        tag = hashlib.sha256(f"{salt}\0{text}".encode()).hexdigest()[:8]
        if tag not in text:
            return tag
        salt += 1


def render_input(item: Input) -> str:
    """One labelled block for one dependency.

    In:  Input(agent_id="a1", name="Analyst", text="x = 3")
    Out: <<output of a1 (Analyst) 5f0c...>>
         x = 3
         <<end 5f0c...>>
    """
    text = item.text.strip() or "(no output)"
    name = " ".join(item.name.split())  # a name with line breaks cannot draw a frame of its own
    tag = block_tag(f"{name}\n{text}")
    return f"<<output of {item.agent_id} ({name}) {tag}>>\n{text}\n<<end {tag}>>"


def render_options(options: Sequence[str]) -> str:
    """In: ["3", "4"]  Out: "A) 3\\nB) 4"."""
    return "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, options, strict=False))


def fixed_prefix(role_name: str) -> str:
    """The part of the system message that every call of this base role begins with."""
    return ROLES[role_name].prompt.rstrip("\n") + "\n\nYour duty: "


def build_messages(problem: Problem, agent: Agent, inputs: Sequence[Input]) -> tuple[Message, ...]:
    """The chat of one worker call; inputs come in spec order."""
    role = ROLES[agent.role]
    parts = [f"Question: {problem.question.strip()}"]
    if problem.options and role.sees_options:
        parts[0] += "\n" + render_options(problem.options)
    parts += [render_input(item) for item in inputs]
    if role.cue:
        separator = "\n\n" if inputs else "\n"
        return _chat(fixed_prefix(agent.role) + agent.duty, "\n\n".join(parts) + separator + role.cue)
    return _chat(fixed_prefix(agent.role) + agent.duty, "\n\n".join(parts))


def _chat(system: str, user: str) -> tuple[Message, ...]:
    return (Message(role="system", content=system), Message(role="user", content=user))
