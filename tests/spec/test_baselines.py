"""The fixed orchestrations are specs that the front end accepts as they are."""

from __future__ import annotations

import hashlib

import pytest

from lemon_jax.errors import LemonError
from lemon_jax.spec import (
    CAPACITIES,
    DEFAULT_BASELINES,
    baseline_names,
    baselines,
    dump,
    edges,
    layers,
    parse,
    parse_strict,
)

EDGES = {
    "vanilla": set(),
    "cot": set(),
    "sc": {(f"a{i}", "a6") for i in range(1, 6)},
    "chain": {("a1", "a2"), ("a2", "a3")},
    "star": {(f"a{i}", "a4") for i in (1, 2, 3)},
    "tree": {("a1", "a5"), ("a2", "a5"), ("a3", "a6"), ("a4", "a6"), ("a5", "a7"), ("a6", "a7")},
    "complete": {("a1", "a2"), ("a1", "a3"), ("a2", "a3")},
    "random": {("a1", "a4"), ("a2", "a3"), ("a2", "a4"), ("a3", "a4")},
    "debate": {(p, c) for p in ("a1", "a2") for c in ("a3", "a4")} | {("a3", "a5"), ("a4", "a5")},
    "debate3": {(f"a{p}", f"a{c}") for p in (1, 2, 3) for c in (4, 5, 6)}
    | {(f"a{p}", "a7") for p in (4, 5, 6)},
}


def test_the_rows_of_the_results_table():
    assert list(baselines()) == list(EDGES)


@pytest.mark.parametrize("family", ["math", "knowledge", "code"])
def test_every_family_has_the_same_graphs_and_roles_of_its_own(family):
    specs = baselines(family=family)
    assert list(specs) == list(EDGES)
    for name, spec in specs.items():
        assert parse(dump(spec)).strict_ok
        assert {(p, a.id) for a in spec.agents for p in a.depends_on} == EDGES[name]
    roles = {a.role for spec in specs.values() for a in spec.agents}
    own = {"math": {"math_solver", "inspector"}, "knowledge": {"knowledge_expert", "critic"}}
    assert roles >= own.get(family, {"coder", "bug_fixer"})
    assert specs["vanilla"] != specs["cot"]


def test_recorded_calls_still_fit_the_default_baselines():
    """Their texts are what the shipped recordings were made with; another text is another call."""
    known = baselines()
    text = "".join(dump(known[name]) for name in DEFAULT_BASELINES)
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "005dfe29db102bc062e3cba901bb3ae35d604087a0aff370f849623f69b2aa17"
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", tuple(EDGES)),
        ("none", ()),
        ("cot", ("cot",)),
        (" debate, vanilla,vanilla", ("vanilla", "debate")),
        (",".join(DEFAULT_BASELINES), DEFAULT_BASELINES),
    ],
)
def test_a_choice_of_baselines(text, names):
    assert baseline_names(text) == names


@pytest.mark.parametrize("text", ["", "cot,", "cot,all", "none,none", "stars", "Debate"])
def test_an_unknown_baseline_is_named(text):
    with pytest.raises(LemonError, match=r"baseline '.*' is unknown.*give all, none, or some of vanilla"):
        baseline_names(text)
    if text == "stars":
        with pytest.raises(LemonError, match="did you mean star"):
            baseline_names(text)


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


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_are_valid_and_nobody_works_for_nothing(seed):
    spec = baselines(seed=seed)["random"]
    assert parse(dump(spec)).strict_ok
    assert dump(baselines(seed=seed)["random"]) == dump(spec)
    read = {parent for agent in spec.agents for parent in agent.depends_on}
    assert read == {agent.id for agent in spec.agents} - {spec.output}
    assert all(agent.role == "math_solver" for agent in spec.agents if not agent.depends_on)


def test_random_graphs_differ_by_seed_and_use_each_edge_half_of_the_time():
    graphs = [baselines(seed=seed)["random"] for seed in range(200)]
    assert len({dump(spec) for spec in graphs}) > 20
    # a1 -> a2 is never added for want of a reader: a2 is not the last one.
    assert 70 < sum("a1" in spec.agents[1].depends_on for spec in graphs) < 130
    assert {a.role for spec in graphs for a in spec.agents} == {"math_solver", "inspector"}


@pytest.mark.parametrize(("name", "debaters"), [("debate", 2), ("debate3", 3)])
def test_a_debate_is_rounds_of_solvers_and_a_judge(name, debaters):
    spec = baselines()[name]
    first, second, (judge,) = layers(spec)
    assert (len(first), len(second), judge) == (debaters, debaters, spec.output)
    for own, agent_id in zip(first, second, strict=True):
        agent = spec.agent(agent_id)
        assert agent.depends_on == first
        assert f"your solution {own} " in agent.duty
        assert agent.name == spec.agent(own).name
    # The first round asks one question several times: each debater is another sample of it.
    assert len({(a.role, a.duty, a.depends_on) for a in spec.agents[:debaters]}) == 1


def test_trees_and_stars_have_one_reader_an_agent():
    for name in ("star", "tree"):
        spec = baselines()[name]
        assert edges(spec) == len(spec.agents) - 1
