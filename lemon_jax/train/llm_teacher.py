"""An LLM as the SFT teacher: any backend writes specs, the spec language decides which are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lemon_jax.backends import Backend, CapacityConfig, Message, Request, WorkerPool, worker_config
from lemon_jax.bench import Task
from lemon_jax.errors import LemonError
from lemon_jax.runtime.show_progress import ShowProgress
from lemon_jax.spec import Spec, dump, explain, parse

MAX_TOKENS = 600  # of one reply; a spec of four agents takes about 300
TEMPERATURE = 0.8  # where the capacity names none
BATCH = 256  # requests handed to the backend at once; how many of them run together is its own limit


@dataclass
class Counts:
    """What became of the teacher's replies. `repaired` ones are among the `kept`."""

    kept: int = 0
    repaired: int = 0
    refused: int = 0
    failed: int = 0  # no reply at all: infrastructure, or a prompt that does not fit
    last_error: str = ""

    def line(self) -> str:
        """One line for people."""
        return (
            f"teacher: {self.kept} specs kept ({self.repaired} of them repaired), "
            f"{self.refused} refused, {self.failed} calls failed"
        )


async def llm_specs(
    tasks: Sequence[Task],
    workers: str,
    *,
    per_task: int,
    capacity: str = "large",
    report: Callable[[str], None] = print,
) -> list[tuple[Task, Spec]]:
    """Specs for each task, written by one capacity of a worker file, in the order of the tasks.

    Args:
        workers: a worker file, or "embedded".
        per_task: replies asked for; the first is greedy, the others are drawn at the capacity's
            temperature.
        report: receives a line now and then, and at the end one with the counts.

    Raises:
        LemonError: the workers cannot be used, or not one reply was a valid spec.
    """
    with ShowProgress() as progress:
        async with WorkerPool(worker_config(workers), on_progress=progress) as pool:
            await pool.check()
            level = pool.capacity(capacity)
            backend = pool.backend(level.model)
            return await ask_specs(backend, level, tasks, per_task=per_task, report=report)


async def ask_specs(
    backend: Backend,
    level: CapacityConfig,
    tasks: Sequence[Task],
    *,
    per_task: int,
    report: Callable[[str], None] = print,
) -> list[tuple[Task, Spec]]:
    """`llm_specs` on one backend that is already open."""
    asked = [(task, request) for task in tasks for request in _requests(task, level, per_task)]
    counts = Counts()
    found: dict[int, Spec] = {}
    for start in range(0, len(asked), BATCH):
        batch = [request for _, request in asked[start : start + BATCH]]
        failed_before = counts.failed
        async for index, reply in backend.generate(batch):
            if reply.finish in ("error", "overflow"):
                counts.failed += 1
                counts.last_error = reply.error or ""
            elif (spec := read_spec(reply.text, counts)) is not None:
                found[start + index] = spec
        if counts.failed - failed_before == len(batch):
            break  # the server is gone: asking on would only wait for as many time-outs
        if start + BATCH < len(asked):
            report(f"teacher: {start + BATCH} of {len(asked)} replies, {counts.kept} specs kept")
    report(counts.line())
    if not found:
        why = f"the last call failed with {counts.last_error}" if counts.failed else "all were refused"
        raise LemonError(
            f"the teacher wrote no valid spec in {counts.refused + counts.failed} replies ({why}); "
            "name a larger model as capacity large, or use --teacher sampler"
        )
    return [(asked[i][0], found[i]) for i in sorted(found)]


def read_spec(reply: str, counts: Counts) -> Spec | None:
    """The spec of one reply, repaired where the language allows it; None, counted, otherwise."""
    parsed = parse(reply)
    if parsed.spec is None or not _round_trips(parsed.spec):
        counts.refused += 1
        return None
    counts.kept += 1
    counts.repaired += not parsed.strict_ok
    return parsed.spec


def teacher_messages(task: Task) -> tuple[Message, ...]:
    """The chat that asks for one spec: the language, the roles, a worked example, the task."""
    user = f"Task:\n{task.prompt()}\n\n"
    if not task.options:
        user += "The task has no options: use neither option_chooser nor nearest_option.\n\n"
    return (Message(role="system", content=explain()), Message(role="user", content=user + "Spec:"))


def _round_trips(spec: Spec) -> bool:
    """Whether its canonical text is strictly valid; a repaired spec's need not be (an odd id stays)."""
    again = parse(dump(spec))
    return again.strict_ok and again.spec == spec


def _requests(task: Task, level: CapacityConfig, per_task: int) -> list[Request]:
    return [
        Request(
            model=level.model,
            messages=teacher_messages(task),
            max_tokens=min(MAX_TOKENS, level.max_tokens),
            temperature=(level.temperature or TEMPERATURE) if index else 0.0,
            sample_index=index,
        )
        for index in range(per_task)
    ]
