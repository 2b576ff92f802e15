"""The canonical text of a spec: the one form the policy is taught to write."""

from __future__ import annotations

import json
import re

from .types import Agent, Spec

ID = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}")
# JSON leaves these as they are, but YAML reads them as line breaks or refuses them.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def quote(text: str) -> str:
    """Double-quoted with JSON escapes; what is not ASCII stays itself. In: a "b"  Out: "a \\"b\\"" """
    return ESCAPED.sub(lambda m: f"\\u{ord(m.group()):04x}", json.dumps(text, ensure_ascii=False))


def word(text: str) -> str:
    """An id, a role or a capacity: plain if it has the format of an id, else quoted."""
    return text if ID.fullmatch(text) else quote(text)


def dump(spec: Spec) -> str:
    """Canonical YAML, ending in a newline; `dump(parse_strict(t)) == t` for every canonical t."""
    lines = [f"version: {spec.version}", "agents:"]
    for agent in spec.agents:
        lines += _agent(agent)
    lines.append(f"output: {word(spec.output)}")
    return "\n".join(lines) + "\n"


def _agent(agent: Agent) -> list[str]:
    return [
        f"  - id: {word(agent.id)}",
        f"    name: {quote(agent.name)}",
        f"    role: {word(agent.role)}",
        f"    duty: {quote(agent.duty)}",
        f"    capacity: {word(agent.capacity)}",
        f"    depends_on: [{', '.join(map(word, agent.depends_on))}]",
    ]
