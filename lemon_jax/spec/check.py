"""The node tree against the language: every fault is found in one pass, and the lenient spec is built.

The checks run on lenient values (case folded, typographic quotes stripped); each departure from the
strict language is a finding that names its repair. A spec comes out when every finding has one, so
the strict and the repaired verdict cannot disagree about what the text says.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from difflib import get_close_matches
from itertools import pairwise

from .dag import find_cycles, stable_order
from .dump import ID
from .errors import Finding, Path, shown
from .reader import FORBIDDEN, MAX_AGENTS, Node
from .repair import ODD_SPACES
from .roles import ROLES
from .types import CAPACITIES, VERSION, Agent, Spec

SPEC_KEYS = ("version", "agents", "output")
AGENT_KEYS = ("id", "name", "role", "duty", "capacity", "depends_on")
MAX_ID = 32
_QUOTES = "“”„‟‘’‚‛«»"
_ODD = re.compile(f"[{_QUOTES}{ODD_SPACES}]")
_TO_SPACE = re.compile(f"[{ODD_SPACES}]")
# Letters, signs and marks that show nothing: fillers, the empty Braille cell, variation selectors and so on.
HIDDEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U0001d159\U000e0100-\U000e01ef]"
)

Spans = dict[Path, tuple[int, int]]
Draft = dict[str, str | tuple[str, ...]]


class Checker:
    """One walk over one tree. `text` is what the nodes' spans point into."""

    def __init__(self, text: str):
        self.text = text
        self.findings: list[Finding] = []
        self.spans: Spans = {}
        self.nodes: dict[Path, Node] = {}

    def check(self, root: Node | None) -> Spec | None:
        """The strict or repaired spec; None if a finding has no repair."""
        if root is None:
            self.report("E_EMPTY", (), 0, "the text holds no spec")
            return None
        if root.kind != "map":
            hint = "put `agents:` above the list" if root.kind == "list" else "begin with `version: 1`"
            self.report("E_SHAPE", (), root.start, f"expected a map, found a {root.kind}", hint)
            return None
        fields = self.keys(root, (), SPEC_KEYS)
        if (version := fields.get("version")) and self.word(version, ("version",)) not in (
            str(VERSION),
            None,
        ):
            found = shown(version.text)
            self.report(
                "E_VERSION", ("version",), version.start, f"version {found} is unknown", "write version: 1"
            )
        drafts = self.agents(fields["agents"]) if "agents" in fields else []
        self.graph(drafts)
        output = self.word(fields["output"], ("output",)) if "output" in fields else None
        ids = [str(draft["id"]) for draft in drafts if "id" in draft]
        if output is not None and output not in ids:
            where = fields["output"].start
            self.report(
                "E_OUTPUT", ("output",), where, f"no agent has the id {shown(output)}", _meant(output, ids)
            )
        if output is None or any(f.repair is None for f in self.findings):
            return None
        return self.build(drafts, output)

    def build(self, drafts: list[Draft], output: str) -> Spec:
        agents = {str(draft["id"]): Agent(**draft) for draft in drafts}  # type: ignore[arg-type]
        # For a valid spec this is its own order; a forward reference moves as few agents as it can.
        order = stable_order({agent_id: agent.depends_on for agent_id, agent in agents.items()})
        return Spec(agents=tuple(agents[agent_id] for agent_id in order), output=output)

    def report(
        self, code: str, path: Path, index: int, message: str, hint: str = "", repair: str | None = None
    ) -> None:
        self.findings.append(
            Finding(code=code, path=path, index=index, message=message, hint=hint, repair=repair)
        )

    def line(self, path: Path) -> int:
        return self.text.count("\n", 0, self.nodes[path].start) + 1

    def keys(self, node: Node, path: Path, expected: tuple[str, ...]) -> dict[str, Node]:
        """The expected fields of a map; unknown, repeated and missing keys are reported."""
        found: dict[str, Node] = {}
        for key, value in node.pairs():
            if key.kind != "scalar":
                self.report(
                    "E_SHAPE", path, key.start, f"a {key.kind} is used as a key", "keys are plain words"
                )
            elif key.text == "<<" and not key.style:
                self.report("E_MERGE", path, key.start, "merge keys are not allowed", "write the fields out")
            elif key.text in found:
                first = self.line((*path, key.text))
                message = f"key {key.text} is repeated (first on line {first})"
                self.report("E_DUP_KEY", (*path, key.text), key.start, message, "keep one of them")
            elif key.text in expected:
                found[key.text] = value
                self.nodes[*path, key.text] = value
                self.spans[*path, key.text] = (value.start, value.end)
            elif odd := _ODD.search(key.text):
                message = f"key {shown(key.text)} contains U+{ord(odd.group()):04X}"
                self.report("E_CHAR", path, key.start, message, "use ordinary quotes and spaces")
            else:
                message = f"unknown key {shown(key.text)}"
                hint = _meant(key.text, expected) or f"known: {', '.join(expected)}"
                self.report("E_UNKNOWN_KEY", path, key.start, message, hint)
        for name in expected:
            if name not in found:
                hint = "write depends_on: []" if name == "depends_on" else ""
                self.report("E_MISSING", (*path, name), node.start, f"key {name} is missing", hint)
        return found

    def word(self, node: Node, path: Path) -> str | None:
        """A scalar that is not prose: typographic quotes and odd spaces are named and normalised."""
        if node.kind != "scalar":
            self.report("E_SHAPE", path, node.start, f"expected one word, found a {node.kind}")
            return None
        if _shows_nothing(node.text):
            self.report("E_EMPTY", path, node.start, f"{path[-1]} is empty")
            return None
        value = node.text
        if odd := _ODD.search(value):
            names = " ".join(f"U+{ord(c):04X}" for c in dict.fromkeys(_ODD.findall(value)))
            message = f"{shown(value)} contains {names}"
            index = node.start + (0 if node.style else odd.start())
            hint = "use ordinary quotes and spaces"
            self.report("E_CHAR", path, index, message, hint, repair="normalise_characters")
            value = _TO_SPACE.sub(" ", value).strip(_QUOTES + " ")
        # Two ids that look alike must be alike, so comparison is by NFC.
        return unicodedata.normalize("NFC", value)

    def prose(self, node: Node, path: Path) -> str | None:
        """A name or a duty: any text that shows something."""
        value, field = node.text, path[-1]
        if node.kind != "scalar":
            # `duty: [check] ` reads as a list; its source is the text that was meant.
            value = self.text[node.start : node.end]
            repair = "quote_text" if node.flow else None
            value += self.cut_off(node, path)
            hint = "quote the value or use |"
            self.report(
                "E_SHAPE", path, node.start, f"{field} is a {node.kind}, not a text", hint, repair=repair
            )
        else:
            value = node.text + self.cut_off(node, path)
        if _shows_nothing(value):
            self.report("E_EMPTY", path, node.start, f"{field} is empty", f"say what the agent's {field} is")
        if bad := FORBIDDEN.search(value.replace("\u2028", "").replace("\u2029", "")):
            message = f"{field} holds the character U+{ord(bad.group()):04X}"
            self.report("E_CHAR", path, node.start, message, "remove it")
        return value

    def cut_off(self, node: Node, path: Path) -> str:
        """What a `#` would cut off an unquoted text without a word, spaces before it included; else ""."""
        end = self.text.find("\n", node.end)
        rest = self.text[node.end : len(self.text) if end < 0 else end].rstrip(" \t\r")
        gap = len(rest) - len(rest.lstrip(" \t"))
        if node.start == node.end or not rest[gap:].startswith("#"):
            return ""
        # A quoted text has its own end; two spaces set a name off from a comment.
        quoted = node.kind == "scalar" and node.style != ""
        if gap > 0 and (quoted or (path[-1] == "name" and (gap > 1 or "\t" in rest[:gap]))):
            return ""
        # Within {} the rest of the line may be another field.
        repair = None if quoted or self.nodes[path[:2]].flow else "quote_text"
        message = f"`#` begins a comment and cuts the {path[-1]} off"
        self.report("E_SYNTAX", path, node.end + gap, message, "quote the value", repair=repair)
        return rest

    def agents(self, node: Node) -> list[Draft]:
        if node.kind != "list":
            hint = "agents is a list: begin each agent with `- id: ...`"
            self.report("E_SHAPE", ("agents",), node.start, f"expected a list, found a {node.kind}", hint)
            return []
        if len(node.items) > MAX_AGENTS:
            message = f"{len(node.items)} agents, at most {MAX_AGENTS} are allowed"
            self.report("E_LIMIT", ("agents",), node.start, message, "use fewer agents")
            return []
        if not node.items:
            self.report("E_EMPTY", ("agents",), node.start, "there are no agents", "write at least one")
        return [self.agent(item, ("agents", i)) for i, item in enumerate(node.items)]

    def agent(self, node: Node, path: Path) -> Draft:
        if node.kind != "map":
            hint = f"an agent has the keys {', '.join(AGENT_KEYS)}"
            self.report("E_SHAPE", path, node.start, f"expected a map, found a {node.kind}", hint)
            return {}
        self.nodes[path] = node
        fields = self.keys(node, path, AGENT_KEYS)
        readers = {
            "id": self.agent_id,
            "name": self.prose,
            "role": lambda n, p: self.choice(n, p, ROLES),
            "duty": self.prose,
            "capacity": lambda n, p: self.choice(n, p, CAPACITIES),
            "depends_on": self.depends_on,
        }
        values = {key: readers[key](fields[key], (*path, key)) for key in AGENT_KEYS if key in fields}
        draft: Draft = {key: value for key, value in values.items() if value is not None}
        role = ROLES.get(str(draft.get("role")))
        if role and not role.llm and draft.get("depends_on") == ():
            message = f"{role.name} is a tool and has nothing to work on"
            self.report(
                "E_NO_INPUT", (*path, "depends_on"), fields["depends_on"].start, message, "add a dependency"
            )
        return draft

    def agent_id(self, node: Node, path: Path) -> str | None:
        value = self.word(node, path)
        if value is None or ID.fullmatch(value):
            return value
        if len(value) > MAX_ID:
            message = f"the id has {len(value)} characters, at most {MAX_ID} are allowed"
            self.report("E_LIMIT", path, node.start, message)
            return value
        # What is one printable word can still be told apart, so it may be executed as it is.
        told_apart = re.fullmatch(r"\S+", value) and value.isprintable() and not HIDDEN.search(value)
        repair = "keep_id" if told_apart else None
        hint = "a letter or _, then letters, digits, _ and -"
        self.report("E_ID_FORMAT", path, node.start, f"{shown(value)} is not an id", hint, repair=repair)
        return value

    def choice(self, node: Node, path: Path, allowed: Collection[str]) -> str | None:
        value = self.word(node, path)
        if value is None or value in allowed:
            return value
        folded = value.strip().lower()
        repair = "fold_case" if folded in allowed else None
        hint = f"one of {', '.join(allowed)}" + (f"; {meant}" if (meant := _meant(value, allowed)) else "")
        self.report("E_ENUM", path, node.start, f"{path[-1]} {shown(value)} is unknown", hint, repair=repair)
        return folded

    def depends_on(self, node: Node, path: Path) -> tuple[str, ...] | None:
        items = node.items
        if node.kind == "map":
            self.report("E_SHAPE", path, node.start, "expected a list of ids, found a map", "write [a1, a2]")
            return None
        if node.kind == "scalar":
            items = [node] if node.text.strip() else []
            hint = f"write [{node.text}]" if len(node.text) <= MAX_ID else "write [a1, a2]"
            self.report(
                "E_SHAPE", path, node.start, "expected a list of ids", hint, repair="list_dependencies"
            )
        found: list[str] = []
        for j, item in enumerate(items):
            self.spans[*path, j] = (item.start, item.end)
            self.nodes[*path, j] = item
            value = self.word(item, (*path, j))
            if value is not None and value in found:
                self.report(
                    "E_DUP_DEP", (*path, j), item.start, f"{shown(value)} is named twice", "name it once"
                )
            if value is not None:
                found.append(value)
        return tuple(found)

    def graph(self, drafts: list[Draft]) -> None:
        """Repeated ids, then what each agent depends on: unknown, later, or in a circle."""
        place: dict[str, int] = {}
        for i, draft in enumerate(drafts):
            if (agent_id := draft.get("id")) is None:
                continue
            if agent_id in place:
                first = self.line(("agents", place[str(agent_id)], "id"))
                message = f"id {shown(str(agent_id))} is taken (first on line {first})"
                path: Path = ("agents", i, "id")
                self.report("E_DUP_ID", path, self.nodes[path].start, message, "give each agent its own id")
            else:
                place[str(agent_id)] = i
        graph = {agent_id: tuple(drafts[i].get("depends_on", ())) for agent_id, i in place.items()}
        closed = self.cycles(graph, place)
        for i, draft in enumerate(drafts):
            for j, dep in enumerate(draft.get("depends_on", ())):
                path = ("agents", i, "depends_on", j)
                if dep not in place:
                    message = f"no agent has the id {shown(dep)}"
                    self.report("E_DEP_UNKNOWN", path, self.nodes[path].start, message, _meant(dep, place))
                elif place[dep] > i and (str(draft.get("id")), dep) not in closed:
                    message = f"{shown(dep)} comes later (line {self.line(('agents', place[dep], 'id'))})"
                    hint = "an agent depends on earlier agents only"
                    self.report(
                        "E_DEP_FORWARD", path, self.nodes[path].start, message, hint, repair="reorder"
                    )

    def cycles(self, graph: dict[str, tuple[str, ...]], place: dict[str, int]) -> set[tuple[str, str]]:
        """Report each cycle where it closes; returns the dependencies that lie on one."""
        closed: set[tuple[str, str]] = set()
        for cycle in find_cycles(graph):
            closed.update(pairwise(cycle))
            last, dep = cycle[-2:]
            path: Path = ("agents", place[last], "depends_on", graph[last].index(dep))
            message = f"agents depend on each other in a circle: {' -> '.join(cycle)}"
            self.report("E_CYCLE", path, self.nodes[path].start, message, "remove one of these dependencies")
        return closed


def _shows_nothing(text: str) -> bool:
    return all(unicodedata.category(c)[0] in "ZC" or HIDDEN.match(c) for c in text)


def _meant(word: str, options: Collection[str]) -> str:
    close = get_close_matches(word.lower(), list(options), n=1)
    return f"did you mean {close[0]}?" if close else ""
