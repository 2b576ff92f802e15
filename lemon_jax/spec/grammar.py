"""The canonical texts of strictly valid specs as an automaton over bytes.

It accepts what `dump` writes for a spec whose ids are a1, a2, ... in order, whose dependencies stand in
rising order, and whose names and duties keep within their bounds; every text it accepts is strictly valid.
It is unrolled over the agents, because an agent may refer to the agents before it only. Bounds are not
unrolled: a state within a text has the bound beside it, and whoever walks counts.

For ablations some choices may be fixed (`CHOICES`), which leaves a smaller language of the same texts:
"capacity", all workers are FIXED_CAPACITY; "role", an agent has its base role's own name and duty;
"structure", each agent reads the one before it, and the last one answers.
"""

from __future__ import annotations

import inspect
import json
import sys
import unicodedata
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from . import text_states as text_states_module
from .base_role import BaseRole
from .check import HIDDEN
from .dump import ESCAPED, quote
from .reader import FORBIDDEN, MAX_AGENTS, MAX_BYTES
from .roles import ROLES
from .text_states import CLOSED, EMPTY, bytes_to_close, text_states
from .types import CAPACITIES, CHOICES, VERSION

NAME_BYTES, DUTY_BYTES = 80, 640  # between the quotes, as written; 16 agents of such texts stay below 16 KiB
FIXED_CAPACITY = "medium"  # that of the baselines
TOOL_CAPACITY = "small"  # means nothing where no worker is asked; what the teacher writes
END = 256  # the symbol after the last byte
DEAD = 0


class ByteGrammar(NamedTuple):
    """States are numbers; the same place within another agent is `stride` away, so that equal places are
    told by equal differences. `next_Sx257[state, symbol]` is DEAD where the symbol may not come; symbol END
    ends the text. `bound_S` is the number of bytes that the free text around a state may have, 0 outside
    of one; `need_S` the fewest bytes after which that text may be closed."""

    next_Sx257: np.ndarray
    bound_S: np.ndarray
    need_S: np.ndarray
    start: int
    stride: int


def language_key(fixed: Collection[str] = ()) -> str:
    """Tells languages apart without building their automata: by what they are made from."""
    roles = {name: [role.llm, role.title, role.default_duty] for name, role in ROLES.items()}
    made_by = [inspect.getsource(module) for module in (text_states_module, sys.modules[__name__])]
    characters = [FORBIDDEN.pattern, ESCAPED.pattern, HIDDEN.pattern, unicodedata.unidata_version]
    return json.dumps([VERSION, MAX_AGENTS, CAPACITIES, roles, characters, made_by, sorted(fixed)])


Place = Hashable  # what a state stands for within its agent


def byte_grammar(max_agents: int = MAX_AGENTS, fixed: Collection[str] = ()) -> ByteGrammar:
    """The automaton for specs of at most `max_agents` agents, without the choices that are `fixed`.

    Raises ValueError if specs within the bounds could exceed the language's 16 KiB, or for an unknown choice.
    """
    if unknown := set(fixed) - {*CHOICES}:
        raise ValueError(f"unknown choices {', '.join(sorted(unknown))}, there are {', '.join(CHOICES)}")
    builder = _Builder(max_agents, frozenset(fixed))
    builder.literal(0, "begin", f"version: {VERSION}\nagents:\n", 1, "agent")
    for k in range(1, max_agents + 1):
        builder.agent(k)
        builder.output(k)
    # Of an agent: its fixed text with the longest role and 15 dependencies, and twice 1 byte of its number.
    longest = max_agents * (NAME_BYTES + DUTY_BYTES + 110 + max(map(len, ROLES)) + 5 * max_agents)
    if longest + 64 > MAX_BYTES:
        raise ValueError(
            f"{max_agents} agents of such texts may have {longest} bytes, allowed are {MAX_BYTES}"
        )
    return builder.build()


