"""Which sample of a reply an agent takes where several agents of a spec ask the very same."""

from __future__ import annotations

from collections.abc import Mapping

from lemon_jax.spec import Spec, order


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
