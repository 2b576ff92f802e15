"""Executes specs on tasks, scores the answers, and counts what they used."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lemon_jax.bench import Grade, Prices, Task, wilson
from lemon_jax.runtime import AgentRun, CallStore, Execution, Executor, Usage
from lemon_jax.spec import Edit, Parsed, Spec, dump, parse
from lemon_jax.train.grading import Grader


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a result was measured on, and how: a row that carries it can be quoted alone.

    `extractor` is the rule that read the answers off the replies, `protocol` the bench's choice of
    splits; both as `bench.grade` and `bench.load` name them. `prices` stand in the row if there are any.
    """

    bench: str
    split: str
    seed: int
    extractor: str = "lemon"
    protocol: str = "full"
    prices: Prices | None = None  # the tasks'; None: the worker file's


@dataclass(frozen=True, kw_only=True)
class Scored:
    """An execution with its verdict. `execution` is None where no spec could be executed."""

    task: Task
    parsed: Parsed
    execution: Execution | None
    grade: Grade

    @property
    def infra_failed(self) -> bool:
        return self.execution is not None and self.execution.infra_failed

    @property
    def overflowed(self) -> bool:
        """Whether the prompt of an agent did not fit its worker's context."""
        return self.execution is not None and any(agent.overflow for agent in self.execution.agents)

    def call_keys(self) -> list[str]:
        """Call keys in spec order, with repetitions."""
        agents: tuple[AgentRun, ...] = self.execution.agents if self.execution else ()
        return [key for agent in agents for key in agent.keys]


