"""What it gains to execute a step's specs beside the update before, and what it costs in reward.

    python experiments/bench/overlap.py
    python experiments/bench/overlap.py --curves 40

Trains the warm-started policy on made-up problems, with `overlap` off and on, one after the other in this
process, so that programs are compiled once. The workers are servers that answer every call after a fixed time
(`light_server.py`). Printed are the medians over the steps after the first, whose specs nothing could be
executed beside: the time of a step, its parts (with overlap only what nobody could hide), and the ratio. The
most that there is to gain is the shorter one of update and executions.

`--curves N` trains N steps with simulated workers instead and prints the mean reward of each fifth of the
steps: with overlap specs come from the policy of one update earlier.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replicas import replicas, worker_text
from rich.console import Console
from rich.table import Table

from lemon_jax.backends import WorkerPool, parse_worker_file, worker_config
from lemon_jax.bench import Task, generate
from lemon_jax.extraction import read_answer
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.train.config import RunConfig
from lemon_jax.train.run_dir import METRICS, TIMINGS, RunDir
from lemon_jax.train.simulation import seal
from lemon_jax.train.trainer import Trainer

WARMSTART = Path(__file__).resolve().parents[2] / "checkpoints" / "warmstart"
PARTS = ("sample_s", "execute_s", "update_s")
UNCOUNTED = 2  # steps: the first ones compile, and nothing was executed beside an update before them


class _Quiet:
    def advance(self, n: int = 1, **facts: Any) -> None: ...


async def train(
    config: RunConfig, policy: Orchestrator, pool: WorkerPool, tasks: Sequence[Task], folder: Path
) -> RunDir:
    """A run in `folder`."""
    run = RunDir.create(folder, {"config": config.to_dict()})
    store = CallStore(run.calls)
    executor = Executor(Caller(pool, store), read_answer)
    trainer = Trainer(
        config=config, policy=policy, tasks=tuple(tasks), executor=executor, store=store, run=run
    )
    try:
        async with pool:
            await trainer.train(_Quiet())
    finally:
        trainer.close()
        store.close()
    return run


def measure(config: RunConfig, policy: Orchestrator, latency_ms: float, folder: Path) -> None:
    """Print the two times of a step side by side."""
    tasks = generate("number", 64, seed=0)
    seconds: dict[bool, dict[str, float]] = {}
    with replicas(1, latency_ms) as urls:
        workers = parse_worker_file(worker_text(urls, 256), source="overlap", folder=folder)
        for overlap in (False, True):
            chosen = replace(config, overlap=overlap)
            run = asyncio.run(train(chosen, policy, WorkerPool(workers), tasks, folder / str(overlap)))
            rows = run.read(TIMINGS)[UNCOUNTED:-1]  # nothing is executed beside the last update
            seconds[overlap] = {name: statistics.median(row[name] for row in rows) for name in PARTS}
            seconds[overlap]["step_s"] = statistics.median(sum(row[name] for name in PARTS) for row in rows)
    table = Table("overlap", "step s", "sampling", "waiting for workers", "update", box=None)
    for overlap, found in seconds.items():
        table.add_row("on" if overlap else "off", *(f"{found[name]:.2f}" for name in ("step_s", *PARTS)))
    Console().print(table)
    off, on = seconds[False], seconds[True]
    best = off["step_s"] - min(off["execute_s"], off["update_s"])
    share, least = on["step_s"] / off["step_s"], best / off["step_s"]
    print(f"{latency_ms:.0f} ms a call: {share:.2f} of the time without overlap; at best {least:.2f}")


def curves(config: RunConfig, policy: Orchestrator, seeds: int, folder: Path) -> None:
    """Print mean rewards of each fifth of the steps, with simulated workers."""
    tasks = generate("number", 256, seed=0)
    table = Table("overlap", "seed", "reward, by fifths of the steps", "worker tokens", box=None)
    for seed in range(seeds):
        for overlap in (False, True):
            pool = WorkerPool(worker_config("simulated"), world=seal(tasks))
            chosen = replace(config, overlap=overlap, seed=seed)
            rows = asyncio.run(train(chosen, policy, pool, tasks, folder / f"{seed}-{overlap}")).read(METRICS)
            fifth = max(1, len(rows) // 5)
            means = [
                statistics.mean(r["reward"] for r in rows[i : i + fifth]) for i in range(0, len(rows), fifth)
            ]
            text = "  ".join(f"{mean:.3f}" for mean in means)
            tokens = sum(row["worker_tokens"] for row in rows)
            table.add_row("on" if overlap else "off", str(seed), text, f"{tokens:,}")
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--latency-ms", type=float, default=2000.0, help="from request to reply (2000)")
    parser.add_argument(
        "--steps", type=int, default=9, help="of each run; two are not counted, nor the last (9)"
    )
    parser.add_argument("--curves", type=int, metavar="N", help="train N steps with simulated workers (off)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of --curves, each way (1)")
    parser.add_argument("--policy", type=Path, default=WARMSTART, help="policy folder (warmstart)")
    parser.add_argument(
        "--policy-loss", choices=("clipped", "truncated"), default="clipped", help="(clipped)"
    )
    args = parser.parse_args(argv)
    policy = Orchestrator.load(args.policy)
    config = RunConfig(bench="multiarith", steps=args.curves or args.steps, checkpoint_every=10**6)
    config = replace(config, update=replace(config.update, policy_loss=args.policy_loss))
    with tempfile.TemporaryDirectory() as name:
        if args.curves:
            curves(config, policy, args.seeds, Path(name))
        else:
            measure(config, policy, args.latency_ms, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
