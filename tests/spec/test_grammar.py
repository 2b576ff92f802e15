"""The canonical language as an automaton, against the strict verdict."""

import random
from dataclasses import replace

import pytest
from grammar_helpers import accepts, grammar, random_text
from policy_helpers import teacher_specs

from lemon_jax.spec import MAX_AGENTS, MAX_BYTES, ROLES, Agent, Spec, dump, parse
from lemon_jax.spec.grammar import DUTY_BYTES, NAME_BYTES


def spec(*parents: str, **changes: str) -> Spec:
    """a1 and a2, of which the last depends on `parents` and has these changes."""
    first = Agent(id="a1", name="One", role="math_solver", duty="Solve it.", capacity="small")
    last = replace(first, **{"id": "a2", "name": "Two", "depends_on": parents} | changes)
    return Spec(agents=(first, last), output="a2")


@pytest.mark.parametrize(("closing", "texts"), [(0.5, 200), (0.05, 100), (0.002, 50)])
def test_whatever_it_accepts_is_strictly_valid_and_canonical(closing, texts):
    rng = random.Random(f"walks-{closing}")
    agents = set()
    for _ in range(texts):
        text = random_text(grammar(), rng, closing).decode()
        parsed = parse(text)
        assert parsed.strict_ok, (text, parsed.issues)
        assert dump(parsed.spec) == text
        agents.add(len(parsed.spec.agents))
    assert min(agents) < 4
    assert max(agents) == MAX_AGENTS


def test_it_accepts_what_the_teacher_writes():
    assert [text for text in teacher_specs(120, seed=3) if not accepts(grammar(), text)] == []
    roles = [dump(spec("a1", role=name, duty=role.default_duty)) for name, role in ROLES.items()]
    assert [text for text in roles if not accepts(grammar(), text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "解题者",
        "ひらがな",
        "Löser – Übung №5",
        "\u00a0x",
        'say "so" \\ then\n\tgo\r',
        "a\u2028b\u2029c",
        "🎲 x",
        "\u0301e",
        "# no comment: [here] & *there* %x {y}",
        "---",
        "null",
        "\U0010ffff!",
        " ~ ",
    ],
)
def test_texts_are_free(text):
    written = dump(spec(name=text, duty=text))
    assert parse(written).strict_ok
    assert accepts(grammar(), written)


@pytest.mark.parametrize(
    "text", ["", " ", "\u00a0\u3000", "\n", "\u2028", "\u200b", "\u2800", "\ufe0f\u3164"]
)
def test_texts_that_show_nothing_are_refused(text):
    written = dump(spec(duty=text))
    assert not parse(written).strict_ok
    assert not accepts(grammar(), written)


@pytest.mark.parametrize("text", ["x\x7f", "x\x85", "x\x00", "x\b", "x\ufeff", "x\ud800", "x\uffff"])
def test_characters_that_yaml_cannot_carry_are_refused(text):
    for written in (dump(spec(duty=text)), dump(spec(duty="DUTY")).replace("DUTY", text)):
        assert not accepts(grammar(), written)


def test_bounds_are_exact():
    for key, bound in (("name", NAME_BYTES), ("duty", DUTY_BYTES)):
        for text in (
            "x" * bound,
            "é" * (bound // 2),
            "€" * (bound // 3) + "x" * (bound % 3),
            '"' * (bound // 2),
        ):
            assert accepts(grammar(), dump(spec(**{key: text})))
            assert not accepts(grammar(), dump(spec(**{key: text + "x"})))


def test_the_largest_spec_keeps_the_language_limits():
    role = max((name for name, r in ROLES.items() if r.llm), key=len)
    agents = tuple(
        Agent(
            id=f"a{k}",
            name="n" * NAME_BYTES,
            role=role,
            duty="d" * DUTY_BYTES,
            capacity="medium",
            depends_on=tuple(f"a{j}" for j in range(1, k)),
        )
        for k in range(1, MAX_AGENTS + 1)
    )
    written = dump(Spec(agents=agents, output=f"a{MAX_AGENTS}"))
    assert 0.8 * MAX_BYTES < len(written.encode()) <= MAX_BYTES
    assert parse(written).strict_ok
    assert accepts(grammar(), written)
    one_more = replace(agents[-1], id="a17", depends_on=())
    assert not accepts(grammar(), dump(Spec(agents=(*agents, one_more), output="a17")))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[a1]", "[a2]"),
        ("[a1]", "[a1, a1]"),
        ("[a1]", "[a0]"),
        ("[a1]", "[a01]"),
        ("[a1]", "[ a1]"),
        ("[a1]", "a1"),
        ("output: a2", "output: a3"),
        ("output: a2\n", "output: a2"),
        ("output: a2\n", "output: a2\n\n"),
        ("id: a2", "id: a1"),
        ("id: a2", "id: a3"),
        ("version: 1", "version: 2"),
        ("capacity: small", "capacity: tiny"),
        ("role: math_solver", "role: solver"),
        ("role: math_solver", "role: majority_vote"),  # the first agent has nothing to vote on
        ('"One"', "One"),
        ('"One"', '"One\\/"'),
        ('"One"', '"One" '),
    ],
)
def test_what_is_not_canonical_or_not_valid_is_refused(old, new):
    written = dump(spec("a1"))
    assert accepts(grammar(), written)
    assert old in written
    assert not accepts(grammar(), written.replace(old, new, 1))
    assert not accepts(grammar(), dump(spec(role="majority_vote")))
