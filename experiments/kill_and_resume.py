"""Check that a killed and resumed run equals one never killed: same policy, metrics, executions.

    python experiments/kill_and_resume.py --workers scripted
    python experiments/kill_and_resume.py --workers experiments/workers/deterministic.toml --kills 4

Trains once undisturbed. Then trains again in another folder, killed with SIGKILL at random moments and
resumed after each, and compares what the two have written. Exit code 0: all equal; 1: they differ, or a kill
came too late; 2: a run failed. Scripted workers: some minutes on 2 cores; embedded ones: about half an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from two_runs import RunFailed, compare

from lemon_jax.bench import SOURCES

RUN = Path(__file__).resolve().parent / "run.py"
TRAINING_PHASES = ("sampling", "executing", "updating", "saving")
POLL_S = 0.002
SAVE_S = 0.1  # within which of its beginning a save is killed
# Kills fall between checkpoints and right at them; steps are small, so that many kinds of moments come soon.
PRESET = """steps = {steps}
tasks_per_step = 2
group = 4
edits_per_step = 3
eval_tasks = {eval_tasks}
checkpoint_every = 2
"""
# What may differ: times, and whether a call was asked or looked up.
NOT_COMPARED = ("wall_s", "live_calls", "recorded_calls")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A moment: in this phase of this step (counted from 0), after this fraction of the phase."""

    phase: str
    step: int
    point: float


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    return compare(args.out, "kill-and-resume-", lambda folder: _check(args, folder))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--workers", required=True, help="scripted, or a worker file whose replies repeat")
    benches = ", ".join(SOURCES)
    add("--bench", default="multiarith", choices=SOURCES, metavar="NAME", help=f"{benches} (multiarith)")
    add("--policy", default="warmstart", help="policy to start from (warmstart)")
    add("--steps", type=count, default=6, help="training steps (6)")
    add("--kills", type=count, default=3, help="how often the second run is killed (3)")
    add("--eval-tasks", type=count, default=8, help="held-out tasks (8)")
    add("--seed", type=int, default=0, help="seed of the runs and of the moments of the kills (0)")
    add("--data", type=Path, default=None, help="folder of benchmark files (as experiments/run.py)")
    add("--out", type=Path, default=None, help="new folder to keep both runs in (a temporary one)")
    return parser.parse_args(argv)


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _check(args: argparse.Namespace, folder: Path) -> bool:
    preset = folder / "kill_and_resume.toml"
    preset.write_text(PRESET.format(steps=args.steps, eval_tasks=args.eval_tasks), encoding="utf-8")
    # Recordings would serve calls at once; here calls are meant to be under way when the kill comes.
    common = ["--fresh", *(["--data", str(args.data)] if args.data else [])]
    start = ["--bench", args.bench, "--preset", str(preset), "--workers", args.workers]
    start += ["--policy", args.policy, "--seed", str(args.seed), *common]
    calm, killed = folder / "undisturbed", folder / "killed"

    print("undisturbed run", flush=True)
    began = time.monotonic()
    _run([*start, "--out", str(calm)], folder / "undisturbed.log")
    print(f"  ended after {time.monotonic() - began:.0f} s", flush=True)

    seconds = phase_seconds(calm)
    arguments = [*start, "--out", str(killed)]
    hits = 0
    plan = plan_kills(args.kills, args.steps, random.Random(f"kills-{args.seed}"))
    for number, kill in enumerate(plan, start=1):
        alive = _run(arguments, folder / "killed.log", moment(killed, kill, seconds))
        hits += alive
        what = f"{'killed' if alive else 'ended before it could be killed'} while {kill.phase}"
        done, saved = _lines(killed / "metrics.jsonl"), _newest_checkpoint(killed)
        print(f"kill {number}/{len(plan)}: {what}, {done} steps logged, last checkpoint {saved}", flush=True)
        arguments = ["--resume", str(killed), *common]
    _run(arguments, folder / "killed.log")
    equal = _compare(calm, killed)
    if hits < len(plan):
        print(f"only {hits} of {len(plan)} kills came in time; give more --steps")
    return equal and hits == len(plan)


def plan_kills(kills: int, steps: int, rng: random.Random) -> list[Kill]:
    """Random moments in order of their steps: all phases in turn, every fifth kill in the evaluation."""
    evaluating = kills // 5
    phases: list[str] = []
    while len(phases) < kills - evaluating:
        phases += rng.sample(TRAINING_PHASES, len(TRAINING_PHASES))
    order = sorted(rng.randrange(steps) for _ in range(kills - evaluating))
    plan = [Kill(phase=p, step=s, point=rng.random()) for p, s in zip(phases, order, strict=False)]
    return plan + [Kill(phase="evaluating", step=steps, point=rng.random()) for _ in range(evaluating)]


