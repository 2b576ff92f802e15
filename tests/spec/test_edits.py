"""Edits are splices of one field in the text as it was written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lemon_jax.spec import CAPACITIES, FAMILIES, OPT_IN_FAMILIES, ROLES, applicable, dump, parse, parse_strict


def check(text: str, families=FAMILIES):
    """The splice identity, validity, and that exactly one field differs; returns the edits."""
    before = parse_strict(text)
    edits = applicable(text, families)
    for edit in edits:
        (start, end), (new_start, new_end) = edit.span, edit.edited_span
        assert start == new_start
        assert text[:start] + edit.text[new_start:new_end] + text[end:] == edit.text
        assert parse_strict(edit.text) == edit.spec
        _, index, key = edit.path
        was, now = before.agents[index], edit.spec.agents[index]
        assert (was.id, now.id) == (edit.agent_id, edit.agent_id)
        assert replace(now, **{key: getattr(was, key)}) == was != now
        assert edit.spec == replace(before, agents=(*before.agents[:index], now, *before.agents[index + 1 :]))
    return edits


@given(st.data())
def test_canonical_specs(specs, data):
    spec = data.draw(specs)
    edits = check(dump(spec))
    assert all(edit.text == dump(edit.spec) for edit in edits)
    assert edits == applicable(parse(dump(spec)))
    ranks = [(FAMILIES.index(edit.family), edit.path[1]) for edit in edits]
    assert ranks == sorted(ranks)
    lowered = sum(a.capacity != "small" and ROLES[a.role].llm for a in spec.agents)
    restored = sum(a.duty != ROLES[a.role].default_duty and ROLES[a.role].llm for a in spec.agents)
    families = [edit.family for edit in edits]
    # A tool keeps its last dependency.
    deleted = sum(len(a.depends_on) for a in spec.agents if ROLES[a.role].llm or len(a.depends_on) > 1)
    assert [families.count(f) for f in FAMILIES] == [deleted, restored, lowered]


def test_exactly_the_scalar_changes_among_five_equal_ones(document, agent):
    agents = [
        agent(f"a{i}", duty='"Keep it small: small."', name="small", capacity="small") for i in range(4)
    ]
    text = document(
        agents[0], agent("m", name="medium", duty='"medium"', capacity="medium"), *agents[1:], output="m"
    )
    (edit,) = [e for e in check(text) if e.family == "lower_capacity"]
    assert (edit.agent_id, edit.path) == ("m", ("agents", 1, "capacity"))
    assert text[slice(*edit.span)] == "medium"
    assert text[: edit.span[0]].endswith("    capacity: ")
    assert edit.text[slice(*edit.edited_span)] == "small"


def test_one_level_down(document, agent):
    for high, low in zip(CAPACITIES[1:], CAPACITIES, strict=False):
        (edit,) = [e for e in applicable(document(agent(capacity=high))) if e.family == "lower_capacity"]
        assert edit.spec.agents[0].capacity == low


def test_tools_keep_their_duty_their_capacity_and_their_last_input(document, agent):
    text = document(agent("a"), agent("s", role="majority_vote", capacity="large", depends_on="[a]"))
    assert {(e.family, e.agent_id) for e in check(text)} == {("restore_duty", "a")}


def test_the_text_that_was_written_is_kept(document, agent):
    duty = "|  # literal\n      First.\n        - id: x\n\n"
    text = document(
        agent("a", duty=duty, capacity="'medium'  # why"),
        agent("b", duty=">-\n      Folded\n      text", depends_on="[ a ,]  # one"),
        agent(
            "c",
            duty="plain é 🧮\n      on two lines",
            depends_on="\n    - a  # first\n    - 'b'",
            capacity='"large"',
        ),
        agent("s", depends_on="\n      - a\n      - c"),
    )
    for version in (text, "\ufeff" + text, text.replace("\n", "\r\n")):
        edits = check(version)
        assert len(edits) == 1 + 2 + 2 + 4 + 2
        new = {(e.family, e.agent_id, e.text[slice(*e.edited_span)]) for e in edits}
        assert ("lower_capacity", "a", "'small'") in new
        assert ("delete_dependency", "b", "[]") in new
        assert ("delete_dependency", "c", " ['b']") in new
        assert ("delete_dependency", "s", " [a]") in new


def test_json(document, agent):
    text = dump(parse_strict(document(agent("a"), agent("s", capacity="large", depends_on="[a]"))))
    spec = parse_strict(text)
    agents = [{**vars(a), "depends_on": list(a.depends_on)} for a in spec.agents]
    edits = check(json.dumps({"version": 1, "agents": agents, "output": "s"}))
    assert [e.family for e in edits] == [
        "delete_dependency",
        "restore_duty",
        "restore_duty",
        "lower_capacity",
    ]
    assert all(json.loads(edit.text) for edit in edits)


def test_an_invalid_text_has_no_edits(document, agent):
    with pytest.raises(ValueError, match="strictly valid"):
        applicable(document(agent(capacity="Large")))


@given(st.data())
def test_opt_in_families_of_canonical_specs(specs, data):
    spec = data.draw(specs)
    edits = check(dump(spec), OPT_IN_FAMILIES)
    assert all(edit.text == dump(edit.spec) for edit in edits)
    count = [edit.family for edit in edits].count
    asked = [agent for agent in spec.agents if ROLES[agent.role].llm]
    workers = sum(role.llm for role in ROLES.values())
    assert count("add_dependency") == sum(i - len(a.depends_on) for i, a in enumerate(spec.agents))
    assert count("raise_capacity") == sum(agent.capacity != "large" for agent in asked)
    # A role may need an input, which an agent without dependencies has not.
    assert count("change_role") <= len(asked) * (workers - 1)
    assert count("change_role") >= sum(bool(agent.depends_on) for agent in asked) * (workers - 1)
    # What one direction does, the other undoes.
    back = {"add_dependency": "delete_dependency", "raise_capacity": "lower_capacity"}
    for edit in edits:
        if edit.family in back:
            undone = [e.text for e in applicable(edit.text) if e.family == back[edit.family]]
            assert dump(spec) in undone


def test_opt_in_edits_keep_the_text_that_was_written(document, agent):
    text = document(
        agent("a", capacity="'medium'  # why"),
        agent("b", depends_on="[]  # none"),
        agent("c", depends_on="\n    - 'b'", role='"math_solver"'),
        output="c",
    )
    edits = check(text, OPT_IN_FAMILIES)
    new = {(e.family, e.agent_id, e.text[slice(*e.edited_span)]) for e in edits}
    assert ("raise_capacity", "a", "'large'") in new
    assert ("add_dependency", "b", "[a]") in new
    assert ("add_dependency", "c", " [a, 'b']") in new
    assert ("change_role", "c", '"inspector"') in new
    assert not [e for e in applicable(text) if e.family in OPT_IN_FAMILIES]


def test_unknown_families_are_refused(document, agent):
    with pytest.raises(ValueError, match="unknown edit families swap_agents"):
        applicable(document(agent()), ("lower_capacity", "swap_agents"))
