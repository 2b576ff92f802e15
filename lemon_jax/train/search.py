"""The best fixed spec, by random search over the orchestrator's own spec space at an equal budget.

What a trained orchestrator must beat is not only the well-known orchestrations but the best single spec
that the same worker tokens would have found. Candidates come from the teacher's sampler, the space that
the policy was taught; successive halving (Karnin et al. 2013, ICML; Jamieson & Talwalkar 2016, AISTATS)
spends the budget on those that look best.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lemon_jax.bench import Task
from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore, Executor
from lemon_jax.spec import ROLES, Parsed, Spec, dump, parse
from lemon_jax.train.evaluate import execute, record, together
from lemon_jax.train.grading import Grader
from lemon_jax.train.rewards import RewardConfig, reward_of
from lemon_jax.train.teacher import write_spec

METHOD = "best_fixed"
SCOPE = "search"
BATCH = 4  # candidates that run together while little is known of what they cost
_DRAWS = 50  # per candidate, before the space counts as exhausted


@dataclass(frozen=True, kw_only=True)
class Found:
    """The chosen spec and what finding it took."""

    spec: Spec
    reward: float  # mean over the tasks that the spec was tried on
    tasks: int  # how many these were
    candidates: int  # different specs that were tried at all
    executions: int
    worker_tokens: int
    budget: int
    rows: list[dict[str, Any]]  # lines of executions.jsonl, phase "search"

    def facts(self) -> dict[str, Any]:
        """The search in `summary.json`."""
        return {
            "spec": dump(self.spec),
            "reward": round(self.reward, 4),
            "tasks": self.tasks,
            "candidates": self.candidates,
            "executions": self.executions,
            "worker_tokens": self.worker_tokens,
            "budget": self.budget,
        }


def draw_candidates(tasks: Sequence[Task], count: int, seed: int) -> list[Spec]:
    """At most `count` different specs in the teacher's distribution, fewer where there are no more.

    Names and duties are those of the base roles: a spec for all tasks cannot speak of one task's numbers.
    """
    rng = random.Random(f"candidates-{seed}")
    found: dict[str, Spec] = {}
    for _ in range(count * _DRAWS):
        if len(found) == count:
            break
        task = rng.choice(tasks)
        spec = _general(write_spec(task.question, task.options, rng, family=task.family))
        found.setdefault(dump(spec), spec)
    return list(found.values())


def _general(spec: Spec) -> Spec:
    agents = (
        replace(agent, name=ROLES[agent.role].title, duty=ROLES[agent.role].default_duty)
        for agent in spec.agents
    )
    return replace(spec, agents=tuple(agents))


async def search_fixed(
    executor: Executor,
    store: CallStore,
    tasks: Sequence[Task],
    *,
    rewards: RewardConfig,
    grader: Grader,
    budget: int,
    samples: Mapping[str, int],
    candidates: int,
    seed: int,
    on_spent: Callable[[int], None] = lambda tokens: None,
) -> Found:
    """The spec with the best mean reward that `budget` worker tokens find among `candidates` of them.

    Each round has an equal share of what is left and ends with the better half of its candidates. Within a
    round all run on the same tasks, one task after the other, so that means are compared paired. Tokens are
    counted as in training: prompt and generated tokens, each different call once. Who asked it before does
    not matter, so a resumed search, whose calls are stored, spends and finds the same.

    The budget is kept by forecast: executions start only if they fit into it when each costs as much as the
    dearest of its candidate so far; one not yet tried is taken for its calls at the dearest tokens a call.
    Only the very first execution starts without a forecast. Candidates that the first round's share cannot
    pay for are not tried.

    Args:
        samples: calls that an agent of each capacity makes.
        on_spent: told the worker tokens of each batch of executions.

    Raises:
        LemonError: there are no tasks, the budget is not positive, or every execution failed on a server.
    """
    if not tasks:
        raise LemonError("there are no train tasks to search a fixed spec on; leave out best-fixed")
    if budget <= 0:
        raise LemonError(f"search-tokens is {budget}, it must be positive")
    specs = draw_candidates(tasks, candidates, seed)
    order = list(tasks)
    random.Random(f"search-{seed}").shuffle(order)
    search = _Search(
        executor=executor,
        store=store,
        rewards=rewards,
        grader=grader,
        parsed=[parse(dump(spec)) for spec in specs],
        calls=[sum(samples[a.capacity] for a in spec.agents if ROLES[a.role].llm) for spec in specs],
        budget=budget,
        on_spent=on_spent,
    )
    limit = budget / _rounds(len(specs))
    alive = await search.first_sweep(order[0], limit)
    tried, used, number = len(alive), 1, 0
    while len(alive) > 1:
        while used < len(order) and await search.sweep(alive, order[used], limit, number):
            used += 1
        alive = sorted(alive, key=lambda i: (-search.mean(i), i))[: math.ceil(len(alive) / 2)]
        limit = search.spent + (budget - search.spent) / _rounds(len(alive))
        number += 1
    (best,) = alive
    if search.mean(best) == -math.inf:
        raise LemonError(
            "the search found nothing: all executions failed on a server; mend it and go on with --resume"
        )
    return Found(
        spec=specs[best],
        reward=search.mean(best),
        tasks=len(search.totals[best]),
        candidates=tried,
        executions=len(search.rows),
        worker_tokens=search.spent,
        budget=budget,
        rows=search.rows,
    )


def _rounds(candidates: int) -> int:
    """How often a half is kept until one is left; at least 1."""
    return max(1, math.ceil(math.log2(candidates)))


@dataclass(kw_only=True)
class _Search:
    """What is known of each candidate, by its index."""

    executor: Executor
    store: CallStore
    rewards: RewardConfig
    grader: Grader
    parsed: list[Parsed]
    calls: list[int]  # worker calls of one execution
    budget: int
    on_spent: Callable[[int], None]
    spent: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals: list[list[float]] = [[] for _ in self.parsed]  # rewards without the masked ones
        self._tokens: list[list[int]] = [[] for _ in self.parsed]  # of each execution, repeated calls too
        self._keys: set[str] = set()

    def mean(self, index: int) -> float:
        """Mean reward; -inf for one of which nothing is known."""
        known = self.totals[index]
        return sum(known) / len(known) if known else -math.inf

    async def first_sweep(self, task: Task, limit: float) -> list[int]:
        """Run on a task the candidates that `limit` pays for, at least one; returns these."""
        await self._run([0], task, 0)
        tried, waiting = [0], list(range(1, len(self.parsed)))
        while waiting:
            batch: list[int] = []
            for index in waiting:
                if len(batch) < BATCH and self._fits([*batch, index], limit):
                    batch.append(index)
            if not batch:
                break
            await self._run(batch, task, 0)
            tried += batch
            waiting = [index for index in waiting if index not in batch]
        return sorted(tried)

    async def sweep(self, alive: Sequence[int], task: Task, limit: float, number: int) -> bool:
        """Run these candidates on a task if that fits below `limit`; returns whether it did."""
        if not self._fits(alive, limit):
            return False
        await self._run(alive, task, number)
        return True

    def _fits(self, indices: Sequence[int], limit: float) -> bool:
        """Whether these executions stay below the round's limit on average, and below the budget at worst."""
        a_call = [t / n for n, used in zip(self.calls, self._tokens, strict=True) for t in used] or [0.0]
        average, dearest = sum(a_call) / len(a_call), max(a_call)
        expected = worst = 0.0
        for i in indices:
            used = self._tokens[i]
            expected += sum(used) / len(used) if used else average * self.calls[i]
            worst += max(used) if used else dearest * self.calls[i]
        return self.spent + expected <= limit and self.spent + worst <= self.budget

    async def _run(self, indices: Sequence[int], task: Task, number: int) -> None:
        scored = await together(
            *(execute(self.executor, task, self.parsed[i], SCOPE, self.grader) for i in indices)
        )
        for index, outcome in zip(indices, scored, strict=True):
            value = reward_of(self.rewards, outcome)
            if not value.masked:
                self.totals[index].append(value.total)
            if outcome.execution and not value.masked:
                usage = outcome.execution.usage
                self._tokens[index].append(usage.prompt_tokens + usage.generated_tokens)
            row = record(outcome, phase="search", method=METHOD, step=None, reward=value.to_dict())
            self.rows.append(row | {"candidate": index, "round": number})
        new = {key for outcome in scored for key in outcome.call_keys()} - self._keys
        tokens = self.store.tokens(new)
        self._keys |= new
        self.spent += tokens
        self.on_spent(tokens)
