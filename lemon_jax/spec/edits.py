"""Edits: one field of a valid spec changes, in the text as it was written.

The three families of the paper take something away. The others go the other way; they are opt-in.

An edit is a splice: original[: span[0]] + replacement + original[span[1] :] is the edited text, byte
for byte, so that a contrast of two rewards belongs to the tokens of one span. Method: LEMON
(arXiv 2605.14483), localised counterfactual credit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .dump import quote
from .errors import Path
from .parse import Parsed, parse
from .roles import ROLES
from .types import CAPACITIES, Agent, Spec

FAMILIES = ("delete_dependency", "restore_duty", "lower_capacity")
OPT_IN_FAMILIES = ("add_dependency", "change_role", "raise_capacity")
# The choice of the policy that each family edits; see `grammar` for languages without one.
CHOICE_OF = {
    "delete_dependency": "structure",
    "restore_duty": "role",
    "lower_capacity": "capacity",
    "add_dependency": "structure",
    "change_role": "role",
    "raise_capacity": "capacity",
}


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One applicable edit. `span` is in characters of the original text, `edited_span` of `text`."""

    family: str
    agent_id: str
    path: Path  # the field that changes, e.g. ("agents", 1, "capacity")
    spec: Spec  # after the edit
    text: str  # after the edit; canonical if the original was
    span: tuple[int, int]
    edited_span: tuple[int, int]


@dataclass(frozen=True)
class _Candidate:
    family: str
    index: int
    agent: Agent  # after the edit
    key: str
    span: tuple[int, int]
    new: str


def applicable(source: Parsed | str, families: Sequence[str] = FAMILIES) -> list[Edit]:
    """Every edit of these families of a strictly valid text: by family, then agent, then the new value.

    An edit whose text would not be strictly valid (a tool that loses its last dependency) is left
    out. Raises ValueError if the text itself is not strictly valid, or for a family that there is not.
    """
    if unknown := set(families) - {*FAMILIES, *OPT_IN_FAMILIES}:
        raise ValueError(f"unknown edit families {', '.join(sorted(unknown))}")
    parsed = parse(source) if isinstance(source, str) else source
    if not parsed.strict_ok or parsed.spec is None:
        raise ValueError("edits need a strictly valid spec; check Parsed.strict_ok first")
    made: dict[str, Callable[[str, Parsed], Iterator[_Candidate]]] = {
        "delete_dependency": _deletions,
        "restore_duty": _duties,
        "lower_capacity": partial(_levels, step=-1),
        "add_dependency": _additions,
        "change_role": _roles,
        "raise_capacity": partial(_levels, step=1),
    }
    ordered = [family for family in made if family in families]
    found = (_apply(parsed.text, parsed.spec, c) for family in ordered for c in made[family](family, parsed))
    return [edit for edit in found if edit is not None]


def _deletions(family: str, parsed: Parsed) -> Iterator[_Candidate]:
    for i, agent, sources in _dependencies(parsed):
        for j in range(len(sources)):
            kept = agent.depends_on[:j] + agent.depends_on[j + 1 :]
            yield _dependency_list(family, parsed, i, kept, sources[:j] + sources[j + 1 :])


def _additions(family: str, parsed: Parsed) -> Iterator[_Candidate]:
    assert parsed.spec is not None
    ids = [agent.id for agent in parsed.spec.agents]
    for i, agent, sources in _dependencies(parsed):
        for new in (earlier for earlier in ids[:i] if earlier not in agent.depends_on):
            # Before the first one that comes later in the spec: canonical texts keep that order.
            at = next((j for j, one in enumerate(agent.depends_on) if ids.index(one) > ids.index(new)), None)
            at = len(sources) if at is None else at
            longer = (*agent.depends_on[:at], new, *agent.depends_on[at:])
            yield _dependency_list(family, parsed, i, longer, [*sources[:at], new, *sources[at:]])


def _dependencies(parsed: Parsed) -> Iterator[tuple[int, Agent, list[str]]]:
    """Each agent with its place, and its dependencies as they are written."""
    assert parsed.spec is not None
    for i, agent in enumerate(parsed.spec.agents):
        spans = [parsed.spans["agents", i, "depends_on", j] for j in range(len(agent.depends_on))]
        yield i, agent, [parsed.text[start:end] for start, end in spans]


def _dependency_list(
    family: str, parsed: Parsed, index: int, after: tuple[str, ...], written: list[str]
) -> _Candidate:
    assert parsed.spec is not None
    span = _list_span(parsed.text, parsed.spans["agents", index, "depends_on"])
    # In a block list the value begins behind the colon, where a flow list needs its space.
    space = "" if parsed.text[span[0]] == "[" else " "
    agent = replace(parsed.spec.agents[index], depends_on=after)
    return _Candidate(family, index, agent, "depends_on", span, f"{space}[{', '.join(written)}]")


def _duties(family: str, parsed: Parsed) -> Iterator[_Candidate]:
    for i, agent in _asked(parsed):
        duty = ROLES[agent.role].default_duty
        if agent.duty != duty:
            span = parsed.spans["agents", i, "duty"]
            yield _Candidate(family, i, replace(agent, duty=duty), "duty", span, quote(duty))


def _levels(family: str, parsed: Parsed, *, step: int) -> Iterator[_Candidate]:
    for i, agent in _asked(parsed):
        level = CAPACITIES.index(agent.capacity) + step
        if 0 <= level < len(CAPACITIES):
            yield _word(family, parsed, i, "capacity", replace(agent, capacity=CAPACITIES[level]))


def _roles(family: str, parsed: Parsed) -> Iterator[_Candidate]:
    for i, agent in _asked(parsed):
        for role in (name for name in ROLES if name != agent.role and ROLES[name].llm):
            yield _word(family, parsed, i, "role", replace(agent, role=role))


def _asked(parsed: Parsed) -> Iterator[tuple[int, Agent]]:
    """The agents that a worker answers for: nobody reads the duty or the capacity of a tool."""
    assert parsed.spec is not None
    return ((i, agent) for i, agent in enumerate(parsed.spec.agents) if ROLES[agent.role].llm)


def _word(family: str, parsed: Parsed, index: int, key: str, after: Agent) -> _Candidate:
    """The agent's new word in the place of the old one, in quotes if that was."""
    span = parsed.spans["agents", index, key]
    mark = parsed.text[span[0]] if parsed.text[span[0]] in "\"'" else ""
    return _Candidate(family, index, after, key, span, f"{mark}{getattr(after, key)}{mark}")


def _list_span(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """A flow list is its own span; a block list's reaches back to the colon of its key."""
    if text[span[0]] == "[":
        return span
    return len(text[: span[0]].rstrip()), span[1]


def _apply(text: str, spec: Spec, c: _Candidate) -> Edit | None:
    start, end = c.span
    edited = text[:start] + c.new + text[end:]
    agents = (*spec.agents[: c.index], c.agent, *spec.agents[c.index + 1 :])
    expected = replace(spec, agents=agents)
    again = parse(edited)
    # The text decides: whatever the splice would have done to a neighbour shows here.
    if not again.strict_ok or again.spec != expected:
        return None
    return Edit(
        family=c.family,
        agent_id=c.agent.id,
        path=("agents", c.index, c.key),
        spec=expected,
        text=edited,
        span=c.span,
        edited_span=(start, start + len(c.new)),
    )
