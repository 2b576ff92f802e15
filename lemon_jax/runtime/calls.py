"""Worker calls through the call store: asked once, answered to all who ask the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lemon_jax.backends import Message, Reply, Request, WorkerPool
from lemon_jax.runtime.store import CallStore, call_key


@dataclass(frozen=True, kw_only=True)
class Call:
    """One answered call and what it used. `prefix_tokens` is the part of `prompt_tokens` that every
    call of the same base role shares."""

    key: str
    reply: Reply
    prompt_tokens: int
    prefix_tokens: int
    generated_tokens: int


class Caller:
    """Looks calls up in the store, sends the others to their backend, and counts tokens.

    Calls that are equal and in flight at the same time are sent once.
    """

    def __init__(
        self, pool: WorkerPool, store: CallStore, *, on_live_call: Callable[[Request, Reply], None] | None = None
    ):
        self.pool = pool
        self.store = store
        self.live_calls = 0
        self._on_live_call = on_live_call
        self._in_flight: dict[str, asyncio.Future[Reply]] = {}

    async def ask(
        self, requests: Sequence[Request], *, prefix: str | None = None, scope: str = ""
    ) -> list[Call]:
        """Answer the requests, in their order. All must name the same model.

        Args:
            requests: the calls; an infrastructure failure comes back as a reply with
                `finish == "error"` and no tokens.
            prefix: the text that the system message shares with all calls of its base role.
            scope: who asks, for the accounting (see CallStore).
        """
        identity = self.pool.backend(requests[0].model).identity
        keys = [call_key(identity, request) for request in requests]
        replies: dict[str, Reply] = {}
        missing: dict[str, Request] = {}
        waiting: dict[str, asyncio.Future[Reply]] = {}
        for key, request in zip(keys, requests, strict=True):
            if key in self._in_flight:
                waiting[key] = self._in_flight[key]
            elif (reply := self.store.get(key, scope)) is not None:
                replies[key] = reply
            else:
                missing[key] = request
        replies |= await self._send(missing, scope)
        for key, future in waiting.items():
            replies[key] = await future
        shared = await self._prefix_tokens(requests[0].model, prefix) if prefix else 0
        return [_count(key, replies[key], shared) for key in keys]

    async def _send(self, missing: dict[str, Request], scope: str) -> dict[str, Reply]:
        if not missing:
            return {}
        futures = {key: asyncio.get_running_loop().create_future() for key in missing}
        self._in_flight |= futures
        keys, requests = list(missing), list(missing.values())
        out: dict[str, Reply] = {}
        try:
            async for index, reply in self.pool.backend(requests[0].model).generate(requests):
                key = keys[index]
                self.store.put(key, scope, reply)
                self.live_calls += 1
                out[key] = reply
                if self._on_live_call:
                    self._on_live_call(requests[index], reply)
        finally:
            for key, future in futures.items():
                del self._in_flight[key]
                lost = Reply(text="", finish="error", error="the backend gave no reply")
                future.set_result(out.setdefault(key, lost))
        return out

    async def _prefix_tokens(self, model: str, prefix: str) -> int:
        """Prompt tokens of a role's fixed prefix, as the server counts them.

        Measured once per model and role by a one-token call that holds nothing else, so that it
        works with any server; it overstates by the chat template's few closing tokens.
        """
        probe = Request(
            model=model,
            messages=(Message(role="system", content=prefix), Message(role="user", content=".")),
            max_tokens=1,
        )
        (call,) = await self.ask([probe], scope="prefix")
        return call.prompt_tokens


def _count(key: str, reply: Reply, shared: int) -> Call:
    prompt = reply.prompt_tokens or 0
    return Call(
        key=key,
        reply=reply,
        prompt_tokens=prompt,
        prefix_tokens=min(shared, prompt),
        generated_tokens=reply.generated_tokens or 0,
    )
