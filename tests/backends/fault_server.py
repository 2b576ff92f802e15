"""A local HTTP server that answers each request with the next step of a script."""

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

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.server.state
        with state["lock"]:
            state["bodies"].append(body)
            state["headers"].append(dict(self.headers))
            steps = state["steps"]
            step = steps.pop(0) if len(steps) > 1 else steps[0]
        if step == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.connection.close()
            self.close_connection = True
            return
        if step == "drip":
            self.drip()
            return
        status, content, *headers = step
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers[0].items() if headers else ():
            self.send_header(name, value)
        declared = len(data) + (50 if headers and "X-Cut" in headers[0] else 0)
        self.send_header("Content-Length", str(declared))
        if declared != len(data):
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def drip(self):
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        try:
            for _ in range(60):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)
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
