"""What a simulated pool is given when a run begins: its tasks with their answers, and the base roles."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction

from lemon_jax.backends import RoleForm, SealedTask, WorkerPool, World
from lemon_jax.backends.simulated import Form
from lemon_jax.bench import LETTERS, Task
from lemon_jax.errors import LemonError
from lemon_jax.numbers import format_number, parse_number
from lemon_jax.runtime import build_messages, fixed_prefix
from lemon_jax.runtime.tools import nearest_option
from lemon_jax.spec import ROLES, Agent, BaseRole

PLANNERS = ("mathematical_analyst",)  # their replies hold no answer
_SLIPS = (1, -1, 2, 10)  # wrong numbers lie this far from the right one
_PLACES = 6
_FORMS: dict[str, Form] = {"calculator": "expression", "program": "program"}


def is_simulated(pool: WorkerPool) -> bool:
    """Whether any capacity of the pool is answered without a language model."""
    models = (pool.config.models[capacity.model] for capacity in pool.config.capacities.values())
    return any(model.backend == "simulated" for model in models)


def seal(tasks: Iterable[Task]) -> World:
    """The world of these tasks. Raises LemonError for a code task: its answers cannot be made up."""
    tasks = list(tasks)
    meant: dict[str, set[tuple[tuple[str, ...], str]]] = {}
    for task in tasks:
        meant.setdefault(task.question, set()).add((task.options, task.gold))
    # Who does not see the options cannot tell such tasks apart, and computes nothing.
    sealed = [_sealed(task, computable=len(meant[task.question]) == 1) for task in tasks]
    return World(sealed, [_form(role) for role in simulated_roles()])


def simulated_roles() -> list[BaseRole]:
    """The base roles that simulated workers play; tools alone need no worker. Those made for code are poor
    at the tasks there are, but a policy may ask for them."""
    return [role for role in ROLES.values() if role.llm]


def task_text(task: Task, *, options: bool = True) -> str:
    """The beginning of the user message that asks this task, as the runtime writes it."""
    # A role with a cue hides the options; one without shows them.
    role = ROLES["math_solver" if options else "equation_writer"]
    agent = Agent(id="a1", name="a", role=role.name, duty="-", capacity="small")
    text = build_messages(task, agent, [])[1].content
    return text.removesuffix("\n" + role.cue) if role.cue else text


def _form(role: BaseRole) -> RoleForm:
    form: Form = "plan" if role.name in PLANNERS else _FORMS.get(role.tool, "text")
    return RoleForm(name=role.name, prefix=fixed_prefix(role.name), form=form, cue=role.cue)


def _sealed(task: Task, *, computable: bool) -> SealedTask:
    if task.kind == "code":
        raise LemonError(
            f"{task.bench}: simulated workers answer number and choice tasks; for code use other workers"
        )
    answers = _answers(task)
    return SealedTask(
        texts=tuple(dict.fromkeys([task_text(task), task_text(task, options=False)])),
        question=task.question,
        bench=task.bench,
        options=len(task.options),
        answers=answers,
        values=tuple(_value(task, answer) if computable else None for answer in answers),
    )


def _answers(task: Task) -> tuple[str, ...]:
    """The gold, then wrong answers in the task's own random order."""
    rng = random.Random(f"wrong answers of {task.question}")
    if task.options:
        wrong = [letter for letter in LETTERS[: len(task.options)] if letter != task.gold]
        rng.shuffle(wrong)
        return (task.gold, *wrong)
    gold = Fraction(task.gold)
    slips = [format_number(gold + slip) for slip in _SLIPS]
    rng.shuffle(slips)
    return (format_number(gold), *slips)


def _value(task: Task, answer: str) -> str | None:
    """The number that a computing role gives where it means this answer; None if no number means it."""
    if not task.options:
        return _exact(Fraction(answer))
    number = parse_number(task.options[LETTERS.index(answer)])
    value = None if number is None else _exact(number)
    return value if value is not None and nearest_option(value, task.options) == answer else None


def _exact(number: Fraction) -> str | None:
    """Its text, if the calculator and a program come to just that: neither does for 1/3."""
    text = format_number(number)
    return text if "/" not in text and len(text.partition(".")[2]) <= _PLACES else None
