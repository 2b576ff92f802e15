"""Who runs before whom. Everything is iterative: a long chain is no reason for a RecursionError."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter

from .types import Spec

Dependencies = Mapping[str, Sequence[str]]  # agent id -> ids it depends on


def dependencies(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Agent id -> the ids it depends on, in spec order."""
    return {agent.id: agent.depends_on for agent in spec.agents}


def stable_order(graph: Dependencies) -> tuple[str, ...]:
    """The topological order that departs least from the graph's own: the first ready id goes first.

    Raises graphlib.CycleError.
    """
    rank = {node: i for i, node in enumerate(graph)}
    names = list(graph)
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    ready = [rank[node] for node in sorter.get_ready()]
    heapq.heapify(ready)
    done = []
    while ready:
        node = names[heapq.heappop(ready)]
        done.append(node)
        sorter.done(node)
        for freed in sorter.get_ready():
            heapq.heappush(ready, rank[freed])
    return tuple(done)


def order(spec: Spec) -> tuple[str, ...]:
    """Agent ids such that each follows all it depends on; the spec's own order when that holds already."""
    return stable_order(dependencies(spec))


def layers(spec: Spec) -> tuple[tuple[str, ...], ...]:
    """Ids that can run together, layer by layer. In: b and c depend on a. Out: ((a,), (b, c))."""
    sorter = TopologicalSorter(dependencies(spec))
    rank = {agent.id: i for i, agent in enumerate(spec.agents)}
    sorter.prepare()
    found = []
    while sorter.is_active():
        layer = sorted(sorter.get_ready(), key=rank.__getitem__)
        found.append(tuple(layer))
        sorter.done(*layer)
    return tuple(found)


def descendants(spec: Spec, agent_id: str) -> frozenset[str]:
    """The agents that an edit of this one affects: itself and all that depend on it, however indirectly.

    Raises KeyError for an unknown id.
    """
    affected = {spec.agent(agent_id).id}
    # One pass in topological order is enough: what an agent depends on is settled before it.
    graph = dependencies(spec)
    for node in order(spec):
        if not affected.isdisjoint(graph[node]):
            affected.add(node)
    return frozenset(affected)


def edges(spec: Spec) -> int:
    """The number of dependencies."""
    return sum(len(agent.depends_on) for agent in spec.agents)


def find_cycles(graph: Dependencies) -> list[tuple[str, ...]]:
    """One cycle for each dependency that closes one, as (a, b, c, a): a depends on b, and so on.

    Depth-first search with an explicit stack, linear in the graph. Ids that the graph lacks are ignored.
    """
    cycles: list[tuple[str, ...]] = []
    finished: set[str] = set()
    for root in graph:
        if root in finished:
            continue
        trail: dict[str, None] = {root: None}  # the path from root, in order, with O(1) membership
        stack: list[tuple[str, Iterator[str]]] = [(root, iter(graph[root]))]
        while stack:
            node, rest = stack[-1]
            step = next(rest, None)
            if step is None:
                stack.pop()
                del trail[node]
                finished.add(node)
            elif step in trail:
                path = list(trail)
                cycles.append((*path[path.index(step) :], step))
            elif step in graph and step not in finished:
                trail[step] = None
                stack.append((step, iter(graph[step])))
    return cycles
