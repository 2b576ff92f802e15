"""Runs attacks, with witnesses outside the sandbox that see what gets out."""

from __future__ import annotations

import importlib.util
import os
import secrets
import select
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attacks import ATTACKS, PROMPT, TEST, Attack

from lemon_jax.runtime.tools import CandidateStatus, Limits, check_candidate, run_program
from lemon_jax.runtime.tools.box import BACKSTOP_S, package_dirs
from lemon_jax.runtime.tools.sandbox import CONFINED

LIMITS = Limits(wall_s=2.0, cpu_s=1, memory_bytes=256 << 20)
ROOT = Path(__file__).resolve().parents[2]
_BOOT_MARK = "marshal.loads(sys.stdin.buffer"

Form = Literal["candidate", "program"]


@dataclass(frozen=True, kw_only=True)
class Case:
    attack: Attack
    form: Form

    def __str__(self) -> str:
        return f"{self.attack.kind}-{self.form}-{self.attack.name.replace(' ', '_')}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: Case
    won: str  # what the attack achieved; empty if nothing
    status: str
    isolation: str
    seconds: float


def cases() -> list[Case]:
    """Every attack as a candidate; escapes also as a worker's program."""
    found = [Case(attack=attack, form="candidate") for attack in ATTACKS]
    return found + [Case(attack=a, form="program") for a in ATTACKS if a.kind == "escape"]


class Witness:
    """What an attack may reach for outside: a secret, a folder, servers; `seen` says what was touched."""

    def __enter__(self) -> Witness:
        self.mark = f"lemon-mark-{secrets.token_hex(8)}"
        self.secret = f"secret-{secrets.token_hex(16)}"
        os.environ[self.mark] = self.secret
        self.folder = Path(tempfile.mkdtemp(prefix="lemon-witness-"))
        (self.folder / "secret").write_text(self.secret)
        (self.folder / "open").write_text("untouched")
        (self.folder / "open").chmod(0o666)
        self.folder.chmod(0o777)
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", self.port))
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(f"\0{self.mark}")
        self._unix.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self._tcp, self._udp, self._unix):
            server.close()
        shutil.rmtree(self.folder)
        del os.environ[self.mark]

    def names(self) -> str:
        """Lines that give an attack the names it uses."""
        packages = [next(Path(p).glob("*/__init__.py"), None) for p in package_dirs()]
        pytest_file = importlib.util.find_spec("pytest")
        known = {
            "MARK": self.mark,
            "SECRET": self.secret,
            "DIR": str(self.folder),
            "PORT": self.port,
            "PID": os.getpid(),
            "PATH": [str(ROOT)],
            "PACKAGES": [str(p) for p in (*packages, pytest_file and pytest_file.origin) if p],
        }
        return "".join(f"{name} = {value!r}\n" for name, value in known.items())

    def seen(self) -> str:
        ready, _, _ = select.select([self._tcp, self._udp, self._unix], [], [], 0)
        if ready:
            return "reached a server"
        mode = stat.S_IMODE((self.folder / "open").stat().st_mode)
        files = {p.name: p.read_text() for p in self.folder.iterdir()}
        if (files, mode) != ({"secret": self.secret, "open": "untouched"}, 0o666):
            return "changed a file"
        return "left a process" if list(processes(self.mark)) else ""


def processes(mark: str = _BOOT_MARK) -> Iterator[int]:
    """Ids of processes whose command line holds `mark`; by default those of any sandbox."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)
        except OSError:  # it ended meanwhile
            continue


def survivors(before: Collection[int] = (), mark: str = _BOOT_MARK, patience_s: float = 5.0) -> set[int]:
    """Processes with `mark` that were not there `before` and are there all the while from now on."""
    left = set(processes(mark)).difference(before)
    deadline = time.monotonic() + patience_s
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= set(processes(mark))
    return left


@contextmanager
def no_survivors() -> Iterator[None]:
    before = set(processes())
    yield
    assert not survivors(before)


async def run(case: Case, witness: Witness, accept: str = CONFINED[0], limits: Limits = LIMITS) -> Outcome:
    names = witness.names() if case.attack.kind == "escape" else ""
    allowed = accept not in CONFINED
    if case.form == "program":
        result = await run_program(names + case.attack.program, limits=limits, allow_unsandboxed=allowed)
        status, isolation, won = result.status, result.isolation, "got out" * (result.value == "out")
        took = result.seconds
    else:
        checked = await check_candidate(
            prompt=PROMPT, entry_point="f", test=TEST, completion=names + case.attack.candidate,
            limits=limits, accept=accept,
        )  # fmt: skip
        status, isolation, took = checked.status.value, checked.isolation, checked.seconds
        won = "passed" if checked.passed else ""
        if checked.status in (CandidateStatus.TEST_ERROR, CandidateStatus.SANDBOX_REFUSED):
            won = f"was not run: {checked.reason}"  # or it has made the test look at fault
    if took > limits.wall_s + BACKSTOP_S:
        won = won or "outlived its limits"
    won = won or witness.seen()
    return Outcome(case=case, won=won, status=status, isolation=isolation, seconds=took)
