"""Executes specs: agents run as soon as their dependencies are done, those of all specs together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from lemon_jax.backends import Request
from lemon_jax.backends.wire import OVERFLOW
from lemon_jax.runtime.calls import Call, Caller
from lemon_jax.runtime.execution import AgentRun, Execution, Status, Usage, call_cost
from lemon_jax.runtime.prompts import Input, Problem, build_messages, fixed_prefix
from lemon_jax.runtime.repeats import repeat_indices
from lemon_jax.runtime.tools import (
    CalculatorError,
    evaluate,
    extract_code,
    format_number,
    majority,
    name_answer,
    nearest_option,
    run_program,
)
from lemon_jax.spec import CAPACITIES, ROLES, Agent, BaseRole, Spec, order

# Reads the final answer off a reply, or None. The bench's rule is passed in, so that votes count
# exactly what the score counts.
Extract = Callable[[Problem, str], str | None]
REPEAT_TEMPERATURE = 0.7  # of an agent that repeats an earlier one, where its capacity names none


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """One sample of one agent, after its tool."""

    text: str
    answer: str | None
    status: Status
    note: str = ""
    overflow: bool = False


class Executor:
    """Runs specs on a worker pool. One instance serves any number of concurrent executions.

    `allow_unsandboxed` lets workers' programs run with the user's own rights where the machine cannot
    isolate them; without it such a program raises LemonError.
    """

    def __init__(self, caller: Caller, extract: Extract, *, allow_unsandboxed: bool = False):
        self._caller = caller
        self._extract = extract
        self._allow_unsandboxed = allow_unsandboxed

    async def execute(
        self,
        spec: Spec,
        problem: Problem,
        *,
        scope: str = "",
        on_agent: Callable[[AgentRun], None] | None = None,
        repeats: Mapping[str, int] | None = None,
        prices: Sequence[float] | None = None,
    ) -> Execution:
        """Run every agent of a valid spec once its dependencies are done.

        Agents that nobody listens to run too: the spec asked for them, and their tokens count. `repeats` are
        places among equal agents that some have already (`repeat_indices`). `prices`, one for each capacity,
        replace the worker file's in what it cost; the calls and their keys are the same.
        """
        tasks: dict[str, asyncio.Task[AgentRun]] = {}
        places = repeat_indices(spec, repeats)
        async with _task_group() as group:
            for agent_id in order(spec):
                agent = spec.agent(agent_id)
                waits = {parent: tasks[parent] for parent in agent.depends_on}
                tasks[agent_id] = group.create_task(
                    self._run_when_ready(spec, agent, problem, waits, places[agent_id], scope, on_agent)
                )
        runs = tuple(tasks[agent.id].result() for agent in spec.agents)
        failed = any(run.status in (Status.INFRA_FAILED, Status.SKIPPED) for run in runs)
        output = tasks[spec.output].result()
        # What a tool could not make a value of is no answer, whatever number stands in it.
        text = "" if output.status is Status.NO_ANSWER else output.output
        execution = Execution(agents=runs, answer_text=text, infra_failed=failed)
        if prices is None:
            return execution
        by_capacity = dict(zip(CAPACITIES, prices, strict=True))
        return execution.at_prices(by_capacity, self._caller.pool.config.cost)

    async def _run_when_ready(
        self,
        spec: Spec,
        agent: Agent,
        problem: Problem,
        waits: dict[str, asyncio.Task[AgentRun]],
        repeat: int,
        scope: str,
        on_agent: Callable[[AgentRun], None] | None,
    ) -> AgentRun:
        parents = {parent: await task for parent, task in waits.items()}
        base = AgentRun(id=agent.id, role=agent.role, capacity=agent.capacity, status=Status.OK)
        lost = [p.id for p in parents.values() if p.status in (Status.INFRA_FAILED, Status.SKIPPED)]
        if lost:
            note = f"depends on {', '.join(lost)}, which did not finish"
            run = replace(base, status=Status.SKIPPED, note=note)
        elif not ROLES[agent.role].llm:
            run = _run_tool(base, ROLES[agent.role], problem, list(parents.values()))
        else:
            inputs = [
                Input(agent_id=a.id, name=a.name, text=parents[a.id].output)
                for a in spec.agents
                if a.id in parents
            ]
            run = await self._run_worker(base, agent, problem, inputs, repeat, scope)
        if on_agent:
            on_agent(run)
        return run

    async def _run_worker(
        self, base: AgentRun, agent: Agent, problem: Problem, inputs: list[Input], repeat: int, scope: str
    ) -> AgentRun:
        role = ROLES[agent.role]
        capacity = self._caller.pool.capacity(agent.capacity)
        messages = build_messages(problem, agent, inputs)
        first = repeat * capacity.samples
        requests = [
            Request(
                model=capacity.model,
                messages=messages,
                max_tokens=min(role.max_tokens, capacity.max_tokens),
                stop=role.stop,
                temperature=(capacity.temperature or REPEAT_TEMPERATURE) if index else 0.0,
                sample_index=index,
            )
            for index in range(first, first + capacity.samples)
        ]
        calls = await self._caller.ask(requests, prefix=fixed_prefix(agent.role), scope=scope)
        usage = sum((self._usage(agent.capacity, call) for call in calls), Usage())
        keys = tuple(call.key for call in calls)
        errors = [call.reply.error for call in calls if call.reply.finish == "error"]
        if errors:
            return replace(base, status=Status.INFRA_FAILED, note=errors[0] or "", usage=usage, keys=keys)
        outcomes = [await self._outcome(role, problem, call) for call in calls]
        chosen = _choose(outcomes)
        return replace(
            base,
            status=chosen.status,
            output=chosen.text,
            answer=chosen.answer,
            note=chosen.note,
            usage=usage,
            keys=keys,
            overflow=chosen.overflow,
        )

    def _usage(self, level: str, call: Call) -> Usage:
        tokens = {
            "prompt_tokens": call.prompt_tokens,
            "prefix_tokens": call.prefix_tokens,
            "generated_tokens": call.generated_tokens,
        }
        pool = self._caller.pool
        cost = call_cost(pool.capacity(level).price, pool.config.cost, **tokens)
        return Usage(calls=1, cost=cost, unmetered=int(call.unmetered), **tokens)

    async def _outcome(self, role: BaseRole, problem: Problem, call: Call) -> _Outcome:
        text = call.reply.text.strip()
        cut = call.reply.finish == "length"
        if call.reply.finish == "overflow":
            # Not the server's words, which no recording holds: a replay notes the same.
            size = f": a prompt of {call.prompt_tokens} tokens" if call.prompt_tokens else ""
            note = f"{OVERFLOW}{size}"
            return _Outcome(text="", answer=None, status=Status.EMPTY, note=note, overflow=True)
        if not text:
            return _Outcome(text="", answer=None, status=Status.EMPTY, note="the worker replied with nothing")
        if role.tool == "none":
            answer = self._extract(problem, text)
        else:
            try:
                answer = await self._tool_value(role, call.reply.text)
            except _NoValueError as error:
                why = f"{role.tool}: {error}" + ("; the reply was cut at its token limit" if cut else "")
                return _Outcome(text=text, answer=None, status=Status.NO_ANSWER, note=why)
            text = f"{text}\nAnswer: {answer}"
        return _Outcome(
            text=text,
            answer=answer,
            status=Status.TRUNCATED if cut else Status.OK,
            note="the reply was cut at its token limit" if cut else "",
        )

    async def _tool_value(self, role: BaseRole, text: str) -> str:
        """The value of a reply handed to its role's tool. Raises _NoValueError with the reason."""
        if role.tool == "calculator":
            try:
                return format_number(evaluate(text.strip()))
            except CalculatorError as error:
                raise _NoValueError(str(error)) from error
        # Not stripped: a program that is indented throughout would lose its first line's indentation.
        program = name_answer(extract_code(text))
        result = await run_program(program, allow_unsandboxed=self._allow_unsandboxed)
        if result.value is None:
            raise _NoValueError(result.reason or result.status)
        return result.value


