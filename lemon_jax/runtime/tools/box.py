"""One fresh interpreter under limits: how it is started, fed, watched, ended, and what it reported.

What runs inside is `sandbox_child.py`; `sandbox.py` puts a worker's program into one box, `humaneval.py`
a candidate and its test into two.
"""

from __future__ import annotations

import marshal
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools.bubblewrap import bwrap_command
from lemon_jax.runtime.tools.seccomp import build_filter

LAYERS = ("bwrap", "namespaces", "landlock", "seccomp")  # what is tried; a test may take layers away
LEVELS = (
    "rlimits", "seccomp", "landlock+seccomp", "namespaces", "bwrap", "namespaces+seccomp", "bwrap+seccomp",
)  # fmt: skip
"""Isolation levels, weakest first: what a run had, and the least that a user accepts."""
ACCEPTED = "namespaces+seccomp"  # the lowest under which a candidate runs, unless its user accepts less

_PATIENCE_S = 5.0  # for a box to end that has nothing left to do but that; milliseconds, on an idle machine
BACKSTOP_S = 10.0  # beyond the wall limit, which the child's warden keeps: start-up on a busy machine
_BOOT = """import marshal, sys
modules, config = marshal.loads(sys.stdin.buffer.read())
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(marshal.loads(code), vars(module))
sys.modules[modules[0][0]].main(config, getattr(module, config["role"]))
"""


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
class Exit:
    """How the boxed process ended, from the parent that waited for it."""

    timed_out: bool
    code: int  # negative: the signal
    cpu_s: float

    @staticmethod
    def parse(fields: Sequence[str]) -> Exit:
        return Exit(timed_out=fields[0] == "1", code=int(fields[1]), cpu_s=float(fields[2]))

    def used_up(self, limits: Limits) -> bool:
        """Whether the CPU limit ended it."""
        # The kernel counts RLIMIT_CPU in sampled ticks and usage exactly: on a busy machine they drift.
        return self.code == -signal.SIGKILL and self.cpu_s >= 0.5 * limits.cpu_s


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of a box that has ended."""

    level: str  # of LEVELS; empty if the code never got to run
    refused: str  # the level there was, where it was below what is accepted
    verdict: tuple[str, ...]  # of the harness beside the code, or of code that found its line; may be empty
    exit: Exit | None
    stdout: str
    stderr: str
    cut: str  # why the harness ended it: "timeout", "limit" (of output) or ""


def levels_from(least: str) -> tuple[str, ...]:
    """`least` and every level above it. LemonError if there is no such level."""
    if least not in LEVELS:
        raise LemonError(f"no isolation level {least!r}; the levels, weakest first: {', '.join(LEVELS)}")
    return LEVELS[LEVELS.index(least) :]


@cache
def _compiled(module: str) -> bytes:
    """A module for the child, compiled here once: the fresh interpreter then has nothing to compile."""
    path = Path(__file__).with_name(f"{module}.py")
    return marshal.dumps(compile(path.read_text(encoding="utf-8"), f"<sandbox>/{module}", "exec"))


@cache
def _library_dirs() -> tuple[str, ...]:
    """Folders an interpreter without site-packages reads: the standard library and shared libraries."""
    base = {"platbase": sys.base_exec_prefix}  # not the virtual environment, which has nothing of it
    paths = sysconfig.get_paths(vars=base)
    wanted = [paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib")]
    wanted += [os.path.join(paths["stdlib"], "lib-dynload"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    found = sorted({os.path.abspath(p) for p in wanted if os.path.isdir(p)})
    return tuple(p for p in found if not any(p.startswith(q + "/") for q in found))


@cache
def package_dirs() -> tuple[str, ...]:
    """Folders of installed packages in there, which stay hidden: some carry benchmarks with solutions."""
    patterns = [f"{below}{kind}-packages" for below in ("", "python*/") for kind in ("site", "dist")]
    found = {str(path) for d in _library_dirs() for pattern in patterns for path in Path(d).glob(pattern)}
    return tuple(sorted(path for path in found if os.path.isdir(path)))


def _open_to_all(path: str, *, ancestors: bool) -> bool:
    """Whether a user without rights may read the folder (and, if asked, reach it)."""
    place = Path(path)
    modes = [place.stat().st_mode & 0o5 == 0o5]
    if ancestors:
        modes += [parent.stat().st_mode & 0o1 == 0o1 for parent in place.parents]
    return all(modes)


def _rlimits(limits: Limits) -> tuple[tuple[str, int], ...]:
    return (
        ("RLIMIT_CPU", math.ceil(limits.cpu_s)),
        ("RLIMIT_AS", limits.memory_bytes),
        ("RLIMIT_FSIZE", limits.file_bytes),
        ("RLIMIT_NOFILE", limits.open_files),
        ("RLIMIT_NPROC", limits.processes),
        ("RLIMIT_CORE", 0),
    )


class Box:
    """`with Box(...) as box` starts it; leaving ends it and all it started. `cancel` from any thread."""

    def __init__(
        self,
        role: str,
        job: dict,
        *,
        limits: Limits,
        accepted: Sequence[str],
        modules: Sequence[str] = ("sandbox_child",),
        fds: Sequence[int] = (),
    ) -> None:
        """`job` goes to the function `role` of the last of the child's `modules`; `fds` are handed on."""
        self.limits = limits
        self.process: subprocess.Popen[bytes] | None = None
        self.cut = ""
        self.output = (bytearray(), bytearray())
        self.nonce = secrets.token_hex(16)
        self._role, self._job, self._accepted = role, job, tuple(accepted)
        self._modules, self._fds = modules, tuple(fds)
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        if self.process is not None:
            self.process.terminate()  # the child's top process, which ends the rest

    def __enter__(self) -> Box:
        self._workdir = tempfile.mkdtemp(prefix="lemon-box-")
        # Two lines back: the boxed process closes its end of the second before it runs a line of code.
        self._told, self._tell = os.pipe()
        self._ended, self._end = os.pipe()
        env = {"LANG": "C.UTF-8"}
        if "LD_LIBRARY_PATH" in os.environ:  # some interpreters cannot start without it
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        self._outer = bwrap_command(_library_dirs(), package_dirs()) if "bwrap" in LAYERS else []
        pipe = subprocess.PIPE
        try:
            # No preexec_fn: with it, Python would fork this process, which deadlocks once JAX has threads.
            self.process = subprocess.Popen(
                [*(self._outer or [sys.executable]), "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT],
                stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=self._workdir,
                pass_fds=(self._tell, self._end, *self._fds), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._release()
            raise
        if self._cancelled:
            self.process.terminate()
        return self

    def feed(self) -> None:
        """Send the code. On its own, so that the start of several boxes overlaps."""
        assert self.process is not None
        assert self.process.stdin is not None
        package = __name__.rpartition(".")[0]
        modules = [(f"{package}.{name}", _compiled(name)) for name in self._modules]
        payload = marshal.dumps((modules, self._config()))
        try:
            self.process.stdin.write(payload)
            self.process.stdin.close()
        except BrokenPipeError:  # it died at once; its exit says why
            pass

    def _config(self) -> dict:
        assert self.process is not None
        stdlib = sysconfig.get_paths()["stdlib"]
        return {
            "role": self._role,
            "job": self._job,
            "nonce": self.nonce,
            "identity": self.process.pid,
            "fds": (self._tell, self._end, self._fds),
            "workdir": self._workdir,
            "layers": LAYERS,
            "in_bwrap": bool(self._outer),
            "dirs": _library_dirs(),
            "hidden": package_dirs(),
            "filter": build_filter(),
            "stdlib_readable": _open_to_all(stdlib, ancestors=False),
            "stdlib_reachable": _open_to_all(stdlib, ancestors=True),
            "accepted": self._accepted,
            "wall_s": float(self.limits.wall_s),
            "limits": _rlimits(self.limits),
        }

    def close(self, *, now: bool) -> None:
        """Leave nothing running; at once, or after it has had a moment to end by itself."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        if now:
            process.terminate()
        try:
            process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __exit__(self, *_: object) -> None:
        try:
            self.close(now=True)
        finally:
            self._release()

    def _release(self) -> None:
        if self.process is not None:
            for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
                assert stream is not None
                try:
                    stream.close()
                except BrokenPipeError:  # what was still to be sent, to one that is gone
                    continue
        for fd in (self._told, self._tell, self._ended, self._end):
            os.close(fd)
        shutil.rmtree(self._workdir, ignore_errors=True)

    def report(self) -> Report:
        """To be asked before the box is left, best after `close`."""
        told = _records(_waiting(self._told), self.nonce)
        ended = _waiting(self._ended).decode("ascii", "replace").split()
        stdout, stderr = (
            bytes(b[: self.limits.output_bytes]).decode("utf-8", "replace") for b in self.output
        )
        level = told.get("ready", ("",))[0]
        return Report(
            level=level,
            # It is refused before the code runs; the code itself could say so only afterwards.
            refused="" if level else (told.get("refused") or ("",))[0],
            verdict=told.get("verdict", ()),
            exit=Exit.parse(ended) if ended else None,
            stdout=stdout,
            stderr=stderr,
            cut=self.cut,
        )


def watch(boxes: Sequence[Box], until: Box) -> None:
    """Read what the boxes print until `until` has ended, its time is over, or one has printed too much.

    The reason is left in that box's `cut`.
    """
    deadline = time.monotonic() + until.limits.wall_s + BACKSTOP_S
    with selectors.DefaultSelector() as selector:
        for box in boxes:
            assert box.process is not None
            for stream, chunks in zip((box.process.stdout, box.process.stderr), box.output, strict=True):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, (box, chunks))
        while any(key.data[0] is until for key in selector.get_map().values()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                until.cut = "timeout"
                return
            for key, _ in selector.select(remaining):
                box, chunks = key.data
                data = os.read(key.fd, 16_384)
                if not data:
                    selector.unregister(key.fileobj)
                chunks += data
                if sum(map(len, box.output)) > box.limits.output_bytes:
                    box.cut = "limit"
                    return


def _waiting(fd: int) -> bytes:
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 65_536)
    except BlockingIOError:
        return b""


def _records(told: bytes, nonce: str) -> dict[str, tuple[str, ...]]:
    """The first report of each kind. Whatever does not carry the nonce was not written by the harness."""
    found: dict[str, tuple[str, ...]] = {}
    for row in told.decode("utf-8", "replace").split("\x1e"):
        mark, _, rest = row.partition("\x1f")
        if mark == nonce and rest:
            kind, *fields = rest.split("\x1f")
            found.setdefault(kind, tuple(fields))
    return found
