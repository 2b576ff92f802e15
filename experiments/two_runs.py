"""What the checks share that compare a disturbed run with an undisturbed one: folder and ending."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


class RunFailed(Exception):
    """A run ended by itself without a result; the message ends with what it printed last."""

    @classmethod
    def ended(cls, log: Path, code: int) -> RunFailed:
        """Of a run that printed to `log` and ended with this exit code."""
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return cls(f"{log}: exit code {code}: {''.join(last)}")


def compare(out: Path | None, prefix: str, check: Callable[[Path], bool]) -> int:
    """Run `check` in a new folder, a temporary one without `out`, and return the exit code.

    0: all equal, and a temporary folder is gone; 1: they differ; 2: a run failed, or `out` is not empty.
    """
    if out is not None and out.exists() and any(out.iterdir()):
        print(f"error: {out}: the folder is not empty; choose another --out", file=sys.stderr)
        return 2
    folder = out or Path(tempfile.mkdtemp(prefix=prefix))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        good = check(folder)
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    if good and out is None:
        shutil.rmtree(folder)
    else:
        print(f"both runs are kept in {folder}")
    return 0 if good else 1
