"""Which sample of a reply an agent takes where several agents of a spec ask the very same."""

from __future__ import annotations

from collections.abc import Mapping

from lemon_jax.spec import MAX_AGENTS, Spec, order


def repeat_indices(spec: Spec, kept: Mapping[str, int] | None = None) -> dict[str, int]:
    """For each agent, its place among the agents that ask the same: 0, 1, 2, …

    Self-consistency would otherwise be one call repeated. `kept` gives places that some agents have already:
    those that an edit leaves alone ask what they asked in the original, and the edited one takes the lowest
    place that is free among its new equals.

    In:  two equal solvers a1, a2; then the same with a1 lowered to "small", kept = {"a2": 1}
    Out: {"a1": 0, "a2": 1};       {"a1": 0, "a2": 1}
    """
    kept = kept or {}
    taken: dict[tuple[object, ...], set[int]] = {}
    out: dict[str, int] = {}
    ids = order(spec)
    for agent_id in [*(i for i in ids if i in kept), *(i for i in ids if i not in kept)]:
        agent = spec.agent(agent_id)
        same = (agent.role, agent.duty, agent.capacity, frozenset(agent.depends_on))
        places = taken.setdefault(same, set())
        place = kept.get(agent_id)
        if place is None:
            place = next(i for i in range(len(ids)) if i not in places)
        places.add(place)
        out[agent_id] = place
    return out


def places_of_sample(places: Mapping[str, int], sample: int) -> dict[str, int]:
    """Where the same agents stand in another execution of the same spec: behind all places of earlier ones.

    Sample 0 is the spec as it is executed without more ado. In each other one every agent asks for replies of
    its own; a capacity's greedy reply is in sample 0 alone.

    In:  {"a1": 0, "a2": 1}, sample 2
    Out: {"a1": 32, "a2": 33}
    """
    return {agent_id: place + sample * MAX_AGENTS for agent_id, place in places.items()}
