"""Simulated workers: text replies that an item-response model makes right or wrong.

They know the right answers of the tasks that they are given (`World`), and tell them only by being right:
what a reply says besides its answer depends on its role and its place in the chain, never on the task.
A reply is a pure function of (seed, request). No language model is involved, so no result with these
workers is a benchmark result.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

from lemon_jax.backends.concurrency import answer_all
from lemon_jax.backends.response_model import (
    Kind,
    Parameters,
    difficulty,
    is_relevant,
    level_of,
    p_right,
    situation,
    uniform,
    wrong_probabilities,
)
from lemon_jax.backends.types import Reply, Request
from lemon_jax.errors import LemonError
from lemon_jax.numbers import parse_number

Form = Literal["text", "plan", "expression", "program"]
COMPUTED: tuple[Form, ...] = ("expression", "program")  # what a tool evaluates
PROBE = "."  # the user message of the call that measures a role's fixed prefix
_OPEN = 256  # calls in work at once
_FILLER = ("the", "work", "goes", "on")
_SHORTEST = {"text": 4, "plan": 3}
_BLOCK = re.compile(r"^<<output of [^\n]* ([0-9a-f]{8})>>\n(.*?)\n<<end \1>>$", re.DOTALL | re.MULTILINE)
_FIRST_BLOCK = "\n\n<<output of "
_SAID = re.compile(r"Answer: (\S+)$")
_TALLY = re.compile(r"(?<!\S)\|+(?!\S)")


@dataclass(frozen=True, kw_only=True)
class RoleForm:
    """How calls of one base role begin, and the form of their replies."""

    name: str
    prefix: str  # of the system message; the duty follows it
    form: Form
    cue: str = ""  # last line of the user message


@dataclass(frozen=True, kw_only=True)
class SealedTask:
    """A task and its answers: the right one first, then likely wrong ones, the likeliest first.

    `answers` are what a text role writes; `values` what an expression or a program comes to, None where no
    number stands for that answer.
    """

    texts: tuple[str, ...]  # the beginnings of a user message that ask this task
    question: str
    bench: str
    options: int
    answers: tuple[str, ...]
    values: tuple[str | None, ...]

    def place_of(self, said: str) -> int | None:
        """Which of the answers this is; None for any other."""
        for known in (self.answers, self.values):
            if said in known:
                return known.index(said)
        number = parse_number(said)
        if number is None:
            return None
        matches = (i for i, v in enumerate(self.values) if v is not None and parse_number(v) == number)
        return next(matches, None)

    def written(self, form: Form, place: int) -> str | None:
        """What a reply of this form says for the answer at `place`; None where it cannot say it."""
        return (self.values if form in COMPUTED else self.answers)[place]


class World:
    """The tasks and roles that a simulated pool can serve. Of two tasks with one text the first counts."""

    def __init__(self, tasks: Iterable[SealedTask], roles: Iterable[RoleForm]) -> None:
        self._tasks: dict[str, SealedTask] = {}
        for task in tasks:
            for text in task.texts:
                self._tasks.setdefault(text, task)
        self.roles = {role.name: role for role in roles}
        self._longest_first = sorted(self.roles.values(), key=lambda role: -len(role.prefix))

    def task(self, text: str) -> SealedTask:
        """The task that a user message with this beginning asks; LemonError for an unknown one."""
        if text not in self._tasks:
            raise LemonError(
                f"simulated workers can answer only the tasks of the run's bench, not {text[:60]!r}; "
                "use --bench, or other workers"
            )
        return self._tasks[text]

    def role(self, system: str) -> RoleForm:
        """The role whose prompt a system message begins with; LemonError for none."""
        for role in self._longest_first:
            if system.startswith(role.prefix):
                return role
        raise LemonError(
            "simulated workers know the base roles of number and choice tasks only, not the one that begins "
            f"with {system[:60]!r}; use other workers"
        )


class SimulatedBackend:
    """Answers for one capacity level. All that is random comes from (`seed`, request)."""

    def __init__(self, level: str, parameters: Parameters, world: World, *, seed: int = 0) -> None:
        self.identity = f"simulated:1:{level}:{seed}:{parameters.digest}"
        self._level, self._parameters, self._world, self._seed = level, parameters, world, seed
        self._limit = asyncio.Semaphore(_OPEN)

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index, reply)` for each request. Raises LemonError for a task or role it does not know."""
        return answer_all(requests, self._answer, self._limit)

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _answer(self, request: Request) -> Reply:
        system, user = (message.content for message in request.messages)
        words = len(system.split()) + len(user.split())
        prompt = prompt_tokens(self._parameters, self._level, words)
        if user == PROBE:
            return Reply(text=PROBE, finish="length", prompt_tokens=prompt, generated_tokens=1)
        role = self._world.role(system)
        task, inputs = self._read(role, user)
        level = level_of([level_in(text) for text in inputs])
        place = situation(
            [_kind(task, text) for text in inputs],
            [level_in(text) for text in inputs],
            relevant=is_relevant(system[len(role.prefix) :], task.question),
        )
        p = p_right(
            self._parameters,
            self._level,
            role.name,
            place,
            difficulty=difficulty(self._parameters, task.bench, task.question),
            options=task.options,
        )
        said = task.written(role.form, self._draw(request, p, len(task.answers) - 1))
        length = reply_words(self._parameters, self._level, role)
        return Reply(
            text=write_reply(role.form, said, level=level, words=length),
            finish="stop",
            prompt_tokens=prompt,
            generated_tokens=round(self._parameters.levels[self._level].tokens[role.name]),
        )

    def _read(self, role: RoleForm, user: str) -> tuple[SealedTask, list[str]]:
        """The task that a user message asks, and the texts of its inputs."""
        head, _, rest = user.partition(_FIRST_BLOCK)
        if not rest and role.cue:
            head = head.removesuffix("\n" + role.cue)
        return self._world.task(head), [match[2] for match in _BLOCK.finditer(user)]

    def _draw(self, request: Request, p: float, wrong: int) -> int:
        """Which answer: 0 with probability `p`, else one of the wrong ones by their shares."""
        key = "\0".join(f"{m.role}\0{m.content}" for m in request.messages)
        u = uniform("reply", str(self._seed), self._level, str(request.sample_index), key)
        if u < p or not wrong:
            return 0
        left = (u - p) / (1 - p)
        for index, share in enumerate(wrong_probabilities(self._parameters, wrong)):
            left -= share
            if left < 0:
                return index + 1
        return 1


