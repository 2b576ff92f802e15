"""Order, layers, what an edit affects, and cycles in large graphs."""

from __future__ import annotations

import time
from graphlib import CycleError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lemon_jax.spec import Agent, Spec, descendants, edges, layers, order
from lemon_jax.spec.dag import find_cycles, stable_order


def build(graph: dict[str, str]) -> Spec:
    agents = [
        Agent(id=i, name=i, role="answerer", duty="d", capacity="small", depends_on=tuple(deps))
        for i, deps in graph.items()
    ]
    return Spec(agents=tuple(agents), output=list(graph)[-1])


DIAMOND = build({"a": "", "b": "a", "c": "a", "d": "bc", "e": ""})


def test_diamond():
    assert order(DIAMOND) == ("a", "b", "c", "d", "e")
    assert layers(DIAMOND) == (("a", "e"), ("b", "c"), ("d",))
    assert edges(DIAMOND) == 4


def test_descendants_are_the_agent_and_all_downstream():
    assert descendants(DIAMOND, "a") == {"a", "b", "c", "d"}
    assert descendants(DIAMOND, "c") == {"c", "d"}
    assert descendants(DIAMOND, "e") == {"e"}
    with pytest.raises(KeyError):
        descendants(DIAMOND, "x")


def test_stable_order_moves_as_little_as_it_can():
    assert stable_order({"a": ["c"], "b": [], "c": [], "d": ["a"]}) == ("b", "c", "a", "d")
    with pytest.raises(CycleError):
        stable_order({"a": ["b"], "b": ["a"]})


@given(st.data())
def test_a_valid_spec_is_its_own_order(specs, data):
    spec = data.draw(specs)
    assert order(spec) == tuple(agent.id for agent in spec.agents)


def test_a_cycle_of_a_thousand_is_found_fast_and_without_recursion():
    chain = {str(i): [str((i + 1) % 1000)] for i in range(1000)}
    start = time.perf_counter()
    (cycle,) = find_cycles(chain)
    assert time.perf_counter() - start < 0.05
    assert cycle[:2] == ("0", "1")
    assert (cycle[-1], len(cycle)) == ("0", 1001)


def test_each_closing_dependency_is_a_cycle_and_unknown_ids_are_none():
    assert find_cycles({"a": ["a"], "b": ["c"], "c": ["b"], "d": ["b", "x"]}) == [("a", "a"), ("b", "c", "b")]
    assert find_cycles({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}) == []
