"""Workers behind any OpenAI-compatible server: vLLM, SGLang, llama.cpp, Ollama, hosted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from lemon_jax.backends import wire
from lemon_jax.backends.concurrency import Place, Places, answer_all
from lemon_jax.backends.redaction import hide, redact, secret_forms
from lemon_jax.backends.server import Server
from lemon_jax.backends.types import Reply, Request
from lemon_jax.backends.wire import Fault

log = logging.getLogger(__name__)

_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_SILENT = "read timeout"
_LOST_AFTER = 2  # failed health checks: calls that a server still has will not be answered


class OpenAIBackend:
    """A client of `{base_url}/chat/completions`, at one server or at several that serve the same weights.

    `base_url` ends before "/chat/completions", mostly in "/v1"; `model` is the servers' name of the
    model. `timeout_s` bounds one request with all its attempts and waits, from when it is first sent.
    Connection faults, 408, 429, 5xx and unreadable replies are tried again, at most five times in all;
    other 4xx are not. After half of the time without a reply a second attempt starts beside the first,
    if fewer requests are open than may be, and whichever is done first counts. At most `max_concurrency`
    requests are open at once at each server, fewer while it is overloaded (`AdaptiveLimit`).

    Of several servers each attempt goes to the one where fewest are open (`Places`). One that cannot be
    reached, or whose health check fails after a fault, is set aside; its calls go to the others, and it
    is checked again after waits that double. Without an `identity` the first address names them all.
    `extra_body` and `rename` are as `wire.chat_body` takes them.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str,
        api_key: str | None = None,
        identity: str | None = None,
        max_concurrency: int = 16,
        timeout_s: float = 300.0,
        extra_body: Mapping[str, Any] | None = None,
        rename: Mapping[str, str | None] | None = None,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        base_urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self._model = model
        self._timeout_s = timeout_s
        self._silent_s = timeout_s / 2
        self._first_wait_s = first_wait_s
        self._extra_body, self._rename = dict(extra_body or {}), dict(rename or {})
        self._warned: set[str] = set()
        urls = [httpx.URL(url) for url in base_urls]
        self.identity = identity or _identity(urls[0], model) + extras_of(self._extra_body, self._rename)
        secrets = [api_key or ""]
        for url in urls:
            secrets += [url.password, url.userinfo.decode() if url.password else ""]
        self._secrets = secret_forms(secrets)
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        connect_s, tls = min(10.0, self._silent_s), httpx.create_ssl_context()
        self._servers = [Server(url, headers, max_concurrency, connect_s, tls) for url in base_urls]
        self._places = Places([server.pace for server in self._servers])
        self._begun = asyncio.Semaphore(max_concurrency * len(base_urls))

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index, reply)` as replies arrive, failures and prompts that do not fit among them."""
        return answer_all(requests, self.answer, self._begun)

    async def answer(self, request: Request, extra_body: dict[str, Any] | None = None) -> Reply:
        """Answer one request, as soon as a server has room for it; `extra_body` goes with this one alone."""
        last: list[Fault] = []
        place = await self._places.enter()
        # The time that others took before its turn is no part of a request's own.
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._attempts(request, place, start, last, extra_body or {})
        except TimeoutError:
            seen = f"; the last attempt failed with {last[-1].kind}: {last[-1].detail}" if last else ""
            fault = Fault(kind="timeout", detail=f"no reply in {self._timeout_s:g} s{seen}", retries=0)
        except Fault as caught:
            fault = caught
        error = f"{fault.kind}: {redact(fault.detail, self._secrets)}"
        seconds = time.monotonic() - start
        if fault.kind == wire.OVERFLOW:
            return wire.overflow_reply(error, fault.prompt_tokens, seconds)
        return Reply(text="", finish="error", seconds=seconds, error=error)

    async def aclose(self) -> None:
        """Close the connections."""
        for server in self._servers:
            await server.aclose()

    async def _attempts(
        self, request: Request, place: Place, start: float, last: list[Fault], extra_body: dict[str, Any]
    ) -> Reply:
        """The one retry layer; `last` collects the faults for the caller whose deadline cuts in."""
        extra_body = self._extra_body | extra_body
        body = json.dumps(wire.chat_body(request, self._model, extra_body, self._rename)).encode()
        running: dict[asyncio.Task[Reply], Place] = {}
        attempt, moves = 0, len(self._servers) - 1
        free: Place | None = place
        try:
            while True:
                if free is not None:
                    running[self._start(free, body, request)] = free
                try:
                    return await _first(running, self._silent_s if attempt < _ATTEMPTS - 1 else None)
                except Fault as fault:
                    last.append(fault)
                    avoid = fault.server
                    if fault.kind in wire.OF_CONNECTION and moves and self._places.elsewhere(avoid):
                        moves -= 1  # the fault of a server, not of the service: no attempt is spent
                    elif attempt >= min(fault.retries, _ATTEMPTS - 1):
                        raise
                    else:
                        await self._wait(request, attempt, fault, start)
                        attempt += 1
                if running:
                    free = self._places.enter_now(avoid)
                else:
                    free = await self._places.enter(again=True, avoid=avoid)
        finally:
            # What the others would still bring is late, and nobody's reply.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _start(self, place: Place, body: bytes, request: Request) -> asyncio.Task[Reply]:
        task = asyncio.create_task(self._attempt(place, body, request))
        # Not at the end of the coroutine: one that is cancelled before its first step never gets there.
        task.add_done_callback(lambda _: place.leave())
        return task

    async def _attempt(self, place: Place, body: bytes, request: Request) -> Reply:
        start = time.monotonic()
        try:
            response, text = await self._servers[place.index].post(body)
            wait_s = wire.retry_after_s(response.headers, time.time())
            wire.check_status(response.status_code, text, wait_s)
            reply = wire.read_reply(text, request, time.monotonic() - start)
        except Fault as fault:
            fault.server = place.index
            self._note(place, fault)
            raise
        place.succeeded()
        self._warn(request, reply, text)
        return replace(reply, text=hide(reply.text, self._secrets)) if self._secrets else reply

    def _note(self, place: Place, fault: Fault) -> None:
        """Draw the conclusions of a failed attempt about its server."""
        server = self._servers[place.index]
        if fault.overload:
            if place.overloaded():
                log.info("%s: overloaded, %d calls at once from now", self._model, server.pace.limit)
        elif fault.retries == wire.MANY:
            self._suspect(server, aside=fault.kind in wire.OF_CONNECTION)

    def _suspect(self, server: Server, *, aside: bool) -> None:
        """Have its health checked, where there are others to go to; `aside`: meanwhile all go there."""
        if len(self._servers) > 1:
            server.pace.aside |= aside
            if server.watch is None:
                server.watch = asyncio.create_task(self._watch(server))

    async def _watch(self, server: Server) -> None:
        """Check a server that had a fault until it is well."""
        wait_s, failed = self._first_wait_s, 0
        while not await server.is_well():
            server.pace.aside = True
            failed += 1
            if failed == 1:
                log.warning("%s: %s is set aside: it fails its health check", self._model, server.address)
            if failed == _LOST_AFTER:
                server.drop_calls()
            await asyncio.sleep(wait_s)
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)
        if failed:
            log.warning("%s: %s is back", self._model, server.address)
        server.watch, server.pace.aside = None, False
        self._places.admit()

    async def _wait(self, request: Request, attempt: int, fault: Fault, start: float) -> None:
        """Wait before the next attempt. Raises the fault where its deadline comes first."""
        if fault.kind == _SILENT:
            self._suspect(self._servers[fault.server], aside=False)
            return  # it has been waited for long enough
        wait_s = self._wait_s(request, attempt, fault)
        if time.monotonic() - start + wait_s >= self._timeout_s:
            if fault.wait_s is not None:
                fault.detail = f"the server asks to wait {fault.wait_s:g} s: {fault.detail}"
            raise fault  # waiting would only hide this fault behind a timeout
        await asyncio.sleep(wait_s)

    def _warn(self, request: Request, reply: Reply, text: str) -> None:
        """Say, once for each kind, what a reply shows to be set up wrongly."""
        if wire.was_cut(request, reply):
            self._warn_once(
                f"the server counted {reply.prompt_tokens} prompt tokens where about "
                f"{wire.prompt_estimate(request)} were sent: it seems to cut long prompts; raise its context "
                "(Ollama: num_ctx in the Modelfile, or OLLAMA_CONTEXT_LENGTH)",
                kind="cut",
            )
        if not reply.text and wire.only_reasoned(text):
            self._warn_once(
                "a reply holds reasoning and no answer, and counts as empty; switch the model's reasoning "
                "off at the server, or raise max_tokens in the worker file",
                kind="reasoning",
            )

    def _warn_once(self, what: str, *, kind: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s: %s", self._model, what)

    def _wait_s(self, request: Request, attempt: int, fault: Fault) -> float:
        """Exponential backoff, or what the server asks for if that is longer.

        The jitter is a function of the request, so that runs repeat.
        """
        spread = wire.seed_of(request) * (attempt + 1) % 1000 / 2000
        own = min(_LONGEST_WAIT_S, self._first_wait_s * 2**attempt) * (0.5 + spread)
        return max(own, fault.wait_s or 0.0)


async def _first(attempts: dict[asyncio.Task[Reply], Place], patience_s: float | None) -> Reply:
    """The reply of the attempt that is done first; those that are done leave the table.

    Raises:
        Fault: its own, or that none was done in time. Those that are not may still win later.
    """
    done, _ = await asyncio.wait(attempts, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        for place in attempts.values():
            place.overloaded()
        server = list(attempts.values())[-1].index
        raise Fault(kind=_SILENT, detail=f"no reply in {patience_s:g} s", retries=wire.MANY, server=server)
    for task in done:
        del attempts[task]
    failures = [failure for task in done if (failure := task.exception())]
    if len(failures) == len(done):
        raise failures[0]
    return next(task.result() for task in done if not task.exception())


def extras_of(extra_body: Mapping[str, Any], rename: Mapping[str, str | None]) -> str:
    """The part of an identity that says how requests differ from the plain ones; "" where they do not."""
    if not extra_body and not rename:
        return ""
    text = json.dumps([extra_body, rename] if rename else extra_body, sort_keys=True)
    return ":" + hashlib.sha256(text.encode()).hexdigest()[:8]


def _identity(url: httpx.URL, model: str) -> str:
    """Model, host and path; never the user, password or query that a URL may hold.

    # http://h:80/v1: "openai:m@h:80"; https://gw/small/v1: "openai:m@gw/small/v1"; http://h: "openai:m@h/"
    """
    # A gateway may serve many models, each on a path of its own; the path of most servers is left out.
    path = url.raw_path.partition(b"?")[0].decode().rstrip("/") or "/"
    place = url.netloc.decode() + (path if path != "/v1" else "")
    return f"openai:{model}@{place}"
