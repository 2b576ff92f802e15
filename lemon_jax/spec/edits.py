"""The three edit families of the paper: one field of a valid spec changes, in the text as it was written.

An edit is a splice: original[: span[0]] + replacement + original[span[1] :] is the edited text, byte
for byte, so that a contrast of two rewards belongs to the tokens of one span. Method: LEMON
(arXiv 2605.14483), localised counterfactual credit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .dump import quote
from .errors import Path
from .parse import Parsed, parse
from .roles import ROLES
from .types import CAPACITIES, Agent, Spec

FAMILIES = ("delete_dependency", "restore_duty", "lower_capacity")


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


def applicable(source: Parsed | str) -> list[Edit]:
    """Every edit of a strictly valid text: by family, then agent, then dependency.

    An edit whose text would not be strictly valid (a tool that loses its last dependency) is left
    out. Raises ValueError if the text itself is not strictly valid.
    """
    parsed = parse(source) if isinstance(source, str) else source
    if not parsed.strict_ok or parsed.spec is None:
        raise ValueError("edits need a strictly valid spec; check Parsed.strict_ok first")
    found = (_apply(parsed.text, parsed.spec, c) for c in _candidates(parsed.text, parsed.spec, parsed))
    return [edit for edit in found if edit is not None]


def _candidates(text: str, spec: Spec, parsed: Parsed) -> Iterator[_Candidate]:
    for i, agent in enumerate(spec.agents):
        sources = [parsed.spans["agents", i, "depends_on", j] for j in range(len(agent.depends_on))]
        span = _list_span(text, parsed.spans["agents", i, "depends_on"])
        for j in range(len(agent.depends_on)):
            left = [text[start:end] for start, end in sources[:j] + sources[j + 1 :]]
            after = replace(agent, depends_on=agent.depends_on[:j] + agent.depends_on[j + 1 :])
            # In a block list the value begins behind the colon, where a flow list needs its space.
            space = "" if text[span[0]] == "[" else " "
            new = f"{space}[{', '.join(left)}]"
            yield _Candidate("delete_dependency", i, after, "depends_on", span, new)
    for i, agent in enumerate(spec.agents):
        duty = ROLES[agent.role].default_duty
        if agent.duty != duty and ROLES[agent.role].llm:  # nobody reads the duty of a tool
            span = parsed.spans["agents", i, "duty"]
            yield _Candidate("restore_duty", i, replace(agent, duty=duty), "duty", span, quote(duty))
    for i, agent in enumerate(spec.agents):
        level = CAPACITIES.index(agent.capacity)
        if level > 0 and ROLES[agent.role].llm:
            span = parsed.spans["agents", i, "capacity"]
            lower = CAPACITIES[level - 1]
            mark = text[span[0]] if text[span[0]] in "\"'" else ""  # written as the original was
            after = replace(agent, capacity=lower)
            yield _Candidate("lower_capacity", i, after, "capacity", span, mark + lower + mark)


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
