"""The fixed orchestrations that a learned one is compared with. They are specs like any other.

All run at one capacity (medium by default), so that a comparison is one of orchestration, not of
worker models.
"""

from __future__ import annotations

from collections.abc import Sequence

from .roles import ROLES
from .types import Agent, Spec

SC_SAMPLES = 5


def baselines(capacity: str = "medium") -> dict[str, Spec]:
    """Name to spec, in the order of the results table.

    vanilla: one agent answers at once. cot: one reasons step by step. sc: five samples of cot and a
    majority vote (self-consistency). chain: solver, inspector, solver, each reading the one before.
    complete: three agents, each reading all before it.
    """
    solver, inspector = "math_solver", "inspector"
    return {
        "vanilla": _spec([_agent(1, "answerer", capacity)]),
        "cot": _spec([_agent(1, solver, capacity)]),
        "sc": _spec(
            [_agent(i, solver, capacity) for i in range(1, SC_SAMPLES + 1)]
            + [_agent(SC_SAMPLES + 1, "majority_vote", "small", range(1, SC_SAMPLES + 1))]
        ),
        "chain": _spec(
            [
                _agent(1, solver, capacity),
                _agent(2, inspector, capacity, [1]),
                _agent(3, solver, capacity, [2]),
            ]
        ),
        "complete": _spec(
            [
                _agent(1, solver, capacity),
                _agent(2, inspector, capacity, [1]),
                _agent(3, solver, capacity, [1, 2]),
            ]
        ),
    }


def _agent(number: int, role: str, capacity: str, parents: Sequence[int] = ()) -> Agent:
    base = ROLES[role]
    return Agent(
        id=f"a{number}",
        name=base.title,
        role=role,
        duty=base.default_duty,
        capacity=capacity,
        depends_on=tuple(f"a{p}" for p in parents),
    )


def _spec(agents: list[Agent]) -> Spec:
    return Spec(agents=tuple(agents), output=agents[-1].id)
