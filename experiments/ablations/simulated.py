"""Which part of the method learns, measured on simulated workers, where the best spec of each task is known.

    python experiments/ablations/simulated.py --out experiments/logs/ablations/simulated

Every arm (arms.py) is trained with every seed from the same small warm-started policy. After every few
steps the policy writes a spec for each held-out task, greedily, and its expected reward is computed exactly:
no luck of the workers is in the curves. Runs that are in the folder already are not repeated. Nothing here
is a result of a benchmark: no language model answers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arms import ARMS, config_of

from lemon_jax.errors import LemonError
from lemon_jax.train.config import RunConfig
from lemon_jax.train.presets import check_counts

ROOT = Path(__file__).resolve().parents[2]
SETTING = "setting.json"


def main() -> int:
    args = _arguments()
    arms = list(ARMS) if args.arms == "all" else args.arms.split(",")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        print(f"error: no arm {', '.join(unknown)}; there are {', '.join(ARMS)}", file=sys.stderr)
        return 2
    from lab import base_config, shipped_folder

    from lemon_jax.orchestrator import read_manifest

    try:
        base = replace(base_config(args.bench, args.steps, args.set), policy=Path(args.policy).name)
        _check(arms, base)
        policy_sha256 = read_manifest(shipped_folder(args.policy)).get("params_sha256")
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    setting = {
        "held_out": args.held_out,
        "every": args.every,
        "policy_sha256": policy_sha256,
        "config": asdict(base),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    text, path = json.dumps(setting, indent=1) + "\n", args.out / SETTING
    if path.exists() and path.read_text(encoding="utf-8") != text:
        print(f"error: {path}: its curves have another setting; give another --out", file=sys.stderr)
        return 2
    path.write_text(text, encoding="utf-8")
    # By seed first, so that a table can be read before all is done.
    jobs = [
        (arm, seed) for seed in range(args.seeds) for arm in arms if not _file(args.out, arm, seed).exists()
    ]
    print(f"{len(jobs)} runs to do", flush=True)
    context = multiprocessing.get_context("spawn")  # JAX has threads: no fork
    queue: Any = context.Queue()
    for job in [*jobs, *[None] * args.processes]:
        queue.put(job)
    workers = [context.Process(target=_work, args=(queue, args, base)) for _ in range(args.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return int(any(worker.exitcode for worker in workers))


def _check(arms: list[str], base: RunConfig) -> None:
    """Raise LemonError where an arm is no run, or has an option that changes nothing of it."""
    faults = []
    for arm in arms:
        try:
            check_counts(config_of(arm, base, 0))
        except LemonError as error:
            faults.append(f"{arm}: {error}")
    if faults:
        raise LemonError("; ".join(faults))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--bench", default="multiarith", metavar="NAME", help="whose tasks (multiarith)")
    add("--arms", default="all", metavar="NAMES", help="ARM[,ARM...] or all (all)")
    add("--seeds", type=int, default=5, metavar="N", help="seeds 0 to N-1 (5)")
    add("--steps", type=int, default=60, metavar="N", help="steps of a run (60)")
    add("--held-out", type=int, default=40, metavar="N", help="test tasks whose specs are valued (40)")
    add("--every", type=int, default=1, metavar="N", help="steps between two valuations (1)")
    add("--policy", default="small", metavar="NAME", help="policy folder, or name in checkpoints/ (small)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of the base configuration (none)")
    add("--processes", type=int, default=2, metavar="N", help="runs at a time (2)")
    add("--data", type=Path, metavar="DIR", help="folder of benchmark files (LEMON_DATA, cache, download)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the curves")
    return parser.parse_args()


def _file(out: Path, arm: str, seed: int) -> Path:
    return out / f"{arm}-s{seed}.json"


def _work(queue: Any, args: argparse.Namespace, base: RunConfig) -> None:
    """One process: takes runs until there are none."""
    import tempfile

    from lab import open_lab, run_arm

    from lemon_jax.compiled import compilation_cache_on_disk
    from lemon_jax.files import replace_file
    from lemon_jax.precision import keep_float32
    from lemon_jax.train.provenance import git_sha

    keep_float32()
    code = git_sha()
    with compilation_cache_on_disk():
        lab = open_lab(base, args.policy, held_out=args.held_out, every=args.every, data=args.data)
        optimum = lab.optimum()
        parent = multiprocessing.parent_process()
        # Whoever stops the command stops it: a process whose parent is gone begins no other run.
        while (job := queue.get()) is not None and parent is not None and parent.is_alive():
            arm, seed = job
            config = config_of(arm, base, seed)
            with tempfile.TemporaryDirectory() as folder:
                start = lab.start(ARMS[arm].get("policy"), seed)
                facts = {"arm": arm, "optimum": optimum, "git_sha": code}
                curve = facts | run_arm(lab, config, start, Path(folder) / "run")
            replace_file(_file(args.out, arm, seed), json.dumps(curve) + "\n")
            last = curve["points"][-1]
            print(
                f"{arm:22s} seed {seed}  {last['value'] / optimum:6.1%} of the optimum after "
                f"{last['worker_tokens']:,} worker tokens, {last['counterfactual_tokens']:,} of them for "
                f"contrasts  {curve['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
