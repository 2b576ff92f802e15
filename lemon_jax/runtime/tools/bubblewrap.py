"""bubblewrap (`bwrap`) around the sandbox's interpreter, where that tool is installed and works.

It builds the same namespaces that `sandbox_child.py` builds with its own system calls, and it often may
where this process may not: systems that deny user namespaces to everybody let a set-uid or listed bwrap
have them. Seccomp, Landlock, limits and the loss of root are laid on inside it all the same. nsjail would
add nothing to that: its namespaces and limits are these, and its filter would be our allow list again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_BOX_BYTES = 16 << 20  # of the one folder that is no part of the system, in memory


def bwrap_command(dirs: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """What to put before the interpreter's own arguments; empty where bwrap is missing or fails.

    `dirs` can be read inside, except the folders `hidden` in them, and nothing else of the file system.
    Needs bubblewrap 0.7, for --size.
    """
    path = shutil.which("bwrap")
    if path is None:
        return []
    interpreter = os.path.realpath(sys.executable)  # the environment it may lie in is not visible inside
    return list(_working_command(path, interpreter, tuple(dirs), tuple(hidden)))


@cache
def _working_command(
    path: str, interpreter: str, dirs: tuple[str, ...], hidden: tuple[str, ...]
) -> tuple[str, ...]:
    kinds = ["ipc", "pid", "net", "uts", *["user"] * (os.getuid() != 0)]
    # Root keeps its users, so that the child can change to one without rights, and enters a user
    # namespace after that.
    command = [path, *(f"--unshare-{kind}" for kind in kinds), "--unshare-cgroup-try", "--die-with-parent"]
    searched = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    shown = [*dirs, *(d for d in searched if os.path.isabs(d) and os.path.isdir(d)), interpreter]
    for parent in sorted({str(p) for name in shown for p in Path(name).parents} - {"/"}):
        command += ["--perms", "0755", "--dir", parent]  # else as closed as it is outside
    for name in shown:
        command += ["--ro-bind", name, name]
    for name in hidden:
        command += ["--tmpfs", name, "--remount-ro", name]
    command += ["--dev-bind", os.devnull, os.devnull]
    command += ["--perms", "0777", "--size", str(_BOX_BYTES), "--tmpfs", "/box", "--remount-ro", "/"]
    command += ["--chdir", "/box", "--", interpreter]
    try:
        trial = subprocess.run([*command, "-I", "-S", "-c", "import ctypes"], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(command) if trial.returncode == 0 else ()
