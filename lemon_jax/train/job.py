"""The main job: train an orchestrator on a bench, evaluate it beside the baselines, write the run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from lemon_jax.backends import Reply, WorkerPool
from lemon_jax.bench import Dataset, Task
from lemon_jax.bench.stats import fifth
from lemon_jax.extraction import read_answer
from lemon_jax.model import params_sha256
from lemon_jax.orchestrator import Orchestrator, Rollout
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.spec import Parsed, baseline_names, baselines
from lemon_jax.train.config import RunConfig, ScaleConfig
from lemon_jax.train.evaluate import Setting, choose_tasks, evaluate, fixed
from lemon_jax.train.hosts import Hosts
from lemon_jax.train.optimum import Optimum
from lemon_jax.train.prices import at_prices, policy_text
from lemon_jax.train.provenance import SPLIT, made_of, policy_facts, tested
from lemon_jax.train.regret import Regret
from lemon_jax.train.run_dir import EXECUTIONS, METRICS, OTHER_CALLS, SUMMARY, TIMINGS, RunDir
from lemon_jax.train.search import METHOD as BEST_FIXED
from lemon_jax.train.search import Found, search_fixed
from lemon_jax.train.simulation import is_simulated
from lemon_jax.train.trainer import Trainer

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "xllamacpp"),
    *("sentencepiece", "tokenizers", "Jinja2"),  # what decides the ids of a text
)


class Progress(Protocol):
    """What the job tells a person while it runs; `report.RunProgress` is one."""

    def phase(self, name: str, total: float | None = None, *, unit: str = "") -> None: ...
    def advance(self, n: int = 1, **facts: Any) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(kw_only=True)
class Job:
    """Everything a run needs, already resolved and checked."""

    config: RunConfig
    datasets: Mapping[str, Dataset]  # of the benches that are trained and tested on, by name
    policy: Orchestrator
    origin: Mapping[str, Any]  # of the policy: its manifest, or which pretrained model it is
    pool: WorkerPool
    run: RunDir
    progress: Progress
    recording: dict[str, Reply] = field(default_factory=dict)
    allow_unsandboxed: bool = False
    resumed: bool = False
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    mesh: Mesh | None = None
    hosts: Hosts = field(default_factory=Hosts)
    checkpoints: str | None = None  # where they lie; in the run directory unless given
    _earlier_s: float = field(default=0.0, init=False)  # seconds of the steps that earlier processes took
    _regret: Regret | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if is_simulated(self.pool):
            optimum = Optimum(self.pool, self.config.reward, self.config.grader.extractor)
            self._regret = Regret(optimum)

    async def execute(self) -> dict[str, Any]:
        """Train, evaluate, write `summary.json`; returns the summary, which is empty on other hosts."""
        started = time.monotonic()
        store = self.hosts.agree(lambda: CallStore(self.run.calls, self.recording))
        try:
            self.hosts.agree(lambda: self._take_over_calls(store))
            self.hosts.sync(store)
            caller = Caller(self.pool, store)
            executor = Executor(caller, read_answer, allow_unsandboxed=self.allow_unsandboxed)
            trained = await self._train(executor, store)
            found = None
            if self.config.best_fixed:
                found = await self.hosts.run_on_first(lambda: self._search(executor, store))
                self.hosts.sync(store)
            rows = await self._evaluate(executor, store, trained, found)

            def summarise() -> dict[str, Any]:
                if not self.hosts.first:
                    return {}
                summary = self._summary(rows, store, time.monotonic() - started)
                summary |= {"search": found.facts()} if found else {}
                self.run.write_json(SUMMARY, summary)
                return summary

            return self.hosts.agree(summarise)
        finally:
            store.close()

    def _take_over_calls(self, store: CallStore) -> None:
        """Make the first host's store hold what hosts of earlier processes of this run have asked."""
        if self.hosts.first:
            present = {OTHER_CALLS.format(index) for index in range(1, self.hosts.count)}
            for path in sorted(self.run.path.glob(OTHER_CALLS.format("*"))):
                if path.name not in present:
                    with contextlib.closing(CallStore(path)) as left:
                        store.add(left.rows())

    async def _train(self, executor: Executor, store: CallStore) -> Orchestrator:
        trainer = Trainer(
            config=self.config,
            policy=self.policy,
            tasks=at_prices(self._train_tasks(), (), self.config, self.pool),
            executor=executor,
            store=store,
            run=self.run,
            regret=self._regret,
            scale=self.scale,
            mesh=self.mesh,
            hosts=self.hosts,
            checkpoints=self.checkpoints,
        )
        self.policy = trainer.policy
        try:
            done = trainer.resume() if self.resumed else 0
            # What an interrupted evaluation took is not known, and not counted.
            self._earlier_s = sum(
                value for row in self.run.read(TIMINGS) for name, value in row.items() if name.endswith("_s")
            )
            if done:
                self.progress.note(f"resumed after step {done}")
            if self.config.steps:
                self.progress.phase("training", self.config.steps - done, unit="step")
            else:
                self.progress.note("no training: lemon is the policy that --policy names, as it is")
            await trainer.train(self.progress)
            return trainer.save_policy(
                {
                    "kind": "trained",
                    "bench": self.config.bench,
                    "seed": self.config.seed,
                    "steps": self.config.steps,
                    **policy_facts(self.config),
                    "continued_from": self.origin,
                    "config_sha256": self.config.sha256(),
                    **self._simulated(),
                }
            )
        finally:
            trainer.close()

    def _train_tasks(self) -> list[Task]:
        return [task for bench in self.config.trained for task in self.datasets[bench].train]

    async def _search(self, executor: Executor, store: CallStore) -> Found | None:
        """The best fixed spec that as many worker tokens find as the training used."""
        used = sum(row["worker_tokens"] for row in self.run.read(METRICS))
        budget = self.config.search_tokens or used
        if not budget:
            self.progress.note("no fixed spec is searched: the training used no worker tokens")
            return None
        self.progress.phase("searching a fixed spec", budget, unit="worker tokens")
        found = await search_fixed(
            executor,
            store,
            at_prices(self._train_tasks(), self.config.prices, self.config, self.pool),
            rewards=self.config.reward,
            grader=self.config.grader,
            budget=budget,
            samples={level: capacity.samples for level, capacity in self.pool.config.capacities.items()},
            candidates=self.config.search_candidates,
            seed=self.config.seed,
            on_spent=self.progress.advance,
        )
        self.run.append(EXECUTIONS, found.rows)
        return found

    async def _evaluate(
        self,
        executor: Executor,
        store: CallStore,
        trained: Orchestrator,
        found: Found | None,
    ) -> list[dict[str, Any]]:
        """The rows of every bench that is tested on, one bench after the other."""
        tasks = {}
        for bench in self.config.tested:
            chosen = choose_tasks(self.datasets[bench].test, self.config.eval_tasks, self.config.seed)
            tasks[bench] = at_prices(chosen, self.config.prices, self.config, self.pool)
        texts = {bench: [policy_text(t, self.config) for t in part] for bench, part in tasks.items()}
        # One for all benches: the policies are compiled once.
        slots = self.policy.prompt_slots([text for part in texts.values() for text in part])
        policies = {"lemon": trained, "warmstart": self.policy}
        if self.config.steps == 0:  # one and the same
            del policies["warmstart"]
        rows = []
        for bench, part in tasks.items():
            specs: dict[str, list[Parsed]] = {}
            for method, policy in policies.items():
                written = policy.write_greedy(
                    texts[bench], prompt_slots=slots, constrained=self.config.constrained
                )
                specs[method] = [_verdict(r) for r in written]
            known = baselines(seed=self.config.seed, family=part[0].family)
            specs |= {n: fixed(known[n], len(part)) for n in baseline_names(self.config.baselines)}
            if found is not None:
                specs[BEST_FIXED] = fixed(found.spec, len(part))
            rows += await self._evaluate_specs(executor, store, bench, part, specs)
        return rows

    async def _evaluate_specs(
        self,
        executor: Executor,
        store: CallStore,
        bench: str,
        tasks: Sequence[Task],
        specs: Mapping[str, list[Parsed]],
    ) -> list[dict[str, Any]]:
        """A row for each method, by its specs for the tasks of one bench."""
        grader = self.config.grader
        setting = Setting(
            bench=bench,
            split=SPLIT,
            seed=self.config.seed,
            extractor=grader.extractor,
            protocol=self.config.protocol,
            prices=tasks[0].prices,
        )
        where = f" on {bench}" if len(self.config.tested) > 1 else ""
        rows = []
        for method, parsed in specs.items():
            self.progress.phase(f"evaluating {method}{where}", len(tasks))
            row, lines = await evaluate(
                executor,
                store,
                method,
                tasks,
                parsed,
                self.progress.advance,
                setting=setting,
                grader=grader,
                regret=self._regret.of if self._regret else None,
                share=partial(self.hosts.share, store),
            )
            self.run.append(EXECUTIONS, lines)
            rows.append(row)
        return rows

    def _summary(self, rows: list[dict[str, Any]], store: CallStore, wall_s: float) -> dict[str, Any]:
        return {
            "bench": self.config.bench,
            "workers": self.config.workers,
            "policy": self.config.policy,
            "seed": self.config.seed,
            "steps": self.config.steps,
            "wall_s": round(self._earlier_s + wall_s, 1),
            "data": tested([self.datasets[bench] for bench in self.config.tested]),
            "train": training_facts(self.run.read(METRICS), self.run.read(EXECUTIONS)),
            # Of the whole run: training, search and evaluation, over all its processes.
            "calls": {"recorded": store.count(recorded=True), "live": store.count(recorded=False)},
            "eval": rows,
            **self._simulated(),
        }

    def _simulated(self) -> dict[str, bool]:
        """What every file with a result of simulated workers says; nothing for real ones."""
        return {"simulated": True} if self._regret else {}


