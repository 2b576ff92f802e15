"""Languages without a choice: subsets of the whole one, by a check that knows nothing of automata."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from grammar_helpers import accepts, fixes, grammar, random_text

from lemon_jax.spec import CHOICE_OF, CHOICES, FAMILIES, OPT_IN_FAMILIES, ROLES, applicable, dump, parse
from lemon_jax.spec.grammar import byte_grammar, language_key

SUBSETS = [tuple(names) for n in (1, 2, 3) for names in combinations(CHOICES, n)]


@pytest.mark.parametrize("fixed", SUBSETS, ids="-".join)
def test_whatever_it_accepts_is_valid_canonical_and_without_the_choice(fixed):
    language, rng = byte_grammar(fixed=fixed), random.Random("-".join(fixed))
    agents, roles = set(), set()
    for _ in range(40):
        text = random_text(language, rng, 0.05).decode()
        parsed = parse(text)
        assert parsed.strict_ok, (text, parsed.issues)
        assert dump(parsed.spec) == text
        assert all(fixes(parsed.spec, name) for name in fixed)
        assert accepts(grammar(), text)
        agents.add(len(parsed.spec.agents))
        roles |= {agent.role for agent in parsed.spec.agents}
    assert min(agents) < 4 < max(agents) == 16
    assert roles == {*ROLES}


@pytest.mark.parametrize("name", CHOICES)
def test_it_accepts_all_that_is_left(name):
    """A text of the whole language is accepted where the choice is as it is fixed, and only there."""
    language, rng = byte_grammar(fixed=[name]), random.Random(name)
    for _ in range(20):
        spec = parse(random_text(grammar(), rng, 0.05).decode()).spec
        assert accepts(language, dump(spec)) == fixes(spec, name)
        assert accepts(language, dump(_fixed(spec, name)))


def _fixed(spec, name):
    """The spec with the choice taken from it."""
    agents = []
    for i, agent in enumerate(spec.agents):
        role = ROLES[agent.role]
        agents.append(
            {
                "capacity": replace(agent, capacity="medium" if role.llm else "small"),
                "role": replace(agent, name=role.title, duty=role.default_duty),
                "structure": replace(agent, depends_on=(f"a{i}",) if i else ()),
            }[name]
        )
    output = agents[-1].id if name == "structure" else spec.output
    return replace(spec, agents=tuple(agents), output=output)


def test_every_family_edits_one_choice_and_none_of_the_others():
    assert set(CHOICE_OF) == {*FAMILIES, *OPT_IN_FAMILIES}
    assert set(CHOICE_OF.values()) == {*CHOICES}
    whole, rng, found = byte_grammar(fixed=CHOICES), random.Random(0), set()
    for _ in range(10):
        text = random_text(whole, rng, 0.05).decode()
        for edit in applicable(text, tuple(CHOICE_OF)):
            found.add(edit.family)
            assert [name for name in CHOICES if not fixes(edit.spec, name)] == [CHOICE_OF[edit.family]]
    assert found == {*CHOICE_OF} - {"restore_duty"}  # all duties are the roles' own


def test_each_language_has_a_key_of_its_own():
    assert len({language_key(fixed) for fixed in [(), *SUBSETS]}) == 8
    assert language_key(("role", "capacity")) == language_key({"capacity", "role"})
    with pytest.raises(ValueError, match="unknown choices roles, there are capacity, role, structure"):
        byte_grammar(fixed=["roles"])
