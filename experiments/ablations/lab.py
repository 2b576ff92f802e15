"""One training run on simulated workers, with the exact value of its policy after every few steps."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shipped import shipped_folder

from lemon_jax.backends import WorkerPool, worker_config
from lemon_jax.bench import Dataset, Task, load
from lemon_jax.extraction import read_answer
from lemon_jax.model import Decoder
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.evaluate import choose_tasks
from lemon_jax.train.optimum import Optimum
from lemon_jax.train.presets import with_values
from lemon_jax.train.regret import Regret
from lemon_jax.train.run_dir import METRICS, RunDir
from lemon_jax.train.simulation import seal
from lemon_jax.train.trainer import Trainer

SPENT = ("worker_tokens", "counterfactual_tokens")  # keys of a step's metrics


@dataclass
class Lab:
    """What the runs of a process share: tasks, simulated workers, the best spec of each held-out task."""

    dataset: Dataset
    held_out: list[Task]
    pool: WorkerPool
    regret: Regret
    policy: Orchestrator
    every: int  # steps between two evaluations

    def optimum(self) -> float:
        """Mean expected reward of the best specs of the held-out tasks."""
        best = [self.regret.best_spec(task).reward for task in self.held_out]
        return sum(best) / len(best)

    def start(self, kind: str | None, seed: int) -> Orchestrator:
        """The warm-started policy, or a random one of the same shape."""
        if kind is None:
            return self.policy
        return self.policy.with_decoder(Decoder(self.policy.config, rngs=nnx.Rngs(seed)))

    def value(self, policy: Orchestrator, constrained: bool) -> tuple[float, float]:
        """Mean expected reward of the specs that the policy writes greedily for the held-out tasks, and the
        share of them that is invalid."""
        texts = [task.prompt() for task in self.held_out]
        slots = self.policy.prompt_slots(texts)
        written = policy.write_greedy(texts, prompt_slots=slots, constrained=constrained)
        pairs = list(zip(written, self.held_out, strict=True))
        # Too many joint states to enumerate: no value is known, and none is made up.
        regrets = [self.regret.of(r.parsed, task, valid=r.valid) for r, task in pairs]
        known = [
            self.regret.best_spec(task).reward - x
            for x, task in zip(regrets, self.held_out, strict=True)
            if not math.isnan(x)
        ]
        return sum(known) / len(known), sum(not r.valid for r in written) / len(written)


@dataclass
class Watch:
    """The trainer's progress: evaluates after every few steps, and keeps the points of the curve."""

    lab: Lab
    trainer: Trainer
    points: list[dict[str, float]] = field(default_factory=list)
    _spent: Counter[str] = field(default_factory=Counter)  # in the steps whose lines are read
    _read: int = 0  # bytes of them

    def advance(self, n: int = 1, **facts: Any) -> None:
        step = self.trainer.steps_done
        if step % self.lab.every == 0:
            self.look(step)

    def look(self, step: int) -> None:
        if step:
            self._read_on()
        policy = self.trainer.policy.with_decoder(self.trainer.decoder())
        value, invalid = self.lab.value(policy, self.trainer.config.constrained)
        self.points.append(
            {
                "step": step,
                **{key: self._spent[key] for key in SPENT},
                "value": round(value, 6),
                "invalid": round(invalid, 4),
            }
        )

    def _read_on(self) -> None:
        """Add what was spent since the last look: the file is read once in all, not once a look."""
        with (self.trainer.run.path / METRICS).open("rb") as file:
            file.seek(self._read)
            for line in file:
                row = json.loads(line)
                self._spent.update({key: row[key] for key in SPENT})
            self._read = file.tell()


BASE = RunConfig(
    bench="multiarith",
    workers="simulated",
    policy="small",
    tasks_per_step=2,
    group=4,
    edits_per_step=1,
    constrained=True,
    checkpoint_every=10**6,
    update=UpdateConfig(learning_rate=1e-4),
)


def base_config(bench: str, steps: int, changes: Sequence[str] = ()) -> RunConfig:
    """The full method's configuration; `changes` such as "group=8" or "update.tau=2" are applied to it.

    Raises LemonError for a key that no preset could have, or a value of another kind.
    """
    values = []
    for change in changes:
        key, _, text = change.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        table, _, name = key.rpartition(".")
        values.append({table: {name: value}} if table else {name: value})
    return with_values(replace(BASE, bench=bench, steps=steps), *values)


def open_lab(base: RunConfig, policy: str, *, held_out: int, every: int, data: Path | None) -> Lab:
    """Tasks, simulated workers and policy of these runs."""
    dataset = load(base.bench, protocol=base.protocol, data_dir=data)
    pool = WorkerPool(worker_config(base.workers))
    pool.world = seal((*dataset.train, *dataset.test))
    return Lab(
        dataset=dataset,
        held_out=choose_tasks(dataset.test, held_out, 0),
        pool=pool,
        regret=Regret(Optimum(pool, base.reward, base.grader.extractor)),
        policy=Orchestrator.load(shipped_folder(policy)),
        every=every,
    )


def run_arm(lab: Lab, config: RunConfig, start: Orchestrator, folder: Path) -> dict[str, Any]:
    """Train as `config` says from `start`; the curve, with what the run was."""
    began = time.monotonic()
    run = RunDir.create(folder, {"config": config.to_dict(), "simulated": True})
    store = CallStore(run.calls)
    try:
        executor = Executor(Caller(lab.pool, store), read_answer)
        trainer = Trainer(
            config=config,
            policy=start,
            tasks=lab.dataset.train,
            executor=executor,
            store=store,
            run=run,
        )
        try:
            watch = Watch(lab, trainer)
            watch.look(0)
            asyncio.run(trainer.train(watch))
        finally:
            trainer.close()
    finally:
        store.close()
    return {"seed": config.seed, "seconds": round(time.monotonic() - began, 1), "points": watch.points}
