"""Which slot of a llama.cpp server holds which prompt, so that common beginnings are computed once.

A server's slot keeps the keys and values of the prompt it answered last, and a prompt that begins alike
computes only what follows. Calls that begin alike and are open at once lie in different slots, each of which
would compute the beginning for itself. So the first of them to run is computed before the others and written
to a file, and the others' slots read that file: milliseconds in place of seconds.

Prompts are compared as texts. The server compares tokens again, so a wrong guess here costs time only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from lemon_jax.backends.types import Request

# Characters, some 80 tokens: a second of computing on two cores, against milliseconds of reading.
_WORTH = 300
_GATHER_S = 0.05  # until calls that are asked for together have all been noted; one takes seconds
# Of a server's files, beside those that are being written: the one that was not used for longest makes room.
# One takes 10 to 20 MB with the packaged models, hundreds of MB with larger models and long prompts.
_FILES = 32
_BYTES = 1 << 30
# Of a prompt: computed; not taken by the server, such as one that is longer than its context; not answered.
Prefill = Literal["done", "refused", "failed"]


class SlotFiles(Protocol):
    """A server that writes the state of an idle slot to a file and reads it into another slot."""

    async def save(self, slot: int, name: str) -> int:
        """The bytes of the state that was written; 0 where it was not."""
        ...

    async def restore(self, slot: int, name: str) -> bool:
        """Whether the state was read; if not, the slot may hold anything."""
        ...

    def remove(self, name: str) -> None:
        """Free the space of a file, if there is one."""
        ...


class Waiting:
    """The prompts of calls that have no slot yet."""

    def __init__(self) -> None:
        self._texts: dict[object, str] = {}

    def add(self, text: str) -> object:
        """Note a call; returns its ticket."""
        ticket = object()
        self._texts[ticket] = text
        return ticket

    def leave(self, ticket: object) -> None:
        """The call has a slot, or needs none any more; may be said twice."""
        self._texts.pop(ticket, None)

    def share(self, text: str, beyond: int, ticket: object) -> bool:
        """Whether another call's prompt begins with more than `beyond` characters of `text`."""
        head = text[: beyond + 1]
        others = (other for owner, other in self._texts.items() if owner is not ticket)
        return len(head) > beyond and any(other.startswith(head) for other in others)


class SlotPrompts:
    """Hands out the slots of one running server, to no more calls at once than it has slots."""

    def __init__(self, files: SlotFiles, slots: int, waiting: Waiting) -> None:
        self._files = files
        self._waiting = waiting
        self._held = [""] * slots
        self._idle = list(range(slots))  # the one that has been idle longest comes first
        # Prompt: its file and the bytes of it; the latest used last.
        self._saved: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._numbers = itertools.count()
        self._leaders: dict[str, asyncio.Event] = {}
        self._failed = False  # the server failed at a prefill: then nobody waits for another one's

    @asynccontextmanager
    async def slot_for(
        self, text: str, ticket: object, prefill: Callable[[int], Awaitable[Prefill]]
    ) -> AsyncIterator[int]:
        """A slot for the length of the block, with as much of the prompt in it as is known.

        `prefill` computes the prompt in a slot and says what came of it; it is called where others wait for
        the same beginning. Where the prompt is refused, the next of them computes the beginning.
        """
        await asyncio.sleep(_GATHER_S)
        while leader := self._leader(text):
            await leader.wait()
        # No other call runs between this look and the entry among the leaders.
        leads = not self._failed and self._waiting.share(text, self._known(text) + _WORTH, ticket)
        self._waiting.leave(ticket)
        done = asyncio.Event()
        if leads:
            self._leaders[text] = done
        slot = max(self._idle, key=lambda i: self._rank(text, i))
        self._idle.remove(slot)
        try:
            await self._bring(text, slot)
            if leads:
                try:
                    await self._lead(text, slot, prefill)
                finally:
                    self._release(text, done)
            yield slot
        finally:
            self._idle.append(slot)
            if leads:
                self._release(text, done)

    def _leader(self, text: str) -> asyncio.Event | None:
        """What will bring more of this prompt than is known."""
        beyond = self._known(text) + _WORTH
        return next((e for other, e in self._leaders.items() if common(other, text) > beyond), None)

    def _release(self, text: str, done: asyncio.Event) -> None:
        if self._leaders.get(text) is done:
            del self._leaders[text]
        done.set()

    def _known(self, text: str) -> int:
        return max((common(other, text) for other in self._saved), default=0)

    def _rank(self, text: str, slot: int) -> tuple[int, int]:
        """The slot that holds most of the prompt; among those that hold little, the longest idle."""
        shared = common(self._held[slot], text)
        return (shared if shared > _WORTH else 0, -self._idle.index(slot))

    async def _bring(self, text: str, slot: int) -> None:
        """Read the file that holds most of the prompt, if it holds clearly more than the slot."""
        own, self._held[slot] = self._held[slot], text
        best = max(self._saved, key=lambda other: common(other, text), default=None)
        if best is None or common(best, text) <= common(own, text) + _WORTH:
            return
        self._saved.move_to_end(best)
        saved = self._saved[best]
        if not await self._files.restore(slot, saved[0]) and self._saved.get(best) == saved:
            self._drop(best)

    async def _lead(self, text: str, slot: int, prefill: Callable[[int], Awaitable[Prefill]]) -> None:
        """Compute a prompt and write it to a file."""
        outcome = await prefill(slot)
        self._failed |= outcome == "failed"
        if outcome == "refused":
            self._held[slot] = ""  # not this prompt: who believed so would read no file
        if outcome == "done":
            name = f"{next(self._numbers)}.bin"
            size = await self._files.save(slot, name)
            if not size:
                self._files.remove(name)  # what a full disk left of it
                return
            self._drop(text)
            self._saved[text] = name, size
            while len(self._saved) > _FILES or sum(size for _, size in self._saved.values()) > _BYTES:
                self._drop(next(iter(self._saved)))

    def _drop(self, text: str) -> None:
        """Forget a file, if there is one of this prompt, and free its space."""
        if text in self._saved:
            name, _ = self._saved.pop(text)
            self._files.remove(name)


def prompt_text(request: Request) -> str:
    """The chat in one text: equal beginnings are equal beginnings of the prompt."""
    return "\0".join(f"{message.role}\0{message.content}" for message in request.messages)


def common(a: str, b: str) -> int:
    """The length of the common beginning, by bisection."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
