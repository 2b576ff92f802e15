"""The folder of a server that the run starts: its log, its address, the states of its slots."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "lemon-llama-"
_LOCK = "lock"


class ServerFolder:
    """A new temporary folder. Those that killed processes of this user have left are removed first."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        # Where files cannot be locked there is no lock, and nobody takes the folder for abandoned.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / "new").rename(self.path / _LOCK)  # only now, so that nobody finds it unlocked

    def close(self, *, keep: bool = False) -> None:
        """Remove the folder, or `keep` it for good."""
        with contextlib.suppress(OSError):
            (self.path / _LOCK).unlink()
        os.close(self._lock)
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned() -> None:
    """Folders with a lock that nobody holds: the kernel lets go of it when a process ends in whatever way."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, another user's, without or with a held lock
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
