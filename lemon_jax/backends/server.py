"""One server of a model: HTTP exchanges with it, and whether it is well."""

from __future__ import annotations

import asyncio
import ssl

import httpx

from lemon_jax.backends import wire
from lemon_jax.backends.concurrency import AdaptiveLimit
from lemon_jax.backends.wire import Fault

_LARGEST_REPLY = 1 << 24  # bytes; a reply of 131,072 tokens has about half a million
_CHECK_S = 10.0


class Server:
    """A client of one address.

    Every open call has a connection of its own, kept alive for the calls after it: one pool of many
    connections is searched from end to end by every request, which at 64 open calls took ten times as long.
    """

    def __init__(
        self, base_url: str, headers: dict[str, str], ceiling: int, connect_s: float, tls: ssl.SSLContext
    ) -> None:
        self._base = base_url.rstrip("/")
        self._url = httpx.URL(f"{self._base}/chat/completions")  # parsed once, not at every call
        self._headers = headers
        self._timeout = httpx.Timeout(None, connect=connect_s)  # how long a reply may take is for the caller
        self._tls = tls
        self._idle: list[httpx.AsyncClient] = []
        self._clients: list[httpx.AsyncClient] = []
        self._lost: set[asyncio.Task[object]] = set()
        self._open: set[asyncio.Task[object]] = set()
        self.address = httpx.URL(base_url).netloc.decode()  # without user and password
        self.pace = AdaptiveLimit(ceiling)
        self.watch: asyncio.Task[None] | None = None  # looks after it while it is not well

    async def post(self, body: bytes) -> tuple[httpx.Response, str]:
        """The response to POST /chat/completions, and its text.

        Raises:
            Fault: the connection failed, or the body does not end in reasonable time.
        """
        # The last one that was given back: as few connections are used as can be, and those stay warm.
        client = self._idle.pop() if self._idle else self._new_client()
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with client.stream("POST", self._url, content=body) as response:
                return response, await _read(response)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict) as e:
            hopeless = isinstance(e, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.InvalidURL)
            retries = 0 if hopeless else wire.MANY
            raise Fault(kind=_kind(e), detail=str(e) or type(e).__name__, retries=retries) from None
        except asyncio.CancelledError:
            if task not in self._lost or task.uncancel():  # its caller's own wish, or that too
                raise
            detail = "the server no longer answers its health check"
            raise Fault(kind=wire.BROKE, detail=detail, retries=wire.MANY) from None
        finally:
            self._open.remove(task)
            self._lost.discard(task)
            self._idle.append(client)

    def drop_calls(self) -> None:
        """Let the open calls fail: nobody is there to answer them."""
        for task in self._open:
            self._lost.add(task)
            task.cancel()

    async def is_well(self) -> bool:
        """Whether it lists its models, or says at least that it does not: any reply but 5xx."""
        client = self._new_client()
        try:
            async with asyncio.timeout(_CHECK_S):
                return (await client.get(f"{self._base}/models")).status_code < 500
        except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, OSError):  # TimeoutError is one
            return False
        finally:
            self._clients.remove(client)
            await client.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        if self.watch is not None:
            self.watch.cancel()
            await asyncio.gather(self.watch, return_exceptions=True)
        for client in self._clients:
            await client.aclose()

    def _new_client(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            headers=self._headers,
            timeout=self._timeout,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
            trust_env=not is_local(self._base),
            verify=self._tls,
        )
        self._clients.append(client)
        return client


def is_local(base_url: str) -> bool:
    """Whether the server is on this machine, where no proxy of the environment is meant to be used."""
    return httpx.URL(base_url).host in ("127.0.0.1", "localhost", "::1")


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
        return wire.UNREACHABLE
    return "malformed reply" if isinstance(error, httpx.DecodingError) else wire.BROKE
