"""How many calls are open at once, and a batch of them answered as the replies arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from lemon_jax.backends.types import Reply, Request

# A server with room for one call would otherwise be tried with two after every other success.
_SHORTEST_ROUND = 5


class AdaptiveLimit:
    """How many calls may be open at a server: additive increase, multiplicative decrease (RFC 5681).

    It begins at `ceiling`, halves at a sign of overload, never below 1, and grows by one after as many
    successes as it allows calls, and at least five, never above `ceiling`. Calls that were sent before a
    cut say nothing about the limit after it: a burst of refusals is one cut. No clock is involved.

    # ceiling 32, one refusal: 16; then 16 successes: 17; then 17 more: 18
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._limit = ceiling
        self._open = 0
        self.cuts = 0
        self._successes = 0  # since the limit last changed
        self._again: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Calls that may be open now."""
        return self._limit

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Hold one place for the length of the block, but for the pauses in it."""
        turn = Turn(self)
        await turn.resume(again=False)
        try:
            yield turn
        finally:
            turn.leave()

    def succeeded(self, cuts: int) -> None:
        """A call was answered; `cuts` is their number when it was sent."""
        if cuts != self.cuts:
            return
        self._successes += 1
        if self._limit < self._ceiling and self._successes >= max(self._limit, _SHORTEST_ROUND):
            self._limit += 1
            self._successes = 0
            self._admit()

    def overloaded(self, cuts: int) -> bool:
        """A call met an overloaded server; `cuts` is their number when it was sent.

        Returns whether that cut the limit.
        """
        if cuts != self.cuts:
            return False
        self._limit = max(1, self._limit // 2)
        self.cuts += 1
        self._successes = 0
        return True

    async def _enter(self, again: bool) -> int:
        """Wait for a place; returns the number of cuts so far."""
        if not self._enter_now():
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue = self._again if again else self._new
            queue.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if not place.cancelled():
                    self._leave()  # cancelled between being admitted and running
                elif place in queue:  # _admit may have dropped it already
                    queue.remove(place)
                raise
        return self.cuts

    def _enter_now(self) -> bool:
        """Take a place that is free; whether there was one. Nobody waits while one is free."""
        if self._open >= self._limit:
            return False
        self._open += 1
        return True

    def _leave(self) -> None:
        self._open -= 1
        self._admit()

    def _admit(self) -> None:
        # Calls that were refused before go first: their deadlines are running.
        while self._open < self._limit and (queue := self._again or self._new):
            place = queue.popleft()
            if not place.done():
                self._open += 1
                place.set_result(None)


class Turn:
    """One call's place under an `AdaptiveLimit`, or its places, while it has several attempts open."""

    def __init__(self, limit: AdaptiveLimit) -> None:
        self._limit = limit
        self._places = 0
        self._cuts = 0  # of the limit, when this call was last sent

    async def resume(self, *, again: bool = True) -> None:
        """Wait for the place."""
        self._cuts = await self._limit._enter(again)
        self._places += 1

    def another(self) -> bool:
        """Take one more place, if there is one that is free."""
        if not self._limit._enter_now():
            return False
        self._cuts = self._limit.cuts
        self._places += 1
        return True

    def leave(self, *, kept: int = 0) -> None:
        """Give all places but `kept` to other calls."""
        while self._places > kept:
            self._places -= 1
            self._limit._leave()

    async def pause(self, seconds: float, *, kept: int = 0) -> None:
        """Let others go for some seconds; then, with no place `kept`, take one before calls that are new."""
        self.leave(kept=kept)
        await asyncio.sleep(seconds)
        if not kept:
            await self.resume()

    def succeeded(self) -> None:
        """The call was answered."""
        self._limit.succeeded(self._cuts)

    def overloaded(self) -> bool:
        """The server cannot keep up; whether that lowered the limit."""
        return self._limit.overloaded(self._cuts)


async def answer_all(
    requests: Sequence[Request],
    answer: Callable[[Request], Awaitable[Reply]],
    limit: asyncio.Semaphore,
) -> AsyncIterator[tuple[int, Reply]]:
    """Yield `(index, reply)` in order of arrival, with at most `limit` calls of `answer` at once.

    `limit` belongs to the backend, not to the batch: two batches share it. When the caller stops
    early, or when `answer` raises, the calls still open are cancelled and awaited.
    """

    async def one(index: int) -> tuple[int, Reply]:
        async with limit:
            return index, await answer(requests[index])

    tasks = {asyncio.create_task(one(i)) for i in range(len(requests))}
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
