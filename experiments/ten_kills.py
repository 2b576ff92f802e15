"""Kill an evaluation ten times at random against a server that fails a fifth of its calls; compare the end.

    python experiments/ten_kills.py
    python experiments/ten_kills.py --bench sample --tasks 100 --kills 3 --spec sc

Starts experiments/faulty_server.py, evaluates once undisturbed (`lemon eval`), then again in another folder,
killed with SIGKILL at random moments and started anew after each. Checks that
- every task ends answered or INFRA_FAILED, each listed once;
- no call is made again whose reply was in the call store at a kill. Calls whose reply was still on its way
  then may be: they are counted. What was called is read in the server's own log;
- once the tasks that failed have been asked again, both runs end with the same table, executions and replies.
Exit code 0: all hold; 1: one does not; 2: a run failed. 1,319 tasks take about 40 seconds on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from faulty_server import ANSWERED
from two_runs import RunFailed, compare

from lemon_jax.backends import Message, Request
from lemon_jax.backends.wire import seed_of
from lemon_jax.bench import SOURCES
from lemon_jax.runtime import call_key

GSM8K_TEST = 1319
IDENTITY, MODEL, SLOTS = "faulty-server:1", "local", 16
MOST_ROUNDS = 20  # of asking failed tasks again; with a fifth of the calls failing, one or two are enough
MOST_SAMPLES = 64
POLL_S, SETTLE_S = 0.002, 0.2
LATEST = 0.95  # of the calls: a kill later than that could find the run ended
WORKERS = """[models.{model}]
backend = "openai"
base_url = "{url}"
model = "local"
identity = "{identity}"
slots = {slots}
""" + "".join(
    f'[capacities.{level}]\nmodel = "{{model}}"\nprice = {price}\n'
    for level, price in (("small", 1), ("medium", 3), ("large", 3))
)


@dataclass
class Log:
    """The server's log as far as it was read: (digest of the request, outcome) a call, and the requests."""

    path: Path
    calls: list[tuple[str, str]] = field(default_factory=list)
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    answered: int = 0
    _read: int = 0

    def update(self) -> Log:
        """Read what is new."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read += whole
        for line in data[:whole].splitlines():
            row = json.loads(line)
            self.calls.append((row["request"], row["outcome"]))
            self.answered += row["outcome"] == ANSWERED
            if "body" in row:
                self.bodies[row["request"]] = row["body"]
        return self

    def settle(self) -> None:
        """Read on until the server has noted what a dead client had sent it."""
        calls = -1
        while calls != len(self.calls):
            calls = len(self.calls)
            time.sleep(SETTLE_S)
            self.update()


@dataclass(frozen=True, kw_only=True)
class Kill:
    """`calls` in the log when the process was dead, and the keys that its store held then."""

    calls: int
    stored: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The command line of one evaluation, without its folder, and the log of its server."""

    command: list[str]
    log: Log

    def run(self, out: Path, kill_at: int | None = None, extra_s: float = 0.0) -> bool:
        """Run to the end, or SIGKILL when the log has `kill_at` answered calls; whether it was killed.

        Raises:
            RunFailed: it ended by itself without a result.
        """
        printed = out.with_suffix(".log")
        with printed.open("ab") as output:
            process = subprocess.Popen(
                [*self.command, "--out", str(out)], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            while kill_at is not None and process.poll() is None:
                if self.log.update().answered >= kill_at:
                    time.sleep(extra_s)
                    process.kill()
                    break
                time.sleep(POLL_S)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if code == -signal.SIGKILL:
            self.log.settle()
            return True
        self.log.update()
        if code not in (0, 1) or not (out / "summary.json").exists():
            raise RunFailed.ended(printed, code)
        return False


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)

    def check(folder: Path) -> bool:
        with _server(folder, args.failures, args.seed) as url:
            return _check(args, folder, url)

    return compare(args.out, "ten-kills-", check)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--spec", default="cot", metavar="SPEC|BASELINE", help="what is evaluated (cot)")
    add("--bench", default=_default_bench(), help="as for lemon eval (gsm8k where its file is, else sample)")
    add("--tasks", type=int, help="tasks (all of the bench; sample: 1319)")
    add("--kills", type=int, default=10, help="how often the second run is killed (10)")
    add("--failures", type=float, default=0.2, help="fraction of calls that fail (0.2)")
    add("--seed", type=int, default=0, help="of the faults and of the moments of the kills (0)")
    add("--data", type=Path, help="folder of benchmark files (as for lemon eval)")
    add("--out", type=Path, help="new folder to keep both runs in (a temporary one)")
    return parser.parse_args(argv)


