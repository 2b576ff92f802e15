"""A local HTTP server that answers each request with the next step of a script.

A step is (status, body) or (status, body, headers), "reset", "drip" (a byte every 50 ms, never done),
"endless" (a body without end), or a function that returns such a step when given the state and the request.
Two headers are for this server alone: X-Cut says that 50 more bytes will come than do, X-Delay waits so
many seconds first.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def chat(text="hi", finish="stop", usage=(7, 2), **message):
    body = {"choices": [{"index": 0, "finish_reason": finish, "message": {"content": text, **message}}]}
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return 200, body


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body go out in two writes

    def do_GET(self):
        # The list of models, for whoever asks whether the server is there.
        self.reply((200, {"data": [{"id": name} for name in self.server.state.get("models", ())]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.server.state
        with state["lock"]:
            state["bodies"].append(body)
            state["headers"].append(dict(self.headers))
            steps = state["steps"]
            step = steps.pop(0) if len(steps) > 1 else steps[0]
        if callable(step):
            step = step(state, body)
        self.reply(step)

    def reply(self, step):
        if step == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.connection.close()
            self.close_connection = True
            return
        if step == "drip":
            self.pour(b" ", 60, pause_s=0.05)
            return
        if step == "endless":
            self.pour(b" " * 65536, 10_000)
            return
        status, content, *more = step
        headers = more[0] if more else {}
        time.sleep(float(headers.get("X-Delay", 0)))
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        declared = len(data) + (50 if "X-Cut" in headers else 0)
        self.send_header("Content-Length", str(declared))
        if declared != len(data):
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def pour(self, block, times, pause_s=0.0):
        """Write a body block by block until it is done or nobody reads it any more."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        try:
            for _ in range(times):
                self.wfile.write(block)
                self.wfile.flush()
                time.sleep(pause_s)
        except OSError:
            pass

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serving(handler=Handler, **state):
    server = Server(("127.0.0.1", 0), handler)
    server.state = {"lock": threading.Lock(), "bodies": [], "headers": [], **state}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
