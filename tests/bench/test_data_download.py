import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lemon_jax.bench import data as bench_data
from lemon_jax.bench import sources
from lemon_jax.bench.download import Member, Unreachable, fetch, fetch_members
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
        if start >= len(server.body):
            return self.send_error(416)
        body = server.body
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        # A cut: the promised length is not sent.
        self.wfile.write(body[start : start + server.cuts.pop(0)] if server.cuts else body[start:])
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.status, httpd.cuts, httpd.seen, httpd.body = 200, [], [], BODY
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


FILES = {f"data/dev/{name}_dev.csv": f"{name},1,2,3,4,A\n".encode() * 999 for name in ("anatomy", "virology")}


def tar_of(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in {**files, "data/auxiliary_train/big.csv": bytes(200_000)}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def members(folder, files=FILES):
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return [Member(name=n, target=folder / n.removeprefix("data/"), sha256=d) for n, d in digests.items()]


def left(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_files_of_an_archive_are_checked_and_kept_but_not_the_archive(server, tmp_path):
    server.body = tar_of(FILES)
    server.cuts = [50_000, 50_000]  # two cut connections are resumed
    wanted = members(tmp_path)
    fetch_members(f"{server.url}/x/data.tar", tmp_path, wanted)
    assert [member.target.read_bytes() for member in wanted] == list(FILES.values())
    assert left(tmp_path) == ["data.tar.lock", "dev/anatomy_dev.csv", "dev/virology_dev.csv"]
    seen = len(server.seen)
    fetch_members(f"{server.url}/x/data.tar", tmp_path, wanted)
    assert len(server.seen) == seen  # all are there


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (tar_of(FILES | {"data/dev/virology_dev.csv": b"other"}), r"SHA-256 of data/dev/virology_dev.csv is"),
        (tar_of({"data/dev/anatomy_dev.csv": FILES["data/dev/anatomy_dev.csv"]}), "holds no file .*virology"),
        (b"<html>moved</html>" * 99, "not a tar archive"),
    ],
)
def test_an_archive_with_other_files_is_refused(server, tmp_path, body, message):
    server.body = body
    with pytest.raises(LemonError, match=f"/data.tar: {message}"):
        fetch_members(f"{server.url}/data.tar", tmp_path, members(tmp_path))
    assert not (tmp_path / "dev/virology_dev.csv").exists()
    assert not list(tmp_path.rglob("*.part"))


def test_a_stale_beginning_of_an_archive_is_fetched_anew(server, tmp_path):
    server.body = tar_of(FILES)
    (tmp_path / "data.tar.part").write_bytes(bytes(1000))
    fetch_members(f"{server.url}/data.tar", tmp_path, members(tmp_path))
    assert (tmp_path / "dev/virology_dev.csv").read_bytes() == FILES["data/dev/virology_dev.csv"]


def test_an_archive_out_of_reach_is_unreachable(server, tmp_path):
    server.status = 404
    with pytest.raises(Unreachable, match=r"/data\.tar: HTTP 404"):
        fetch_members(f"{server.url}/data.tar", tmp_path, members(tmp_path))


def test_archived_files_come_from_the_archive_and_from_a_mirror_by_themselves(server, tmp_path, monkeypatch):
    content = FILES["data/dev/anatomy_dev.csv"]
    archived = sources.DataFile(
        path="mmlu/dev/anatomy_dev.csv",
        url="mmlu/dev/anatomy_dev.csv",
        sha256=hashlib.sha256(content).hexdigest(),
        archive=f"{server.url}/~x/data.tar",
        member="data/dev/anatomy_dev.csv",
    )
    plain = sources.DataFile(path="x/f", url="o/r/main/f", sha256=DIGEST)
    monkeypatch.setattr(bench_data, "OFFICIAL_URL", server.url)
    monkeypatch.delenv("LEMON_DATA_URL", raising=False)
    server.body = tar_of(FILES)
    assert bench_data.cached_files((archived,), tmp_path) == [tmp_path / "mmlu/dev/anatomy_dev.csv"]
    assert (tmp_path / "mmlu/dev/anatomy_dev.csv").read_bytes() == content
    monkeypatch.setenv("LEMON_DATA_URL", f"{server.url}/mirror/")
    (tmp_path / "mmlu/dev/anatomy_dev.csv").unlink()
    server.body = content
    bench_data.cached_files((archived,), tmp_path)
    server.body = BODY
    bench_data.cached_files((archived, plain), tmp_path)
    assert [path for path, _ in server.seen] == [
        "/~x/data.tar",
        "/mirror/mmlu/dev/anatomy_dev.csv",
        "/mirror/o/r/main/f",
    ]
