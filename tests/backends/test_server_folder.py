"""What is left in the temporary folder, and by whom."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from lemon_jax.backends.server_folder import ServerFolder

KILLED = """import os, signal, tempfile
from lemon_jax.backends.server_folder import ServerFolder
tempfile.tempdir = {folder!r}
(ServerFolder().path / "states").write_bytes(bytes(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_server_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive, failed = ServerFolder(), ServerFolder()
    failed.close(keep=True)
    (other := tmp_path / "lemon-llama-other").mkdir()
    ended = subprocess.run([sys.executable, "-c", KILLED.format(folder=str(tmp_path))], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert len(left := set(tmp_path.glob("*/states"))) == 1

    following = ServerFolder()
    assert set(tmp_path.iterdir()) == {alive.path, failed.path, other, following.path}
    assert not any(path.exists() for path in left)
    for folder in (alive, following):
        folder.close()
    assert set(tmp_path.iterdir()) == {failed.path, other}
