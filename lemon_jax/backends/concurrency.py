"""Answer a batch of requests concurrently and yield the replies as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from lemon_jax.backends.types import Reply, Request


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
