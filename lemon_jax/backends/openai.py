"""Workers behind any OpenAI-compatible server: vLLM, SGLang, llama.cpp, Ollama, hosted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx

from lemon_jax.backends import wire
from lemon_jax.backends.concurrency import AdaptiveLimit, Turn, answer_all
from lemon_jax.backends.redaction import hide, redact, secret_forms
from lemon_jax.backends.types import Reply, Request
from lemon_jax.backends.wire import Fault

log = logging.getLogger(__name__)

_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_LARGEST_REPLY = 1 << 24  # bytes; a reply of 131,072 tokens has about half a million
_SILENT = "read timeout"


class OpenAIBackend:
    """A client of `{base_url}/chat/completions`.

    `base_url` ends before "/chat/completions", mostly in "/v1"; `model` is the server's name of the
    model. `timeout_s` bounds one request with all its attempts and waits, from when it is first sent.
    Connection faults, 408, 429, 5xx and unreadable replies are tried again, at most five times in all;
    other 4xx are not. After half of the time without a reply a second attempt starts beside the first,
    if fewer requests are open than may be, and whichever is done first counts. At most `max_concurrency`
    requests are open at once, fewer while the server is overloaded (`AdaptiveLimit`).
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        identity: str | None = None,
        max_concurrency: int = 16,
        timeout_s: float = 300.0,
        extra_body: dict[str, Any] | None = None,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._timeout_s = timeout_s
        self._silent_s = timeout_s / 2
        self._first_wait_s = first_wait_s
        self._extra_body = dict(extra_body or {})
        self._begun = asyncio.Semaphore(max_concurrency)
        self._pace = AdaptiveLimit(max_concurrency)
        self._warned: set[str] = set()
        url = httpx.URL(base_url)
        self.identity = identity or _identity(url, model, self._extra_body)
        user_info = url.userinfo.decode()
        self._secrets = secret_forms([api_key or "", url.password, user_info if url.password else ""])
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            # How long a reply may take is for `answer` to say.
            timeout=httpx.Timeout(None, connect=min(10.0, self._silent_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
            trust_env=not is_local(base_url),
        )

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index, reply)` as replies arrive; failures are replies with `finish="error"`."""
        return answer_all(requests, self.answer, self._begun)

    async def answer(self, request: Request) -> Reply:
        """Answer one request, as soon as the server has room for it."""
        last: list[Fault] = []
        async with self._pace.turn() as turn:
            # The time that others took before its turn is no part of a request's own.
            start = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._attempts(request, turn, start, last)
            except TimeoutError:
                seen = f"; the last attempt failed with {last[-1].kind}: {last[-1].detail}" if last else ""
                fault = Fault(kind="timeout", detail=f"no reply in {self._timeout_s:g} s{seen}", retries=0)
            except Fault as caught:
                fault = caught
        error = f"{fault.kind}: {redact(fault.detail, self._secrets)}"
        return Reply(text="", finish="error", seconds=time.monotonic() - start, error=error)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempts(self, request: Request, turn: Turn, start: float, last: list[Fault]) -> Reply:
        """The one retry layer; `last` collects the faults for the caller whose deadline cuts in."""
        body = json.dumps(wire.chat_body(request, self._model, self._extra_body)).encode()
        running: set[asyncio.Task[Reply]] = set()
        try:
            for attempt in range(_ATTEMPTS):
                if not running or turn.another():
                    running.add(asyncio.create_task(self._attempt(body, request)))
                patience_s = self._silent_s if attempt < _ATTEMPTS - 1 else None
                try:
                    reply = await _first(running, patience_s)
                    turn.succeeded()
                    return reply
                except Fault as fault:
                    last.append(fault)
                    if fault.overload and turn.overloaded():
                        log.info("%s: overloaded, %d calls at once from now", self._model, self._pace.limit)
                    if attempt >= min(fault.retries, _ATTEMPTS - 1):
                        raise
                    if fault.kind == _SILENT:
                        continue  # it has been waited for long enough
                    wait_s = self._wait_s(request, attempt, fault)
                    if time.monotonic() - start + wait_s >= self._timeout_s:
                        if fault.wait_s is not None:
                            fault.detail = f"the server asks to wait {fault.wait_s:g} s: {fault.detail}"
                        raise  # waiting would only hide this fault behind a timeout
                    await turn.pause(wait_s, kept=len(running))
            raise last[-1]
        finally:
            # What the others would still bring is late, and nobody's reply.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _attempt(self, body: bytes, request: Request) -> Reply:
        start = time.monotonic()
        try:
            async with self._client.stream("POST", self._url, content=body) as response:
                text = await _read(response)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict) as e:
            hopeless = isinstance(e, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.InvalidURL)
            retries = 0 if hopeless else wire.MANY
            raise Fault(kind=_kind(e), detail=str(e) or type(e).__name__, retries=retries) from None
        wait_s = wire.retry_after_s(response.headers, time.time())
        wire.check_status(response.status_code, text, wait_s)
        reply = wire.read_reply(text, request, time.monotonic() - start)
        self._warn(request, reply, text)
        return replace(reply, text=hide(reply.text, self._secrets))

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


def is_local(base_url: str) -> bool:
    """Whether the server is on this machine, where no proxy of the environment is meant to be used."""
    return httpx.URL(base_url).host in ("127.0.0.1", "localhost", "::1")


async def _first(attempts: set[asyncio.Task[Reply]], patience_s: float | None) -> Reply:
    """The reply of the attempt that is done first; those that are done leave the set.

    Raises:
        Fault: its own, or that none was done in time. Those that are not may still win later.
    """
    done, _ = await asyncio.wait(attempts, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    attempts -= done
    if not done:
        detail = f"no reply in {patience_s:g} s"
        raise Fault(kind=_SILENT, detail=detail, retries=wire.MANY, overload=True)
    failures = [failure for task in done if (failure := task.exception())]
    if len(failures) == len(done):
        raise failures[0]
    return next(task.result() for task in done if not task.exception())


async def _read(response: httpx.Response) -> str:
    """The body as text. Raises Fault where it does not end in reasonable time."""
    data = bytearray()
    async for block in response.aiter_bytes():
        data += block
        if len(data) > _LARGEST_REPLY:
            raise Fault(kind="malformed reply", detail=f"more than {_LARGEST_REPLY} bytes", retries=1)
    return data.decode("utf-8-sig", "replace")  # JSON is UTF-8, whatever the header says


def _kind(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "cannot connect"
    return "malformed reply" if isinstance(error, httpx.DecodingError) else "connection broke"


def _identity(url: httpx.URL, model: str, extra_body: dict[str, Any]) -> str:
    """Model, host, path and request extras; never the user, password or query that a URL may hold.

    # http://h:80/v1: "openai:m@h:80"; https://gw/small/v1: "openai:m@gw/small/v1"; http://h: "openai:m@h/"
    """
    extras = ""
    if extra_body:
        extras = ":" + hashlib.sha256(json.dumps(extra_body, sort_keys=True).encode()).hexdigest()[:8]
    # A gateway may serve many models, each on a path of its own; the path of most servers is left out.
    path = url.raw_path.partition(b"?")[0].decode().rstrip("/") or "/"
    place = url.netloc.decode() + (path if path != "/v1" else "")
    return f"openai:{model}@{place}{extras}"
