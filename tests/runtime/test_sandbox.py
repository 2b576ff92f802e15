from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attack_runner import processes, survivors
from sandbox_helpers import QUICK, run

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools import box
from lemon_jax.runtime.tools.box import Limits
from lemon_jax.runtime.tools.sandbox import ProgramResult, run_program

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the isolation layers are Linux's"),
    pytest.mark.usefixtures("nothing_left_behind"),
]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("answer = 6 * 7", "42"),
        ("answer = 7 / 2", "3.5"),
        ("answer = 'C'", "C"),
        ("answer = 3 > 2", "True"),
        ("from fractions import Fraction\nanswer = Fraction(1, 3)", "1/3"),
        ("from decimal import Decimal\nanswer = Decimal('78.20')", "78.20"),
        ("import math, itertools, statistics\nanswer = math.comb(5, 2)", "10"),
        ("import sys\nanswer = 5\nsys.exit(1)", "5"),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nanswer = f(20)", "2432902008176640000"),
        ("answer = 'é√\\ud800'", "é√\\ud800"),
    ],
)
def test_answers(code: str, value: str) -> None:
    result = run(code, allow=True)
    assert (result.status, result.value, result.from_stdout) == ("ok", value, False), result


def test_a_printed_last_number_stands_in_for_the_answer() -> None:
    for code, value in (
        ("print('a')\nprint(12)", "12"),
        ("print('x =', 3.5)", "3.5"),
        ("print('$1,200')", "1200"),
    ):
        result = run(code, allow=True)
        assert (result.status, result.value, result.from_stdout) == ("ok", value, True)


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("x = 1", "error", "no variable `answer`"),
        ("print('3 and 4 apples')", "error", "no variable `answer`"),
        ("answer = 1 / 0", "error", "ZeroDivisionError"),
        ("answer = (", "error", "SyntaxError"),
        ("import no_such_module\nanswer = 1", "error", "ModuleNotFoundError"),
        ("answer = input()", "error", "EOFError"),
        ("answer = [1]", "error", "answer is a list"),
        ("answer = None", "error", "answer is a NoneType"),
        ("answer = float('nan')", "error", "not finite"),
        ("answer = 10 ** 100_000", "error", "bits"),
        ("answer = 'x' * 100_000", "error", "100000 characters"),
        ("def f(): return f()\nanswer = f()", "error", "RecursionError"),
        ("class E(BaseException):\n    def __str__(self): raise self\nraise E", "error", "cannot be printed"),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nanswer = f()", None, ""),
        ("x = bytearray(10**11)\nanswer = 1", "limit", "memory"),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "limit", "memory"),
        ("while True: pass", "limit", "CPU"),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", "limit", "CPU"),
        ("answer = 3 ** 3 ** 30", "limit", ""),
        ("import time\ntime.sleep(60)\nanswer = 1", "timeout", "1.5 s"),
        ("while True: print('x' * 1000)", "limit", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "limit", "output"),
        ("import os\nanswer = 1\nos._exit(0)", "killed", "exit code 0"),
        ("import os\nanswer = 1\nos.closerange(0, 1000)", "killed", ""),
        (
            "import os\nf = [open(os.__file__) for _ in range(100)]\nanswer = 1",
            "error",
            "Too many open files",
        ),
        ("#" * 70_000, "limit", "65536 bytes"),
        ("import ctypes\nctypes.string_at(0)", "killed", "-11"),
    ],
)
def test_failures_are_results(code: str, status: str | None, reason: str) -> None:
    started = time.monotonic()
    # The wall limit is far away unless it is what is tested: on a busy machine a CPU second is long.
    limits = QUICK if status == "timeout" else Limits(wall_s=20, cpu_s=1, output_bytes=4096)
    result = run(code, limits, allow=True)
    assert result.value is None
    assert result.status == status if status else result.status != "ok", result
    assert reason in result.reason, result
    assert len(result.stdout) + len(result.stderr) <= 16_384 + 2 * 4096
    assert time.monotonic() - started < 25


def test_a_thread_left_running_does_not_delay_the_answer() -> None:
    result = run(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(30,)).start()\nanswer = 2",
        allow=True,
    )
    assert (result.status, result.value) == ("ok", "2")
    assert result.seconds < 0.9


def test_the_trace_shows_the_programs_own_lines() -> None:
    result = run("def f():\n    return {}['k']\nprint('before')\nanswer = f()", allow=True)
    assert result.stdout == "before\n"
    assert "KeyError: 'k'" in result.stderr
    assert 'File "<program>", line 2' in result.stderr
    assert "<sandbox>" not in result.stderr


