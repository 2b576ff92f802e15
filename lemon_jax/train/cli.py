"""`lemon eval`: one spec, or a baseline by its name, on a whole bench with any workers; starts no JAX."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lemon_jax.backends import WorkerPool, worker_config
from lemon_jax.bench import PROTOCOLS, SOURCES, Dataset, Task, generate, load
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.report import RunProgress, write_report
from lemon_jax.report.cli import print_failures, print_results
from lemon_jax.report.table import SIMULATED_WARNING
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.runtime.cli import read_spec
from lemon_jax.runtime.tools import ACCEPTED
from lemon_jax.spec import CAPACITIES, Parsed, Spec, baselines, dump
from lemon_jax.train.evaluate import Setting, choose_tasks, evaluate, fixed
from lemon_jax.train.grading import Grader
from lemon_jax.train.optimum import Optimum
from lemon_jax.train.provenance import SPLIT, made_of, tested
from lemon_jax.train.regret import Regret
from lemon_jax.train.rewards import RewardConfig
from lemon_jax.train.run_dir import EXECUTIONS, MANIFEST, SUMMARY, RunDir
from lemon_jax.train.simulation import is_simulated, seal

SAMPLE = "sample"
_SAMPLE_TASKS, _SAMPLE_MOST = 64, 5000  # more would take long to make, and be much alike
# What must be equal for an evaluation to go on in the folder of an earlier one.
_SAME = ("config", "data", "workers")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `eval`; it sets `func(args) -> exit code`."""
    parser = subparsers.add_parser(
        "eval", help="evaluate a spec or a baseline on a bench", description=run_eval.__doc__
    )
    add = parser.add_argument
    add(
        "spec",
        metavar="SPEC|BASELINE",
        help=f"a YAML file, - for standard input, or one of {', '.join(baselines())}",
    )
    add(
        "--bench",
        required=True,
        choices=(*SOURCES, SAMPLE),
        metavar="NAME",
        help=f"{', '.join(SOURCES)}, or {SAMPLE}: problems that are made up here",
    )
    add("--protocol", default="full", choices=tuple(PROTOCOLS), help="task sets, reading of answers (full)")
    add("--workers", default="embedded", metavar="NAME|FILE", help="as for lemon run (embedded)")
    add("--capacity", default="medium", choices=CAPACITIES, help="of a baseline's agents (medium)")
    add("--tasks", type=int, metavar="N", help=f"tasks of the test split (all; {SAMPLE}: {_SAMPLE_TASKS})")
    add("--seed", type=int, default=0, metavar="N", help="which tasks, and in which order (0)")
    add("--data", type=Path, metavar="DIR", help="folder of benchmark files (LEMON_DATA, cache, download)")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="run directory, new or of this same evaluation (runs/eval-...)",
    )
    add(
        "--accept-isolation",
        default=ACCEPTED,
        metavar="LEVEL",
        help=f"lowest for an answer's code ({ACCEPTED})",
    )
    add("--allow-unsandboxed", action="store_true", help="as for lemon run (off)")
    parser.set_defaults(func=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate one spec, the same for every task, and print its row of the results table. The same command
    with the same --out goes on where an earlier one was stopped: no call that was answered is made again.
    Exit code 0: every task has a verdict; 1: the spec is invalid, or workers failed on some tasks, which the
    same command asks again; 2: something else to mend, in one line."""
    if args.tasks is not None and args.tasks < 1:
        raise LemonError(f"--tasks is {args.tasks}, it must be at least 1")
    method, spec = _method(args.spec)
    if spec is None:
        return 1
    try:
        return _evaluate(args, method, spec)
    except KeyboardInterrupt:
        print("interrupted; the same command with the same --out goes on from here", file=sys.stderr)
        raise


def _method(name: str) -> tuple[str, Spec | None]:
    """What the row is called, and its spec; None where that was invalid, which has been said."""
    named = baselines()
    if name in named:
        return name, named[name]
    if name != "-" and not Path(name).exists() and not name.endswith((".yaml", ".yml")):
        raise LemonError(f"{name}: neither a file nor one of {', '.join(named)}")
    return ("stdin" if name == "-" else Path(name).stem), read_spec(name)


def _evaluate(args: argparse.Namespace, method: str, spec: Spec) -> int:
    with RunProgress() as progress:
        dataset = _dataset(args, progress)
        tasks = choose_tasks(dataset.test, args.tasks or len(dataset.test), args.seed)
        grader = Grader.of(args.protocol, args.accept_isolation)
        grader.check(tasks)
        # A baseline of this name has roles of the task's own family.
        spec = baselines(args.capacity, seed=args.seed, family=tasks[0].family).get(args.spec, spec)
        pool = WorkerPool(worker_config(args.workers), progress.download)
        if is_simulated(pool):
            pool.world = seal(dataset.test)
            progress.note(SIMULATED_WARNING)
        summary, run = asyncio.run(_run(args, method, spec, dataset, tasks, pool, progress, grader))
    executions = run.read(EXECUTIONS)
    print_results(summary, executions)
    print_failures(executions, f"the same command with --out {run.path}")
    print(f"summary: {run.path / SUMMARY}")
    print(f"report:  {write_report(run.path)}")
    return 1 if any(row["infra_failed"] for row in executions) else 0


async def _run(
    args: argparse.Namespace,
    method: str,
    spec: Spec,
    dataset: Dataset,
    tasks: Sequence[Task],
    pool: WorkerPool,
    progress: RunProgress,
    grader: Grader,
) -> tuple[dict[str, Any], RunDir]:
    started = time.monotonic()
    async with pool:
        await pool.check()
        facts = _facts(args, method, spec, dataset, tasks, pool)
        run = _open(args.out or _default_out(args.bench, method), facts)
        progress.note(f"run directory: {run.path}")
        # From here on the folder is this process's own: a second one may neither write nor clear it away.
        with run.locked():
            store = CallStore(run.calls)
            try:
                if stored := store.count():
                    progress.note(f"{stored:,} worker calls have been answered before")
                caller = Caller(pool, store)
                executor = Executor(caller, read_answer, allow_unsandboxed=args.allow_unsandboxed)
                progress.phase(f"evaluating {method}", len(tasks))
                setting = Setting(
                    bench=args.bench,
                    split=SPLIT,
                    seed=args.seed,
                    extractor=grader.extractor,
                    protocol=args.protocol,
                )
                row, lines = await evaluate(
                    executor,
                    store,
                    method,
                    tasks,
                    fixed(spec, len(tasks)),
                    progress.advance,
                    setting=setting,
                    grader=grader,
                    regret=_regret(pool, grader),
                )
            except LemonError:
                if not (run.path / SUMMARY).exists():
                    run.discard_unused()
                raise
            finally:
                store.close()
            seconds = time.monotonic() - started
            summary = _summary(args, dataset, row, live_calls=caller.live_calls, seconds=seconds)
            run.write_lines(EXECUTIONS, lines)
            run.write_json(SUMMARY, summary)
    return summary, run


def _summary(
    args: argparse.Namespace, dataset: Dataset, row: dict[str, Any], *, live_calls: int, seconds: float
) -> dict[str, Any]:
    return {
        "bench": args.bench,
        "workers": args.workers,
        "policy": None,
        "seed": args.seed,
        "steps": 0,
        "wall_s": round(seconds, 1),
        "data": tested([dataset]),
        "train": {"live_calls": live_calls},
        "eval": [row],
        **({"simulated": True} if row.get("simulated") else {}),
    }


def _regret(pool: WorkerPool, grader: Grader) -> Callable[[Parsed, Task], float] | None:
    """Under the default reward; None for real workers, whose best spec nobody knows."""
    return Regret(Optimum(pool, RewardConfig(), grader.extractor)).of if is_simulated(pool) else None


def _dataset(args: argparse.Namespace, progress: RunProgress) -> Dataset:
    if args.bench != SAMPLE:
        dataset = load(
            args.bench,
            protocol=args.protocol,
            data_dir=args.data,
            on_progress=progress.file,
        )
        if dataset.banner:
            progress.note(dataset.banner)
        return dataset
    count = args.tasks or _SAMPLE_TASKS
    if count > _SAMPLE_MOST:
        raise LemonError(f"--tasks is {count}, the {SAMPLE} has at most {_SAMPLE_MOST}")
    made = generate("number", count, args.seed, split="test")
    text = "\n".join(f"{task.prompt()}\n{task.gold}" for task in made)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Dataset(bench=SAMPLE, source="sample", train=(), test=made, sha256=digest, faults=())


def _facts(
    args: argparse.Namespace,
    method: str,
    spec: Spec,
    dataset: Dataset,
    tasks: Sequence[Task],
    pool: WorkerPool,
) -> dict[str, Any]:
    return {
        "config": {
            "bench": args.bench,
            "protocol": args.protocol,
            "method": method,
            "spec": dump(spec),
            "tasks": len(tasks),
            "seed": args.seed,
        },
        **made_of([dataset], pool, ["xllamacpp"]),
    }


def _open(out: Path, facts: dict[str, Any]) -> RunDir:
    """A new run directory, or the one of an earlier run of the same evaluation.

    Raises:
        LemonError: the folder holds something else.
    """
    if not (out / MANIFEST).exists():
        return RunDir.create(out, facts)
    run, earlier = RunDir.open(out)
    changed = [key for key in _SAME if earlier.get(key) != facts[key]]
    if changed:
        raise LemonError(
            f"{out}: holds another evaluation ({', '.join(changed)} differ from its {MANIFEST}); "
            "choose another --out, or repeat what it was started with"
        )
    return run


def _default_out(bench: str, method: str) -> Path:
    return Path("runs") / f"eval-{bench}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
