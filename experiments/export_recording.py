"""Export the worker calls of runs as the recording that serves later runs of the same bench.

    python experiments/export_recording.py runs/multiarith-default-s0-... --bench multiarith

A recording holds keys (hashes) and replies, not the text of a task, of which a coder's reply often repeats
signature, docstring and examples. Calls already recorded are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shipped import CHECKPOINTS, other_calls, recorded_calls

from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore, read_recording, write_recording


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run directories, or their calls.sqlite")
    parser.add_argument("--bench", required=True, help="names the recording")
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="folder of recordings/ (checkpoints)")
    args = parser.parse_args()
    try:
        path = other_calls(args.out, args.bench)
        replies = read_recording(path) if path.exists() else {}
        shipped = recorded_calls(args.bench, args.out)
        before = len(replies)
        for run in args.runs:
            calls = run / "calls.sqlite" if run.is_dir() else run
            if not calls.is_file():
                raise LemonError(f"{calls}: no such call store; give the folder of a run")
            store = CallStore(calls)
            # Of two replies to one call the recorded one stays; none is stored beside a replayable run's.
            known = shipped | replies
            replies |= {key: reply for key, reply in store.replies().items() if key not in known}
            store.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_recording(path, replies)
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = path.stat().st_size / 1024
    print(f"{path}: {len(replies):,} calls ({len(replies) - before:,} new), {size:,.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
