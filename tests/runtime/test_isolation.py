"""What a program reaches outside the sandbox, at each level of isolation."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import pytest
from attack_runner import processes
from sandbox_helpers import reads_confined, run

from lemon_jax.runtime.tools import box
from lemon_jax.runtime.tools.box import Limits
from lemon_jax.runtime.tools.sandbox import run_program

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the isolation layers are Linux's"),
    pytest.mark.usefixtures("nothing_left_behind"),
]


def test_environment_is_scrubbed(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-42")
    result = run("import os\nanswer = repr(sorted(os.environ.items()))", allow=True)
    assert result.value == "[('LANG', 'C.UTF-8')]"
    if not reads_confined(level):
        return
    reach = """
        import os
        seen = b""
        for pid in [os.getppid(), *range(1, 20000)]:
            try: seen += open(f"/proc/{pid}/environ", "rb").read()
            except OSError: pass
        answer = b"secret-42" in seen
    """
    assert run(reach, Limits(wall_s=4, cpu_s=3)).value == "False"


def test_writing_outside_fails(level: str, tmp_path: Path) -> None:
    if level == "rlimits":
        pytest.skip(
            "nothing but the user's rights confines this level, which is why it is refused by default"
        )
    target = tmp_path / "x"
    tmp_path.chmod(0o777)
    code = f"""
        done = 0
        for path in ({str(target)!r}, "../lemon-escape-test", "/usr/lib/lemon-escape-test"):
            try:
                open(path, "w").write("x"); done += 1
            except OSError: pass
        answer = done
    """
    result = run(code, allow=level == "seccomp")
    assert (result.status, result.value) == ("ok", "0")
    assert not target.exists()
    assert not (Path(box.tempfile.gettempdir()) / "lemon-escape-test").exists()


def test_landlock_holds_inside_namespaces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "LAYERS", ("landlock", "seccomp"))
    if run("answer = 1", allow=True).isolation != "landlock+seccomp":
        pytest.skip("this kernel has no Landlock")
    for others, written in ((("namespaces",), "1"), (("namespaces", "landlock"), None)):
        monkeypatch.setattr(box, "LAYERS", others)
        result = run("open('x', 'w').write('x')\nimport json\nanswer = len(open('x').read())")
        assert result.isolation == "namespaces"
        assert result.value == written, result


def test_installed_packages_cannot_be_read(level: str) -> None:
    if not reads_confined(level):
        pytest.skip("nothing confines reading at this level")
    code = f"""
        read = 0
        for path in {[str(next(Path(p).iterdir())) for p in box.package_dirs() if any(Path(p).iterdir())]!r}:
            try: __import__("os").stat(path + "/../" + path) and open(path).read(); read += 1
            except IsADirectoryError: __import__("os").listdir(path); read += 1
            except OSError: pass
        answer = read
    """
    assert run(code).value == "0"


def test_reading_the_users_files_fails(level: str, tmp_path: Path) -> None:
    if not reads_confined(level):
        pytest.skip("nothing confines reading at this level")
    secret = tmp_path / "gold.txt"
    secret.write_text("42")
    result = run(f"answer = open({str(secret)!r}).read()")
    assert result.status == "error", result


def test_no_network(level: str) -> None:
    if level == "rlimits":
        pytest.skip("nothing confines the network at this level")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 0.5)\nanswer = 1"
        result = run(code, allow=level == "seccomp")
    assert result.status == "error"
    assert "Error" in result.reason


def test_every_namespace_is_its_own(level: str) -> None:
    if "namespaces" not in level and "bwrap" not in level:
        pytest.skip("no namespaces at this level")
    kinds = ("user", "mnt", "pid", "net", "ipc", "uts")

    def own(pid: int) -> set[str]:
        try:
            return {
                k for k in kinds if os.readlink(f"/proc/{pid}/ns/{k}") != os.readlink(f"/proc/self/ns/{k}")
            }
        except PermissionError:
            pytest.skip("only root may look at another user's namespaces")
        except OSError:  # it ended meanwhile
            return set()

    async def scenario() -> bool:
        running = asyncio.create_task(run_program("import time\ntime.sleep(20)", limits=Limits(wall_s=20)))
        before, deadline, found = set(processes()), time.monotonic() + 10, False
        while not found and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            found = any(own(pid) == set(kinds) for pid in set(processes()) - before)
        running.cancel()
        return found

    assert asyncio.run(scenario())


def test_no_signal_reaches_the_harness(level: str) -> None:
    if level == "rlimits":
        pytest.skip("at this level a program could end the test run itself")
    code = f"""
        import os
        hit = 0
        for pid in ({os.getpid()}, os.getppid() or {os.getpid()}):
            try:
                os.kill(pid, 0); hit += 1
            except OSError: pass
        answer = hit
    """
    result = run(code, allow=level == "seccomp")
    assert (result.status, result.value) == ("ok", "0")
