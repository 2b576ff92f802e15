"""What a trained policy keeps on benches, and at prices, that it was not trained on; simulated workers.

    python experiments/sft.py --init checkpoints/small --tell-prices --steps 40 --specs-per-bench 400 \
        --learning-rate 0.001 --out runs/told
    python experiments/ablations/transfer.py --policy runs/told --out runs/transfer

Benches: one policy is trained on MultiArith, SVAMP and GSM8K, another on AQuA and MMLU; both are tested on
all five. Prices: policies are trained on MultiArith at one price table or at three, told of them or not, and
are tested at these tables and at two that none has seen. The number is regret: by how much the best spec of
a held-out task has the higher expected reward. It is exact, no luck of the workers is in it; intervals are
over seeds (Student's t, 95 %). No language model answers: nothing here is a result of a benchmark.

With real workers, PRICES.toml being `price_tables = [[1, 1, 1], [1, 3, 10], [1, 10, 30]]`:

    python experiments/run.py --bench multiarith,svamp,gsm8k --eval-bench aqua,mmlu,humaneval --preset full
    python experiments/run.py --bench multiarith --preset PRICES.toml --tell-prices --prices 1,2,4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import table

from lemon_jax.backends import WorkerPool, worker_config
from lemon_jax.bench import Dataset, Prices, Task, load
from lemon_jax.compiled import compilation_cache_on_disk
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.precision import keep_float32
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.evaluate import choose_tasks
from lemon_jax.train.optimum import Optimum
from lemon_jax.train.prices import at_prices, policy_text
from lemon_jax.train.regret import Regret
from lemon_jax.train.run_dir import RunDir
from lemon_jax.train.simulation import seal
from lemon_jax.train.trainer import Trainer

BENCHES = ("multiarith", "svamp", "gsm8k", "aqua", "mmlu")
ONE: tuple[Prices, ...] = ((1.0, 3.0, 10.0),)
TABLES: tuple[Prices, ...] = ((1.0, 1.0, 1.0), *ONE, (1.0, 10.0, 30.0))
UNSEEN: tuple[Prices, ...] = ((1.0, 2.0, 4.0), (1.0, 20.0, 50.0))

BASE = RunConfig(
    bench="multiarith",
    workers="simulated",
    tasks_per_step=6,
    edits_per_step=2,
    constrained=True,
    checkpoint_every=10**6,
    update=UpdateConfig(learning_rate=1e-3),
)
FIRST = replace(BASE, bench="multiarith,svamp,gsm8k")
SECOND = replace(BASE, bench="aqua,mmlu")
TOLD = replace(BASE, tell_prices=True)
BENCH_ARMS: dict[str, RunConfig] = {
    "warm start": replace(FIRST, steps=0),
    "trained on multiarith, svamp, gsm8k": FIRST,
    "trained on aqua, mmlu": SECOND,
}
PRICE_ARMS: dict[str, RunConfig] = {
    "warm start, told": replace(TOLD, steps=0),
    "one table, told": replace(TOLD, price_tables=ONE),
    "three tables, not told": replace(BASE, price_tables=TABLES),
    "three tables, told": replace(TOLD, price_tables=TABLES),
}


class Progress:
    """The trainer's, of which nothing is shown."""

    def advance(self, n: int = 1, **facts: Any) -> None: ...


@dataclass(kw_only=True)
class Bed:
    """The tasks, the workers, and the best specs; shared by all runs."""

    datasets: Mapping[str, Dataset]
    pool: WorkerPool
    regret: Regret
    policy: Orchestrator
    held_out: int

    def train(self, config: RunConfig, folder: Path) -> Orchestrator:
        """The policy after the training that `config` says."""
        if not config.steps:
            return self.policy
        run = RunDir.create(folder, {"config": config.to_dict(), "simulated": True})
        store = CallStore(run.calls)
        tasks = [task for bench in config.trained for task in self.datasets[bench].train]
        try:
            trainer = Trainer(
                config=config,
                policy=self.policy,
                tasks=at_prices(tasks, (), config, self.pool),
                executor=Executor(Caller(self.pool, store), read_answer),
                store=store,
                run=run,
            )
            try:
                asyncio.run(trainer.train(Progress()))
                return trainer.policy.with_decoder(trainer.decoder())
            finally:
                trainer.close()
        finally:
            store.close()

    def test(self, policy: Orchestrator, config: RunConfig, bench: str, prices: Prices = ()) -> float:
        """Mean regret of the specs that the policy writes for held-out tasks of a bench, at these prices."""
        chosen = choose_tasks(self.datasets[bench].test, self.held_out, 0)
        tasks: Sequence[Task] = at_prices(chosen, prices, config, self.pool)
        texts = [policy_text(task, config) for task in tasks]
        written = policy.write_greedy(texts, prompt_slots=policy.max_prompt, constrained=config.constrained)
        regrets = [self.regret.of(r.parsed, t, valid=r.valid) for r, t in zip(written, tasks, strict=True)]
        return float(np.nanmean(regrets))  # NaN: too many joint states to sum


