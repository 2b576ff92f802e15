"""Turn-taking between CPU servers that must not compute at the same time.

Two llama.cpp servers on the same cores wait for each other in spin loops and become tens of times
slower, so all calls to one server form a turn, and the next server waits for the turn to end.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class ExclusiveGate:
    """Many holders of one name at once, never holders of two names.

    Names take turns first come, first served. While another name waits, the current one admits
    new holders only during its first `quantum_s` seconds, so nobody starves.
    """

    def __init__(self, quantum_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._quantum_s = quantum_s
        self._clock = clock
        self._name: str | None = None
        self._holders = 0
        self._since = 0.0
        self._waiting: OrderedDict[str, list[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Hold the gate under `name` for the length of the block."""
        await self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def _admits(self, name: str) -> bool:
        if self._name is None:
            return True
        if self._name != name:
            return False
        return not self._waiting or self._clock() - self._since < self._quantum_s

    async def _enter(self, name: str) -> None:
        if self._admits(name):
            if self._name is None:
                self._name, self._since = name, self._clock()
            self._holders += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            # Cancelled between being granted and running: the place was already counted.
            if granted.done() and not granted.cancelled():
                self._leave()
            else:
                self._forget(name, granted)
            raise

    def _forget(self, name: str, granted: asyncio.Future[None]) -> None:
        group = self._waiting.get(name, [])
        if granted in group:
            group.remove(granted)
        if not group:
            self._waiting.pop(name, None)
        # The one that left may have been the only reason to keep its own name's callers out.
        if self._name is not None and list(self._waiting) == [self._name]:
            self._grant(self._waiting.pop(self._name))

    def _leave(self) -> None:
        self._holders -= 1
        if self._holders:
            return
        self._name = None
        # A group whose members were all cancelled grants nothing; then the next one has the turn.
        while self._waiting and not self._holders:
            self._name, group = self._waiting.popitem(last=False)
            self._since = self._clock()
            self._grant(group)
        if not self._holders:
            self._name = None

    def _grant(self, group: list[asyncio.Future[None]]) -> None:
        for granted in group:
            if not granted.done():
                self._holders += 1
                granted.set_result(None)
