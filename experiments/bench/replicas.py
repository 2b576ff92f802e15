"""Weak scaling of the executor over worker replicas: twice the replicas, twice the specs, in the same time?

    python experiments/bench/replicas.py

For 1, 2, 4 and 8 replicas that answer every call after 50 ms, runs chains of three agents on made-up tasks:
as many as a client without any cost of its own would finish in `--seconds`, with `--slots` calls open at each
replica. Prints calls a second, their share of what one replica's rate promises (the target is 0.9), and this
process's CPU time a call, which bounds what one process can drive. The servers run in a process of their own.
No model, no network; about 20 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lemon_jax.backends import WorkerPool, parse_worker_file
from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.runtime.prompts import TextProblem
from lemon_jax.spec.baselines import baselines

SERVER = Path(__file__).with_name("light_server.py")
CALLS_OF_A_SPEC = 3  # the baseline "chain"


@contextmanager
def replicas(count: int, latency_ms: float) -> Iterator[list[str]]:
    """The addresses of that many servers."""
    command = [sys.executable, str(SERVER), "--replicas", str(count), "--latency-ms", str(latency_ms)]
    with subprocess.Popen([*command, "--parent", str(os.getpid())], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def worker_text(urls: list[str], slots: int) -> str:
    """A worker file with one model at all capacities."""
    model = f'[models.m]\nbackend = "openai"\nmodel = "m"\nslots = {slots}\nbase_urls = {json.dumps(urls)}\n'
    levels = [f'[capacities.{level}]\nmodel = "m"\nprice = 1\n' for level in ("small", "medium", "large")]
    return "".join([model, *levels])


async def run(urls: list[str], specs: int, slots: int, store_path: Path) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, to execute that many specs."""
    config = parse_worker_file(worker_text(urls, slots), source="replicas", folder=Path())
    store, spec = CallStore(store_path), baselines()["chain"]
    try:
        async with WorkerPool(config) as pool:
            executor = Executor(Caller(pool, store), read_answer)

            async def one(index: int) -> None:
                question = f"A farm has {index} sheep and {index + 3} goats. How many animals has it?"
                execution = await executor.execute(spec, TextProblem(question=question), scope="bench")
                assert not execution.infra_failed, execution

            await asyncio.gather(*(one(-1 - i) for i in range(slots * len(urls))))  # connections, prefixes
            start, cpu_start = time.perf_counter(), time.process_time()
            await asyncio.gather(*(one(index) for index in range(specs)))
            return time.perf_counter() - start, time.process_time() - cpu_start
    finally:
        store.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], help="how many (1 2 4 8)")
    parser.add_argument("--slots", type=int, default=4, help="open calls at each replica (4)")
    parser.add_argument("--latency-ms", type=float, default=50.0, help="from request to reply (50)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement, if all is ideal (4)")
    args = parser.parse_args(argv)
    table = Table("replicas", "calls", "calls/s", "of linear", "of ideal", "CPU ms/call", box=None)
    ideal = args.slots / args.latency_ms * 1000  # calls a second of one replica
    first = 0.0
    with replicas(max(args.replicas), args.latency_ms) as urls, tempfile.TemporaryDirectory() as folder:
        for count in args.replicas:
            specs = round(ideal * count * args.seconds / CALLS_OF_A_SPEC)
            work = run(urls[:count], specs, args.slots, Path(folder) / f"{count}.sqlite")
            seconds, cpu_seconds = asyncio.run(work)
            calls = specs * CALLS_OF_A_SPEC
            rate = calls / seconds / count
            first = first or rate
            row = [f"{calls}", f"{calls / seconds:.0f}", f"{rate / first:.2f}", f"{rate / ideal:.2f}"]
            table.add_row(f"{count}", *row, f"{1000 * cpu_seconds / calls:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
