import random
from collections import Counter
from dataclasses import replace

from policy_helpers import teacher_specs

from lemon_jax.bench import Task, generate
from lemon_jax.spec import CAPACITIES, ROLES, dump, parse, parse_strict
from lemon_jax.train.teacher import describe, write_spec

FUNCTION = 'from typing import List\n\n\ndef double(xs: List[int]) -> List[int]:\n    """Twice each."""\n'
TASKS = (
    *generate("number", 50, seed=3),
    *generate("choice", 50, seed=3),
    *(replace(task, subject="world_history") for task in generate("choice", 50, seed=4)),
    *[Task(id="f", bench="x", question=FUNCTION, gold="", kind="code", entry_point="double")] * 25,
)


def _write(seed: int = 0, per_task: int = 5):
    rng = random.Random(seed)
    return [
        (t, write_spec(t.question, t.options, rng, family=t.family)) for t in TASKS for _ in range(per_task)
    ]


def test_500_specs_are_strictly_valid_and_canonical():
    for task, spec in _write():
        text = dump(spec)
        parsed = parse(text)
        assert parsed.strict_ok, (task.question, text, parsed.issues)
        assert parsed.spec == spec
        assert dump(parse_strict(text)) == text


def test_they_are_diverse():
    specs = [spec for _, spec in _write()]
    agents = [a for s in specs for a in s.agents]
    assert {a.role for a in agents} == set(ROLES)
    assert {a.capacity for a in agents} == set(CAPACITIES)
    structures = Counter(tuple((ROLES[a.role].tool, a.depends_on) for a in s.agents) for s in specs)
    assert len(structures) >= 6
    assert structures.most_common(1)[0][1] < len(specs) / 2
    assert len({a.duty for a in agents}) > 100
    defaults = sum(a.duty == ROLES[a.role].default_duty for a in agents)
    assert 0.1 < defaults / len(agents) < 0.5


def test_the_same_seed_writes_the_same_specs():
    assert teacher_specs(40, seed=5) == teacher_specs(40, seed=5)
    assert teacher_specs(40, seed=5) != teacher_specs(40, seed=6)


def test_the_output_of_a_choice_task_can_give_a_letter():
    """A role that computes without seeing the options is never the last one there."""
    for task, spec in _write(seed=1):
        role = ROLES[spec.agent(spec.output).role]
        if task.family == "code":
            assert role.name in ("coder", "bug_fixer"), dump(spec)
        elif task.options:
            assert role.sees_options or role.tool == "nearest_option", dump(spec)
        else:
            assert role.name not in ("option_chooser", "nearest_option"), dump(spec)
        assert role.name != "mathematical_analyst"


def test_tools_have_dependencies_and_every_agent_is_heard():
    for _, spec in _write(seed=2):
        for agent in spec.agents:
            assert ROLES[agent.role].llm or agent.depends_on
        heard = {parent for a in spec.agents for parent in a.depends_on} | {spec.output}
        assert heard == {a.id for a in spec.agents}


def test_duties_speak_of_the_task():
    rng = random.Random(0)
    question = "How many boxes of 5 muffins does Mia need for 20 muffins?"
    duties = {a.duty for _ in range(200) for a in write_spec(question, (), rng).agents}
    assert "Find the number of boxes, one short step a line." in duties
    assert "Work out the sharing question and state the number of boxes." in duties
    found = describe(question)
    assert found == {"topic": "sharing", "Topic": "Sharing", "asked": "number of boxes", "n": "2"}


def test_questions_with_braces_quotes_or_nothing_are_no_trouble():
    rng = random.Random(0)
    for question in ('What is the "{topic}" of {0}?', "", "¿Cuál — 7 €?\n- id: a1", "how many {n}s"):
        for options in ((), ("1", "2")):
            for _ in range(20):
                assert parse(dump(write_spec(question, options, rng))).strict_ok