class _Builder:
    """Edges between (agent, place); agent 0 is the head of the text."""

    def __init__(self, max_agents: int, fixed: frozenset[str]):
        self.max_agents = max_agents
        self.fixed = fixed
        self.places: dict[Place, int] = {"dead": DEAD}
        self.edges: list[tuple[int, int, int, int, int]] = []
        self.fields: list[tuple[int, int, int, int]] = []  # agent, place, bound, need
        self.text = text_states()
        self.need = bytes_to_close(self.text)

    def edge(self, k: int, place: Place, symbol: int, to_k: int, to: Place) -> None:
        number = self.places.setdefault
        self.edges.append((k, number(place, len(self.places)), symbol, to_k, number(to, len(self.places))))

    def literal(self, k: int, place: Place, text: str, to_k: int, to: Place) -> None:
        """A path that spells `text`; paths from one place share what they begin with."""
        for i, byte in enumerate(text.encode()):
            here = (place, text[:i]) if i else place
            last = i == len(text) - 1
            self.edge(k, here, byte, to_k if last else k, to if last else (place, text[: i + 1]))

    def free_text(self, k: int, place: Place, bound: int, to: Place) -> None:
        """What stands between the quotes, and the closing one."""
        for state, out in enumerate(self.text):
            for byte, target in out.items():
                self.edge(k, (place, state), byte, k, to if target == CLOSED else (place, target))
            self.fields.append((k, self.places[place, state], bound, self.need[state]))

    def agent(self, k: int) -> None:
        # Named by their length, not by their text: the number is all in which these places differ.
        head = f"  - id: a{k}\n"
        for i, byte in enumerate(head.encode()):
            # The last byte stands in one place, whether the number has one digit or two.
            here = ("newline" if i == len(head) - 1 else ("id", i)) if i else "agent"
            after = "id end" if i == len(head) - 1 else ("newline" if i == len(head) - 2 else ("id", i + 1))
            self.edge(k, here, byte, k, after)
        # A tool works on what others found, so the first agent is none.
        roles = [role for role in ROLES.values() if role.llm or k > 1]
        if "role" in self.fixed:
            self.base_roles(k, roles)
        else:
            self.own_roles(k, roles)
        for tool in (False, True) if k > 1 else (False,):
            for capacity in self.capacities(tool=tool):
                self.literal(k, ("capacity", tool), f"{capacity}\n", k, ("capacity end", tool))
            self.literal(k, ("capacity end", tool), "    depends_on: [", k, ("list", tool))
        if "structure" in self.fixed:
            self.the_one_before(k)
        else:
            self.dependencies(k)
        self.edge(k, "list end", ord("\n"), k, "next")
        if k < self.max_agents:
            self.edge(k, "next", ord(" "), k + 1, ("id", 1))

    def own_roles(self, k: int, roles: Sequence[BaseRole]) -> None:
        """A name, a base role and a duty, the texts free."""
        self.literal(k, "id end", '    name: "', k, ("name", EMPTY))
        self.free_text(k, "name", NAME_BYTES, "name end")
        self.literal(k, "name end", "\n    role: ", k, "role")
        for role in roles:
            self.literal(k, "role", f"{role.name}\n", k, ("role end", not role.llm))
        for tool in (False, True) if k > 1 else (False,):
            self.literal(k, ("role end", tool), '    duty: "', k, (("duty", tool), EMPTY))
            self.free_text(k, ("duty", tool), DUTY_BYTES, ("duty end", tool))
            self.literal(k, ("duty end", tool), "\n    capacity: ", k, ("capacity", tool))

    def base_roles(self, k: int, roles: Sequence[BaseRole]) -> None:
        """A base role with its own name and duty; the name comes first, so it decides."""
        for role in roles:
            texts = {"name": quote(role.title), "role": role.name, "duty": quote(role.default_duty)}
            lines = "".join(f"    {key}: {text}\n" for key, text in texts.items())
            self.literal(k, "id end", f"{lines}    capacity: ", k, ("capacity", not role.llm))

    def capacities(self, *, tool: bool) -> Sequence[str]:
        if "capacity" not in self.fixed:
            return CAPACITIES
        return (TOOL_CAPACITY,) if tool else (FIXED_CAPACITY,)

    def the_one_before(self, k: int) -> None:
        """A chain: the first agent reads nobody."""
        for tool in (False, True) if k > 1 else (False,):
            self.literal(k, ("list", tool), f"a{k - 1}]" if k > 1 else "]", k, "list end")

    def dependencies(self, k: int) -> None:
        """Rising numbers below k. A place holds the last number and the digits of the one that is begun."""
        self.edge(k, ("list", False), ord("]"), k, "list end")
        for last in range(k - 1):
            if last == 0:
                for tool in (False, True):
                    self.edge(k, ("list", tool), ord("a"), k, ("number", 0, ""))
            else:
                self.literal(k, ("comma", last), " a", k, ("number", last, ""))
            allowed = range(last + 1, k)
            begun = {str(n)[:i] for n in allowed for i in range(len(str(n)) + 1)}
            for digits in sorted(begun):
                here = ("number", last, digits)
                for digit in "0123456789":
                    if digits + digit in begun:
                        self.edge(k, here, ord(digit), k, ("number", last, digits + digit))
                if digits and int(digits) in allowed:
                    self.edge(k, here, ord("]"), k, "list end")
                    if int(digits) < k - 1:
                        self.edge(k, here, ord(","), k, ("comma", int(digits)))

    def output(self, k: int) -> None:
        """The last line, which names one of k agents."""
        self.literal(k, "next", "output: a", k, "output")
        for n in (k,) if "structure" in self.fixed else range(1, k + 1):
            self.literal(k, "output", f"{n}\n", k, "done")
        self.edge(k, "done", END, k, "ended")

    def build(self) -> ByteGrammar:
        stride = len(self.places)
        states = (self.max_agents + 1) * stride
        table = np.full((states, END + 1), DEAD, np.int32)
        k, place, symbol, to_k, to = np.array(self.edges, np.int32).T
        table[k * stride + place, symbol] = to_k * stride + to
        bound, need = np.zeros((2, states), np.int32)
        k, place, bounds, needs = np.array(self.fields, np.int32).reshape(-1, 4).T
        bound[k * stride + place], need[k * stride + place] = bounds, needs
        return ByteGrammar(table, bound, need, start=self.places["begin"], stride=stride)