def _default_bench() -> str:
    data = os.environ.get("LEMON_DATA")
    return "gsm8k" if "gsm8k" in SOURCES and data and (Path(data) / "gsm8k").is_dir() else "sample"


@contextmanager
def _server(folder: Path, failures: float, seed: int) -> Iterator[str]:
    script = Path(__file__).resolve().with_name("faulty_server.py")
    options = ["--log", str(folder / "calls.jsonl"), "--failures", str(failures), "--seed", str(seed)]
    options += ["--parent", str(os.getpid())]
    process = subprocess.Popen([sys.executable, str(script), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not (url := process.stdout.readline().strip()):
            raise RunFailed(f"{script}: the server did not start")
        yield url
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _check(args: argparse.Namespace, folder: Path, url: str) -> bool:
    workers = folder / "workers.toml"
    workers.write_text(WORKERS.format(model=MODEL, url=url, identity=IDENTITY, slots=SLOTS), encoding="utf-8")
    tasks = args.tasks or (GSM8K_TEST if args.bench == "sample" else None)
    command = [sys.executable, "-m", "lemon_jax.cli", "eval", args.spec, "--bench", args.bench]
    command += ["--workers", str(workers), *(["--tasks", str(tasks)] if tasks else [])]
    command += ["--data", str(args.data)] if args.data else []
    evaluation = Evaluation(command=command, log=Log(folder / "calls.jsonl"))
    print(f"{args.spec} on {args.bench}; the server fails {args.failures:.0%} of its calls", flush=True)

    calm, killed = folder / "undisturbed", folder / "killed"
    began = time.monotonic()
    evaluation.run(calm)
    good = _print_end("undisturbed", calm, evaluation.log.calls, time.monotonic() - began)
    good &= _ask_again(evaluation, calm)

    first, before = len(evaluation.log.calls), evaluation.log.answered
    kills = _kill(evaluation, killed, args.kills, random.Random(f"kills-{args.seed}"))
    began = time.monotonic()
    evaluation.run(killed)
    ended = evaluation.log.calls[first:]
    good &= _print_end("killed", killed, ended, time.monotonic() - began)
    good &= _ask_again(evaluation, killed)

    good &= len(kills) == args.kills
    good &= _print_repeats(evaluation.log, first, before, kills)
    good &= _compare(calm, killed)
    print(f"\nverdict: {'all hold' if good else 'NOT ALL HOLD'}")
    return good


def _kill(evaluation: Evaluation, out: Path, kills: int, rng: random.Random) -> list[Kill]:
    """Start the evaluation and kill it, again and again; each time somewhat further on."""
    log = evaluation.log
    before, total = log.answered, log.answered
    done = []
    for number, point in enumerate(sorted(rng.uniform(0, LATEST) for _ in range(kills)), start=1):
        # At least one reply more than at the start: a process that did nothing yet has nothing to lose.
        target = max(before + int(point * total), log.answered + 1)
        if not evaluation.run(out, kill_at=target, extra_s=rng.uniform(0, 0.02)):
            print(f"kill {number}/{kills} came too late: the run had ended")
            continue
        done.append(Kill(calls=len(log.calls), stored=frozenset(_stored(out))))
        answered = log.answered - before
        print(
            f"kill {number}/{kills}: {answered:,} calls answered, {len(done[-1].stored):,} stored", flush=True
        )
    return done


def _ask_again(evaluation: Evaluation, out: Path) -> bool:
    """Repeat the command until no task is without a verdict."""
    for rounds in range(MOST_ROUNDS):
        failed = _row(out)["infra_failed"]
        if not failed:
            if rounds:
                print(f"  asked again, {rounds} times, until every task had a verdict")
            return True
        evaluation.run(out)
    print(f"  {failed} tasks still fail after {MOST_ROUNDS} rounds")
    return False


def _print_end(name: str, out: Path, calls: list[tuple[str, str]], seconds: float) -> bool:
    """Say how a run ended; whether its tasks are all there, once, and add up."""
    rows, row = _executions(out), _row(out)
    failed = sum(r["infra_failed"] for r in rows)
    answered = sum(not r["infra_failed"] and r["agents"][-1]["status"] != "SKIPPED" for r in rows)
    faults = sum(outcome != ANSWERED for _, outcome in calls)
    share = faults / max(len(calls), 1)
    print(
        f"{name}: {row['n']:,} tasks: {answered:,} answered, {failed} INFRA_FAILED; the server had "
        f"{len(calls):,} calls and failed {faults:,} ({share:.1%}); {seconds:.0f} s",
        flush=True,
    )
    whole = len({r["task"] for r in rows}) == len(rows) == row["n"] == answered + failed
    if not (whole and failed == row["infra_failed"]):
        print("  TASKS ARE LOST OR COUNTED TWICE")
    return whole and failed == row["infra_failed"]


def _print_repeats(log: Log, first: int, before: int, kills: list[Kill]) -> bool:
    """Calls of the killed run that were made again after they had been answered: allowed, and not."""
    answered: dict[str, list[int]] = defaultdict(list)  # request -> places of its answered calls in the log
    for place, (request, outcome) in enumerate(log.calls[first:], start=first):
        if outcome == ANSWERED:
            answered[request].append(place)
    in_flight = twice = 0
    for places in answered.values():
        for place, following in pairwise(places):
            died = any(place < kill.calls <= following for kill in kills)
            in_flight += died
            twice += not died
    stored_again = 0
    keys = {request: key_of(body) for request, body in log.bodies.items()}
    for kill in kills:
        stored_again += sum(keys[request] in kill.stored for request, _ in log.calls[kill.calls :])
    print(f"different calls: {len(answered):,}, answered {log.answered - before:,} times")
    print(f"  made again although their reply was stored at a kill: {stored_again}")
    print(f"  answered twice without a kill between: {twice}")
    print(f"  made again because a kill came before their reply was stored: {in_flight}")
    return not (stored_again or twice) and in_flight <= len(kills) * SLOTS


def key_of(body: dict[str, Any]) -> str:
    """The call's key in the store, from the request as the server got it."""
    for index in range(MOST_SAMPLES):
        request = Request(
            model=MODEL,
            messages=tuple(Message(role=m["role"], content=m["content"]) for m in body["messages"]),
            max_tokens=body["max_tokens"],
            stop=tuple(body.get("stop", ())),
            temperature=body["temperature"],
            sample_index=index,
        )
        if seed_of(request) == body["seed"]:
            return call_key(IDENTITY, request)
    raise RunFailed(f"a request of the log is none of this project's: seed {body['seed']}")


def _compare(calm: Path, killed: Path) -> bool:
    """Print whether the two runs end alike."""
    good = True
    for name, read in (("table", _row), ("executions", _executions), ("calls and replies", _replies)):
        equal = read(calm) == read(killed)
        good &= equal
        print(f"{name}: {'equal' if equal else 'DIFFERENT'}")
    row = _row(calm)
    share = "unknown how many" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
    right = f"{share} of {row['n']:,} right, {row['no_answer']} without an answer"
    print(f"  {right}, cost per task {row['cost_per_task']}, {row['calls']:,} calls")
    return good


def _row(out: Path) -> dict[str, Any]:
    """The row of the results table, without its time."""
    (row,) = json.loads((out / "summary.json").read_text(encoding="utf-8"))["eval"]
    return {key: value for key, value in row.items() if key != "wall_s"}


def _executions(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "executions.jsonl").read_text(encoding="utf-8").splitlines()]


def _stored(out: Path) -> dict[str, str]:
    """Key -> reply of the call store; empty where the process was killed before it made one."""
    path = out / "calls.sqlite"
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path)) as store:
        if not store.execute("select count(*) from sqlite_master where name = 'calls'").fetchone()[0]:
            return {}
        return dict(store.execute("select key, reply from calls"))


def _replies(out: Path) -> dict[str, dict[str, Any]]:
    return {key: json.loads(reply) | {"seconds": 0.0} for key, reply in _stored(out).items()}


if __name__ == "__main__":
    sys.exit(main())
