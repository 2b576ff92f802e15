"""A worker double that answers by duty, and the pool and executor around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import contextmanager

from lemon_jax.backends import Reply, Request, WorkerPool, worker_config
from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Caller, CallStore, Execution, Executor, TextProblem
from lemon_jax.spec import Agent, Spec

PROBLEM = TextProblem(question="What is 3 + 4?")
Answer = Callable[[Request], "str | Reply"]


def duty(request: Request) -> str:
    """The duty of the agent that asks; empty for the call that measures a role's fixed prefix."""
    return request.messages[0].content.partition("\n\nYour duty: ")[2]


class Worker:
    """Answers by `answer` after `delay_s`. `events` holds ("start" | "end", duty) in order of time."""

    identity = "double:1"

    def __init__(self, answer: Answer = lambda request: "Answer: 7", delay_s: float = 0.0):
        self.answer = answer
        self.delay_s = delay_s
        self.calls: list[Request] = []
        self.events: list[tuple[str, str]] = []

    @property
    def duties(self) -> list[str]:
        """The duties asked for, without the measurements of prefixes."""
        return [duty(request) for request in self.calls if duty(request)]

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        self.calls += requests
        self.events += [("start", duty(r)) for r in requests]
        await asyncio.sleep(self.delay_s)
        for index, request in enumerate(requests):
            found = self.answer(request)
            self.events.append(("end", duty(request)))
            yield index, found if isinstance(found, Reply) else reply(request, found)

    async def aclose(self) -> None:
        pass


def reply(request: Request, text: str, finish="stop") -> Reply:
    """Tokens are words."""
    prompt = sum(len(m.content.split()) for m in request.messages)
    return Reply(text=text, finish=finish, prompt_tokens=prompt, generated_tokens=len(text.split()))


class Pool(WorkerPool):
    """The scripted worker file's capacities, all answered by one worker."""

    def __init__(self, worker: Worker):
        super().__init__(worker_config("scripted"))
        self._worker = worker

    def backend(self, model: str) -> Worker:
        return self._worker


@contextmanager
def caller(worker: Worker, **kwargs):
    store = CallStore(None)
    try:
        yield Caller(Pool(worker), store, **kwargs)
    finally:
        store.close()


def run(worker: Worker, *specs: Spec, problem=PROBLEM, on_agent=None) -> list[Execution]:
    """Execute the specs one after another, with one store."""

    async def run_all(executor: Executor) -> list[Execution]:
        return [await executor.execute(spec, problem, on_agent=on_agent) for spec in specs]

    with caller(worker) as c:
        return asyncio.run(run_all(Executor(c, read_answer, allow_unsandboxed=True)))


def agent(agent_id, *parents: str, role="math_solver", capacity="small", says: str | None = None) -> Agent:
    """An agent whose duty is its id, unless `says` is given."""
    return Agent(
        id=agent_id,
        name=agent_id.upper(),
        role=role,
        duty=says or agent_id,
        capacity=capacity,
        depends_on=parents,
    )


def spec(*agents: Agent, output: str | None = None) -> Spec:
    return Spec(agents=agents, output=output or agents[-1].id)
