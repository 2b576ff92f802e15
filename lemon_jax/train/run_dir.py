"""The run directory: manifest, metrics, executions, calls, summary; and how a killed run is cut back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from lemon_jax.errors import LemonError
from lemon_jax.files import PART, create_file, replace_file

MANIFEST, METRICS, TIMINGS = "manifest.json", "metrics.jsonl", "timings.jsonl"
EXECUTIONS, CALLS, SUMMARY = "executions.jsonl", "calls.sqlite", "summary.json"
OTHER_CALLS = "calls-p{}.sqlite"  # of each host but the first
AFTER_TRAINING = ("search", "eval")  # phases of executions that belong to no step


class RunDir:
    """Files of one run. JSON lines are appended whole and flushed; JSON files are replaced atomically."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path, manifest: dict[str, Any]) -> RunDir:
        """A new run directory. Raises LemonError if the folder holds anything already."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            # A manifest that is being written is another run's that begins there, or nothing of use.
            others = [p for p in path.iterdir() if not p.match(f"{MANIFEST}*{PART}")]
            with contextlib.suppress(FileExistsError):  # another run was faster
                if not others:
                    create_file(path / MANIFEST, _json(manifest))
                    return cls(path)
            advice = f"continue that run with --resume {path}, or " if (path / MANIFEST).exists() else ""
            raise LemonError(f"{path}: the folder is not empty; {advice}choose another --out")
        except OSError as error:
            raise LemonError(
                f"{path}: cannot write the run there ({error.strerror}); choose another --out"
            ) from error

    @classmethod
    def open(cls, path: Path) -> tuple[RunDir, dict[str, Any]]:
        """An existing run and its manifest. Raises LemonError where there is none."""
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            manifest["config"]["bench"]  # the least a manifest must have
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LemonError(
                f"{path / MANIFEST}: no run to resume there ({type(error).__name__}: {error}); "
                "give the folder that an earlier run wrote"
            ) from error
        return cls(path), manifest

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working on this run; the kernel lets go when this one ends.

        Raises LemonError where another process holds it.
        """
        # The manifest is written once and stays: no file of its own is left behind by a lock.
        manifest = self.path / MANIFEST
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(manifest.open("r+b"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A run that failed at once may have removed it meanwhile, and a new one written its own.
                held = os.path.samestat(os.fstat(file.fileno()), manifest.stat())
            except (BlockingIOError, FileNotFoundError):
                held = False
            if not held:
                raise LemonError(
                    f"{self.path}: another process is working on this run; wait for its end, or stop it"
                )
            yield

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def calls(self) -> Path:
        return self.path / CALLS

    def discard_unused(self) -> None:
        """Remove a new run that failed before its first worker call: its folder holds nothing of use."""
        if _asked(self.calls):
            return
        if (self.path / METRICS).exists() or (self.path / EXECUTIONS).exists():
            return
        for name in (MANIFEST, CALLS, f"{CALLS}-wal", f"{CALLS}-shm"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.policy, ignore_errors=True)  # after no step it is the one the run began with
        for folder in (self.checkpoints, self.path):
            with contextlib.suppress(OSError):  # not there, or something else is in it and stays
                folder.rmdir()

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows as JSON lines. NaN is an error: a log that other programs cannot read is none."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(_json_lines(rows))

    def write_lines(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Replace a JSON-lines file by these rows, atomically."""
        replace_file(self.path / name, _json_lines(rows), durable=True)

    def read(self, name: str) -> list[dict[str, Any]]:
        """Rows of a JSON-lines file, without a last line that a kill cut short; [] if there is no file."""
        path = self.path / name
        if not path.exists():
            return []
        rows = []
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number == len(lines):  # no newline behind it: it was being written
                    break
                raise LemonError(f"{path}:{number}: not a line of JSON; restore the run folder") from error
        return rows

    def cut(self, name: str, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite a JSON-lines file with the rows that `keep` accepts, atomically.

        Raises LemonError naming a line that `keep` cannot judge.
        """
        rows = []
        for number, row in enumerate(self.read(name), start=1):
            try:
                if keep(row):
                    rows.append(row)
            except (KeyError, TypeError) as error:
                raise LemonError(
                    f"{self.path / name}:{number}: not a line of a run ({type(error).__name__}: {error}); "
                    "restore the run folder"
                ) from error
        self.write_lines(name, rows)

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run. Raises LemonError where it is none."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LemonError(
                f"{self.path / name}: not readable ({error}); remove the folder, or restore it"
            ) from error

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        replace_file(self.path / name, _json(value), durable=True)

    def cut_back(self, step: int) -> None:
        """Forget everything after the first `step` steps, so that they can be taken again."""
        self.cut(METRICS, lambda row: row["step"] < step)
        self.cut(TIMINGS, lambda row: row["step"] < step)
        self.cut(EXECUTIONS, lambda row: row["phase"] not in AFTER_TRAINING and row["step"] < step)


def _asked(calls: Path) -> bool:
    """Whether a call store holds calls, or cannot be read, as on a full disk."""
    if not calls.exists():
        return False
    try:
        with closing(sqlite3.connect(calls)) as store:
            return bool(store.execute("select count(*) from calls").fetchone()[0])
    except sqlite3.OperationalError:
        return True


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _json_lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


class OtherHost(RunDir):
    """A run as a host sees it that does not write its files: only its own worker calls are kept there.

    The folder need not be the first host's: only checkpoints are read by all.
    """

    def __init__(self, path: Path, index: int, *, new: bool):
        """Raises LemonError where a `new` run finds calls of another one."""
        super().__init__(path)
        self._index = index
        path.mkdir(parents=True, exist_ok=True)
        if new and self.calls.exists():
            raise LemonError(f"{self.calls}: left by another run; remove it, or choose another --out")

    @property
    def calls(self) -> Path:
        return self.path / OTHER_CALLS.format(self._index)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def discard_unused(self) -> None:
        if not _asked(self.calls):
            for ending in ("", "-wal", "-shm"):
                (self.path / f"{self.calls.name}{ending}").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the first host's files are still there
                self.path.rmdir()

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None: ...

    def write_lines(self, name: str, rows: Iterable[dict[str, Any]]) -> None: ...

    def write_json(self, name: str, value: dict[str, Any]) -> None: ...

    def read(self, name: str) -> list[dict[str, Any]]:
        return []
