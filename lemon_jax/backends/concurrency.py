"""How many calls are open at once, at which of several servers; a batch answered as the replies arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

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
        self.limit = ceiling  # calls that may be open now
        self.open = 0
        self.cuts = 0
        self.aside = False  # no new calls, while any other server takes some
        self._successes = 0  # since the limit last changed

    def succeeded(self, cuts: int) -> None:
        """A call was answered; `cuts` is their number when it was sent."""
        if cuts != self.cuts:
            return
        self._successes += 1
        if self.limit < self._ceiling and self._successes >= max(self.limit, _SHORTEST_ROUND):
            self.limit += 1
            self._successes = 0

    def overloaded(self, cuts: int) -> bool:
        """A call met an overloaded server; `cuts` is their number when it was sent.

        Returns whether that cut the limit.
        """
        if cuts != self.cuts:
            return False
        self.limit = max(1, self.limit // 2)
        self.cuts += 1
        self._successes = 0
        return True


class Place:
    """One open call at one of several servers, given back with `leave`."""

    def __init__(self, places: Places, index: int) -> None:
        self._places = places
        self.index = index  # of the server
        self._limit = places.limits[index]
        self._cuts = self._limit.cuts
        self._limit.open += 1

    def succeeded(self) -> None:
        """The call was answered."""
        self._limit.succeeded(self._cuts)
        self._places.admit()

    def overloaded(self) -> bool:
        """The server cannot keep up; whether that lowered its limit."""
        return self._limit.overloaded(self._cuts)

    def leave(self) -> None:
        """Give the place to another call. Once only."""
        self._limit.open -= 1
        self._places.admit()


class Places:
    """Calls shared out over servers of the same model: each goes where fewest are open.

    Of servers with equally many the first counts. One that is set aside takes calls only where all are.
    Calls beyond the limits of all wait in one queue, so that none waits for a slow server while another is
    free.
    """

    def __init__(self, limits: Sequence[AdaptiveLimit]) -> None:
        self.limits = limits
        self._again: deque[asyncio.Future[Place]] = deque()
        self._new: deque[asyncio.Future[Place]] = deque()

    async def enter(self, *, again: bool = False, avoid: int | None = None) -> Place:
        """Wait for a place, `again` before calls that are new; at `avoid` only where no other has one."""
        if (place := self.enter_now(avoid)) is not None:
            return place
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        queue = self._again if again else self._new
        queue.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().leave()  # cancelled between being admitted and running
            elif future in queue:  # admit may have dropped it already
                queue.remove(future)
            raise

    def enter_now(self, avoid: int | None = None) -> Place | None:
        """A place that is free, or None. Nobody waits while one is free."""
        whole = [i for i, limit in enumerate(self.limits) if not limit.aside] or range(len(self.limits))
        free = [i for i in whole if self.limits[i].open < self.limits[i].limit]
        if not free:
            return None
        return Place(self, min(free, key=lambda i: (i == avoid, self.limits[i].open)))

    def elsewhere(self, index: int) -> bool:
        """Whether any other server than this one takes calls."""
        return any(not limit.aside for i, limit in enumerate(self.limits) if i != index)

    def admit(self) -> None:
        """Hand out what has become free."""
        # Calls that were refused before go first: their deadlines are running.
        while queue := self._again or self._new:
            if queue[0].done():
                queue.popleft()
            elif (place := self.enter_now()) is not None:
                queue.popleft().set_result(place)
            else:
                return


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