def phase_seconds(run: Path) -> dict[str, float]:
    """How long each phase of a step took in a finished run (median: the first step also compiles)."""
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {"sampling": "sample_s", "executing": "execute_s", "updating": "update_s"}
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {phase: statistics.median(row[name] for row in rows) for phase, name in names.items()} | {
        "saving": SAVE_S,
        "evaluating": sum(row["wall_s"] for row in summary["eval"]),
    }


def _run(
    arguments: list[str], log: Path, is_time: Callable[[subprocess.Popen[bytes]], bool] | None = None
) -> bool:
    """Run experiments/run.py to its end, or kill it when `is_time` says so; returns whether it was killed.

    Raises:
        RunFailed: it ended by itself with another exit code than 0.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(RUN), *arguments], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        if is_time is not None and is_time(process):
            process.kill()
            # It may have ended by itself in the last moment.
            return process.wait() == -signal.SIGKILL
        if process.wait() != 0:
            raise RunFailed.ended(log, process.returncode)
        return False
    finally:
        process.kill()
        process.wait()


def moment(run: Path, kill: Kill, seconds: dict[str, float]) -> Callable[[subprocess.Popen[bytes]], bool]:
    """Waits for the kill's moment in the process it is given; false if the process ended before."""
    metrics = run / "metrics.jsonl"
    # Call this before the process starts: a resumed one replaces the logs when it cuts them back.
    before = _identity(metrics)
    resumed = (run / "manifest.json").exists()

    def began() -> bool:
        return _identity(metrics) != before if resumed else (run / "manifest.json").exists()

    return lambda process: _wait(process, began) and _wait_for(process, run, kill, seconds)


def _wait_for(process: subprocess.Popen[bytes], run: Path, kill: Kill, seconds: dict[str, float]) -> bool:
    """Wait for the kill's moment; returns whether the process is still there to be killed."""
    metrics, store, checkpoints = run / "metrics.jsonl", run / "calls.sqlite-wal", run / "checkpoints"
    part = kill.point * seconds[kill.phase]
    if kill.phase == "evaluating":
        _wait(process, (run / "policy" / "manifest.json").exists)
        return _wait_seconds(process, part)
    if not _wait(process, lambda: _lines(metrics) >= kill.step):
        return False
    if kill.phase == "executing":
        size, lines = _size(store), _lines(metrics)
        _wait(process, lambda: _size(store) != size or _lines(metrics) > lines)
    elif kill.phase == "updating":
        part += seconds["sampling"] + seconds["executing"]
    elif kill.phase == "saving":
        names = _names(checkpoints)
        _wait(process, lambda: not _names(checkpoints) <= names)
    return _wait_seconds(process, part)


def _wait(process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> bool:
    while process.poll() is None:
        if reached():
            return True
        time.sleep(POLL_S)
    return False


def _wait_seconds(process: subprocess.Popen[bytes], seconds: float) -> bool:
    end = time.monotonic() + seconds
    return _wait(process, lambda: time.monotonic() >= end)


def _identity(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _newest_checkpoint(run: Path) -> str:
    steps = [int(name) for name in _names(run / "checkpoints") if name.isdecimal()]
    return f"after step {max(steps)}" if steps else "none"


def _compare(calm: Path, killed: Path) -> bool:
    """Print a table of digests; returns whether all are equal."""
    pairs = list(zip(_digests(calm).items(), _digests(killed).values(), strict=True))
    print(f"\n{'':36}{'undisturbed':14}{'killed, resumed':18}")
    for (name, one), other in pairs:
        print(f"{name:36}{one[:12]:14}{other[:12]:18}{'equal' if one == other else 'DIFFERENT'}")
    equal = all(one == other for (_, one), other in pairs)
    print(f"\nverdict: {'equal' if equal else 'DIFFERENT'}")
    return equal


def _digests(run: Path) -> dict[str, str]:
    policy = json.loads((run / "policy" / "manifest.json").read_text(encoding="utf-8"))
    summary = _without_times(json.loads((run / "summary.json").read_text(encoding="utf-8")))
    with closing(sqlite3.connect(run / "calls.sqlite")) as store:
        rows = store.execute("select key, scope, reply from calls order by key").fetchall()
    calls = [[key, scope, json.loads(reply) | {"seconds": 0.0}] for key, scope, reply in rows]
    return {
        "policy, SHA-256 of all parameters": policy["params_sha256"],
        "policy/policy.safetensors": _sha256((run / "policy" / "policy.safetensors").read_bytes()),
        "metrics.jsonl": _sha256((run / "metrics.jsonl").read_bytes()),
        "executions.jsonl": _sha256((run / "executions.jsonl").read_bytes()),
        "worker calls and their replies": _sha256(json.dumps(calls).encode()),
        "summary.json without times": _sha256(json.dumps(summary).encode()),
    }


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if k not in NOT_COMPARED}
    return [_without_times(v) for v in value] if isinstance(value, list) else value


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
