"""Run a short program that a worker wrote, in a fresh process, without trusting it.

What protects the machine, strongest first; each layer is taken where the kernel allows it:

- **namespaces**: an own network without interfaces, an own process list, and a file system that holds
  the standard library and the system's shared libraries, read-only, and nothing else.
- **seccomp**: an allow list of system calls (`seccomp.py`): no sockets, no child processes, no signals,
  no file opened for writing. Landlock, where present, also confines reading to the standard library.
- **rlimits**, always: CPU time, memory, file size, open files, threads, no core dump; a wall clock;
  an empty environment, no standard input, a fresh empty folder. Root is given up where the interpreter
  stays readable, and all capabilities are dropped.

The level reached is in every result. On a machine that has neither namespaces nor seccomp (macOS,
some containers) nothing would keep a program from the network and from the user's files, so
`run_program` refuses unless it is told `allow_unsandboxed=True`.

What it does not protect from: a hole in the kernel; what a program learns by timing; heat (a program
may use its CPU seconds and its memory limit in full, times the number that run at once); reading
world-readable files at the level "seccomp" on kernels without Landlock; anything the user may do at
the level "rlimits". It isolates the answer from nothing: a program may answer what it likes.
Only the standard library can be imported.
"""

from __future__ import annotations

import asyncio
import marshal
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools.seccomp import build_filter

Status = Literal["ok", "error", "timeout", "limit", "killed"]

