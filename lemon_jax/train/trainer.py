"""The training loop: write, execute, edit, update; and pick up where a killed run stopped."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lemon_jax.bench import Task
from lemon_jax.errors import LemonError
from lemon_jax.model import Decoder, params_sha256
from lemon_jax.model.lora import add_lora, merge_lora
from lemon_jax.model.projection import LoraParam
from lemon_jax.model.sharding import fetch, place, using
from lemon_jax.orchestrator import Orchestrator, Rollout
from lemon_jax.runtime import CallStore, Executor
from lemon_jax.spec import Edit
from lemon_jax.train.ahead import pack, unpack
from lemon_jax.train.batch import SpanTokens, make_batch, micro_batches, span_tokens
from lemon_jax.train.checkpoint import Checkpoints
from lemon_jax.train.config import RunConfig, ScaleConfig
from lemon_jax.train.contrast_model import (
    ContrastModel,
    differences_of,
    predicted_edits,
    prediction_metrics,
)
from lemon_jax.train.dynamic_sampling import Executed, key_of_round, sample_dynamically
from lemon_jax.train.hosts import Hosts, Preempted, of_all
from lemon_jax.train.losses import group_advantages, zero_std_fraction
from lemon_jax.train.prices import policy_text, training_texts
from lemon_jax.train.regret import Regret
from lemon_jax.train.rollouts import (
    StepOutcome,
    WorkersFailed,
    execution_rows,
    run_step,
    step_metrics,
    tasks_of_step,
    workers_fault,
)
from lemon_jax.train.run_dir import EXECUTIONS, METRICS, TIMINGS, RunDir
from lemon_jax.train.update import cast, init_state, update

# Of a step's metrics, what a person sees while the run goes on.
FACTS = ("reward", "regret", "accuracy", "invalid_rate", "cost_per_task", "worker_tokens")


class Progress(Protocol):
    """Where the loop reports to; `report.RunProgress` is one."""

    def advance(self, n: int = 1, **facts: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A step whose specs are written and being executed."""

    rollouts: list[Rollout]  # of its first round
    sample_s: float
    executing: asyncio.Task[Executed]