def _kind(task: SealedTask, text: str) -> Kind:
    """What an input says; every input is the output of a simulated worker or of a tool."""
    if said := _SAID.search(text):
        return "right" if task.place_of(said[1]) == 0 else "wrong"
    return "plan" if text.endswith(" plan") else "nothing"


def level_in(text: str) -> int:
    """The level that an output states; 1 for a tool's, which states none."""
    if tally := _TALLY.search(text):
        return len(tally[0])
    return max(1, len(text) - len(text.lstrip("(")) - 1)


def write_reply(form: Form, said: str | None, *, level: int, words: int) -> str:
    """A reply of `words` words (text and plan; the others have lengths of their own) at a level of a chain.

    A text role says "Level || the work goes on Answer: 39"; a plan holds no answer; an expression opens one
    parenthesis more than its level; `said` None makes a reply that its tool has no value for. With the
    line that a tool adds, replies of one form have one number of words, whatever they say.
    """
    tally = "|" * level
    if form == "expression":
        if said is None:
            return f"{'unknown ' * 6}{tally}"
        return f"{'(' * level}({said} + 7) - 7{')' * level}"
    if form == "program":
        if said is None:
            return f"# level {tally} no value was found here\nanswer = unknown"
        return f"# level {tally}\nx = {said}\nanswer = x"
    end = ["plan"] if form == "plan" else ["Answer:", str(said)]
    filler = islice(cycle(_FILLER), max(0, words - 2 - len(end)))
    return " ".join(["Level", tally, *filler, *end])


def output_words(parameters: Parameters, level: str, role: RoleForm) -> int:
    """Words of what an agent hands on: its reply, and the line that its tool adds."""
    return {"expression": 7, "program": 11}.get(role.form) or reply_words(parameters, level, role)


def reply_words(parameters: Parameters, level: str, role: RoleForm) -> int:
    """Words of a text reply: as many as its tokens make, and enough to say what it must."""
    config = parameters.levels[level]
    words = round(config.tokens[role.name] / config.calls / parameters.tokens_per_word)
    return max(_SHORTEST.get(role.form, 0), words)


def prompt_tokens(parameters: Parameters, level: str, words: int) -> int:
    """Prompt tokens of a reply whose messages have so many words, over all its calls."""
    return parameters.levels[level].calls * round(parameters.tokens_per_word * words)
