"""Workers behind any OpenAI-compatible server: vLLM, SGLang, llama.cpp, Ollama, hosted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from lemon_jax.backends import wire
from lemon_jax.backends.concurrency import answer_all
from lemon_jax.backends.types import Reply, Request
from lemon_jax.backends.wire import Fault

log = logging.getLogger(__name__)

_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


class OpenAIBackend:
    """A client of `{base_url}/chat/completions`.

    `base_url` ends before "/chat/completions", mostly in "/v1"; `model` is the server's name of the
    model. `timeout_s` bounds one request with all its attempts and waits. Connection faults, 408,
    429, 5xx and unreadable replies are tried again, at most five times in all; other 4xx are not.
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
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._first_wait_s = first_wait_s
        self._extra_body = dict(extra_body or {})
        self._limit = asyncio.Semaphore(max_concurrency)
        self._warned_cut = False
        url = httpx.URL(base_url)
        self.identity = identity or _identity(url, model, self._extra_body)
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            # One silent attempt may use half the time, so that a hung server gets a second chance.
            timeout=httpx.Timeout(timeout_s / 2, connect=min(10.0, timeout_s / 2), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
            trust_env=not is_local(base_url),
        )

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index, reply)` as replies arrive; failures are replies with `finish="error"`."""
        return answer_all(requests, self.answer, self._limit)

    async def answer(self, request: Request) -> Reply:
        """Answer one request, outside the concurrency limit of `generate`."""
        start = time.monotonic()
        last: list[Fault] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._attempts(request, start, last)
        except TimeoutError:
            seen = f"; the last attempt failed with {last[-1].kind}: {last[-1].detail}" if last else ""
            fault = Fault(kind="timeout", detail=f"no reply in {self._timeout_s:g} s{seen}", retries=0)
        except Fault as caught:
            fault = caught
        error = f"{fault.kind}: {wire.redact(fault.detail, self._api_key)}"
        return Reply(text="", finish="error", seconds=time.monotonic() - start, error=error)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempts(self, request: Request, start: float, last: list[Fault]) -> Reply:
        """The one retry layer; `last` collects the faults for the caller whose deadline cuts in."""
        body = json.dumps(wire.chat_body(request, self._model, self._extra_body)).encode()
        for attempt in range(_ATTEMPTS):
            try:
                return await self._attempt(body, request)
            except Fault as fault:
                last.append(fault)
                if attempt >= min(fault.retries, _ATTEMPTS - 1):
                    raise
                wait_s = self._wait_s(request, attempt, fault)
                if time.monotonic() - start + wait_s >= self._timeout_s:
                    raise  # waiting would only hide this fault behind a timeout
                await asyncio.sleep(wait_s)
        raise last[-1]

    async def _attempt(self, body: bytes, request: Request) -> Reply:
        start = time.monotonic()
        try:
            response = await self._client.post(self._url, content=body)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict) as e:
            hopeless = isinstance(e, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.InvalidURL)
            retries = 0 if hopeless else wire.MANY
            raise Fault(kind=_kind(e), detail=str(e) or type(e).__name__, retries=retries) from None
        wait_s = wire.retry_after_s(response.headers.get("Retry-After"), time.time())
        wire.check_status(response.status_code, response.text, wait_s)
        reply = wire.read_reply(response.text, request, time.monotonic() - start)
        if not self._warned_cut and wire.was_cut(request, reply):
            self._warned_cut = True
            log.warning(
                "%s: the server counted %s prompt tokens where about %d were sent: it seems to cut long"
                " prompts; raise its context (Ollama: num_ctx in the Modelfile, or OLLAMA_CONTEXT_LENGTH)",
                self._model, reply.prompt_tokens, wire.prompt_estimate(request),
            )  # fmt: skip
        return reply

    def _wait_s(self, request: Request, attempt: int, fault: Fault) -> float:
        """Exponential backoff; the jitter is a function of the request, so that runs repeat."""
        if fault.wait_s is not None:
            return fault.wait_s
        spread = wire.seed_of(request) * (attempt + 1) % 1000 / 2000
        return min(_LONGEST_WAIT_S, self._first_wait_s * 2**attempt) * (0.5 + spread)


def is_local(base_url: str) -> bool:
    """Whether the server is on this machine, where no proxy of the environment is meant to be used."""
    return httpx.URL(base_url).host in ("127.0.0.1", "localhost", "::1")


def _kind(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "cannot connect"
    return "read timeout" if isinstance(error, httpx.TimeoutException) else "connection broke"


def _identity(url: httpx.URL, model: str, extra_body: dict[str, Any]) -> str:
    """Model, host and request extras; never the user or password that a URL may hold."""
    extras = ""
    if extra_body:
        extras = ":" + hashlib.sha256(json.dumps(extra_body, sort_keys=True).encode()).hexdigest()[:8]
    return f"openai:{model}@{url.netloc.decode()}{extras}"
