"""Dynamic sampling: groups that carry no signal are replaced by groups of further tasks.

A group whose rewards are all equal has advantages of 0 and dilutes the batch; the easier the tasks become to
the policy, the more such groups there are (Yu et al. 2025, DAPO, section 3.2). There batches are filled until
they are full; here for a bounded number of rounds, since each costs executions, and a batch keeps its shape.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from lemon_jax.bench import Task
from lemon_jax.orchestrator import Rollout
from lemon_jax.train.config import RunConfig
from lemon_jax.train.losses import carries_signal
from lemon_jax.train.rollouts import StepOutcome, tasks_of_step

Write = Callable[[list[Task], int], list[Rollout]]  # the specs of a round
Run = Callable[[RunConfig, list[Task], list[Rollout]], Awaitable[StepOutcome]]


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What a step executed, and the part of it that the update learns from. `everything` begins with the
    groups of the `batch`, in its order; without dynamic sampling the two are the same."""

    batch: StepOutcome
    everything: StepOutcome
    rounds: tuple[int, ...] = ()  # of each group of `everything`, the round that sampled it
    rounds_failed: int = 0  # executions that failed in their round, and perhaps not when executed again

    def facts(self, group: int) -> dict[str, Any]:
        """Metrics of dynamic sampling; none without it. The share is of all groups that were sampled."""
        if not self.rounds:
            return {}
        signal = carries_signal(self.everything.totals(), group)
        return {
            "dynamic_rounds": max(self.rounds),
            "frac_reward_zero_std": float(np.mean(~signal)),
            "rounds_infra_failed": self.rounds_failed,
        }

    def mark(self, rows: list[dict[str, Any]], group: int) -> list[dict[str, Any]]:
        """The step's lines of executions.jsonl; those of rollouts say their round and whether they were
        learned from."""
        learned = len(self.batch.rollouts)
        for index, row in enumerate(rows[: len(self.rounds) * group]):
            row |= {"round": self.rounds[index // group], "in_batch": index < learned}
        return rows


def key_of_round(seed: int, step: int, round_: int) -> jax.Array:
    """The random key that samples a round: fold_in(key(seed), step) for the first, whatever the rounds."""
    key = jax.random.key(seed)
    # Folded before the step, as a step that no run comes to: within one, rows and tokens are folded.
    if round_:
        key = jax.random.fold_in(key, 2**32 - round_)
    return jax.random.fold_in(key, step)


async def sample_dynamically(
    config: RunConfig, step: int, tasks: Sequence[Task], write: Write, run: Run
) -> Executed:
    """Execute groups until `tasks_per_step` of them carry signal, or until `dynamic_sampling` rounds of
    replacements are spent; then edit specs of the batch, and execute these.

    Each round writes specs for a whole step of tasks, so that one shape is compiled, and executes as many
    groups as are missing: what it leaves out costs no worker token. Groups with signal come into the batch
    as they came; the first of the others fill it up. All is a function of (seed, step) and the rewards.
    """
    size, group = config.tasks_per_step, config.group
    unedited = replace(config, edits_per_step=0)
    sampled: list[StepOutcome] = []  # one group each
    rounds: list[int] = []
    signal: list[bool] = []
    for round_ in range(config.dynamic_sampling + 1):
        missing = size - sum(signal)
        if not missing:
            break
        these = tasks_of_step(tasks, config, step, round_)
        rollouts = write(these, round_)
        outcome = await run(unedited, these[:missing], rollouts[: missing * group])
        sampled += _groups(outcome, group)
        rounds += [round_] * missing
        signal += carries_signal(outcome.totals(), group).tolist()
    # Stable: by signal first, then as they were sampled.
    order = sorted(range(len(sampled)), key=lambda i: not signal[i])
    chosen, dropped = sorted(order[:size]), sorted(order[size:])
    # The call store answers what has been executed already; only edits, and calls that failed, ask workers.
    batch = await run(config, _flat(sampled, chosen, "tasks"), _flat(sampled, chosen, "rollouts"))
    names = ("tasks", "rollouts", "scored", "rewards")
    more: dict[str, Any] = {name: getattr(batch, name) + _flat(sampled, dropped, name) for name in names}
    return Executed(
        batch=batch,
        everything=replace(batch, **more),
        rounds=tuple(rounds[i] for i in (*chosen, *dropped)),
        rounds_failed=sum(reward.masked for group in sampled for reward in group.rewards),
    )


def _groups(outcome: StepOutcome, group: int) -> list[StepOutcome]:
    """The outcome of each task alone; nothing in it was edited."""
    out = []
    for n, task in enumerate(outcome.tasks):
        rows = slice(n * group, (n + 1) * group)
        parts = {name: getattr(outcome, name)[rows] for name in ("rollouts", "scored", "rewards")}
        out.append(replace(outcome, tasks=[task], **parts))
    return out


def _flat(groups: Sequence[StepOutcome], chosen: Sequence[int], name: str) -> list[Any]:
    return [item for i in chosen for item in getattr(groups[i], name)]
