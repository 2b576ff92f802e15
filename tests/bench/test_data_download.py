import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lemon_jax.bench import data as bench_data
from lemon_jax.bench import sources
from lemon_jax.bench.download import Unreachable, fetch
from lemon_jax.errors import LemonError

BODY = bytes(range(256)) * 2000
DIGEST = hashlib.sha256(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        start = 0
        if sent := self.headers.get("Range"):
            start = int(sent.removeprefix("bytes=").removesuffix("-"))
        server.seen.append((self.path, start))
        if server.status != 200:
            return self.send_error(server.status)
        if start >= len(BODY):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        # A cut: the promised length is not sent.
        self.wfile.write(BODY[start : start + server.cuts.pop(0)] if server.cuts else BODY[start:])
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.status, httpd.cuts, httpd.seen = 200, [], []
        httpd.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield httpd
        httpd.shutdown()
        thread.join()


def test_success_reports_progress_and_leaves_no_part(server, tmp_path):
    steps = []
    fetch(f"{server.url}/f", tmp_path / "d" / "f", DIGEST, on_progress=lambda *step: steps.append(step))
    assert (tmp_path / "d" / "f").read_bytes() == BODY
    assert steps[-1] == ("f", len(BODY), len(BODY))
    assert not list(tmp_path.rglob("*.part"))
    fetch(f"{server.url}/f", tmp_path / "d" / "f", DIGEST)
    assert len(server.seen) == 1  # what is there and right is not fetched again


def test_wrong_digest_names_both_and_leaves_nothing(server, tmp_path):
    with pytest.raises(LemonError, match=f"/f: SHA-256 is {DIGEST}, expected {'0' * 64}"):
        fetch(f"{server.url}/f", tmp_path / "f", "0" * 64)
    assert not (tmp_path / "f").exists()
    assert not (tmp_path / "f.part").exists()


def test_a_cut_connection_is_resumed(server, tmp_path):
    server.cuts = [100_000, 50_000]
    fetch(f"{server.url}/f", tmp_path / "f", DIGEST)
    assert (tmp_path / "f").read_bytes() == BODY
    starts = [start for _, start in server.seen]
    assert starts[0] == 0
    assert 0 < starts[1] < starts[2]


def test_a_part_of_an_earlier_run_is_resumed(server, tmp_path):
    server.cuts = [1000] * 3
    with pytest.raises(Unreachable):
        fetch(f"{server.url}/f", tmp_path / "f", DIGEST)
    assert not (tmp_path / "f").exists()
    have = (tmp_path / "f.part").stat().st_size
    assert have > 0
    fetch(f"{server.url}/f", tmp_path / "f", DIGEST)
    assert server.seen[-1][1] == have
    assert (tmp_path / "f").read_bytes() == BODY


@pytest.mark.parametrize("stale", [b"from another version", BODY + b"too long", BODY])
def test_a_stale_part_does_not_spoil_the_download(server, tmp_path, stale):
    (tmp_path / "f.part").write_bytes(stale)
    fetch(f"{server.url}/f", tmp_path / "f", DIGEST)
    assert (tmp_path / "f").read_bytes() == BODY


def test_404_is_unreachable_and_names_the_address(server, tmp_path):
    server.status = 404
    with pytest.raises(Unreachable, match="/f: HTTP 404"):
        fetch(f"{server.url}/f", tmp_path / "f", DIGEST)


@pytest.fixture
def tiny_bench(monkeypatch):
    """The aqua entry, with the server's body as its one expected file."""
    monkeypatch.delenv("LEMON_DATA", raising=False)
    source = sources.SOURCES["aqua"]
    files = tuple(sources.DataFile(path=file.path, url=file.url, sha256=DIGEST) for file in source.files)
    changed = sources.Source(kind="choice", files=files, split=source.split, n_train=0, n_test=0)
    monkeypatch.setitem(sources.SOURCES, "aqua", changed)


@pytest.mark.usefixtures("tiny_bench")
def test_load_falls_back_to_the_sample_only_when_unreachable(server, tmp_path):
    server.status = 404
    data = bench_data.load("aqua", base_url=server.url, cache_dir=tmp_path)
    assert data.source == "sample"
    assert "HTTP 404" in data.banner
    assert server.seen[0][0] == "/google-deepmind/AQuA/master/dev.json"
    data = bench_data.load("aqua", base_url="http://127.0.0.1:9", cache_dir=tmp_path)
    assert data.source == "sample"
    assert "127.0.0.1:9" in data.banner


def test_load_with_a_wrong_download_is_an_error(server, tmp_path, monkeypatch):
    monkeypatch.delenv("LEMON_DATA", raising=False)
    with pytest.raises(LemonError, match=f"SHA-256 is {DIGEST}, expected 4a52301d"):
        bench_data.load("aqua", base_url=server.url, cache_dir=tmp_path)


@pytest.mark.usefixtures("tiny_bench")
def test_load_keeps_what_it_downloaded_and_mends_a_damaged_cache(server, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(bench_data, "build", lambda bench, source, paths, protocol: built.append(paths))
    bench_data.load("aqua", base_url=server.url, cache_dir=tmp_path)
    bench_data.load("aqua", base_url=server.url, cache_dir=tmp_path, download=False)
    assert built[0] == built[1] == [tmp_path / "aqua/dev.json", tmp_path / "aqua/test.json"]
    (tmp_path / "aqua/dev.json").write_bytes(b"damaged")
    bench_data.load("aqua", base_url=server.url, cache_dir=tmp_path)
    assert (tmp_path / "aqua/dev.json").read_bytes() == BODY
