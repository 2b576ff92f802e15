"""The spec language in short, for a language model that is to write specs."""

from __future__ import annotations

from .base_role import BaseRole
from .dump import dump
from .roles import ROLES
from .types import CAPACITIES, Agent, Spec

_EXAMPLE_TASK = """\
One pump fills a tank in 6 hours and another in 4 hours. How many hours do both together need?
A) 2
B) 2.4
C) 5
D) 10"""
_EXAMPLE = Spec(
    agents=(
        Agent(
            id="a1",
            name="Work rate analyst",
            role="mathematical_analyst",
            duty="Write how the two rates add up.",
            capacity="small",
        ),
        Agent(
            id="a2",
            name="Programming expert",
            role="programming_expert",
            duty="Compute the hours from the joint rate.",
            capacity="medium",
            depends_on=("a1",),
        ),
        Agent(
            id="a3",
            name="Nearest option",
            role="nearest_option",
            duty="Choose the option nearest to the hours.",
            capacity="small",
            depends_on=("a2",),
        ),
    ),
    output="a3",
)
_TOOLS = {
    "calculator": " A calculator evaluates it.",
    "program": " It is run, and its value is the answer.",
}


def explain() -> str:
    """A system message: what a spec is, the roles, and one worked example."""
    roles = "\n".join(_role_line(role) for role in ROLES.values())
    return f"""\
You design small teams of agents. For the task that you are given, write one spec: a YAML document and \
nothing else, no code fence, no comment.

- First `version: 1`, then `agents:` with one to four agents, then `output:` with the id of the agent whose \
answer counts.
- Each agent has the keys id, name, role, duty, capacity and depends_on, in this order.
- id: a1, a2 and so on. name, duty: short texts in double quotes; the duty is one sentence that fits the task.
- role: one of the roles below. capacity: {", ".join(CAPACITIES)}; a higher one is better and costs more.
- depends_on: the earlier agents whose outputs the agent reads, such as [a1, a2], or [].

Roles:
{roles}

Example task:
{_EXAMPLE_TASK}

Example spec:
{dump(_EXAMPLE)}"""


def _role_line(role: BaseRole) -> str:
    tool = _TOOLS.get(role.tool, "") if role.llm else " A tool without a model; it needs a dependency."
    return f"- {role.name}: {role.default_duty}{tool}"
