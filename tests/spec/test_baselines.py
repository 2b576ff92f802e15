"""The fixed orchestrations are specs that the front end accepts as they are."""

from __future__ import annotations

import pytest

from lemon_jax.spec import CAPACITIES, baselines, dump, edges, layers, parse, parse_strict

EDGES = {
    "vanilla": set(),
    "cot": set(),
    "sc": {(f"a{i}", "a6") for i in range(1, 6)},
    "chain": {("a1", "a2"), ("a2", "a3")},
    "complete": {("a1", "a2"), ("a1", "a3"), ("a2", "a3")},
}


def test_the_rows_of_the_results_table():
    assert list(baselines()) == list(EDGES)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", EDGES)
def test_strictly_valid_with_the_expected_edges(name, capacity):
    spec = baselines(capacity)[name]
    parsed = parse(dump(spec))
    assert parsed.strict_ok, parsed.issues
    assert parsed.spec == spec
    assert dump(parse_strict(dump(spec))) == dump(spec)
    found = {(parent, agent.id) for agent in spec.agents for parent in agent.depends_on}
    assert found == EDGES[name]
    assert edges(spec) == len(found)
    assert spec.output == spec.agents[-1].id
    workers = [agent for agent in spec.agents if agent.role != "majority_vote"]
    assert {agent.capacity for agent in workers} == {capacity}


def test_self_consistency_is_five_equal_agents_and_a_vote():
    spec = baselines()["sc"]
    *samples, vote = spec.agents
    assert len({(a.role, a.duty, a.capacity, a.depends_on) for a in samples}) == 1
    assert vote.role == "majority_vote"
    assert layers(spec) == (("a1", "a2", "a3", "a4", "a5"), ("a6",))
