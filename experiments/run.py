"""The main job: train an orchestrator on a bench with real workers, and evaluate it beside the baselines.

python experiments/run.py --bench aqua
python experiments/run.py --bench multiarith --preset full --workers my_workers.toml
python experiments/run.py --bench multiarith,svamp,gsm8k --eval-bench aqua,mmlu
python experiments/run.py --bench gsm8k --mesh fsdp=8 --compute-dtype bfloat16 --remat   (docs/scale.md)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from all_benches import check_all, check_data
from replay import print_verdict
from run_arguments import BENCHES, config_of, parse_arguments
from shipped import CALLS, CHECKPOINTS, policy_origin, recorded_calls, shipped_folder

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from lemon_jax.backends import Reply, WorkerPool
    from lemon_jax.bench import Dataset
    from lemon_jax.orchestrator import Orchestrator
    from lemon_jax.report import RunProgress
    from lemon_jax.train.config import RunConfig, ScaleConfig
    from lemon_jax.train.hosts import Hosts
    from lemon_jax.train.job import Job
    from lemon_jax.train.run_dir import RunDir

# Of a manifest: the same in all processes, and when a run is resumed.
MADE_OF = ("policy_sha256", "tokenizer_sha256", "chat_template_sha256", "data", "workers")
# Flags that go with --resume.
OF_A_RESUME = ("data", "fresh", "allow_unsandboxed", "mesh", "accumulate", "remat", "checkpoint_dir", "grace")
EXIT_DIFFERENT, EXIT_INTERRUPTED = 1, 130
EXIT_UNKNOWN = 1  # workers failed on every task of a method, whose row says nothing


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv, __doc__)
    # Imported behind the argument parser, so that --help does not wait for JAX.
    from lemon_jax.errors import EXIT_FAULT, LemonError, fault_line
    from lemon_jax.train.hosts import Hosts, Preempted, connect
    from lemon_jax.train.preemption import EXIT_PREEMPTED

    terminated = False

    def terminate(*_: object) -> None:
        nonlocal terminated
        terminated = True
        signal.raise_signal(signal.SIGINT)

    # A shell that starts it in the background would leave SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        hosts = Hosts()
        if args.distributed:
            hosts = connect(args.coordinator, args.num_processes, args.process_id)
        elif (args.coordinator, args.num_processes, args.process_id) != (None, None, None):
            raise LemonError("--coordinator, --num-processes and --process-id go with --distributed; add it")
        # While the job runs, SIGTERM stops it between two steps instead; see run.
        signal.signal(signal.SIGTERM, terminate)
        if args.bench == "all":
            return run_all(args)
        return run(args, hosts) if args.replay is None else replay(args)
    except (LemonError, OSError) as error:
        if (line := fault_line(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return EXIT_FAULT
    except Preempted as stop:
        print(f"stopped by SIGTERM: {stop}", file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        what = "stopped by SIGTERM" if terminated else "interrupted"
        print(f"{what}; continue with {_way_on(args)}", file=sys.stderr)
        return EXIT_PREEMPTED if terminated else EXIT_INTERRUPTED


def run(args: argparse.Namespace, hosts: Hosts | None = None) -> int:
    """One run, in this process or, with all `hosts`, in several that execute this together."""
    from rich.console import Console

    from lemon_jax.report import RunProgress, write_report
    from lemon_jax.report.cli import print_failures, print_results
    from lemon_jax.report.table import SIMULATED_WARNING
    from lemon_jax.train.hosts import Hosts
    from lemon_jax.train.job import Job, manifest
    from lemon_jax.train.preemption import preemptible
    from lemon_jax.train.run_dir import EXECUTIONS
    from lemon_jax.train.simulation import is_simulated, seal

    hosts = hosts or Hosts()
    config, scale, before = hosts.on_first(lambda: config_of(args))
    earlier, recorded = (before, None) if args.replay is None else (None, before)
    with RunProgress(None if hosts.first else Console(quiet=True)) as progress:
        mesh, datasets, policy, origin, pool = hosts.agree(
            lambda: _load(args, config, scale, progress, recorded)
        )
        if is_simulated(pool):
            pool.world = seal(task for d in datasets.values() for task in (*d.train, *d.test))
            progress.note(SIMULATED_WARNING)
        fresh = args.fresh or bool((earlier or {}).get("fresh"))  # and so it stays when it is resumed
        unserved = fresh or is_simulated(pool)
        recording = hosts.agree(lambda: {} if unserved else _recording(args, datasets))
        if recording:
            size, how = f"{len(recording):,}", "may serve this run (--fresh ignores them)"
            how = "serve this replay, and no worker" if recorded else how
            progress.note(f"{size} recorded worker calls {how}")

        async def job() -> tuple[dict[str, Any], RunDir]:
            with preemptible(hosts, grace_s=args.grace):
                async with pool:
                    await hosts.run(pool.check)
                    facts = manifest(config, datasets, policy, pool, scale)
                    place = hosts.on_first(lambda: _checkpoints(args, earlier))
                    facts |= {"checkpoints": place} if place else {}
                    facts |= {"fresh": True} if fresh else {}
                    if recorded is not None:
                        _check_same(recorded, facts, "replay")
                    directory = _directory(args, config, hosts, facts, earlier, progress)
                    running = Job(
                        config=config,
                        datasets=datasets,
                        policy=policy,
                        origin=origin,
                        pool=pool,
                        run=directory,
                        progress=progress,
                        recording=recording,
                        allow_unsandboxed=args.allow_unsandboxed,
                        resumed=earlier is not None,
                        scale=scale,
                        mesh=mesh,
                        hosts=hosts,
                        checkpoints=place,
                    )
                    return await _execute(running), directory

        summary, directory = asyncio.run(job())
    if hosts.first:
        executions = directory.read(EXECUTIONS)
        print_results(summary, executions)
        print_failures(executions, f"--resume {directory.path}")
        print(f"summary: {directory.path / 'summary.json'}")
        print(f"report:  {write_report(directory.path)}")
        if any(row["infra_failed"] == row["n"] for row in summary["eval"]):
            return EXIT_UNKNOWN
    return 0


def replay(args: argparse.Namespace) -> int:
    """A shipped run again, from its recorded calls alone, and what differs; 0 if nothing does."""
    from lemon_jax.backends import MissingCall
    from lemon_jax.errors import LemonError
    from lemon_jax.train.hosts import Preempted

    if args.distributed:
        raise LemonError("--replay runs in one process; leave out --distributed")
    shipped = args.replay = shipped_folder(args.replay, CHECKPOINTS)
    args.out = args.out or Path("runs") / f"replay-{shipped.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        run(args)
    except (Preempted, KeyboardInterrupt):
        print(f"stopped; a replay is not continued: start it again (see {args.out})", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MissingCall as missing:
        print(f"error: {missing}", file=sys.stderr)
        print_verdict(shipped, args.out, partial=True)
        return EXIT_DIFFERENT
    return 0 if print_verdict(shipped, args.out) else EXIT_DIFFERENT


def _load(
    args: argparse.Namespace,
    config: RunConfig,
    scale: ScaleConfig,
    progress: RunProgress,
    recorded: dict[str, Any] | None,
) -> tuple[Mesh | None, dict[str, Dataset], Orchestrator, dict[str, Any], WorkerPool]:
    """What every host reads for itself; a replay has the workers of the `recorded` manifest."""
    from lemon_jax.backends import WorkerPool, replay_workers, worker_config
    from lemon_jax.bench import load
    from lemon_jax.model.sharding import make_mesh, on_host
    from lemon_jax.orchestrator import Orchestrator
    from lemon_jax.train.provenance import seen_in_training, used_otherwise

    mesh = None
    if scale.devices > 1 or args.distributed:
        mesh = make_mesh(data=scale.data, fsdp=scale.fsdp, tensor=scale.tensor)

    def sets(bench: str, protocol: str) -> Dataset:
        return load(bench, protocol=protocol, data_dir=args.data, on_progress=progress.file)

    benches = dict.fromkeys((*config.trained, *config.tested))
    datasets = {bench: sets(bench, config.protocol) for bench in benches}
    check_data(config, datasets)
    for dataset in datasets.values():
        if dataset.banner:
            progress.note(dataset.banner)
    with contextlib.nullcontext() if mesh is None else on_host():
        policy = Orchestrator.load(folder := shipped_folder(config.policy, CHECKPOINTS))
    origin = policy_origin(folder, CHECKPOINTS)
    seen = seen_in_training(origin, {bench: datasets[bench] for bench in config.tested}, sets)
    for text in (*used_otherwise(origin, config), *seen):
        progress.note(f"warning: {text}")
    workers = worker_config(config.workers) if recorded is None else replay_workers(recorded["workers"])
    return mesh, datasets, policy, origin, WorkerPool(workers, progress.download)


def _directory(
    args: argparse.Namespace,
    config: RunConfig,
    hosts: Hosts,
    facts: dict[str, Any],
    earlier: dict[str, Any] | None,
    progress: RunProgress,
) -> RunDir:
    """The run directory, new or resumed: the first host's, or another host's view of it."""
    from lemon_jax.train.run_dir import OtherHost, RunDir

    def first() -> Path:
        if earlier is None:
            return RunDir.create(args.out or _default_out(config), facts).path
        _check_same(earlier, facts)
        if [name for name in ("git_sha", "versions") if earlier.get(name) != facts[name]]:
            progress.note("warning: the code or its libraries changed since this run began")
        return RunDir.open(args.resume)[0].path

    hosts.same({name: facts.get(name) for name in MADE_OF})
    path = hosts.on_first(first)
    progress.note(f"run directory: {path}")
    return hosts.agree(lambda: RunDir(path) if hosts.first else OtherHost(path, hosts.index, new=not earlier))


def _checkpoints(args: argparse.Namespace, earlier: dict[str, Any] | None) -> str | None:
    """Where the run's checkpoints lie, if not in its folder: the same from whatever folder it is resumed.

    Raises LemonError where a new run would find another run's there, or a resumed one none.
    """
    from lemon_jax.errors import LemonError
    from lemon_jax.train.checkpoint import folder_of, holds_any

    before: str | None = (earlier or {}).get("checkpoints")
    if args.checkpoint_dir is None:
        return before
    place = str(folder_of(args.checkpoint_dir))
    if earlier is None and holds_any(place):
        raise LemonError(
            f"--checkpoint-dir {place}: holds the checkpoints of another run; choose another folder, or "
            "continue that run with --resume and its folder"
        )
    if earlier is not None and place != before and not holds_any(place):
        raise LemonError(
            f"--checkpoint-dir {place}: holds no checkpoint of this run; they are in "
            f"{before or args.resume / 'checkpoints'}: move them there first, or leave out --checkpoint-dir"
        )
    return place


async def _execute(job: Job) -> dict[str, Any]:
    """The job, alone in its folder; the summary."""
    from lemon_jax.compiled import compilation_cache_on_disk
    from lemon_jax.errors import LemonError
    from lemon_jax.precision import keep_float32
    from lemon_jax.train.hosts import Preempted
    from lemon_jax.train.rollouts import WorkersFailed

    if job.config.update.compute_dtype == "float32":
        keep_float32()
    with compilation_cache_on_disk(), contextlib.ExitStack() as stack:
        locked = False
        try:
            job.hosts.agree(lambda: stack.enter_context(job.run.locked()))
            locked = True
            return await job.execute()
        except Preempted as stop:
            raise Preempted(f"continue with --resume {job.run.path}") from stop
        except WorkersFailed:
            raise  # the folder stays, to be resumed
        except LemonError:
            if locked and not job.resumed:  # else it is another process's
                job.run.discard_unused()
            raise


def run_all(args: argparse.Namespace) -> int:
    """Every bench in a folder of its own, then one table. The same command with the same --out goes on."""
    from lemon_jax.backends import WorkerPool, worker_config
    from lemon_jax.errors import LemonError
    from lemon_jax.report.cli import print_results
    from lemon_jax.train.hosts import Preempted
    from lemon_jax.train.run_dir import MANIFEST, SUMMARY, RunDir
    from lemon_jax.train.simulation import is_simulated

    if args.resume is not None:
        raise LemonError("--bench all goes on by the same command with the same --out; leave out --resume")
    if args.distributed:
        raise LemonError("--distributed runs one bench at a time; name one instead of all")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    root = args.out = args.out or Path("runs") / f"all-{args.preset or 'default'}-s{args.seed or 0}-{stamp}"
    simulated = args.workers is not None and is_simulated(WorkerPool(worker_config(args.workers)))
    folders = {bench: root / bench for bench in BENCHES}
    if simulated:
        del folders["humaneval"]
        print("== humaneval left out: simulated workers write no code", file=sys.stderr)
    check_all(args, folders)
    summaries, code = [], 0
    for bench, folder in folders.items():
        if not (folder / SUMMARY).exists():
            print(f"== {bench}", file=sys.stderr)
            one: dict[str, Any] = {"bench": bench, "out": folder}
            if (folder / MANIFEST).exists():
                resumed = vars(parse_arguments(["--resume", str(folder)]))
                one = resumed | {k: getattr(args, k) for k in OF_A_RESUME}  # all else is in the manifest
            if args.checkpoint_dir:
                one["checkpoint_dir"] = f"{args.checkpoint_dir.rstrip('/')}/{bench}"
            try:
                code |= run(argparse.Namespace(**vars(args) | one))
            except Preempted as stop:
                raise Preempted(f"continue with {_way_on(args)}") from stop
        summaries.append(RunDir(folder).read_json(SUMMARY))
    rows = [row for summary in summaries for row in summary["eval"]]
    summary = {"bench": "all", "workers": summaries[0]["workers"], "simulated": simulated, "eval": rows}
    print_results(summary, [])
    print(f"runs: {root}")
    return code


def _way_on(args: argparse.Namespace) -> str:
    """What continues a run that was stopped, or all of --bench all."""
    if args.bench != "all":
        return "--resume and the run's folder"
    return f"the same command and --out {args.out}" if args.out else "the same command"


def _recording(args: argparse.Namespace, benches: Iterable[str]) -> dict[str, Reply]:
    """The recorded calls that may answer this run's: of a replay its own, else those of all its benches."""
    from lemon_jax.runtime import read_recording

    if args.replay:
        return read_recording(args.replay / CALLS)
    return {key: reply for bench in benches for key, reply in recorded_calls(bench, CHECKPOINTS).items()}


def _default_out(config: RunConfig) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{'+'.join(config.trained)}-{config.preset}-s{config.seed}-{stamp}"


def _check_same(earlier: dict[str, Any], now: dict[str, Any], what: str = "resume") -> None:
    """A resumed run, or a replay, must find what the first one started with. Raises LemonError naming what
    differs."""
    from lemon_jax.errors import LemonError

    changed = [name for name in MADE_OF if earlier.get(name) != now.get(name)]
    if changed:
        raise LemonError(
            f"cannot {what}: {', '.join(changed)} differ from the run's manifest; restore what the run was "
            "started with (same --data, policy folder and worker file), or start a new run"
        )


if __name__ == "__main__":
    sys.exit(main())
