"""From the start of the main job to the first reply of a worker, in a second run: models and files are there.

python experiments/bench/start.py
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import machine, spread, versions

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0


def seconds_to_first_reply(bench: str, out: Path) -> float:
    """Seconds from the command to the first stored worker call; the job is stopped there.

    A call is stored when its whole reply has come: the first token came before that.
    """
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), "--bench", bench, "--fresh"]
    command += ["--steps", "1", "--out", str(out)]
    started = time.perf_counter()
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ)
    try:
        while job.poll() is None and time.perf_counter() - started < PATIENCE_S:
            if stored(out / "calls.sqlite"):
                return time.perf_counter() - started
            time.sleep(0.05)
    finally:
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=60)
    raise SystemExit(f"no worker replied: {errors.decode()[-500:]}")


def stored(path: Path) -> int:
    """Calls in the store so far; 0 before there is one."""
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            return int(db.execute("select count(*) from calls").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", default="multiarith")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(machine())
    print(versions("jax", "xllamacpp"))
    with tempfile.TemporaryDirectory() as folder:
        first = seconds_to_first_reply(args.bench, Path(folder) / "0")
        print(f"first run: {first:.1f} s to the first worker reply")
        later = [seconds_to_first_reply(args.bench, Path(folder) / str(n)) for n in range(1, args.rounds + 1)]
    print(f"later runs: {spread(later)} to the first worker reply (target 15)")


if __name__ == "__main__":
    main()
