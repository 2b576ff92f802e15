"""The fixed orchestrations that a learned one is compared with. They are specs like any other.

All run at one capacity (medium by default), so that a comparison is one of orchestration, not of
worker models. None knows the bench; which roles solve, check and answer at once depends on the family
of the task alone: see `_CAST`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import get_close_matches

from ..errors import LemonError
from .base_role import Family
from .roles import ROLES
from .types import Agent, Spec

SC_SAMPLES = 5
RANDOM_AGENTS = 4
DEFAULT_BASELINES = ("vanilla", "cot", "sc", "chain", "complete")


# Who answers at once, who solves, who checks.
_CAST: dict[Family, tuple[str, str, str]] = {
    "math": ("answerer", "math_solver", "inspector"),
    "knowledge": ("answerer", "knowledge_expert", "critic"),
    "code": ("coder", "coder", "bug_fixer"),
}
_PLAN_FIRST = "Write the steps of the algorithm as comments, then the code of each."  # cot, of a coder


def baselines(capacity: str = "medium", *, seed: int = 0, family: Family = "math") -> dict[str, Spec]:
    """Name to spec, in the order of the results table; `seed` draws the graph of "random".

    vanilla: one agent answers at once. cot: one reasons step by step. sc: five samples of cot (for code:
    of vanilla) and a majority vote (self-consistency). chain: solver, inspector, solver, each reading the
    one before. star: a centre that reads three solvers. tree: four solvers, two inspectors that read two
    each, and a root that reads both. complete: three agents, each reading all before it. random: see
    `_random`. debate, debate3: see `_debate`.
    """
    direct, solver, inspector = _CAST[family]
    return {
        "vanilla": _spec([_agent(1, direct, capacity)]),
        "cot": _spec([_agent(1, solver, capacity, duty=_PLAN_FIRST if direct == solver else "")]),
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
        "star": _spec(
            [_agent(i, solver, capacity) for i in (1, 2, 3)] + [_agent(4, inspector, capacity, [1, 2, 3])]
        ),
        "tree": _spec(
            [_agent(i, solver, capacity) for i in (1, 2, 3, 4)]
            + [_agent(5, inspector, capacity, [1, 2]), _agent(6, inspector, capacity, [3, 4])]
            + [_agent(7, solver, capacity, [5, 6])]
        ),
        "complete": _spec(
            [
                _agent(1, solver, capacity),
                _agent(2, inspector, capacity, [1]),
                _agent(3, solver, capacity, [1, 2]),
            ]
        ),
        "random": _random(capacity, seed, solver, inspector),
        "debate": _debate(capacity, 2, solver, inspector),
        "debate3": _debate(capacity, 3, solver, inspector),
    }


def baseline_names(text: str) -> tuple[str, ...]:
    """The names that a choice stands for, in the order of the results table.

    In:  "cot,vanilla"  "all"                  "none"
    Out: (vanilla, cot) every one there is     ()

    Raises:
        LemonError: an unknown name.
    """
    known = tuple(baselines())
    words = [word.strip() for word in text.split(",")]
    if words in (["all"], ["none"]):
        return known if words == ["all"] else ()
    for word in words:
        if word not in known:
            close = get_close_matches(word, known, 1)
            hint = f", did you mean {close[0]}" if close else ""
            raise LemonError(
                f"baseline {word!r} is unknown{hint}; give all, none, or some of {', '.join(known)}"
            )
    return tuple(name for name in known if name in words)


def _random(capacity: str, seed: int, solver: str, inspector: str) -> Spec:
    """A seeded random graph: each agent reads each earlier one with probability 1/2.

    Who reads nobody solves, others solve or inspect; the last one solves and also reads all whom
    nobody else reads, so that no agent works for nothing.
    """
    rng = random.Random(f"random-{seed}")
    agents: list[Agent] = []
    unread = set(range(1, RANDOM_AGENTS))
    for number in range(1, RANDOM_AGENTS + 1):
        parents = {p for p in range(1, number) if rng.random() < 0.5}
        unread -= parents
        last = number == RANDOM_AGENTS
        parents |= unread if last else set()
        role = rng.choice((solver, inspector)) if parents and not last else solver
        agents.append(_agent(number, role, capacity, sorted(parents)))
    return _spec(agents)


def _debate(capacity: str, debaters: int, solver: str, inspector: str, rounds: int = 2) -> Spec:
    """Multi-agent debate (Du et al. 2023, arXiv 2305.14325): rounds are layers, then a judge decides.

    In the first round everyone solves alone; in each later one everyone reads all solutions of the
    round before, and which of them was their own.
    """
    agents: list[Agent] = []
    before: list[int] = []
    for _ in range(rounds):
        first = len(agents) + 1
        for i in range(debaters):
            own = f"a{before[i]}" if before else ""
            duty = f"Compare your solution {own} with the others, then correct or defend it." if own else ""
            agents.append(_agent(first + i, solver, capacity, before, name=f"Debater {i + 1}", duty=duty))
        before = list(range(first, first + debaters))
    return _spec([*agents, _agent(len(agents) + 1, inspector, capacity, before, name="Judge")])


def _agent(
    number: int,
    role: str,
    capacity: str,
    parents: Sequence[int] = (),
    *,
    name: str = "",
    duty: str = "",
) -> Agent:
    base = ROLES[role]
    return Agent(
        id=f"a{number}",
        name=name or base.title,
        role=role,
        duty=duty or base.default_duty,
        capacity=capacity,
        depends_on=tuple(f"a{p}" for p in parents),
    )


def _spec(agents: list[Agent]) -> Spec:
    return Spec(agents=tuple(agents), output=agents[-1].id)
