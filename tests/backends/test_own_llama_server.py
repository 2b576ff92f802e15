"""LEMON_LLAMA_SERVER: a llama-server of the user's own instead of the one in the package."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lemon_jax.backends import EmbeddedServer, WorkerPool, worker_config
from lemon_jax.backends import embedded as embedded_module
from lemon_jax.errors import LemonError

# Answers /health to all and /props to those with its key; writes what it was started with beside itself.
PROGRAM = """#!{python}
import http.server, json, os, sys
from pathlib import Path

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
facts = {{"argv": sys.argv[1:], "key": Path(arguments["--api-key-file"]).read_text(), "pid": os.getpid()}}
facts["environment"] = sorted(os.environ)
Path(__file__).with_suffix(".json").write_text(json.dumps(facts))

allowed = os.environ.get("ANY_KEY") or "Bearer " + (os.environ.get("OTHER_KEY") or facts["key"])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = allowed in (self.headers["Authorization"], "yes")
        self.send_response({{"/health": 200, "/props": 200 if known else 401}}.get(self.path, 404))
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/slots/1?action=save":
            Path(arguments["--slot-save-path"] + body["filename"]).write_bytes(bytes(1234))
        self.send_response(200 if self.path == "/slots/1?action=save" else 500)
        self.end_headers()

http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""
PARENT = """
import asyncio, sys, time
from pathlib import Path
from lemon_jax.backends import EmbeddedServer, embedded

embedded.read_gguf_header = lambda path: None
asyncio.run(EmbeddedServer(Path(sys.argv[1]), slots=1, context=512, threads=1).start())
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "llama-server"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("LEMON_LLAMA_SERVER", str(path))
    monkeypatch.setattr(embedded_module, "read_gguf_header", lambda path: None)
    return path


def facts_of(program: Path):
    return json.loads(program.with_suffix(".json").read_text())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_it_is_started_with_the_settings_of_the_packaged_one(program, tmp_path):
    async def run():
        async with EmbeddedServer(tmp_path / "m.gguf", slots=4, context=512, threads=2) as server:
            return server.api_key, server.base_url

    key, base_url = asyncio.run(run())
    facts = facts_of(program)
    settings = dict(zip(facts["argv"][::2], facts["argv"][1::2], strict=False))
    assert settings["--model"] == str(tmp_path / "m.gguf")
    assert (settings["--parallel"], settings["--ctx-size"], settings["--threads"]) == ("4", "2048", "2")
    assert base_url == f"http://127.0.0.1:{settings['--port']}/v1"
    assert facts["key"] == key
    assert key not in facts["argv"]  # other users of the machine can read a command line
    assert not {"LEMON_LLAMA_SERVER_KEY", "LEMON_LLAMA_SERVER"} & set(facts["environment"])
    assert not runs(facts["pid"])  # stopped with the server


def test_a_saved_state_says_its_size_and_is_removed(program, tmp_path):
    async def run():
        async with EmbeddedServer(tmp_path / "m.gguf", slots=2, context=512, threads=1) as server:
            states = Path(server._folder) / "slots"
            assert await server.save(1, "0.bin") == 1234
            assert [p.name for p in states.iterdir()] == ["0.bin"]
            server.remove("0.bin")
            server.remove("0.bin")  # nothing to remove is no fault
            assert not list(states.iterdir())
            assert await server.save(0, "1.bin") == 0
        server.remove("1.bin")
        assert await server.save(1, "1.bin") == 0  # it was stopped

    asyncio.run(run())


def test_it_ends_with_a_killed_parent(program, tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "m.gguf")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as p:
        assert p.stdout.readline() == "started\n"
        pid = facts_of(program)["pid"]
        assert runs(pid)
        p.kill()
    deadline = time.monotonic() + 5
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


@pytest.mark.parametrize("setting", ["OTHER_KEY", "ANY_KEY"])
def test_another_server_on_the_port_is_not_taken_for_it(setting, program, tmp_path, monkeypatch):
    monkeypatch.setenv(setting, "yes")
    server = EmbeddedServer(tmp_path / "m.gguf", slots=1, context=512, threads=1, start_timeout_s=4)
    with pytest.raises(LemonError, match="did not answer in 4 s"):
        asyncio.run(server.start())
    assert program.with_suffix(".json").exists()  # it did start
    assert not server.base_url


def test_what_cannot_be_run_is_one_clear_line(program, tmp_path, monkeypatch):
    program.chmod(0o600)
    with pytest.raises(
        LemonError, match=r"LEMON_LLAMA_SERVER: .*no program that can be run.*unset the variable"
    ):
        asyncio.run(EmbeddedServer(tmp_path / "m.gguf", slots=1, context=512).start())
    monkeypatch.setenv("LEMON_LLAMA_SERVER", str(tmp_path / "missing"))
    with pytest.raises(LemonError, match="missing is no program"):
        asyncio.run(EmbeddedServer(tmp_path / "m.gguf", slots=1, context=512).start())


def check_pool():
    async def run():
        async with WorkerPool(worker_config("embedded")) as pool:
            await pool.check()

    asyncio.run(run())


def test_with_a_program_no_package_is_needed(program, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_module.importlib.util, "find_spec", lambda name: None)
    check_pool()
    monkeypatch.delenv("LEMON_LLAMA_SERVER")
    with pytest.raises(LemonError, match=r"models\..*xllamacpp is not installed.*LEMON_LLAMA_SERVER"):
        check_pool()


def test_a_run_does_not_start_with_a_mistyped_program(program, tmp_path, monkeypatch):
    monkeypatch.setenv("LEMON_LLAMA_SERVER", f"{program}s")
    with pytest.raises(LemonError, match=r"models\..*llama-servers is no program that can be run"):
        check_pool()
