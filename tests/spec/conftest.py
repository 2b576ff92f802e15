"""Builders that several files of this part share."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from lemon_jax.spec import CAPACITIES, ROLES, Agent, Spec

# The machines that run these tests differ in speed; what is measured is behaviour.
settings.register_profile("spec", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("spec")

EXAMPLE = """\
version: 1
agents:
  - id: a1
    name: Ratio analyst            # identity; free text
    role: mathematical_analyst     # a base role of the library
    duty: "Write the speed ratio as an equation and solve it."
    capacity: small                # small | medium | large
    depends_on: []                 # ids of earlier agents
  - id: a2
    name: Final solver
    role: math_solver
    duty: "Check the equation, compute the value, choose the option."
    capacity: medium
    depends_on: [a1]
output: a2
"""


@pytest.fixture
def example() -> str:
    return EXAMPLE


def _agent_text(agent_id="s", **fields) -> str:
    values = {"id": agent_id, "name": "Solver", "role": "math_solver", "duty": "Add.", "capacity": "small"}
    values |= {"depends_on": "[]"} | fields
    lines = [f"{key}: {value}" for key, value in values.items() if value is not None]
    return "  - " + "\n    ".join(lines) + "\n"


@pytest.fixture
def agent():
    """agent("a", duty="...") -> the block text of one agent; a field given as None is left out."""
    return _agent_text


@pytest.fixture
def document():
    """document(agent("a"), agent("b"), output="b") -> the text of a whole spec."""

    def build(*agents: str, output: str = "s", version: str = "1") -> str:
        return f"version: {version}\nagents:\n{''.join(agents)}output: {output}\n"

    return build


_prose = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cn"], exclude_characters="\ufeff"), max_size=30
).map(lambda s: "x" + s) | st.sampled_from(
    [
        'a "quoted": b',
        "small",
        "- id: x\n  duty: y\n",
        "\tsmall # 3 ",
        "🧮 求解者",
        "e\u0301 שלום",
        "\u2028 a",
    ]
)
_ids = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}", fullmatch=True) | st.sampled_from(
    ["no", "on", "y", "null", "true"]
)


@st.composite
def _specs(draw) -> Spec:
    ids = draw(st.lists(_ids, min_size=1, max_size=5, unique=True))
    agents = []
    for i, agent_id in enumerate(ids):
        role = ROLES[draw(st.sampled_from([r.name for r in ROLES.values() if r.llm or i > 0]))]
        deps = draw(st.lists(st.sampled_from(ids[:i]), unique=True, min_size=int(not role.llm))) if i else []
        duty = draw(_prose | st.just(role.default_duty))
        capacity = draw(st.sampled_from(CAPACITIES))
        agents.append(
            Agent(
                id=agent_id,
                name=draw(_prose),
                role=role.name,
                duty=duty,
                capacity=capacity,
                depends_on=tuple(deps),
            )
        )
    return Spec(agents=tuple(agents), output=draw(st.sampled_from(ids)))


@pytest.fixture(scope="session")
def specs():
    """A hypothesis strategy of valid specs; draw from it with st.data()."""
    return _specs()
