"""The canonical form and the schema describe the same language as the parser."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from lemon_jax.spec import MAX_AGENTS, Agent, Spec, dump, json_schema, parse, parse_strict

CANONICAL = """\
version: 1
agents:
  - id: a1
    name: "Ratio analyst"
    role: mathematical_analyst
    duty: "Write the speed ratio as an equation and solve it."
    capacity: small
    depends_on: []
  - id: a2
    name: "Final solver"
    role: math_solver
    duty: "Check the equation, compute the value, choose the option."
    capacity: medium
    depends_on: [a1]
output: a2
"""


def loaded(spec: Spec) -> dict:
    """The spec as a JSON reader would hold it: lists, not tuples."""
    fields = asdict(spec)
    fields["agents"] = [agent | {"depends_on": list(agent["depends_on"])} for agent in fields["agents"]]
    return fields


def test_canonical_form_of_the_example(example):
    assert dump(parse_strict(example)) == CANONICAL


@given(st.data())
def test_canonical_text_round_trips_byte_for_byte(specs, data):
    spec = data.draw(specs)
    text = dump(spec)
    parsed = parse(text)
    assert parsed.strict_ok, parsed.issues
    assert parsed.spec == spec
    assert dump(parsed.spec).encode() == text.encode()


def test_text_that_yaml_would_break_is_escaped():
    duty = 'tab\t quote" back\\ bell\x07 nel\x85 ls\u2028 bom\ufeff é 🧮'
    agent = Agent(id="s", name="n", role="answerer", duty=duty, capacity="small")
    line = next(row for row in dump(Spec(agents=(agent,), output="s")).split("\n") if "duty" in row)
    assert line.isprintable()
    assert line.endswith('tab\\t quote\\" back\\\\ bell\\u0007 nel\\u0085 ls\\u2028 bom\\ufeff é 🧮"')


def test_an_id_out_of_format_is_quoted_so_that_it_stays_one_word():
    agents = [
        Agent(id=i, name="n", role="answerer", duty="d", capacity="small", depends_on=d)
        for i, d in (("1:30", ()), ("b]", ("1:30",)))
    ]
    spec = Spec(agents=tuple(agents), output="b]")
    assert 'depends_on: ["1:30"]' in dump(spec)
    assert parse(dump(spec)).spec == spec


def test_the_schema_is_a_schema():
    Draft202012Validator.check_schema(json_schema())


@given(st.data())
def test_valid_specs_satisfy_the_schema(specs, data):
    Draft202012Validator(json_schema()).validate(loaded(data.draw(specs)))


WRONG = {
    "version": lambda s: s | {"version": 2},
    "no output": lambda s: {k: v for k, v in s.items() if k != "output"},
    "extra key": lambda s: s | {"note": "x"},
    "no agents": lambda s: s | {"agents": []},
    "too many agents": lambda s: s | {"agents": s["agents"] * MAX_AGENTS},
    "agent map": lambda s: s | {"agents": {"s": s["agents"][0]}},
}
WRONG_FIELDS = {
    "id": "1a",
    "name": " ",
    "role": "wizard",
    "duty": "",
    "capacity": "Large",
    "depends_on": ["a b"],
    "extra": "x",
}


@pytest.mark.parametrize("damage", WRONG.values(), ids=WRONG)
def test_wrong_specs_fail_the_schema(damage):
    good = loaded(parse_strict(CANONICAL))
    assert not Draft202012Validator(json_schema()).is_valid(damage(good))


@pytest.mark.parametrize(("key", "value"), WRONG_FIELDS.items())
def test_wrong_fields_fail_the_schema(key, value):
    wrong = loaded(parse_strict(CANONICAL))
    wrong["agents"][0][key] = value
    assert not Draft202012Validator(json_schema()).is_valid(wrong)


def test_a_tool_without_input_fails_the_schema():
    wrong = loaded(parse_strict(CANONICAL))
    wrong["agents"][0]["role"] = "majority_vote"
    assert not Draft202012Validator(json_schema()).is_valid(wrong)
    wrong["agents"][0]["depends_on"] = ["a2"]  # the order of agents is parse's to judge
    assert Draft202012Validator(json_schema()).is_valid(wrong)
