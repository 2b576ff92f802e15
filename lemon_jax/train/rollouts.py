"""One step's walk: tasks, specs, executions, edits, rewards and contrasts. No parameters change here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lemon_jax.bench import Task
from lemon_jax.errors import LemonError
from lemon_jax.orchestrator import Rollout
from lemon_jax.runtime import CallStore, Executor, Status
from lemon_jax.spec import Edit, Parsed, edges, parse
from lemon_jax.train.config import RunConfig
from lemon_jax.train.contrasts import (
    Contrast,
    Sample,
    choose_edits,
    contrast_facts,
    contrast_metrics,
    mean_of,
    places_of_edited,
    places_of_original,
)
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.evaluate import Scored, Share, Work, alone, count_calls, execute, record
from lemon_jax.train.regret import Regret
from lemon_jax.train.rewards import Reward, reward_of


def tasks_of_step(tasks: Sequence[Task], config: RunConfig, step: int, round_: int = 0) -> list[Task]:
    """The tasks of a step, a pure function of (seed, step): epochs of a seeded shuffle, end to end.

    Each bench has epochs of its own, and the benches come in turn, so that of any number of positions each
    has its share, up to one task, however many tasks it has. Price tables come in turn too; without any a
    task keeps the prices that it has.

    With dynamic sampling a step has as many tasks again for each round that it may come to, whether it does
    or not, and no task is another step's too before the epoch ends.
    """
    benches: dict[str, list[Task]] = {}
    for task in tasks:
        benches.setdefault(task.bench, []).append(task)
    members = list(benches.values())
    out = []
    place = step * (config.dynamic_sampling + 1) + round_
    for position in range(place * config.tasks_per_step, (place + 1) * config.tasks_per_step):
        turn, bench = _in_turn(len(members), position, f"benches-{config.seed}")
        epoch, index = divmod(turn, len(members[bench]))
        order = list(range(len(members[bench])))
        random.Random(f"order-{config.seed}-{epoch}").shuffle(order)
        task = members[bench][order[index]]
        if config.price_tables:
            _, table = _in_turn(len(config.price_tables), position, f"prices-{config.seed}")
            task = replace(task, prices=config.price_tables[table])
        out.append(task)
    return out


def _in_turn(count: int, position: int, label: str) -> tuple[int, int]:
    """(turn, who) at a position, where in each turn each of `count` has one position, in a seeded order.

    # of 2, drawn as 1 0 | 0 1 | ...: position 3 -> (1, 1)
    """
    turn, place = divmod(position, count)
    order = list(range(count))
    random.Random(f"{label}-{turn}").shuffle(order)
    return turn, order[place]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """All that one step learned from the workers."""

    tasks: list[Task]
    rollouts: list[Rollout]
    scored: list[Scored]
    rewards: list[Reward]
    resampled: dict[int, list[Sample]]  # of edited rollouts, by index: their samples 1, 2, ... of contrasts
    contrasts: list[Contrast]

    @property
    def for_contrasts(self) -> list[Sample]:
        """All executions that only contrasts needed."""
        edited = [s for c in self.contrasts for s in c.samples]
        return [s for samples in self.resampled.values() for s in samples] + edited

    def totals(self) -> np.ndarray:
        """Rewards [B]; NaN where masked."""
        return np.array([r.total for r in self.rewards])


async def run_step(
    executor: Executor,
    config: RunConfig,
    step: int,
    tasks: list[Task],
    rollouts: list[Rollout],
    sampler: EditSampler,
    share: Share = alone,
) -> StepOutcome:
    """Execute a step's specs and their edits, all together, or as `share` has them executed.

    Calls of the original that an edit does not reach are the edited spec's too, answered by the call store
    (common random numbers; the others are calls of their own, with seeds of their own). With several samples
    of a contrast, specs with an edit are executed as often; their rewards remain those of their first
    execution, by which alone all specs of a task are compared alike.
    """
    rng = random.Random(f"edits-{config.seed}-{step}")
    count = config.edits_per_step if config.families else 0
    edits = choose_edits(rollouts, count, sampler, rng, per_rollout=config.edits_per_rollout)
    samples = config.contrast_samples
    again = [(i, k) for i in dict.fromkeys(i for i, _ in edits) for k in range(1, samples)]
    per_rollout = [tasks[i // config.group] for i in range(len(rollouts))]
    scope, grader = scope_of(step), config.grader

    def work_on(i: int, parsed: Parsed, places: dict[str, int] | None = None) -> Work:
        task = per_rollout[i]
        return Work(task.prompt(), i, partial(execute, executor, task, parsed, scope, grader, places))

    work = [work_on(i, _as_written(rollout)) for i, rollout in enumerate(rollouts)]
    work += [work_on(i, rollouts[i].parsed, places_of_original(rollouts[i], k)) for i, k in again]
    for i, edit in edits:
        parsed = parse(edit.text)
        places = [places_of_edited(rollouts[i], edit, k, config) for k in range(samples)]
        work += [work_on(i, parsed, each) for each in places]

    results = iter(await share(work))
    scored = [next(results) for _ in rollouts]
    rewards = [reward_of(config.reward, s, valid=r.valid) for s, r in zip(scored, rollouts, strict=True)]

    def sample() -> Sample:
        outcome = next(results)
        return Sample(scored=outcome, reward=reward_of(config.reward, outcome))

    resampled: dict[int, list[Sample]] = {}
    for i, _ in again:
        resampled.setdefault(i, []).append(sample())
    contrasts = [
        Contrast(
            index=i,
            edit=edit,
            originals=(rewards[i], *(s.reward for s in resampled.get(i, []))),
            samples=tuple(sample() for _ in range(samples)),
            noise_gate=config.noise_gate,
        )
        for i, edit in edits
    ]
    return StepOutcome(
        tasks=tasks,
        rollouts=rollouts,
        scored=scored,
        rewards=rewards,
        resampled=resampled,
        contrasts=contrasts,
    )


class WorkersFailed(LemonError):
    """Most executions of a step failed on their workers. The step is not done; a resumed run repeats it."""


def workers_fault(outcome: StepOutcome, step: int, way_on: str) -> WorkersFailed | None:
    """What to raise, before the step counts, where more than half of the specs that were executed failed:
    what is left says little of the policy, and an update would use the step up."""
    executed = [s.execution for s in outcome.scored if s.execution is not None]
    failed = [execution for execution in executed if execution.infra_failed]
    if 2 * len(failed) <= len(executed):
        return None
    agents = [agent for agent in failed[0].agents if agent.status is Status.INFRA_FAILED]
    return WorkersFailed(
        f"step {step}: workers failed in {len(failed)} of {len(executed)} executions, first with "
        f"{agents[0].note!r} ({agents[0].capacity} capacity); nothing is learned from such a step: "
        f"see to the workers, then continue with {way_on}"
    )


def scope_of(step: int) -> str:
    return f"train:{step}"


def _as_written(rollout: Rollout) -> Parsed:
    """In training only a spec that is valid as written is executed: the reward sees the strict verdict."""
    return rollout.parsed if rollout.valid else replace(rollout.parsed, spec=None, strict_ok=False)


def execution_rows(outcome: StepOutcome, config: RunConfig, step: int) -> list[dict[str, Any]]:
    """The step's lines of executions.jsonl: rollouts in order, then more samples of them for contrasts, then
    edits in order, each with all its samples."""
    rows = [
        record(
            s,
            phase="train",
            method="lemon",
            step=step,
            reward=r.to_dict(),
            group_index=i % config.group,
            text=rollout.text,
            finished=rollout.finished,
        )
        for i, (s, r, rollout) in enumerate(
            zip(outcome.scored, outcome.rewards, outcome.rollouts, strict=True)
        )
    ]
    for i, samples in outcome.resampled.items():
        rows += [_extra_row(s, i, config, step) | {"sample": k} for k, s in enumerate(samples, start=1)]
    for c in outcome.contrasts:
        for k, s in enumerate(c.samples):
            number = {"sample": k} if len(c.samples) > 1 else {}
            rows.append(_extra_row(s, c.index, config, step, c.edit) | number | contrast_facts(c))
    return rows


def _extra_row(
    sample: Sample, index: int, config: RunConfig, step: int, edit: Edit | None = None
) -> dict[str, Any]:
    """The line of an execution that a contrast needed, of rollout `index` or of an edit of it."""
    return record(
        sample.scored,
        phase="counterfactual",
        method="lemon",
        step=step,
        reward=sample.reward.to_dict(),
        group_index=index % config.group,
        edit=edit,
    )


def step_metrics(
    outcome: StepOutcome,
    store: CallStore,
    sampler: EditSampler,
    config: RunConfig,
    step: int,
    regret: Regret | None = None,
) -> dict[str, Any]:
    """What the workers' side of a step amounts to; means are over valid, unmasked executions, but those of
    `reward`, `invalid_rate` and `regret` over all that are known. `regret` needs simulated workers."""
    totals = outcome.totals()
    executed = [
        s for s, r in zip(outcome.scored, outcome.rewards, strict=True) if s.execution and not r.masked
    ]
    specs = [s.parsed.spec for s in executed if s.parsed.spec is not None]
    own = [key for s in outcome.scored for key in s.call_keys()]
    extra_samples = outcome.for_contrasts
    theirs = [key for s in extra_samples for key in s.scored.call_keys()]
    calls = count_calls(store, scope_of(step), own)
    extra = count_calls(store, scope_of(step), theirs, known=own)
    known = totals[~np.isnan(totals)]
    metrics: dict[str, Any] = {
        "step": step,
        "reward": mean_of(known),
        "reward_std": float(np.std(known)) if len(known) else None,
        "accuracy": mean_of([float(s.grade.correct) for s in executed]),
        "invalid_rate": mean_of([float(not r.valid) for r in outcome.rollouts]),
        "cost_per_task": mean_of([s.execution.usage.cost for s in executed if s.execution]),
        "agents_per_spec": mean_of([float(len(s.agents)) for s in specs]),
        "dependencies_per_spec": mean_of([float(edges(s)) for s in specs]),
        "completion_length": mean_of([float(len(r.token_ids)) for r in outcome.rollouts]),
        "executions": sum(s.execution is not None for s in outcome.scored),
        "counterfactual_executions": len(extra_samples),
        "infra_failed": sum(r.masked for r in outcome.rewards) + sum(s.reward.masked for s in extra_samples),
        "worker_tokens": calls.tokens + extra.tokens,
        "counterfactual_tokens": extra.tokens,
        "cached_calls": calls.cached + extra.cached,
        "recorded_calls": calls.recorded + extra.recorded,
    }
    if regret is not None:
        each = [
            regret.of(r.parsed, s.task, valid=r.valid)
            for r, s in zip(outcome.rollouts, outcome.scored, strict=True)
        ]
        metrics["regret"] = mean_of([x for x in each if not np.isnan(x)])
    p = sampler.probabilities()
    for family in sampler.families:
        sizes = [abs(c.difference) for c in outcome.contrasts if c.edit.family == family]
        metrics[f"contrast/{family}"] = mean_of([x for x in sizes if not np.isnan(x)])
        metrics[f"edit_prob/{family}"] = p[family]
    if config.contrast_samples > 1:
        metrics |= contrast_metrics(outcome.contrasts, noise_gate=config.noise_gate)
    return metrics
