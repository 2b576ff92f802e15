"""The call store: every worker call by its key, in SQLite.

It is three things at once: the execution cache of the counterfactuals (an agent that an edit does
not affect is looked up, not called again), the resume of an interrupted run, and the recording that
can be shipped. A shipped recording holds keys (hashes) and replies, never the text of a task.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from lemon_jax.backends import Reply, Request
from lemon_jax.errors import LemonError
from lemon_jax.files import replace_file

RECORDING_FORMAT = "lemon-calls-1"


def call_key(identity: str, request: Request) -> str:
    """SHA-256 over the model's identity, the messages, the sampling parameters and the sample index."""
    material = [
        identity,
        [[m.role, m.content] for m in request.messages],
        request.max_tokens,
        list(request.stop),
        request.temperature if request.sample_index else 0.0,  # sample 0 is greedy whatever the capacity says
        request.sample_index,
    ]
    return hashlib.sha256(json.dumps(material, ensure_ascii=True).encode()).hexdigest()


class CallStore:
    """Replies by key, and under which scope (such as "train:12") a key was first asked for.

    The scope makes token accounting independent of interruptions: a step that is repeated after a
    kill finds its own calls here and still counts them as its own.
    """

    def __init__(self, path: Path | None, recording: dict[str, Reply] | None = None):
        """Open, or create, the store at `path`; None keeps it in memory.

        Raises:
            LemonError: the file cannot be opened or written, or is something else.
        """
        self._path = path or "call store"
        self._recording = recording or {}
        try:
            self._db = sqlite3.connect(path if path is not None else ":memory:", isolation_level=None)
        except sqlite3.OperationalError as error:
            raise LemonError(f"{path}: {error}; give a file in a folder that exists") from error
        try:
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=normal")
            self._db.execute(
                "create table if not exists calls (key text primary key, scope text not null,"
                " recorded integer not null, reply text not null)"
            )
            self._db.execute("select key, scope, recorded, reply from calls limit 0")
        except sqlite3.DatabaseError as error:
            self._db.close()
            # The one code of an OperationalError that blames the content: a column that is not there.
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise self._unwritable(error) from error
            raise LemonError(f"{path}: not a call store ({error}); move it away and run again") from error

    def get(self, key: str, scope: str) -> Reply | None:
        """The stored or recorded reply; a recorded one becomes part of this store under `scope`."""
        row = self._db.execute("select reply from calls where key = ?", (key,)).fetchone()
        if row is not None:
            return Reply(**json.loads(row[0]))
        reply = self._recording.get(key)
        if reply is not None:
            self._insert(key, scope, reply, recorded=True)
        return reply

    def put(self, key: str, scope: str, reply: Reply) -> None:
        """Keep a reply of a backend. Failures are not kept: they are asked again."""
        if reply.finish != "error":
            self._insert(key, scope, reply, recorded=False)

    def _insert(self, key: str, scope: str, reply: Reply | str, *, recorded: bool) -> None:
        text = reply if isinstance(reply, str) else json.dumps(vars(reply), ensure_ascii=False)
        row = (key, scope, int(recorded), text)
        try:
            self._db.execute("insert or ignore into calls values (?, ?, ?, ?)", row)
        except sqlite3.OperationalError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: sqlite3.OperationalError) -> LemonError:
        """What to do about a sound store that cannot be written now: the disk is full, most often."""
        busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        first = "wait for the end of the process that uses it" if busy else "make room"
        return LemonError(
            f"{self._path}: {error}; {first}, then go on: experiments/run.py with --resume, lemon eval "
            "with the same command"
        )

    def origin(self, keys: Iterable[str]) -> dict[str, tuple[str, bool]]:
        """For each stored key: the scope that first asked for it, and whether a recording answered."""
        out = {}
        for key in set(keys):
            row = self._db.execute("select scope, recorded from calls where key = ?", (key,)).fetchone()
            if row is not None:
                out[key] = (row[0], bool(row[1]))
        return out

    def tokens(self, keys: Iterable[str]) -> int:
        """Prompt and generated tokens of these stored calls, each counted once."""
        total = 0
        for key in set(keys):
            row = self._db.execute("select reply from calls where key = ?", (key,)).fetchone()
            reply = json.loads(row[0]) if row is not None else {}
            total += (reply.get("prompt_tokens") or 0) + (reply.get("generated_tokens") or 0)
        return total

    def count(self, *, recorded: bool | None = None) -> int:
        """Number of stored calls; with `recorded`, only those that a recording did or did not answer."""
        if recorded is None:
            return int(self._db.execute("select count(*) from calls").fetchone()[0])
        query = "select count(*) from calls where recorded = ?"
        return int(self._db.execute(query, (int(recorded),)).fetchone()[0])

    def replies(self) -> dict[str, Reply]:
        """All stored calls, in the order of their keys."""
        rows = self._db.execute("select key, reply from calls order by key")
        return {key: Reply(**json.loads(reply)) for key, reply in rows}

    def last_row(self) -> int:
        """The number of the newest stored call; `rows(after=...)` takes it."""
        return int(self._db.execute("select coalesce(max(rowid), 0) from calls").fetchone()[0])

    def rows(self, *, after: int = 0) -> list[tuple[str, str, int, str]]:
        """Stored calls (key, scope, recorded, reply) in the order they came, for another store's `add`."""
        query = "select key, scope, recorded, reply from calls where rowid > ? order by rowid"
        return self._db.execute(query, (after,)).fetchall()

    def add(self, rows: Iterable[tuple[str, str, int, str]]) -> None:
        """Take over calls of another store; those that are here already stay as they are."""
        for key, scope, recorded, reply in rows:
            self._insert(key, scope, reply, recorded=bool(recorded))

    def close(self) -> None:
        self._db.close()


def write_recording(path: Path, replies: dict[str, Reply]) -> None:
    """Save replies as xz-compressed JSON lines, sorted by key, so that equal contents are equal files."""
    lines = [json.dumps({"format": RECORDING_FORMAT})]
    for key in sorted(replies):
        r = replies[key]
        lines.append(
            json.dumps([key, r.text, r.finish, r.prompt_tokens, r.generated_tokens], ensure_ascii=False)
        )
    replace_file(path, lzma.compress(("\n".join(lines) + "\n").encode(), preset=9))


def read_recording(path: Path) -> dict[str, Reply]:
    """Load a file of `write_recording`. Raises LemonError where it is damaged."""
    try:
        # Not splitlines(): JSON leaves U+2028 and its like in a reply as they are.
        lines = lzma.decompress(path.read_bytes()).decode().rstrip("\n").split("\n")
        if json.loads(lines[0]) != {"format": RECORDING_FORMAT}:
            raise ValueError(f"first line is {lines[0][:60]}")
        rows = [json.loads(line) for line in lines[1:]]
        return {
            key: Reply(text=text, finish=finish, prompt_tokens=prompt, generated_tokens=generated)
            for key, text, finish, prompt, generated in rows
        }
    except (OSError, lzma.LZMAError, EOFError, ValueError, TypeError) as error:
        raise LemonError(
            f"{path}: not a readable call recording ({error}); fetch it again, or run with --fresh"
        ) from error