LAYERS = ("namespaces", "landlock", "seccomp")  # what the child tries; a test may take layers away
_BACKSTOP_S = 10.0  # beyond the wall limit, which the child's supervisor keeps: start-up on a busy machine
_MAX_CODE = 65_536
_BOOT = "import marshal,sys;c,k=marshal.loads(sys.stdin.buffer.read());n={};exec(c,n);n['main'](k)"
_TAG_LINE = re.compile(r"[ \t]*([\w+.-]*)[ \t]*(?:\r?\n|$)(.*)", re.DOTALL)
_TAG_INLINE = re.compile(r"[ \t]*(python3?|py)\s+(.*)", re.DOTALL | re.IGNORECASE)
_LAST_NUMBER = re.compile(
    r"(?:^|[=:])\s*\$?\s*([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?:/\d+)?%?)\s*$"
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds for one program; every one is enforced by the kernel or by the harness."""

    wall_s: float = 5.0
    cpu_s: int = 4  # whole seconds, as RLIMIT_CPU counts them
    memory_bytes: int = 512 << 20  # address space
    file_bytes: int = 1 << 20
    open_files: int = 32
    processes: int = 16  # threads included; outside namespaces the user's other processes count too
    output_bytes: int = 64 << 10  # stdout and stderr together


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
    isolation: str = ""  # "namespaces+seccomp", "namespaces", "seccomp" or "rlimits"
    seconds: float = 0.0
    reason: str = ""  # one line, empty when the status is "ok"
    from_stdout: bool = False  # the program set no `answer`; `value` is the number it printed last


def extract_code(text: str) -> str:
    """The program in a worker's reply: the last complete fenced block, or the text itself.

    Blocks marked as another language ("output", "text") count only if there is no other. Without a
    closing fence: the rest after the opening one, or, when nothing follows it, what stands before it.
    """
    parts = text.split("```")
    if len(parts) == 1:
        return textwrap.dedent(text).strip()
    blocks = []
    for index in range(1, len(parts), 2):
        match = _TAG_LINE.match(parts[index]) or _TAG_INLINE.match(parts[index])
        label, body = (match[1].lower(), match[2]) if match else ("", parts[index])
        if body.strip():
            blocks.append((label, body, index + 1 < len(parts)))
    complete = [(label, body) for label, body, closed in blocks if closed]
    ours = [body for label, body in complete if label in ("", "python", "python3", "py")]
    candidates = ours or [body for _, body in complete] or [body for _, body, _ in blocks] or [parts[0]]
    return textwrap.dedent(candidates[-1]).strip()


@cache
def _child_code() -> bytes:
    """The child's module, compiled here once: the fresh interpreter then has nothing to compile."""
    path = Path(__file__).with_name("sandbox_child.py")
    return marshal.dumps(compile(path.read_text(encoding="utf-8"), "<sandbox>", "exec"))


@cache
def _library_dirs() -> tuple[str, ...]:
    """Folders an interpreter without site-packages reads: the standard library and shared libraries."""
    paths = sysconfig.get_paths()
    wanted = [paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib")]
    wanted += [os.path.join(paths["stdlib"], "lib-dynload"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    found = sorted({os.path.abspath(p) for p in wanted if os.path.isdir(p)})
    return tuple(p for p in found if not any(p.startswith(q + "/") for q in found))


def _open_to_all(path: str, *, ancestors: bool) -> bool:
    """Whether a user without rights may read the folder (and, if asked, reach it)."""
    place = Path(path)
    modes = [place.stat().st_mode & 0o5 == 0o5]
    if ancestors:
        modes += [parent.stat().st_mode & 0o1 == 0o1 for parent in place.parents]
    return all(modes)


def _config(code: str, limits: Limits, *, workdir: str, result_fd: int, nonce: str, allow: bool) -> dict:
    stdlib = sysconfig.get_paths()["stdlib"]
    return {
        "code": code,
        "nonce": nonce,
        "result_fd": result_fd,
        "workdir": workdir,
        "layers": LAYERS,
        "dirs": _library_dirs(),
        "filter": build_filter(),
        "stdlib_readable": _open_to_all(stdlib, ancestors=False),
        "stdlib_reachable": _open_to_all(stdlib, ancestors=True),
        "allow_unsandboxed": allow,
        "wall_s": float(limits.wall_s),
        "limits": (
            ("RLIMIT_CPU", math.ceil(limits.cpu_s)),
            ("RLIMIT_AS", limits.memory_bytes),
            ("RLIMIT_FSIZE", limits.file_bytes),
            ("RLIMIT_NOFILE", limits.open_files),
            ("RLIMIT_NPROC", limits.processes),
            ("RLIMIT_CORE", 0),
        ),
    }


class _Job:
    """One run; `cancel` may be called from another thread at any time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.process is not None:
            self.process.terminate()  # the supervisor, which ends the program

    def run(self, code: str, limits: Limits, allow_unsandboxed: bool) -> ProgramResult:
        nonce = secrets.token_hex(16)
        workdir = tempfile.mkdtemp(prefix="lemon-box-")
        read_fd, write_fd = os.pipe()
        started = time.monotonic()
        try:
            config = _config(
                code, limits, workdir=workdir, result_fd=write_fd, nonce=nonce, allow=allow_unsandboxed
            )
            payload = marshal.dumps((marshal.loads(_child_code()), config))
            stdout, stderr, ended = self._talk(payload, write_fd, workdir, limits)
            os.set_blocking(read_fd, False)
            try:
                told = os.read(read_fd, 65_536)
            except BlockingIOError:
                told = b""
        finally:
            os.close(read_fd)
            os.close(write_fd)
            shutil.rmtree(workdir, ignore_errors=True)
        records = _records(told, nonce)
        return _judge(records, stdout, stderr, ended, limits, time.monotonic() - started)

    def _talk(self, payload: bytes, write_fd: int, workdir: str, limits: Limits) -> tuple[str, str, str]:
        """Start the child, feed it, read what it prints. Third value: why it was ended, or ""."""
        env = {"LANG": "C.UTF-8"}
        if "LD_LIBRARY_PATH" in os.environ:  # some interpreters cannot start without it
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        pipe = subprocess.PIPE
        # No preexec_fn: with it, Python would fork this process, which deadlocks once JAX has threads.
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT],
            stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=workdir,
            pass_fds=(write_fd,), start_new_session=True,
        ) as process:  # fmt: skip
            self.process = process
            ended = "error"
            try:
                if self.cancelled:
                    process.terminate()
                assert process.stdin is not None
                try:
                    process.stdin.write(payload)
                    process.stdin.close()
                except BrokenPipeError:  # it died at once; its exit says why
                    pass
                output, ended = _read_output(process, limits)
            finally:
                _end(process, now=ended != "")
        stdout, stderr = (b.decode("utf-8", "replace") for b in output)
        return stdout, stderr, ended


def _read_output(process: subprocess.Popen[bytes], limits: Limits) -> tuple[list[bytes], str]:
    deadline = time.monotonic() + limits.wall_s + _BACKSTOP_S
    chunks: list[bytearray] = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, 0)  # type: ignore[arg-type]
        selector.register(process.stderr, selectors.EVENT_READ, 1)  # type: ignore[arg-type]
        while selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return [bytes(c) for c in chunks], "timeout"
            for key, _ in selector.select(remaining):
                data = os.read(key.fd, 16_384)
                if not data:
                    selector.unregister(key.fileobj)
                chunks[key.data] += data
            if sum(map(len, chunks)) > limits.output_bytes:
                return [bytes(c[: limits.output_bytes]) for c in chunks], "limit"
    return [bytes(c) for c in chunks], ""


def _end(process: subprocess.Popen[bytes], *, now: bool) -> None:
    """Leave nothing running. The supervisor ends the program, and what it left, on SIGTERM."""
    if now:
        process.terminate()
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _records(told: bytes, nonce: str) -> dict[str, list[str]]:
    """Reports by kind. Whatever does not carry the nonce was not written by the harness."""
    rows = (row.split("\x1f") for row in told.decode("utf-8", "replace").split("\x1e"))
    return {row[1]: row[2:] for row in rows if len(row) > 1 and row[0] == nonce}


def _judge(
    records: dict[str, list[str]], stdout: str, stderr: str, ended: str, limits: Limits, seconds: float
) -> ProgramResult:
    def result(
        status: Status, *, value: str | None = None, reason: str = "", printed: bool = False
    ) -> ProgramResult:
        return ProgramResult(
            status=status, value=value, reason=reason, stdout=stdout, stderr=stderr, from_stdout=printed,
            isolation=records.get("ready", [""])[0], seconds=seconds,
        )  # fmt: skip

    if "refused" in records:
        raise LemonError(
            "this machine allows neither namespaces nor seccomp, so a worker's program would run with your "
            "rights: run where one of them is allowed, or accept it with --allow-unsandboxed"
        )
    if ended == "limit":
        return result("limit", reason=f"more than {limits.output_bytes} bytes of output")
    timed_out, exit_code, cpu = records.get("exit", ["0", "0", "0"])
    if "result" in records:
        status, text = records["result"]
        printed = _printed_number(stdout) if status == "no_answer" else None
        if printed is not None:
            return result("ok", value=printed, printed=True)
        if status == "ok":
            return result("ok", value=text)
        return result("limit" if status == "limit" else "error", reason=text)
    if ended == "timeout" or timed_out == "1":
        return result("timeout", reason=f"still running after {limits.wall_s:g} s")
    if "ready" not in records:
        raise LemonError(f"the sandbox's interpreter {sys.executable} did not start: {stderr.strip()[-300:]}")
    # The kernel counts RLIMIT_CPU in sampled ticks and usage exactly: on a busy machine they drift apart.
    if int(exit_code) == -signal.SIGKILL and float(cpu) >= 0.5 * limits.cpu_s:
        return result("limit", reason=f"more than {limits.cpu_s:g} s of CPU time")
    return result("killed", reason=f"it ended without reporting (exit code {exit_code})")


def _printed_number(stdout: str) -> str | None:
    """The number that the last printed line is, or ends in after "=" or ":"."""
    lines = stdout.strip().splitlines()
    match = _LAST_NUMBER.search(lines[-1]) if lines else None
    return match[1].replace(",", "") if match else None


_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _workers() -> ThreadPoolExecutor:
    """At most one program per core at a time, whichever event loop asks."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="lemon-sandbox")
    return _pool


async def run_program(
    code: str,
    *,
    limits: Limits = Limits(),
    allow_unsandboxed: bool = False,
) -> ProgramResult:
    """Run `code` (plain or in a fenced block with prose around) and return its variable `answer`.

    The answer must be an int, float, Fraction, Decimal, bool or str. Programs beyond the number of
    cores wait their turn; that wait counts neither as wall time nor in `seconds`. Cancelling ends the
    program. Raises LemonError where the machine cannot isolate and `allow_unsandboxed` is false; no
    fault of the program itself raises.
    """
    source = extract_code(code)
    if len(source.encode("utf-8", "replace")) > _MAX_CODE:
        return ProgramResult(status="limit", reason=f"a program of more than {_MAX_CODE} bytes")
    job = _Job()
    try:
        return await asyncio.get_running_loop().run_in_executor(
            _workers(), job.run, source, limits, allow_unsandboxed
        )
    except asyncio.CancelledError:
        job.cancel()
        raise
