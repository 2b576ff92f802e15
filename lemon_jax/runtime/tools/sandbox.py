"""Run a short program that a worker wrote, in a fresh process, without trusting it.

What protects the machine, strongest first; each layer is taken where the kernel allows it:

- **namespaces**: own users, an own network without interfaces, an own process list, and a file system
  that holds the standard library and the system's shared libraries, read-only, and nothing else (no
  installed packages either: some carry benchmarks with their solutions); made by bubblewrap where that
  is installed (`bubblewrap.py`), by own system calls otherwise.
- **seccomp**: an allow list of system calls (`seccomp.py`): no sockets, no child processes, no signals,
  no file opened for writing. Landlock, where present, also confines reading to the standard library.
- **rlimits**, always: CPU time, memory, file size, open files, threads, no core dump; a wall clock;
  an empty environment, no standard input, a fresh empty folder. Root is given up where the interpreter
  stays readable, and all capabilities are dropped.

The level reached is in every result (`box.LEVELS` orders them). On a machine that has neither
namespaces nor Landlock (macOS, some containers) nothing would keep a program from reading what its user
may, so `run_program` refuses unless it is told `allow_unsandboxed=True`.

What it does not protect from: a hole in the kernel; what a program learns by timing; heat (a program
may use its CPU seconds and its memory limit in full, times the number that run at once); at the level
"seccomp" reading all that its user may read, environments and memory of the user's other processes too
(where root is given up, what everybody may read); anything the user may do at the level "rlimits". It
isolates the answer from nothing: a program may answer what it likes.
Only the standard library can be imported.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools.box import LEVELS, Box, Limits, Report, levels_from, watch
from lemon_jax.runtime.tools.programs import MAX_CODE, extract_code

Status = Literal["ok", "error", "timeout", "limit", "killed"]

CONFINED = levels_from("landlock+seccomp")
"""Where the user's files and processes cannot be read: the levels at which programs run unasked."""

_DEFAULT = Limits()
_LAST_NUMBER = re.compile(
    r"(?:^|[=:])\s*\$?\s*([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?:/\d+)?%?)\s*$"
)


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """What one program did.

    `status`: "ok" (there is a value), "error" (it failed, or set no usable `answer`), "timeout" (wall
    clock), "limit" (CPU time, memory or output), "killed" (it ended without a word: `os._exit`, a crash).
    """

    status: Status
    value: str | None = None
    stdout: str = ""
    stderr: str = ""
    isolation: str = ""  # one of box.LEVELS
    seconds: float = 0.0
    reason: str = ""  # one line, empty when the status is "ok"
    from_stdout: bool = False  # the program set no `answer`; `value` is the number it printed last


class _Job:
    """One run; `cancel` may be called from another thread at any time."""

    def __init__(self, code: str, limits: Limits, allow_unsandboxed: bool) -> None:
        accepted = LEVELS if allow_unsandboxed else CONFINED
        self._box = Box("program", {"code": code}, limits=limits, accepted=accepted)

    def cancel(self) -> None:
        self._box.cancel()

    def run(self) -> ProgramResult:
        started = time.monotonic()
        with self._box as box:
            box.feed()
            watch([box], until=box)
            box.close(now=box.cut != "")
            report = box.report()
        return _judge(report, box.limits, time.monotonic() - started)


def _judge(report: Report, limits: Limits, seconds: float) -> ProgramResult:
    def result(
        status: Status, *, value: str | None = None, reason: str = "", printed: bool = False
    ) -> ProgramResult:
        return ProgramResult(
            status=status, value=value, reason=reason, stdout=report.stdout, stderr=report.stderr,
            from_stdout=printed, isolation=report.level, seconds=seconds,
        )  # fmt: skip

    if report.refused:
        raise LemonError(
            f"this machine isolates programs at level {report.refused!r}: a worker's program could read your "
            "files, and keys in your processes' environments; run where namespaces or Landlock are allowed, "
            "install bubblewrap, or accept it with --allow-unsandboxed"
        )
    if report.cut == "limit":
        return result("limit", reason=f"more than {limits.output_bytes} bytes of output")
    match report.verdict:  # a program may find the harness's line in its frames, and say anything
        case ("ok", text):
            return result("ok", value=text)
        case ("no_answer", text):
            printed = _printed_number(report.stdout)
            if printed is not None:
                return result("ok", value=printed, printed=True)
            return result("error", reason=text)
        case ("error" | "limit" as status, text):
            return result(status, reason=text)
    if report.cut == "timeout" or (report.exit and report.exit.timed_out):
        return result("timeout", reason=f"still running after {limits.wall_s:g} s")
    if not report.level:
        raise LemonError(not_started(report))
    if report.exit and report.exit.used_up(limits):
        return result("limit", reason=f"more than {limits.cpu_s:g} s of CPU time")
    code = report.exit.code if report.exit else 0
    return result("killed", reason=f"it ended without reporting (exit code {code})")


def not_started(report: Report) -> str:
    return f"the sandbox's interpreter {sys.executable} did not start: {report.stderr.strip()[-300:]}"


def _printed_number(stdout: str) -> str | None:
    """The number that the last printed line is, or ends in after "=" or ":"."""
    lines = stdout.strip().splitlines()
    match = _LAST_NUMBER.search(lines[-1]) if lines else None
    return match[1].replace(",", "") if match else None


_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def workers() -> ThreadPoolExecutor:
    """At most one program per core at a time, whichever event loop asks."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="lemon-sandbox")
    return _pool


async def run_program(
    code: str,
    *,
    limits: Limits = _DEFAULT,
    allow_unsandboxed: bool = False,
) -> ProgramResult:
    """Run `code` (plain or in a fenced block with prose around) and return its variable `answer`.

    The answer must be an int, float, Fraction, Decimal, bool or str. Programs beyond the number of
    cores wait their turn; that wait counts neither as wall time nor in `seconds`. Cancelling ends the
    program. Raises LemonError where the machine cannot isolate and `allow_unsandboxed` is false; no
    fault of the program itself raises.
    """
    source = extract_code(code)
    if len(source.encode("utf-8", "replace")) > MAX_CODE:
        return ProgramResult(status="limit", reason=f"a program of more than {MAX_CODE} bytes")
    job = _Job(source, limits, allow_unsandboxed)
    try:
        return await asyncio.get_running_loop().run_in_executor(workers(), job.run)
    except asyncio.CancelledError:
        job.cancel()
        raise
