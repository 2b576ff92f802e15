"""Text to a small node tree with character spans; every scalar is its written text.

It is PyYAML's `compose` over parser events, with three differences: nothing is resolved to a type
(`no` stays "no"), anchors, aliases, tags and second documents are refused, and the walk is iterative,
so that a deep input meets the depth limit instead of Python's recursion limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import yaml

from .errors import Fault, Finding

MAX_BYTES = 16 * 1024
MAX_DEPTH = 8
MAX_AGENTS = 16
# Keys and values, maps and lists. The largest spec has 335; without a bound a text of 16 KiB holds thousands,
# and reading it anew for each of its faults takes seconds.
MAX_NODES = 1000

# The C parser is ten times faster and gives the same marks (tests compare the two); not every wheel has it.
LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# What YAML cannot carry, the C1 controls, and the three line breaks that only YAML sees as such.
FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
MAX_REPORTED = 8  # forbidden characters named one by one; a binary file has thousands


@dataclass(slots=True)
class Node:
    """A scalar, a list or a map. `items` of a map alternate key, value. text[start:end] is its source."""

    kind: Literal["scalar", "list", "map"]
    start: int
    end: int
    text: str = ""
    style: str = ""  # of a scalar: "" plain, else one of ' " | >
    flow: bool = False
    items: list[Node] = field(default_factory=list)

    def pairs(self) -> list[tuple[Node, Node]]:
        return list(zip(self.items[::2], self.items[1::2], strict=True))


def check_text(text: str) -> list[Finding]:
    """Size and characters, before any parser sees the text; empty if it may be parsed."""
    size = len(text) if len(text) > MAX_BYTES else len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        message = f"the text has more than {MAX_BYTES} bytes"
        return [Finding(code="E_LIMIT", index=0, message=message, hint="shorten the duties")]
    found = []
    for match in FORBIDDEN.finditer(text):
        if match.group() == "\ufeff" and match.start() == 0:
            continue  # a byte order mark; compose() steps over it
        message = f"character U+{ord(match.group()):04X} is not allowed"
        found.append(Finding(code="E_CHAR", index=match.start(), message=message, hint="remove it"))
    return found[:MAX_REPORTED]


def compose(text: str) -> Node | None:
    """The tree of a text that passed `check_text`; None for an empty document. Raises Fault."""
    base = int(text.startswith("\ufeff"))
    try:
        return _build(text, base)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        index = base + mark.index if mark else 0
        context = base + error.context_mark.index if error.context_mark else None
        message = str(error.problem or error.context)
        # The C scanner has a limit of its own (1,000), which it can meet while it looks ahead.
        code = "E_LIMIT" if "nesting depth" in message else "E_SYNTAX"
        raise Fault(Finding(code=code, index=index, message=message), context) from None


def _build(text: str, base: int) -> Node | None:
    root: Node | None = None
    stack: list[Node] = []
    documents = nodes = 0
    for event in yaml.parse(text[base:], Loader=LOADER):
        assert event.start_mark is not None  # what a parser yields has both marks
        assert event.end_mark is not None
        start = base + event.start_mark.index
        end = base + event.end_mark.index
        if isinstance(event, yaml.CollectionEndEvent):
            node = stack.pop()
            # A block collection ends where its last child does, not before the next token.
            node.end = end if node.flow else (node.items[-1].end if node.items else node.start)
            continue
        if isinstance(event, yaml.NodeEvent):
            _refuse_references(event, start)
            nodes += 1
            if nodes > MAX_NODES:
                raise _fault("E_LIMIT", start, f"more than {MAX_NODES} keys and values", "a spec needs fewer")
            node = _node(event, text, start, end)
            if stack:
                stack[-1].items.append(node)
            else:
                root = node
            if node.kind != "scalar":
                stack.append(node)
                if len(stack) > MAX_DEPTH:
                    raise _fault(
                        "E_LIMIT", start, f"nested deeper than {MAX_DEPTH} levels", "a spec needs four"
                    )
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if event.version or event.tags:
                raise _fault("E_DIRECTIVE", start, "YAML directives are not allowed", "remove the % lines")
            if documents > 1:
                raise _fault("E_DOCUMENTS", start, "a second document begins", "write one spec only")
    # YAML gives an explicit but empty document (`---` alone) as an empty plain scalar.
    return None if root is None or (root.kind == "scalar" and root.start == root.end) else root


def _node(event: yaml.NodeEvent, text: str, start: int, end: int) -> Node:
    if isinstance(event, yaml.ScalarEvent):
        if event.style in ("|", ">"):  # the parser's end mark lies behind the blank lines that follow
            end = start + len(text[start:end].rstrip())
        return Node("scalar", start, end, text=event.value, style=event.style or "")
    assert isinstance(event, yaml.CollectionStartEvent)  # aliases have been refused
    kind: Literal["list", "map"] = "list" if isinstance(event, yaml.SequenceStartEvent) else "map"
    return Node(kind, start, end, flow=bool(event.flow_style))


def _refuse_references(event: yaml.NodeEvent, start: int) -> None:
    quote = "quote the value if the character is part of the text"
    if isinstance(event, yaml.AliasEvent):
        raise _fault("E_ALIAS", start, f"alias *{event.anchor} is not allowed", quote)
    if event.anchor is not None:
        raise _fault("E_ANCHOR", start, f"anchor &{event.anchor} is not allowed", quote)
    if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
        raise _fault("E_TAG", start, f"tag {event.tag} is not allowed", quote)


def _fault(code: str, index: int, message: str, hint: str) -> Fault:
    return Fault(Finding(code=code, index=index, message=message, hint=hint))
