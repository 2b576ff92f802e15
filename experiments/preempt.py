"""How long after SIGTERM has a run saved its state and ended? Stopped in each phase of a step, and resumed.

    python experiments/preempt.py
    python experiments/preempt.py --processes 2

A run whose workers take seconds for each call (`bench/light_server.py`). Its last process alone is told to
stop: while it samples, while it waits for workers, while it updates. Exit code 0: each time all left
within 30 s with exit code 75 and the last whole step saved; 1: not so; 2: the run failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kill_and_resume import count
from two_runs import RunFailed

from lemon_jax.train.preemption import EXIT_PREEMPTED
from lemon_jax.train.run_dir import TIMINGS, RunDir

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
from replicas import replicas, worker_text

RUN = Path(__file__).resolve().parent / "run.py"
NOTICE_S = 30.0  # what clouds give
PHASES = {"sampling": "sample_s", "executing": "execute_s", "updating": "update_s"}
WARM_UP = 2  # steps before the first stop: they compile


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--processes", type=count, default=1, help="processes of the run (1)")
    add("--policy", default="warmstart", help="policy to start from (warmstart)")
    add("--latency-s", type=float, default=4.0, help="seconds a worker takes for a call (4)")
    args = parser.parse_args(argv)
    with (
        replicas(1, 1000 * args.latency_s) as urls,
        tempfile.TemporaryDirectory(prefix="preempt-") as folder,
    ):
        workers = Path(folder) / "workers.toml"
        workers.write_text(worker_text(urls, slots=4), encoding="utf-8")
        try:
            good = [_stop(args, Path(folder), workers, phase) for phase in PHASES]
        except RunFailed as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 2
    return 0 if all(good) else 1


def _stop(args: argparse.Namespace, folder: Path, workers: Path, phase: str) -> bool:
    """Start or resume the run, stop it in the middle of a phase, and say how it ended."""
    run, log = folder / "run", folder / "log"
    arguments = ["--resume", run, "--fresh"]
    if not run.exists():
        arguments = ["--bench", "multiarith", "--workers", workers, "--policy", args.policy, "--fresh"]
        arguments += ["--seed", 0, "--steps", 40, "--out", run]
    lines = len(_rows(run))
    processes = _start([str(a) for a in arguments], args.processes, log)
    try:
        while len(_rows(run)) < lines + WARM_UP:
            _check_alive(processes, log)
        seconds = _rows(run)[-1]
        before = [seconds[name] for name in PHASES.values()][: list(PHASES).index(phase)]
        time.sleep(sum(before) + 0.5 * seconds[PHASES[phase]])
        _check_alive(processes, log)
        steps = len(_rows(run))
        processes[-1].send_signal(signal.SIGTERM)
        began = time.monotonic()
        codes = [process.wait(timeout=10 * NOTICE_S) for process in processes]
        took = time.monotonic() - began
    finally:
        for process in processes:
            process.kill()
            process.wait()
    done = len(_rows(run))
    saved = max((int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()), default=0)
    phases = ", ".join(f"{name} {seconds[key]:.1f} s" for name, key in PHASES.items())
    print(
        f"{args.processes} processes, stopped while {phase} (a step: {phases}): left after {took:.1f} s with "
        f"exit codes {codes}; {steps} whole steps then, {done} at the end, {saved} saved",
        flush=True,
    )
    return took < NOTICE_S and set(codes) == {EXIT_PREEMPTED} and saved == done


def _start(arguments: list[str], processes: int, log: Path) -> list[subprocess.Popen[bytes]]:
    joined: list[list[str]] = [[]]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        common = ["--distributed", "--coordinator", address, "--num-processes", str(processes)]
        joined = [[*common, "--process-id", str(index)] for index in range(processes)]
    environ = os.environ | ({"JAX_PLATFORMS": "cpu"} if processes > 1 else {})
    with log.open("ab") as output:
        return [
            subprocess.Popen(
                [sys.executable, str(RUN), *arguments, *own], stdout=output, stderr=output, env=environ
            )
            for own in joined
        ]


def _rows(run: Path) -> list[dict[str, Any]]:
    """The times of the steps that are whole."""
    return RunDir(run).read(TIMINGS)


def _check_alive(processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    for process in processes:
        if process.poll() is not None:
            raise RunFailed.ended(log, process.returncode)
    time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
