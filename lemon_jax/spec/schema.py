"""The language as a JSON Schema (2020-12), from the same limits and names that the checks use.

What a schema cannot say (ids that differ, dependencies on earlier agents only) is left to `parse`.
"""

from __future__ import annotations

from typing import Any

from .check import AGENT_KEYS, SPEC_KEYS
from .dump import ID
from .reader import MAX_AGENTS, MAX_BYTES
from .roles import ROLES
from .types import CAPACITIES, VERSION


def json_schema() -> dict[str, Any]:
    """A fresh schema of the loaded spec (`version` an integer, everything else strings and lists)."""
    word = {"type": "string", "pattern": f"^{ID.pattern}$"}
    prose = {"type": "string", "pattern": r"\S", "maxLength": MAX_BYTES}
    ids = {"type": "array", "items": word, "uniqueItems": True, "maxItems": MAX_AGENTS - 1}
    fields = {
        "id": word,
        "name": prose | {"description": "identity; free text"},
        "role": {"enum": list(ROLES), "description": "a base role of the library"},
        "duty": prose,
        "capacity": {"enum": list(CAPACITIES)},
        "depends_on": ids | {"description": "ids of earlier agents"},
    }
    tools = [name for name, role in ROLES.items() if not role.llm]
    agent = _closed(fields, AGENT_KEYS) | {
        "if": {"properties": {"role": {"enum": tools}}, "required": ["role"]},
        "then": {"properties": {"depends_on": {"minItems": 1}}},
    }
    agents = {"type": "array", "items": agent, "minItems": 1, "maxItems": MAX_AGENTS}
    top = {"version": {"const": VERSION}, "agents": agents, "output": word}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"lemon spec, version {VERSION}",
        **_closed(top, SPEC_KEYS),
    }


def _closed(properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    """An object with exactly these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
