"""Simulated worker replicas: OpenAI-compatible servers that answer after a fixed time, for almost nothing.

    python experiments/bench/light_server.py --replicas 8 --latency-ms 50

Prints a JSON list of addresses, then serves until it is killed. All replicas live in this one process, on raw
asyncio protocols: a benchmark of the client must not measure its servers. Every reply is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from lemon_jax.backends.llama_server import die_with

TEXT = "The two add up to seven. The answer is 7."
BODY = json.dumps(
    {
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 12},
    }
).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
REPLY = HEAD % len(BODY) + BODY


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time, as HTTP/1.1 clients send them."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Reply once a request is complete."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if end and len(body) >= size:
            self._received = body[size:]
            asyncio.get_running_loop().call_later(self._latency_s, self._transport.write, REPLY)


async def serve(replicas: int, latency_s: float) -> None:
    """Listen on one free port for each replica, for ever."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Connection(latency_s), "127.0.0.1", 0, backlog=1024)
        for _ in range(replicas)
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(json.dumps([f"http://127.0.0.1:{port}/v1" for port in ports]), flush=True)
    await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--replicas", type=int, default=8, help="servers (8)")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="from request to reply (50)")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process does (never)")
    args = parser.parse_args(argv)
    if args.parent is not None:
        die_with(args.parent)
    asyncio.run(serve(args.replicas, args.latency_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