@dataclass
class Trainer:
    """Trains `policy` on `tasks`. The warm-started policy stays as the KL reference.

    With a mesh parameters, optimiser, reference, sampling and update are split over it. From then on
    `policy` is the one to evaluate: on the mesh, in the numerics of the run. With `lora_rank` only low-rank
    adapters are trained: state and checkpoints hold nothing else, and policy and reference share the rest.
    """

    config: RunConfig
    policy: Orchestrator
    tasks: tuple[Task, ...]
    executor: Executor
    store: CallStore
    run: RunDir
    regret: Regret | None = None  # where the best spec is known
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    mesh: Mesh | None = None
    hosts: Hosts = field(default_factory=Hosts)
    checkpoints: str | None = None  # where they lie; in the run directory unless given

    def __post_init__(self) -> None:
        self.policy = self.policy.within(self.config.fixed)
        decoder = self.policy.decoder
        if self.config.lora_rank:
            decoder = add_lora(
                decoder,
                rank=self.config.lora_rank,
                alpha=self.config.lora_alpha,
                targets=self.config.lora_targets.split(","),
                key=jax.random.key(self.config.seed),
            )
        trained = LoraParam if self.config.lora_rank else nnx.Param
        self._graph, start, *rest = nnx.split(decoder, trained, ...)
        if self.mesh is not None:
            start, rest = place(start, self.mesh), place(rest, self.mesh)
        self._frozen = tuple(cast(part, self.config.update) for part in rest)
        self._reference = cast(start, self.config.update)
        self.policy = self.policy.with_decoder(self._decoder(self._reference))
        self._prompt_slots = self.policy.prompt_slots([*training_texts(self.tasks, self.config)])
        # A copy: the update donates its state's buffers, and the reference must outlive them.
        params = jax.tree.map(lambda x: x.copy(), start)
        self._state = init_state(params, self.config.update)
        self._sampler = self.config.edit_sampler
        self._model = ContrastModel()
        self._checkpoints = Checkpoints(self.checkpoints or self.run.checkpoints, self.hosts)
        self.steps_done = self._saved = 0
        self._begun: Begun | None = None  # the next step, if it is under way
        self._written: list[Rollout] | None = None  # its specs, of a checkpoint

    def resume(self) -> int:
        """Load the newest readable checkpoint and cut the logs back to it; returns the steps done.

        Raises LemonError where there is none though one must have been saved; the logs are as they were.
        """
        restored = self._checkpoints.restore(self._state, self._sampler, self._more())
        if restored is None:
            self.hosts.on_first(self._check_none_was_saved)
        else:
            self.steps_done, self._state, self._sampler, more = restored
            if self.config.predicted_edits:
                self._model = ContrastModel.of(more)
            if self.config.overlap:
                tasks = tasks_of_step(self.tasks, self.config, self.steps_done)
                texts = [policy_text(t, self.config) for t in tasks]
                self._written = unpack(more, self.policy, texts, self.config.group)
        self._saved = self.steps_done
        self.hosts.agree(lambda: self.run.cut_back(self.steps_done))
        return self.steps_done

    def _check_none_was_saved(self) -> None:
        steps = len(self.run.read(METRICS))
        # A step's lines come before its checkpoint, and that is whole at the latest when the next one begins:
        # a kill may leave this many steps, and an empty folder.
        unsaved = 0 if self._checkpoints.missing else 2 * self.config.checkpoint_every
        if steps > unsaved:
            self._checkpoints.unmake()
            raise LemonError(
                f"{self._checkpoints.folder}: no checkpoint there, but {self.run.path / METRICS} has {steps} "
                "steps; mount or restore that folder, or name with --checkpoint-dir where its checkpoints are"
            )

    def decoder(self) -> Decoder:
        """The decoder with its present parameters, in the numerics of the run."""
        return self._decoder(cast(self._state.params, self.config.update))

    def _decoder(self, params: nnx.State) -> Decoder:
        return nnx.merge(self._graph, params, *self._frozen)

    async def train(self, progress: Progress) -> None:
        """Run the remaining steps, and leave with all saved.

        Raises:
            LemonError: the loss of a step, which is named, is not finite.
            WorkersFailed: most of a step failed on its workers; all before it is saved.
            Preempted: a host was told to stop; what the last whole step left is saved.
        """
        try:
            while self.steps_done < self.config.steps:
                if self._begun is None:  # otherwise its executions learn of a stop
                    await self.hosts.check()
                metrics = await self._step(self.steps_done)
                self.steps_done += 1
                if (
                    self.steps_done % self.config.checkpoint_every == 0
                    or self.steps_done == self.config.steps
                ):
                    self._save()
                facts = {name: metrics[name] for name in FACTS if name in metrics}
                facts |= {"infra_failed": failed} if (failed := metrics["infra_failed"]) else {}
                progress.advance(1, **facts)
        except (Preempted, WorkersFailed):
            self._save()
            self._checkpoints.wait()
            raise
        finally:
            await self._break_off()
        self._checkpoints.wait()

    def _save(self) -> None:
        if self._saved != self.steps_done:
            self._checkpoints.save(self.steps_done, self._state, self._sampler, self._more())
            self._saved = self.steps_done

    def _more(self) -> dict[str, np.ndarray]:
        """What else a checkpoint holds: with predicted edits their model, with overlap the step under way."""
        arrays = self._model.arrays() if self.config.predicted_edits else {}
        if self.config.overlap:
            written = self._begun.rollouts if self._begun else self._written or []
            arrays |= pack(written, self.config.specs_per_step, self.policy.max_new)
        return arrays

    async def _break_off(self) -> None:
        """Leave no executions behind that nobody waits for."""
        if self._begun is not None:
            self._begun.executing.cancel()
            await asyncio.gather(self._begun.executing, return_exceptions=True)
            self._begun = None

    def _write(self, step: int, tasks: list[Task], round_: int) -> list[Rollout]:
        return self.policy.write(
            [policy_text(t, self.config) for t in tasks],
            key_of_round(self.config.seed, step, round_),
            group=self.config.group,
            temperature=self.config.update.temperature,
            prompt_slots=self._prompt_slots,
            decoder=self.decoder(),
            constrained=self.config.constrained,
        )

    def _begin(self, step: int) -> Begun:
        """Write a step's specs with the present parameters, unless a checkpoint held them; start to execute
        them."""
        started = time.monotonic()
        rollouts, self._written = self._written, None
        if rollouts is None:
            rollouts = self._write(step, tasks_of_step(self.tasks, self.config, step), 0)
        executing = asyncio.create_task(self._execute(step, rollouts))
        return Begun(rollouts=rollouts, sample_s=time.monotonic() - started, executing=executing)

    async def _execute(self, step: int, rollouts: list[Rollout]) -> Executed:
        sampler, share = self._sampler, partial(self.hosts.share, self.store)

        async def run(config: RunConfig, tasks: list[Task], rollouts: list[Rollout]) -> StepOutcome:
            return await run_step(self.executor, config, step, tasks, rollouts, sampler, share)

        def write(tasks: list[Task], round_: int) -> list[Rollout]:
            return self._write(step, tasks, round_) if round_ else rollouts

        if self.config.dynamic_sampling:
            return await sample_dynamically(self.config, step, self.tasks, write, run)
        outcome = await run(self.config, tasks_of_step(self.tasks, self.config, step), rollouts)
        return Executed(batch=outcome, everything=outcome)

    async def _step(self, step: int) -> dict[str, Any]:
        """One step; with overlap the next one is begun before this one's update, and executed beside it."""
        started = time.monotonic()
        sampling = 0.0
        if self._begun is None:
            self._begun = self._begin(step)
            sampling = self._begun.sample_s
        executed = await self._begun.executing
        if self.config.overlap:  # it may have ended beside the last update: a stop is not to wait for another
            await self.hosts.check()
        if fault := workers_fault(executed.batch, step, f"--resume {self.run.path}"):
            raise of_all(fault)  # every host has the same outcomes
        waiting = time.monotonic() - started - sampling
        self._begun = None
        outcome, group = executed.everything, self.config.group
        metrics = step_metrics(outcome, self.store, self._sampler, self.config, step, self.regret)
        self._sampler = self._sampler.updated(
            [(c.edit.family, c.size) for c in outcome.contrasts if not np.isnan(c.size)]
        )
        learn = partial(self._update, executed.batch, step)
        if self.config.overlap and step + 1 < self.config.steps:
            self._begun = self._begin(step + 1)
            sampling += self._begun.sample_s
            metrics |= await self.hosts.beside(learn)
        else:
            metrics |= learn()
        metrics |= executed.facts(group)
        self.run.append(EXECUTIONS, executed.mark(execution_rows(outcome, self.config, step), group))
        self.run.append(METRICS, [metrics])
        # They add up to the step's wall time: what is done beside an update, nobody waited for.
        seconds = {"sample_s": sampling, "execute_s": waiting}
        seconds["update_s"] = time.monotonic() - started - sampling - waiting
        self.run.append(TIMINGS, [{"step": step} | {k: round(v, 3) for k, v in seconds.items()}])
        return metrics

    def _update(self, outcome: StepOutcome, step: int) -> dict[str, Any]:
        totals = outcome.totals()
        known = [c for c in outcome.contrasts if not np.isnan(c.difference)]
        spell = self.policy.spell if self.config.constrained else None

        def span_of(index: int, edit: Edit) -> SpanTokens | None:
            return span_tokens(self.policy.tokenizer, outcome.rollouts[index], edit, spell)

        found = [(c, span) for c in known if (span := span_of(c.index, c.edit)) is not None]
        masked = [r.masked for r in outcome.rewards]
        edits = [(c.index, span, c.difference) for c, span in found if not c.gated]
        predicted, facts = self._predict(outcome, totals, step)
        edits += [(i, span, d) for i, edit, d in predicted if (span := span_of(i, edit)) is not None]
        batch = make_batch(
            outcome.rollouts,
            group_advantages(totals, self.config.group, scale=self.config.update.advantage_scale),
            masked,
            edits,
            num_edits=self.config.edits_per_step + self.config.predicted_edits,
            prompt_slots=self._prompt_slots,
            pad_id=self.policy.tokenizer.pad_id,
        )
        if self.scale.accumulate > 1:
            batch = micro_batches(batch, self.scale.accumulate)
        constraint = self.policy.constraint if self.config.constrained else None
        passes: list[dict[str, float]] = []
        for _ in range(self.config.updates_per_step):
            with using(self._state.params):
                self._state, values = update(
                    self._state,
                    self._reference,
                    batch,
                    constraint,
                    frozen=self._frozen,
                    graph=self._graph,
                    config=self.config.update,
                    remat=self.scale.remat,
                )
            passes.append({name: float(value) for name, value in values.items()})
            bad = [name for name, value in passes[-1].items() if not np.isfinite(value)]
            if bad:
                raise of_all(
                    LemonError(
                        f"step {step}: {', '.join(bad)} not finite, as it will be when resumed; start a new "
                        "run with a lower update.learning_rate in a preset of your own (--preset FILE.toml)"
                    )
                )
        # The first pass sees the policy that sampled; only a later one can be clipped.
        metrics: dict[str, Any] = passes[0] | {"clip_fraction": passes[-1]["clip_fraction"]}
        metrics |= {"frac_reward_zero_std": zero_std_fraction(totals, self.config.group)} | facts
        if self.config.constrained:
            # Edits for which the sampled spec left too few tokens: their contrasts have no span to score.
            metrics["spans_beyond_max_new"] = len(known) - len(found)
        return metrics

    def _predict(
        self, outcome: StepOutcome, totals: np.ndarray, step: int
    ) -> tuple[list[tuple[int, Edit, float]], dict[str, float | None]]:
        """Edits with the contrasts that the model, this step included, expects of them; what it foresaw."""
        config = self.config
        if not config.predicted_edits:
            return [], {}
        facts = prediction_metrics(self._model, outcome.rollouts, outcome.contrasts)
        self._model.learn(differences_of(outcome.rollouts, totals.tolist(), config.group, outcome.contrasts))
        rng = random.Random(f"predicted-{config.seed}-{step}")
        chosen = predicted_edits(
            self._model,
            outcome.rollouts,
            config.predicted_families,
            config.predicted_edits,
            rng,
            executed=outcome.contrasts,
            masked={i for i, reward in enumerate(outcome.rewards) if reward.masked},
        )
        sizes = [abs(d) for _, _, d in chosen]
        facts |= {"predicted_edits": float(len(chosen))}
        facts |= {"predicted_contrast": float(np.mean(sizes)) if sizes else None}
        return chosen, facts

    def save_policy(self, manifest: dict[str, Any]) -> Orchestrator:
        """Write the trained policy into the run directory, in fp32, adapters merged; returns it as the run
        computes."""
        # On the host, whole: what the mesh holds in parts.
        whole = self.policy.with_decoder(self._merged())

        def save() -> None:
            if self.hosts.first:
                digest = {"params_sha256": params_sha256(whole.decoder)}
                whole.save(self.run.policy, manifest | digest, dtype="float32")

        self.hosts.agree(save)
        return self.policy.with_decoder(self.decoder())

    def _merged(self) -> Decoder:
        params = fetch(self._state.params)
        if not self.config.lora_rank:
            return nnx.merge(self._graph, params, *self._frozen)
        frozen = jax.tree.map(lambda x: x.astype(np.float32), fetch(self._frozen))
        return merge_lora(nnx.merge(self._graph, params, *frozen))

    def close(self) -> None:
        self._checkpoints.close()
