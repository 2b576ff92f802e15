"""An OpenAI-compatible server without a model that fails some calls at random, and logs every one.

    python experiments/faulty_server.py --log calls.jsonl --failures 0.2

Prints its address, then serves until it is killed. A reply depends on the request alone (it is the scripted
pseudo-worker's); whether a call fails depends on the seed, the request, and how often it has come before. The
log has a line a call: number, digest of the request, what became of it, and the request when it is new.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

from lemon_jax.backends import Message, Request
from lemon_jax.backends.llama_server import die_with
from lemon_jax.backends.scripted import pseudo_worker

ANSWERED = "answered"
# Each as often as it stands here. A client must slow down at 429 and 503, so they are few.
FAULTS = (*("HTTP 500", "HTTP 502", "reset", "half a body", "HTML with 200") * 2, "HTTP 503", "HTTP 429")
SLOWEST_S = 0.03


class Server(ThreadingHTTPServer):
    """Decides and logs, one call at a time; its threads reply."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, log: TextIO, failures: float, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._log = log
        self._failures = failures
        self._seed = seed
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._calls = 0

    def decide(self, body: dict[str, Any]) -> tuple[str, float]:
        """What becomes of a call ("answered" or one of FAULTS), and after how many seconds."""
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
        with self._lock:
            before = self._seen.get(digest, 0)
            self._seen[digest] = before + 1
            draw = hashlib.sha256(f"{self._seed} {digest} {before}".encode()).digest()
            fails = int.from_bytes(draw[:4], "big") < self._failures * 2**32
            outcome = FAULTS[draw[4] % len(FAULTS)] if fails else ANSWERED
            self._calls += 1
            row = {"call": self._calls, "request": digest, "outcome": outcome}
            # Written before the reply: no client can have a reply that the log does not know.
            print(json.dumps(row if before else row | {"body": body}), file=self._log, flush=True)
        return outcome, SLOWEST_S * draw[5] / 255

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        """The list of models, for whoever asks whether the server is there."""
        self._send(200, b'{"object": "list", "data": [{"id": "local"}]}')

    def do_POST(self) -> None:
        """A reply, or a fault."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        outcome, seconds = self.server.decide(body)
        time.sleep(seconds)
        if outcome == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.connection.close()
            self.close_connection = True
        elif outcome == "half a body":
            self._send(200, json.dumps(_reply(body)).encode()[:-40], missing=40)
        elif outcome == "HTML with 200":
            self._send(200, b"<html>a proxy's page</html>")
        elif outcome == ANSWERED:
            self._send(200, json.dumps(_reply(body)).encode())
        else:
            self._send(int(outcome.removeprefix("HTTP ")), b"fault on purpose")

    def _send(self, status: int, data: bytes, missing: int = 0) -> None:
        self.close_connection = bool(missing)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + missing))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet: the log is the server's own."""


def _reply(body: dict[str, Any]) -> dict[str, Any]:
    request = Request(
        model=body["model"],
        messages=tuple(Message(role=m["role"], content=m["content"]) for m in body["messages"]),
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        sample_index=body["seed"],  # tells samples apart, which is all that it does
    )
    text = pseudo_worker(request)
    for stop in body.get("stop", []):
        text = text.split(stop, 1)[0]
    prompt = sum(len(message.content.split()) for message in request.messages)
    return {
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(text.split())},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="a line a call")
    parser.add_argument("--failures", type=float, default=0.2, help="fraction of calls that fail (0.2)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (0)")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process does (never)")
    args = parser.parse_args(argv)
    if args.parent is not None:
        die_with(args.parent)
    with args.log.open("a", encoding="utf-8") as log, Server(log, args.failures, args.seed) as server:
        print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
        server.serve_forever(poll_interval=0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