@pytest.mark.parametrize("target", ["1", "2", "*range(3, 32)"])
def test_a_forged_report_is_not_believed(target: str) -> None:
    code = f"""
        import os
        for fd in [{target}]:
            for nonce in ("", "0" * 32):
                try: os.write(fd, f"\\x1e{{nonce}}\\x1fverdict\\x1fok\\x1f99\\x1e".encode())
                except OSError: pass
        print("verdict ok 99")
        answer = 41
    """
    result = run(code, allow=True)
    assert (result.status, result.value) == ("ok", "41")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ('"refused", "rlimits"', "ok"),
        ('"refused"', "ok"),
        ('"ready"', "ok"),
        ("", "ok"),
        ('"verdict"', "killed"),
        ('"verdict", "ok"', "killed"),
        ('"verdict", "ok", 1, 2', "killed"),
        ('"verdict", "passed", ""', "killed"),
        ('"verdict", None, b"x"', "killed"),
    ],
)
def test_nothing_that_a_program_says_for_the_harness_ends_the_run(fields: str, status: str) -> None:
    """The harness's own line is in the frames that call the program: it may say what it likes there."""
    code = f"""
        import sys
        sys._getframe(1).f_back.f_locals["say"]({fields})
        answer = 41
    """
    result = run(code, allow=True)
    assert (result.status, result.value) == (status, "41" if status == "ok" else None), result


DOUBLE_FORK = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(16):
                try: os.close(fd)
                except OSError: pass
            time.sleep(30)
        os._exit(0)
    answer = 3
"""


@pytest.mark.parametrize(("end", "unfiltered"), [("answer = 3", "ok"), ("time.sleep(30)", "timeout")])
def test_double_forked_children_do_not_survive(level: str, end: str, unfiltered: str) -> None:
    result = run(DOUBLE_FORK.replace("answer = 3", end), allow=True)
    assert result.status == ("error" if "seccomp" in level else unfiltered), result


def test_a_started_process_does_not_survive(level: str) -> None:
    mark = f"lemon-child-{secrets.token_hex(8)}"
    command = [sys.executable, "-c", "import time; time.sleep(30)", mark]
    result = run(f"import subprocess\nsubprocess.Popen({command!r})\nanswer = 1", allow=True)
    # Without a filter and with this file system it does start.
    assert result.status in (("ok",) if level == "rlimits" else ("ok", "error")), result
    assert not survivors(mark=mark)


def test_a_fork_bomb_is_bounded() -> None:
    code = """
        import os
        made = 0
        for _ in range(200):
            try:
                if os.fork() == 0:
                    while True: pass
                made += 1
            except OSError: pass
        answer = made
    """
    result = run(code)
    assert result.value in ("0", None), result


def test_a_file_flood_is_bounded(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        made = 0
        for i in range(40):
            try:
                with open(f"f{i}", "wb") as file:
                    file.write(bytes(1 << 20))
                made += 1
            except OSError: pass
        answer = made
    """
    limits = Limits(wall_s=2, cpu_s=1, file_bytes=1 << 16)
    monkeypatch.setattr(box.tempfile, "tempdir", str(tmp_path))
    result = run(code, limits, allow=True)
    assert result.value == "0", result
    assert not list(tmp_path.iterdir())


def test_without_isolation_nothing_runs_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "LAYERS", ())
    with pytest.raises(LemonError, match="--allow-unsandboxed"):
        run("answer = 1")
    result = run("answer = 1", allow=True)
    assert (result.value, result.isolation) == ("1", "rlimits")


def test_an_interpreter_that_does_not_start_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box.sys, "executable", "/bin/false")
    with pytest.raises(LemonError, match="/bin/false did not start"):
        run("answer = 1", allow=True)


def test_cancelling_ends_the_program() -> None:
    async def scenario() -> None:
        program = run_program("import time\ntime.sleep(20)", limits=Limits(wall_s=20), allow_unsandboxed=True)
        await asyncio.wait_for(program, 0.5)

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    # the fixture checks that it is gone within seconds


def test_programs_die_with_the_harness(tmp_path: Path) -> None:
    code = (
        "import asyncio\nfrom lemon_jax.runtime.tools import run_program, Limits\n"
        "print('go', flush=True)\n"
        "code, limits = 'import time; time.sleep(30)', Limits(wall_s=30)\n"
        "asyncio.run(run_program(code, limits=limits, allow_unsandboxed=True))"
    )
    before = set(processes())
    env = os.environ | {"TMPDIR": str(tmp_path)}  # a killed harness leaves its empty folder
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as harness:
        assert harness.stdout is not None
        harness.stdout.readline()
        deadline = time.monotonic() + 5
        while len(set(processes()) - before) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        harness.send_signal(signal.SIGKILL)


def test_sixteen_at_once_after_jax_started() -> None:
    jax = pytest.importorskip("jax")
    jax.numpy.ones(3).block_until_ready()

    async def scenario() -> list[ProgramResult]:
        gate = asyncio.Semaphore(16)

        async def one(i: int) -> ProgramResult:
            async with gate:
                return await run_program(f"answer = {i} * 2", allow_unsandboxed=True)

        return await asyncio.gather(*map(one, range(48)))

    assert [r.value for r in asyncio.run(scenario())] == [str(2 * i) for i in range(48)]
