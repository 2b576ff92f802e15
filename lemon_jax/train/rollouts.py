"""One step's walk: tasks, specs, executions, edits, rewards and contrasts. No parameters change here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lemon_jax.bench import Task
from lemon_jax.orchestrator import Rollout
from lemon_jax.runtime import CallStore, Executor, repeat_indices
from lemon_jax.spec import Edit, applicable, edges, parse
from lemon_jax.train.config import RunConfig
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.evaluate import Scored, Share, Work, alone, count_calls, execute, record
from lemon_jax.train.grading import Grader
from lemon_jax.train.regret import Regret
from lemon_jax.train.rewards import Reward, reward_of


def tasks_of_step(tasks: Sequence[Task], config: RunConfig, step: int) -> list[Task]:
    """The tasks of a step, a pure function of (seed, step): epochs of a seeded shuffle, end to end.

    Each bench has epochs of its own, and the benches come in turn, so that of any number of positions each
    has its share, up to one task, however many tasks it has. Price tables come in turn too; without any a
    task keeps the prices that it has.
    """
    benches: dict[str, list[Task]] = {}
    for task in tasks:
        benches.setdefault(task.bench, []).append(task)
    members = list(benches.values())
    out = []
    for position in range(step * config.tasks_per_step, (step + 1) * config.tasks_per_step):
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
class Contrast:
    """An edited spec, executed: D = R(original) - R(edited), NaN if either was masked."""

    index: int  # of the rollout
    edit: Edit
    scored: Scored
    reward: Reward
    difference: float


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """All that one step learned from the workers."""

    tasks: list[Task]
    rollouts: list[Rollout]
    scored: list[Scored]
    rewards: list[Reward]
    contrasts: list[Contrast]

    def totals(self) -> np.ndarray:
        """Rewards [B]; NaN where masked."""
        return np.array([r.total for r in self.rewards])


def choose_edits(
    rollouts: Sequence[Rollout], count: int, sampler: EditSampler, rng: random.Random
) -> list[tuple[int, Edit]]:
    """At most `count` edits, each of another rollout, before any of them is executed."""
    order = [i for i, r in enumerate(rollouts) if r.valid]
    rng.shuffle(order)
    chosen: list[tuple[int, Edit]] = []
    for index in order:
        if len(chosen) == count:
            break
        edit = sampler.draw(applicable(rollouts[index].parsed, sampler.families), rng)
        if edit is not None:
            chosen.append((index, edit))
    return chosen


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

    An edited spec asks its workers with the same seeds as the original (common random numbers), and
    agents that the edit does not affect are answered by the call store.
    """
    rng = random.Random(f"edits-{config.seed}-{step}")
    edits = choose_edits(rollouts, config.edits_per_step, sampler, rng)
    scope = scope_of(step)
    per_rollout = [tasks[i // config.group] for i in range(len(rollouts))]
    grader = config.grader
    work = [
        Work(t.prompt(), i, partial(_maybe_execute, executor, t, rollouts[i], scope, grader))
        for i, t in enumerate(per_rollout)
    ]
    for i, edit in edits:
        edited_spec = partial(_execute_edited, executor, per_rollout[i], rollouts[i], edit, scope, grader)
        work.append(Work(per_rollout[i].prompt(), i, edited_spec))
    results = await share(work)
    scored, edited = results[: len(rollouts)], results[len(rollouts) :]
    rewards = [reward_of(config.reward, s, valid=r.valid) for s, r in zip(scored, rollouts, strict=True)]
    contrasts = []
    for (index, edit), outcome in zip(edits, edited, strict=True):
        value = reward_of(config.reward, outcome)
        contrasts.append(
            Contrast(
                index=index,
                edit=edit,
                scored=outcome,
                reward=value,
                difference=rewards[index].total - value.total,
            )
        )
    return StepOutcome(tasks=tasks, rollouts=rollouts, scored=scored, rewards=rewards, contrasts=contrasts)


def _kept(rollout: Rollout, edit: Edit) -> dict[str, int]:
    """The places among equals of the agents that the edit leaves alone, as in the original."""
    assert rollout.parsed.spec is not None  # only valid specs are edited
    places = repeat_indices(rollout.parsed.spec)
    return {agent: place for agent, place in places.items() if agent != edit.agent_id}


def scope_of(step: int) -> str:
    return f"train:{step}"


async def _maybe_execute(
    executor: Executor, task: Task, rollout: Rollout, scope: str, grader: Grader
) -> Scored:
    """In training only a spec that is valid as written is executed: the reward sees the strict verdict."""
    parsed = rollout.parsed if rollout.valid else replace(rollout.parsed, spec=None, strict_ok=False)
    return await execute(executor, task, parsed, scope, grader)


async def _execute_edited(
    executor: Executor, task: Task, rollout: Rollout, edit: Edit, scope: str, grader: Grader
) -> Scored:
    return await execute(executor, task, parse(edit.text), scope, grader, _kept(rollout, edit))


def execution_rows(outcome: StepOutcome, config: RunConfig, step: int) -> list[dict[str, Any]]:
    """The step's lines of executions.jsonl: rollouts in order, then edits in order."""
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
    for c in outcome.contrasts:
        row = record(
            c.scored,
            phase="counterfactual",
            method="lemon",
            step=step,
            reward=c.reward.to_dict(),
            group_index=c.index % config.group,
            edit=c.edit,
        )
        row["contrast"] = None if np.isnan(c.difference) else round(c.difference, 6)
        rows.append(row)
    return rows


def step_metrics(
    outcome: StepOutcome, store: CallStore, sampler: EditSampler, step: int, regret: Regret | None = None
) -> dict[str, Any]:
    """What the workers' side of a step amounts to; means are over valid, unmasked executions, but those of
    `reward`, `invalid_rate` and `regret` over all that are known. `regret` needs simulated workers."""
    totals = outcome.totals()
    executed = [
        s for s, r in zip(outcome.scored, outcome.rewards, strict=True) if s.execution and not r.masked
    ]
    specs = [s.parsed.spec for s in executed if s.parsed.spec is not None]
    own = [key for s in outcome.scored for key in s.call_keys()]
    theirs = [key for c in outcome.contrasts for key in c.scored.call_keys()]
    calls = count_calls(store, scope_of(step), own)
    extra = count_calls(store, scope_of(step), theirs, known=own)
    known = totals[~np.isnan(totals)]
    metrics: dict[str, Any] = {
        "step": step,
        "reward": _mean(known),
        "reward_std": float(np.std(known)) if len(known) else None,
        "accuracy": _mean([float(s.grade.correct) for s in executed]),
        "invalid_rate": _mean([float(not r.valid) for r in outcome.rollouts]),
        "cost_per_task": _mean([s.execution.usage.cost for s in executed if s.execution]),
        "agents_per_spec": _mean([float(len(s.agents)) for s in specs]),
        "dependencies_per_spec": _mean([float(edges(s)) for s in specs]),
        "completion_length": _mean([float(len(r.token_ids)) for r in outcome.rollouts]),
        "executions": sum(s.execution is not None for s in outcome.scored),
        "counterfactual_executions": len(outcome.contrasts),
        "infra_failed": sum(r.masked for r in outcome.rewards)
        + sum(c.reward.masked for c in outcome.contrasts),
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
        metrics["regret"] = _mean([x for x in each if not np.isnan(x)])
    p = sampler.probabilities()
    for family in sampler.families:
        sizes = [abs(c.difference) for c in outcome.contrasts if c.edit.family == family]
        metrics[f"contrast/{family}"] = _mean([x for x in sizes if not np.isnan(x)])
        metrics[f"edit_prob/{family}"] = p[family]
    return metrics


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None