async def together(*work: Coroutine[Any, Any, Scored]) -> list[Scored]:
    """All results in order. At the first failure the rest is stopped and awaited, and it alone is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Work(NamedTuple):
    """An execution that any host may do. Those of one task ask many equal calls; an edited spec has the
    `spec` number of its original, whose calls it repeats."""

    task: str
    spec: int
    execute: Callable[[], Coroutine[Any, Any, Scored]]


Share = Callable[[Sequence[Work]], Awaitable[list[Scored]]]  # the results in order; see hosts.Hosts.share


async def alone(work: Sequence[Work]) -> list[Scored]:
    """All of it done here."""
    return await together(*(one.execute() for one in work))


NOT_EXECUTED = Grade(correct=False, answer=None, fallback=False, no_answer=True)


async def execute(
    executor: Executor,
    task: Task,
    parsed: Parsed,
    scope: str,
    grader: Grader | None = None,
    repeats: Mapping[str, int] | None = None,
) -> Scored:
    """Run a parsed spec (repaired, if that is all there is) on a task and grade its answer.

    `repeats` are handed to `Executor.execute`, as the task's prices are.
    """
    if parsed.spec is None:
        return Scored(task=task, parsed=parsed, execution=None, grade=NOT_EXECUTED)
    execution = await executor.execute(parsed.spec, task, scope=scope, repeats=repeats, prices=task.prices)
    verdict = NOT_EXECUTED
    if not execution.infra_failed:  # such an answer is not judged, and there may be none
        verdict = await (grader or Grader()).grade(task, execution.answer_text)
    return Scored(task=task, parsed=parsed, execution=execution, grade=verdict)


def record(
    scored: Scored,
    *,
    phase: str,
    method: str,
    step: int | None,
    reward: dict[str, Any] | None = None,
    group_index: int | None = None,
    edit: Edit | None = None,
    text: str | None = None,
    finished: bool = True,
) -> dict[str, Any]:
    """One line of executions.jsonl. It holds no wall times: equal runs write equal lines.

    `text` is the spec as it was written, where that is not what was executed; `finished` is False for
    one that was cut at its token limit.
    """
    execution = scored.execution
    row: dict[str, Any] = {
        "phase": phase,
        "method": method,
        "step": step,
        "task": scored.task.id,
        "spec": scored.parsed.text if text is None else text,
        "valid": scored.parsed.strict_ok and finished,
        "errors": [issue.code for issue in scored.parsed.issues] + ([] if finished else ["UNFINISHED"]),
        "repairs": list(scored.parsed.repairs),
        "agents": [_agent_row(agent) for agent in execution.agents] if execution else [],
        "answer": scored.grade.answer,
        # A code task's gold is a whole solution, and no reader needs it to see what came of the reply.
        "gold": None if scored.task.kind == "code" else scored.task.gold,
        "correct": scored.grade.correct,
        "fallback": scored.grade.fallback,
        "infra_failed": scored.infra_failed,
        "cost": _cost(execution.usage) if execution else 0.0,
    }
    if scored.task.prices is not None:
        row["prices"] = list(scored.task.prices)
    if reward is not None:
        row["reward"] = reward
    if group_index is not None:
        row["group_index"] = group_index
    if edit is not None:
        row["edit"] = {"family": edit.family, "agent": edit.agent_id}
    return row


def _agent_row(agent: AgentRun) -> dict[str, Any]:
    usage = agent.usage
    return {
        "id": agent.id,
        "role": agent.role,
        "capacity": agent.capacity,
        "status": str(agent.status),
        "answer": agent.answer,
        "note": agent.note,
        "calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "prefix_tokens": usage.prefix_tokens,
        "generated_tokens": usage.generated_tokens,
        "cost": _cost(usage),
    }


def _cost(usage: Usage) -> float | None:
    """Unknown where a server did not report its tokens."""
    return None if usage.unmetered else round(usage.cost, 4)


@dataclass(frozen=True, kw_only=True)
class CallCount:
    """Calls of some executions. `new` were first asked for in this scope; of them `recorded` were
    answered by a recording; `cached` had been answered before. A call that failed is none of these.
    `tokens` are prompt and generated tokens of the new ones."""

    calls: int
    new: int
    cached: int
    recorded: int
    tokens: int


def count_calls(store: CallStore, scope: str, keys: Sequence[str], *, known: Iterable[str] = ()) -> CallCount:
    """Account for the calls with these keys; those in `known` count as cached.

    It depends on the set of keys and on the scope that first asked for each, not on which execution
    happened to be served first, nor on interruptions.
    """
    origin = store.origin(keys)  # failed calls are not stored
    before = set(known)
    new = [key for key, (first, _) in origin.items() if first == scope and key not in before]
    return CallCount(
        calls=len(keys),
        new=len(new),
        cached=sum(key in origin for key in keys) - len(new),
        recorded=sum(origin[key][1] for key in new),
        tokens=store.tokens(new),
    )


def choose_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """The evaluation tasks: the first `count` of a seeded shuffle, so that fewer are a subset of more."""
    order = list(tasks)
    random.Random(f"eval-{seed}").shuffle(order)
    return order[:count]


async def evaluate(
    executor: Executor,
    store: CallStore,
    method: str,
    tasks: Sequence[Task],
    specs: Sequence[Parsed],
    on_done: Callable[[], None] | None = None,
    *,
    setting: Setting,
    grader: Grader | None = None,
    regret: Callable[[Parsed, Task], float] | None = None,
    share: Share = alone,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One row of the results table, and its lines of executions.jsonl; each has the `output` that was graded.

    `accuracy` is over the tasks that no infrastructure failure took out, its interval is Wilson's 95 %.
    Where it took all out, accuracy, tokens and cost are None. A spec that is not strictly valid is executed
    as repaired; what cannot be repaired is wrong. `context_overflows` are tasks with a prompt that did not
    fit its worker's context, if there are any.
    `regret` of each spec is known where workers are simulated, and the row says that they are.
    """
    start = time.monotonic()
    scope = f"eval:{method}"

    async def one(task: Task, parsed: Parsed) -> Scored:
        scored = await execute(executor, task, parsed, scope, grader)
        if on_done:
            on_done()
        return scored

    pairs = enumerate(zip(tasks, specs, strict=True))
    scored = await share([Work(t.prompt(), i, partial(one, t, s)) for i, (t, s) in pairs])
    known = [s for s in scored if not s.infra_failed]
    correct = sum(s.grade.correct for s in known)
    usages = [s.execution.usage for s in known if s.execution]
    unmetered = sum(u.unmetered for u in usages)

    def per_task(name: str) -> float | None:
        """A mean that is unknown as soon as one call's tokens are, and where nothing was measured."""
        if unmetered or not known:
            return None
        return round(sum(getattr(u, name) for u in usages) / len(known), 2)

    calls = count_calls(store, scope, [key for s in scored for key in s.call_keys()])
    low, high = wilson(correct, len(known)) if known else (0.0, 1.0)
    row = {
        "method": method,
        "bench": setting.bench,
        "split": setting.split,
        "n": len(tasks),
        "seed": setting.seed,
        "extractor": setting.extractor,
        "protocol": setting.protocol,
        "accuracy": round(correct / len(known), 4) if known else None,
        "ci95": [round(low, 4), round(high, 4)],
        "prompt_tokens_per_task": per_task("prompt_tokens"),
        "prefix_tokens_per_task": per_task("prefix_tokens"),
        "generated_tokens_per_task": per_task("generated_tokens"),
        "cost_per_task": per_task("cost"),
        "no_answer": sum(s.grade.no_answer for s in known),
        "infra_failed": len(scored) - len(known),
        "invalid": sum(not s.parsed.strict_ok for s in scored),
        "calls": calls.calls,
        "recorded_calls": calls.recorded,
        "unmetered_calls": unmetered,
        "wall_s": round(time.monotonic() - start, 1),
    }
    if setting.prices is not None:
        row["prices"] = list(setting.prices)
    if overflows := sum(s.overflowed for s in known):
        row["context_overflows"] = overflows
    if regret is not None:
        each = [value for s in scored if not math.isnan(value := regret(s.parsed, s.task))]
        row["regret_per_task"] = round(sum(each) / len(each), 4) if each else None
        row["simulated"] = True
    return row, [
        record(s, phase="eval", method=method, step=None)
        | {"bench": setting.bench, "output": s.execution.answer_text if s.execution else ""}
        for s in scored
    ]


def fixed(spec: Spec, count: int) -> list[Parsed]:
    """The same spec for every task, as if it had been written `count` times."""
    return [parse(dump(spec))] * count