def _verdict(rollout: Rollout) -> Parsed:
    """A spec that was cut at the token limit is not valid as written, even where it parses."""
    return rollout.parsed if rollout.finished else replace(rollout.parsed, strict_ok=False)


def training_facts(
    metrics: Sequence[Mapping[str, Any]], executions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What summary.json says of the training, by the lines of metrics.jsonl and executions.jsonl."""
    valid = [row["valid"] for row in executions if row["phase"] == "train"]
    rewards = [m["reward"] for m in metrics if m["reward"] is not None]
    ends = fifth(len(rewards))
    counted = ("executions", "counterfactual_executions", "worker_tokens", "counterfactual_tokens")
    return {
        **{name: sum(m[name] for m in metrics) for name in (*counted, "cached_calls", "recorded_calls")},
        # Of all specs: with dynamic sampling steps have more or fewer of them.
        "invalid_rate": round(valid.count(False) / max(len(valid), 1), 4),
        "reward_first": _mean(rewards[:ends]),
        "reward_last": _mean(rewards[-ends:]),
    }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def manifest(
    config: RunConfig,
    datasets: Mapping[str, Dataset],
    policy: Orchestrator,
    pool: WorkerPool,
    scale: ScaleConfig | None = None,
) -> dict[str, Any]:
    """What a run was made of: enough to know whether two runs should agree."""
    return {
        "config": config.to_dict(),
        "config_sha256": config.sha256(),
        "seed": config.seed,
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}, {os.cpu_count()} cores",
        "scale": asdict(scale or ScaleConfig()) | {"processes": jax.process_count()},
        "tokenizer_sha256": policy.tokenizer.sha256,
        **({"chat_template_sha256": policy.chat.sha256} if policy.chat else {}),
        "policy_sha256": params_sha256(policy.decoder),
        **made_of([*datasets.values()], pool, PACKAGES),
    }
