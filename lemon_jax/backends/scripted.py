"""The deterministic test double: replies are a pure function of the request, without any model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict

from lemon_jax.backends.concurrency import answer_all
from lemon_jax.backends.types import Finish, Reply, Request

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_OPTION = re.compile(r"(?m)^\s*\(?([A-J])[).:]\s*(.*)$")
# A word of the question and the operation it suggests, first match wins.
_CUES = (
    (r"\beach\b|\bper\b|\bevery\b|\btimes\b", "*"),
    (r"\bshare|\bsplit|\bdivid|\bequal", "/"),
    (r"\bleft\b|\blost|\bgave|\bfewer|\bless\b|\bremain", "-"),
    (r"", "+"),
)
# In how many of 100 questions the pseudo-worker follows the cue instead of guessing.
_SKILL = {"small": 40, "medium": 70, "large": 90}


class ScriptedBackend:
    """Answers by `script`, or as a weak pseudo-worker whose skill follows the model's name.

    `failures` is the fraction of requests that fail as infrastructure would, chosen by hash;
    `delay_s` is the time each call takes. Token counts are whitespace-separated words.
    """

    def __init__(
        self,
        script: Callable[[Request], str] | None = None,
        *,
        identity: str = "scripted:1",
        failures: float = 0.0,
        delay_s: float = 0.0,
        max_concurrency: int = 64,
    ) -> None:
        self.identity = identity
        self._script = script or pseudo_worker
        self._failures = failures
        self._delay_s = delay_s
        self._limit = asyncio.Semaphore(max_concurrency)
        self.calls: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index, reply)` for each request."""
        return answer_all(requests, self._answer, self._limit)

    async def aclose(self) -> None:
        """Nothing to release."""

    async def _answer(self, request: Request) -> Reply:
        self.calls.append(request)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if _draw(request, "failure", 1_000_000) < self._failures * 1_000_000:
            return Reply(text="", finish="error", error="scripted failure", seconds=self._delay_s)
        text = self._script(request)
        for stop in request.stop:
            text = text.split(stop, 1)[0]
        words = text.split()
        finish: Finish = "stop"
        if len(words) > request.max_tokens:
            text, finish = " ".join(words[: request.max_tokens]), "length"
        return Reply(
            text=text,
            finish=finish,
            prompt_tokens=sum(len(m.content.split()) for m in request.messages),
            generated_tokens=min(len(words), request.max_tokens),
            seconds=self._delay_s,
        )


def pseudo_worker(request: Request) -> str:
    """A plausible reply in the form that the system message asks for."""
    system = " ".join(m.content for m in request.messages if m.role == "system")
    user = next((m.content for m in reversed(request.messages) if m.role == "user"), "")
    expression = _expression(request, user)
    if "Expression:" in system:
        return expression
    if "answer =" in system:
        return f"answer = {expression}"
    options = _OPTION.findall(user)
    if options:
        work, answer = "Comparing the options.", _choose(request, options, expression)
    else:
        work, answer = f"The quantities give {expression}.", _value(expression)
    # A role that stops at the line's end wants the answer at once.
    return f"Answer: {answer}" if "\n" in request.stop else f"{work}\nAnswer: {answer}"


def _draw(request: Request, what: str, below: int) -> int:
    text = what + json.dumps(asdict(request), sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % below


def _expression(request: Request, user: str) -> str:
    """One to three numbers of the question joined by operations."""
    numbers = _NUMBER.findall(user)[:3]
    if not numbers:
        return str(_draw(request, "number", 20))
    skill = next((s for level, s in _SKILL.items() if level in request.model), 50)
    if _draw(request, "skill", 100) < skill:
        operation = next(op for cue, op in _CUES if re.search(cue, user.lower()))
        return f" {operation} ".join(numbers)
    operations = ("+-*/"[_draw(request, f"operation {i}", 4)] for i in range(len(numbers)))
    return numbers[0] + "".join(f" {op} {n}" for op, n in zip(operations, numbers[1:], strict=False))


def _value(expression: str) -> str:
    """The value of numbers joined by operations, read from left to right."""
    first, *rest = expression.split()
    value = float(first)
    for operation, number in zip(rest[::2], rest[1::2], strict=True):
        n = float(number)
        if operation == "/" and n == 0:
            return "0"
        value = {"+": value + n, "-": value - n, "*": value * n, "/": value / (n or 1)}[operation]
    return f"{value:.10g}"


def _choose(request: Request, options: list[tuple[str, str]], expression: str) -> str:
    value = _value(expression)
    for letter, text in options:
        if value in _NUMBER.findall(text):
            return letter
    return options[_draw(request, "option", len(options))][0]
