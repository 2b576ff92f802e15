"""Worker calls through the call store: asked once, answered to all who ask the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lemon_jax.backends import Message, MissingCall, Reply, Request, WorkerPool
from lemon_jax.backends.wire import REFUSED
from lemon_jax.runtime.store import CallStore, call_key

log = logging.getLogger(__name__)

# What a call in flight brings those who wait for it: its reply, the failure that ended it, or None where
# its sender was cancelled. All three as values: an exception set on a future that happens to have no
# waiter would be reported as never retrieved.
_Outcome = Reply | Exception | None


@dataclass(frozen=True, kw_only=True)
class Call:
    """One answered call and what it used. `prefix_tokens` is the part of `prompt_tokens` that every
    call of the same base role shares; tokens that the server does not report (`unmetered`) are 0 here."""

    key: str
    reply: Reply
    prompt_tokens: int
    prefix_tokens: int
    generated_tokens: int
    unmetered: bool = False


class Caller:
    """Looks calls up in the store, sends the others to their backend, and counts tokens.

    Calls that are equal and in flight at the same time are sent once.
    """

    def __init__(
        self,
        pool: WorkerPool,
        store: CallStore,
        *,
        on_live_call: Callable[[Request, Reply], None] | None = None,
    ):
        self.pool = pool
        self.store = store
        self.live_calls = 0
        self._on_live_call = on_live_call
        self._overflowed: set[str] = set()  # models
        self._in_flight: dict[str, asyncio.Future[_Outcome]] = {}

    async def ask(
        self, requests: Sequence[Request], *, prefix: str | None = None, scope: str = ""
    ) -> list[Call]:
        """Answer the requests, in their order. All must name the same model.

        Args:
            requests: the calls; an infrastructure failure comes back as a reply with
                `finish == "error"` and no tokens.
            prefix: the text that the system message shares with all calls of its base role; where its
                length cannot be measured, the calls have failed too.
            scope: who asks, for the accounting (see CallStore).

        Raises:
            LemonError: the backend cannot serve at all; all who wait for the same call get it.
        """
        identity = self.pool.backend(requests[0].model).identity
        keys = [call_key(identity, request) for request in requests]
        # Before the calls: behind those of all other tasks it would be the last to be answered, and no task
        # would be done until then.
        measured = await self._measure(requests[0].model, prefix) if prefix else None
        open_calls = dict(zip(keys, requests, strict=True))
        replies: dict[str, Reply] = {}
        while open_calls:
            replies |= await self._round(open_calls, scope)
            # A call whose sender was cancelled is left over, and asked again as this task's own.
            open_calls = {key: request for key, request in open_calls.items() if key not in replies}
        # Where a call has failed, nothing will be counted that needs the prefix.
        if measured is None or any(replies[key].finish == "error" for key in keys):
            return [_count(key, replies[key], 0) for key in keys]
        # Of one that is refused nothing is known, now and at any other time.
        error = measured.reply.error or ""
        if measured.reply.finish == "error" and not REFUSED.match(error):
            # Without the measurement the cost would be another one than at the next attempt.
            lost = replace(measured.reply, error=f"{error} (measuring the role's fixed prefix)")
            return [_count(key, lost, 0) for key in keys]
        calls = [_count(key, replies[key], measured.prompt_tokens) for key in keys]
        # A prefix of unknown length makes the price of the prompt unknown.
        return [replace(call, unmetered=call.unmetered or measured.unmetered) for call in calls]

    async def _round(self, wanted: dict[str, Request], scope: str) -> dict[str, Reply]:
        """Look up, send, and wait for what others have sent already; in that order, so that no two wait
        for each other."""
        replies: dict[str, Reply] = {}
        missing: dict[str, Request] = {}
        waiting: dict[str, asyncio.Future[_Outcome]] = {}
        for key, request in wanted.items():
            if key in self._in_flight:
                waiting[key] = self._in_flight[key]
            elif (reply := self.store.get(key, scope)) is not None:
                replies[key] = reply
            else:
                missing[key] = request
        if missing:
            replies |= await self._send(missing, scope)
        for key, future in waiting.items():
            # Shielded: cancelling one who waits must not take the reply from the others.
            outcome = await asyncio.shield(future)
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                replies[key] = outcome
        return replies

    async def _send(self, missing: dict[str, Request], scope: str) -> dict[str, Reply]:
        keys, requests = list(missing), list(missing.values())
        loop = asyncio.get_running_loop()
        futures: dict[str, asyncio.Future[_Outcome]] = {key: loop.create_future() for key in missing}
        self._in_flight |= futures
        out: dict[str, Reply] = {}

        def settle(key: str, outcome: _Outcome) -> None:
            del self._in_flight[key]
            futures.pop(key).set_result(outcome)

        unanswered: _Outcome = None
        try:
            async for index, reply in self.pool.backend(requests[0].model).generate(requests):
                key = keys[index]
                self.store.put(key, scope, reply)
                self.live_calls += 1
                out[key] = reply
                settle(key, reply)
                if reply.finish == "overflow":
                    self._warn_of_overflow(requests[0].model, reply)
                if self._on_live_call:
                    self._on_live_call(requests[index], reply)
            unanswered = lost = Reply(text="", finish="error", error="the backend gave no reply")
            out |= dict.fromkeys(futures, lost)
        except Exception as failure:
            unanswered = failure
            raise
        finally:
            for key in list(futures):
                settle(key, unanswered)
        return out

    def _warn_of_overflow(self, model: str, reply: Reply) -> None:
        """Once for each model: a context that is set too small costs answers."""
        if model not in self._overflowed:
            self._overflowed.add(model)
            log.warning("%s: %s: an agent with such a prompt has no answer", model, reply.error)

    async def _measure(self, model: str, prefix: str) -> Call | None:
        """The call whose prompt tokens are those of a role's fixed prefix, as the server counts them.

        Asked once per model and role: one token that holds nothing else, so that it works with any
        server; it overstates by the chat template's few closing tokens. None in a replay of a run whose
        server refused it: a refusal is not recorded. Where it was recorded and is lost, costs differ, and
        the replay says so.
        """
        probe = Request(
            model=model,
            messages=(Message(role="system", content=prefix), Message(role="user", content=".")),
            max_tokens=1,
        )
        try:
            (call,) = await self.ask([probe], scope="prefix")
        except MissingCall:
            return None
        return call


def _count(key: str, reply: Reply, shared: int) -> Call:
    prompt = reply.prompt_tokens or 0
    return Call(
        key=key,
        reply=reply,
        prompt_tokens=prompt,
        prefix_tokens=min(shared, prompt),
        generated_tokens=reply.generated_tokens or 0,
        unmetered=reply.finish in ("stop", "length")
        and None in (reply.prompt_tokens, reply.generated_tokens),
    )
