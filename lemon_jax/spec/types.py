"""The spec: agents in order, who depends on whom, and whose output is the answer."""

from __future__ import annotations

from dataclasses import dataclass

CAPACITIES = ("small", "medium", "large")  # in rising order; lowering goes left
CHOICES = ("capacity", "role", "structure")  # what a policy decides of an agent; see `grammar`
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One step of a spec. `depends_on` holds ids of earlier agents only."""

    id: str
    name: str
    role: str
    duty: str
    capacity: str
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A multi-agent system for one task."""

    agents: tuple[Agent, ...]
    output: str
    version: int = VERSION

    def agent(self, agent_id: str) -> Agent:
        """The agent with this id; KeyError if there is none."""
        for agent in self.agents:
            if agent.id == agent_id:
                return agent
        raise KeyError(agent_id)