def main() -> int:
    args = _arguments()
    keep_float32()
    try:
        with compilation_cache_on_disk():
            _run(args)
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--policy", type=Path, required=True, metavar="DIR", help="the warm-started policy of all runs")
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder for the runs and their numbers")
    add("--data", type=Path, metavar="DIR", help="folder of benchmark files (LEMON_DATA, cache, download)")
    add("--steps", type=int, default=30, metavar="N", help="training steps of a run (30)")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each arm (3)")
    add("--held-out", type=int, default=24, metavar="N", help="test tasks of a bench (24)")
    add("--quick", action="store_true", help="2 steps, 2 seeds, 4 tasks: whether it runs, not what comes out")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds, args.held_out = 2, 2, 4
    return args


def _run(args: argparse.Namespace) -> None:
    datasets = {bench: load(bench, data_dir=args.data) for bench in BENCHES}
    for dataset in datasets.values():
        if dataset.banner:
            print(dataset.banner)
    pool = WorkerPool(worker_config("simulated"))
    pool.world = seal(task for d in datasets.values() for task in (*d.train, *d.test))
    bed = Bed(
        datasets=datasets,
        pool=pool,
        regret=Regret(Optimum(pool, BASE.reward)),
        policy=Orchestrator.load(args.policy),
        held_out=args.held_out,
    )
    print("simulated workers: no language model answered")
    arms = {("benches", name): arm for name, arm in BENCH_ARMS.items()}
    arms |= {("prices", name): arm for name, arm in PRICE_ARMS.items()}
    found: dict[str, dict[str, dict[str, list[float]]]] = {"benches": {}, "prices": {}}
    for seed in range(args.seeds):
        for (title, name), arm in arms.items():
            if seed and not arm.steps:  # the warm start is one policy
                continue
            began = time.monotonic()
            config = replace(arm, seed=seed, steps=arm.steps and args.steps)
            policy = bed.train(
                config, args.out / title / f"{name.replace(',', '').replace(' ', '-')}-s{seed}"
            )
            row = found[title].setdefault(name, {})
            for column, value in _columns(bed, policy, config, title):
                row.setdefault(column, []).append(round(value, 5))
            seconds = time.monotonic() - began
            print(f"{title}: {name}, seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
        # After each seed: a run that is stopped leaves what it found.
        setting = {"steps": args.steps, "seeds": seed + 1, "held_out": args.held_out, "base": asdict(BASE)}
        text = json.dumps({"simulated": True, "setting": setting, "regret": found}, indent=1)
        (args.out / "transfer.json").write_text(text + "\n", encoding="utf-8")
    for title, rows in found.items():
        _print_table(title, rows)


def _columns(bed: Bed, policy: Orchestrator, config: RunConfig, title: str) -> Iterator[tuple[str, float]]:
    """What the policy is tested on, with its regret there."""
    if title == "benches":
        for bench in BENCHES:
            yield bench, bed.test(policy, config, bench)
    else:
        for prices in (*TABLES, *UNSEEN):
            yield ",".join(f"{p:g}" for p in prices), bed.test(policy, config, "multiarith", prices)


def _print_table(title: str, arms: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    columns = list(next(iter(arms.values())))
    print(f"\nregret by {title}")
    print(f"| {'':36s} | " + " | ".join(f"{column:>15s}" for column in columns) + " |")
    for name, row in arms.items():
        print(f"| {name:36s} | " + " | ".join(f"{interval(row[column]):>15s}" for column in columns) + " |")


def interval(values: Sequence[float]) -> str:
    """Mean and half of its 95 % interval over seeds.

    # In: [0.1, 0.2, 0.3]   Out: "0.200 ± 0.248"
    """
    mean, half = table.interval(values)
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ± {half:.3f}"


if __name__ == "__main__":
    sys.exit(main())