class _NoValueError(Exception):
    """A tool made no value of a reply: a fault of the reply, and the agent's status says so."""


@asynccontextmanager
async def _task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first failure itself: a LemonError must reach the terminal as one line."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _choose(outcomes: list[_Outcome]) -> _Outcome:
    """The first sample that gave the most frequent answer; the first sample if none has an answer."""
    winner = majority([o.answer for o in outcomes])
    return next((o for o in outcomes if o.answer is not None and o.answer.strip() == winner), outcomes[0])


def _run_tool(base: AgentRun, role: BaseRole, problem: Problem, parents: list[AgentRun]) -> AgentRun:
    """A role that is a tool alone: it works on the dependencies' answers and costs no worker call."""
    answers = [p.answer for p in parents if p.answer is not None]
    if role.tool == "majority_vote":
        # On a choice task a computed value votes for the option it is nearest to.
        votes = [nearest_option(a, problem.options) for a in answers] if problem.options else answers
        answer = majority(votes)
    else:
        # The latest dependency that yields an option wins; earlier ones are its fallback.
        found = (nearest_option(a, problem.options) for a in reversed(answers))
        answer = next((letter for letter in found if letter is not None), None)
    if answer is None:
        return replace(base, status=Status.NO_ANSWER, note=f"{role.name}: no dependency gave a usable answer")
    # A program is no line of text: it is handed on as it is.
    return replace(base, output=answer if problem.entry_point else f"Answer: {answer}", answer=answer)
