"""What a worker backend receives and returns. Pure data: no HTTP, no JAX."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Finish = Literal["stop", "length", "overflow", "error"]


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One worker call. Two requests that compare equal are the same call.

    `sample_index` tells repeated samples of one prompt apart: index 0 is greedy, higher ones are
    drawn at `temperature`. A backend derives its sampling seed from the request, never from time.
    """

    model: str  # name of a model in the worker file
    messages: tuple[Message, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    sample_index: int = 0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The outcome of one call.

    "error" is an infrastructure failure. "overflow" is none: the prompt does not fit the worker's context, at
    no try, and there is no text. `error` says what was seen, of these two alone; no recording holds it. Token
    counts are None where the server did not report them.
    """

    text: str
    finish: Finish
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    seconds: float = 0.0
    error: str | None = None


class Backend(Protocol):
    """Anything that answers requests: a server, a process, a recording, a script."""

    @property
    def identity(self) -> str:
        """A stable name of the weights behind the replies; part of every call's key."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index into requests, reply)` as replies arrive, each index exactly once.

        An infrastructure failure is a reply with `finish="error"`, not an exception.
        """
        ...

    async def aclose(self) -> None:
        """Release connections and stop what this backend started."""
        ...
