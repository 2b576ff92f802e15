"""Google Cloud Storage's JSON API in memory, as far as writing, listing and restoring checkpoints need it.

Objects with generations and their preconditions, listings with prefixes, reads of ranges, uploads whole, in
two parts and in pieces (cloud.google.com/storage/docs/json_api). Three clients speak to it: TensorStore,
gcsfs, and Google's own, each by an environment variable that names the server.
"""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers
STAMP = "2026-01-01T00:00:00.000Z"


class FakeGcs:
    """One bucket, at `address` while the context lasts."""

    def __init__(self, bucket: str):
        self.bucket = bucket
        self.objects: dict[str, tuple[int, bytes]] = {}  # name: (generation, content)
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        self.lock = threading.Lock()
        self.generation = 0
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Leads every client of this process, or of a child, to this server, without credentials."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,  # gcsfs and google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",  # TensorStore's
            "GOOGLE_CLOUD_PROJECT": "tests",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else gcsfs asks another service what kind it is
            "NO_GCE_CHECK": "true",  # nor is this a machine of Google's
            "NO_PROXY": "127.0.0.1",
        }

    def __enter__(self) -> FakeGcs:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put(self, name: str, content: bytes) -> dict[str, Any]:
        self.generation += 1
        self.objects[name] = (self.generation, bytes(content))
        return self.describe(name)

    def describe(self, name: str) -> dict[str, Any]:
        generation, content = self.objects[name]
        return {
            "kind": "storage#object",
            "id": f"{self.bucket}/{name}/{generation}",
            "name": name,
            "bucket": self.bucket,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "md5Hash": b64encode(md5(content).digest()).decode(),
            "contentType": "application/octet-stream",
            "timeCreated": STAMP,
            "updated": STAMP,
        }

    def listing(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        first, end = query.get("startOffset", ""), query.get("endOffset", "")
        items, prefixes = [], set()
        for name in sorted(self.objects):
            if not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                prefixes.add(prefix + head + delimiter)
            else:
                items.append(self.describe(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that has left does not wait for its answer."""


class _Handler(BaseHTTPRequestHandler):
    store: FakeGcs
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        with self.store.lock:
            answer = self._get(*self._asked())
        self._send(answer)

    def do_POST(self) -> None:
        body = self._body()
        with self.store.lock:
            answer = self._post(*self._asked(), body)
        self._send(answer)

    def do_PUT(self) -> None:
        self.do_POST()

    def do_DELETE(self) -> None:
        with self.store.lock:
            answer = self._delete(*self._asked())
        self._send(answer)

    def _asked(self) -> tuple[str | None, dict[str, str]]:
        """The object's name, "" for all of the bucket, None for the bucket itself; and the query."""
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        found = re.search(rf"/b/{self.store.bucket}(/o(?:/([^/]*))?)?(?:/|$)", url.path)
        if not found or not found[1]:
            return None, query
        return unquote(found[2] or ""), query

    def _delete(self, name: str | None, query: dict[str, str]) -> Answer:
        if name not in self.store.objects:
            return _fail(404)
        if self._changed(name, query):
            return _fail(412)
        del self.store.objects[name]
        return 204, b"", {}

    def _get(self, name: str | None, query: dict[str, str]) -> Answer:
        if name is None:
            facts = {"kind": "storage#bucket", "id": self.store.bucket, "name": self.store.bucket}
            return _json(facts | {"location": "US", "storageClass": "STANDARD"})
        if not name:
            return _json(self.store.listing(query))
        if name not in self.store.objects:
            return _fail(404)
        generation, content = self.store.objects[name]
        if query.get("ifGenerationNotMatch") == str(generation):
            return _fail(304)
        if self._changed(name, query):
            return _fail(412)
        if query.get("alt") != "media":
            return _json(self.store.describe(name))
        headers = {"x-goog-generation": str(generation), "x-goog-stored-content-length": str(len(content))}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return 200, content, headers
        if asked[1]:
            start, end = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
        else:
            start, end = max(len(content) - int(asked[2]), 0), len(content) - 1
        if start >= len(content):
            return _fail(416)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return 206, content[start : end + 1], headers

    def _post(self, name: str | None, query: dict[str, str], body: bytes) -> Answer:
        if upload := query.get("upload_id"):
            name, pieces = self.store.uploads[upload]
            pieces += body
            total = self.headers.get("Content-Range", "").rpartition("/")[2]
            if total in ("", "*", str(len(pieces))) and total != "*":
                return _json(self.store.put(name, pieces))
            return 308, b"", {"Range": f"bytes=0-{len(pieces) - 1}"}
        kind = query.get("uploadType", "")
        if found := re.search(r"/(?:rewriteTo|copyTo)/b/[^/]+/o/([^/?]+)", self.path):
            source = self.store.objects.get(name or "")
            if source is None:
                return _fail(404)
            resource = self.store.put(unquote(found[1]), source[1])
            return _json({"kind": "storage#rewriteResponse", "done": True, "resource": resource})
        if kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
            assert boundary is not None
            _, facts, content, _ = body.split(b"--" + boundary[1].encode(), 3)
            name = json.loads(re.split(rb"\r?\n\r?\n", facts, maxsplit=1)[1])["name"]
            body = re.sub(rb"\r?\n$", b"", re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1])
        else:
            name = query.get("name") or json.loads(body)["name"]
        assert name is not None
        if self._changed(name, query):
            return _fail(412)
        if kind == "resumable":
            upload = str(len(self.store.uploads))
            self.store.uploads[upload] = (name, bytearray())
            where = f"{self.store.address}/upload/storage/v1/b/{self.store.bucket}/o"
            where += f"?uploadType=resumable&name={quote(name, safe='')}&upload_id={upload}"
            return 200, b"", {"Location": where}
        return _json(self.store.put(name, body))

    def _changed(self, name: str, query: dict[str, str]) -> bool:
        """Whether the object has another generation than the one that the request is meant for."""
        wanted = query.get("ifGenerationMatch")
        return wanted is not None and int(wanted) != self.store.objects.get(name, (0, b""))[0]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        out = b""
        while size := int(self.rfile.readline(), 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out

    def _send(self, answer: Answer) -> None:
        status, body, headers = answer
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _json(value: dict[str, Any], status: int = 200) -> Answer:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _fail(status: int) -> Answer:
    if status == 304:  # has no body
        return status, b"", {}
    return _json({"error": {"code": status, "message": f"status {status}"}}, status)
