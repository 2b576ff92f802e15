from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tiny_gguf import NO_THOUGHTS, THINKING_TEMPLATE, write_tiny_gguf

from lemon_jax.backends import EmbeddedBackend, EmbeddedServer, ExclusiveGate, Message, Request
from lemon_jax.backends import embedded as embedded_module
from lemon_jax.errors import LemonError

GGUF = os.environ.get("LEMON_TEST_GGUF")
needs_model = pytest.mark.skipif(not GGUF, reason="LEMON_TEST_GGUF names no GGUF file")

PARENT = """
import asyncio, sys, time
from pathlib import Path
from lemon_jax.backends import EmbeddedServer

async def main():
    server = EmbeddedServer(Path(sys.argv[1]), slots=1, context=512, threads=1)
    await server.start()
    print(server._process.pid, flush=True)
    time.sleep(600)

asyncio.run(main())
"""


def ask(text):
    return Request(model="m", messages=(Message(role="user", content=text),), max_tokens=4)


def gone(pid):
    for _ in range(50):
        try:
            os.kill(pid, 0)
            # A zombie still has its number; it has stopped computing all the same.
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_a_damaged_file_starts_no_process(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"<html>")
    with pytest.raises(LemonError, match=r"bad\.gguf"):
        asyncio.run(EmbeddedServer(path, slots=1, context=512).start())


def test_the_child_refuses_a_parent_that_is_not_its_own(tmp_path):
    command = [sys.executable, "-m", "lemon_jax.backends.llama_server", "--model", "x", "--slots", "1"]
    command += ["--address-file", str(tmp_path / "a"), "--parent", "1", "--ctx", "512", "--threads", "1"]
    assert subprocess.run(command, timeout=30, capture_output=True).returncode == 1


def test_one_failed_start_is_one_failure_for_all_requests():
    tries = []

    def locate(progress):
        tries.append(1)
        raise LemonError("no such model")

    async def run():
        backend = EmbeddedBackend("m", locate, "gguf:0", ExclusiveGate(), slots=4)
        for _ in range(2):
            with pytest.raises(LemonError, match="no such model"):
                async for _ in backend.generate([ask("a"), ask("b")]):
                    pass
        await backend.aclose()

    asyncio.run(run())
    assert len(tries) == 1


def test_a_cancelled_download_ends_its_thread():
    ended = threading.Event()

    def locate(progress):
        try:
            while True:
                progress(0, 1, "downloading")
                time.sleep(0.01)
        finally:
            ended.set()

    async def run():
        backend = EmbeddedBackend("m", locate, "gguf:0", ExclusiveGate())

        async def drain():
            return [reply async for reply in backend.generate([ask("a")])]

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(drain(), 0.1)
        await backend.aclose()

    asyncio.run(run())
    assert ended.wait(2)


def test_a_start_that_fails_names_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the log of a failed start is kept
    path = tmp_path / "empty.gguf"
    path.write_bytes(b"GGUF" + b"\x03\0\0\0" + (1).to_bytes(8, "little") * 2)
    monkeypatch.setattr(embedded_module, "read_gguf_header", lambda p: None)
    server = EmbeddedServer(path, slots=1, context=512, threads=1)
    with pytest.raises(LemonError, match=r"ended while loading.*see .*server\.log"):
        asyncio.run(server.start())
    assert not server.alive


def test_a_model_that_thinks_is_told_to_answer_at_once(tmp_path):
    pytest.importorskip("xllamacpp", reason="needs the package xllamacpp")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", template=THINKING_TEMPLATE)

    async def run():
        backend = EmbeddedBackend("m", lambda p: path, "gguf:0", ExclusiveGate(), slots=1, context=256)
        try:
            return [reply async for _, reply in backend.generate([ask("2+3=?")])]
        finally:
            await backend.aclose()

    (reply,) = asyncio.run(run())
    # A token for each byte, but one for each symbol.
    assert reply.prompt_tokens == len("(user\n2+3=?)\n(assistant\n") + len(NO_THOUGHTS)


def test_a_prompt_that_does_not_fit_ends_no_sharing_of_beginnings(tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp", reason="needs the package xllamacpp")
    path, saved = write_tiny_gguf(tmp_path / "tiny.gguf"), []
    save = EmbeddedServer.save

    async def noted(server, slot, name):
        saved.append(await save(server, slot, name))
        return saved[-1]

    monkeypatch.setattr(EmbeddedServer, "save", noted)

    async def run():
        backend = EmbeddedBackend("m", lambda p: path, "gguf:0", ExclusiveGate(), slots=4, context=1024)
        asked = [ask("x" * 700 + text) for text in ("y" * 1000, "1", "2", "3")]
        try:
            return {index: reply async for index, reply in backend.generate(asked)}
        finally:
            await backend.aclose()

    replies = asyncio.run(run())
    long = replies.pop(0)
    assert (long.finish, long.text, long.generated_tokens) == ("overflow", "", 0)
    assert long.prompt_tokens >= 1700
    assert {reply.error for reply in replies.values()} == {None}
    assert len(saved) == 1
    assert saved[0] > 0


@needs_model
@pytest.mark.slow
def test_life_of_a_real_server():
    async def run():
        backend = EmbeddedBackend("m", lambda p: Path(GGUF), "gguf:0", ExclusiveGate(), slots=2, context=512)
        try:
            replies = [r async for _, r in backend.generate([ask("2+3=?"), ask("word " * 900)])]
            pid = backend._server._process.pid
            os.kill(pid, signal.SIGKILL)
            backend._server._process.wait()
            again = [r async for _, r in backend.generate([ask("2+3=?")])]
            return replies, again, pid, backend._server._process.pid
        finally:
            await backend.aclose()

    replies, again, *pids = asyncio.run(run())
    assert sorted(r.finish in ("stop", "length") for r in replies) == [False, True]
    assert any((r.error or "").startswith("context overflow") for r in replies)
    assert again[0].error is None
    assert again[0].generated_tokens > 0
    assert all(gone(pid) for pid in pids)


@needs_model
@pytest.mark.slow
def test_slots_of_a_real_server_read_a_common_beginning_from_a_file(monkeypatch):
    done = []
    action = EmbeddedServer._slot_action

    async def noted(server, slot, what, name):
        done.append((what, await action(server, slot, what, name)))
        return done[-1][1]

    monkeypatch.setattr(EmbeddedServer, "_slot_action", noted)
    asked = [
        ask(f"{'A long story of a dog and a cat. ' * 15}{question}") for question in ("Who?", "Why?", "So?")
    ]

    async def run(**options):
        backend = EmbeddedBackend(
            "m", lambda p: Path(GGUF), "gguf:0", ExclusiveGate(), slots=4, context=512, **options
        )
        try:
            return {index: reply.text async for index, reply in backend.generate(asked)}
        finally:
            await backend.aclose()

    replies = asyncio.run(run())
    assert sorted(done) == [("restore", True), ("restore", True), ("save", True)]
    assert replies == asyncio.run(run(deterministic=True))  # short ones: no near tie to lose
    assert len(done) == 3


@needs_model
@pytest.mark.slow
def test_no_server_outlives_a_killed_parent(tmp_path):
    command, env = [sys.executable, "-c", PARENT, GGUF], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert gone(pid)
