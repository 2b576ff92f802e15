"""Repairs of the text itself, for faults that stop the reader: each is named and loses no content.

`diagnose` turns the reader's fault into the finding a person should see (a tab, a fence, an unquoted
duty) and, where there is one, the splices that mend it. Faults of meaning are `check`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .dump import quote
from .errors import Fault, Finding
from .reader import Node

ODD_SPACES = "\xa0\u1680\u2000-\u200a\u202f\u205f\u3000"
# Every run is possessive: where two of them could share a run of spaces, backtracking would take cubic time.
_FENCE = re.compile(r"^\ufeff? {0,3}(?P<mark>`{3,}+|~{3,}+)(?P<info>[^\n`]*+)$", re.MULTILINE)
_SPEC_KEY = re.compile(
    rf"""^(?:---)?[\ufeff \t{{{ODD_SPACES}]*+["']?(?:agents|version)["']?[ \t]*+:""", re.MULTILINE
)
# A one-line name or duty (without the spaces at its end) whose value is neither quoted nor a block scalar.
_TEXT_FIELD = re.compile(
    r"(?P<head>[ \t]*+(?:-[ \t]++)?(?P<key>name|duty)[ \t]*+:[ \t]++)"
    r"(?P<value>(?![\"'])(?![|>][-+\d]*+[ \t]*+(?:#.*)?$)\S.*)"
)
# `&d "text"` and a lone `*d` look like real references, which are refused and not guessed at.
_REFERENCE = re.compile(r"""[&!]\S*\s*(?:["'|>\[{*].*)?|\*[\w-]+""")
_KEY_HEAD = re.compile(
    rf"[ \t{ODD_SPACES}]*(?:-[ {ODD_SPACES}]+)?(?:\"?\w+\"?[ {ODD_SPACES}]*:[ {ODD_SPACES}]*)?"
)
_ODD_SPACE = re.compile(f"[{ODD_SPACES}]")
_PAIR = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)


@dataclass(frozen=True)
class Splice:
    """text[start : start + length] is replaced by `new`."""

    start: int
    length: int
    new: str


@dataclass(frozen=True)
class Fix:
    """Splices, last in the text first, so that none moves another; and the names of the repairs."""

    splices: tuple[Splice, ...]
    names: tuple[str, ...]

    def apply(self, text: str) -> str:
        for s in self.splices:
            text = text[: s.start] + s.new + text[s.start + s.length :]
        return text


def original_index(index: int, splices: list[Splice]) -> int:
    """Where a character of the repaired text stood in the text as it was given."""
    for s in reversed(splices):
        if index >= s.start + len(s.new):
            index += s.length - len(s.new)
        elif index > s.start:
            index = s.start + min(index - s.start, s.length)
    return index


def diagnose(text: str, fault: Fault) -> tuple[Finding, Fix | None]:
    """What a person should be told about the fault, and how to mend it (None: it cannot be mended)."""
    if fences := list(_FENCE.finditer(text)):
        return _fenced(text, fences, fault)
    return _unfenced(text, fault)


def _unfenced(text: str, fault: Fault) -> tuple[Finding, Fix | None]:
    finding = fault.finding
    if finding.code not in ("E_SYNTAX", "E_ANCHOR", "E_ALIAS", "E_TAG"):
        return finding, None
    if finding.code == "E_SYNTAX":
        for attempt in (_tab, _odd_space, _surrogate_pair):
            if answer := attempt(text, finding.index):
                return answer
        # `id:<no-break space>s` is one plain scalar, which YAML takes to go on until the next line's colon.
        if answer := _odd_space(text, max(0, _line(text, finding.index)[0] - 1)):
            return answer
    return _unquoted(text, fault)


def stray_space(text: str, node: Node) -> tuple[Finding, Fix] | None:
    """A no-break space that became part of a key or of a list item, because YAML does not indent by it."""
    for scalar in _words(node):
        found = None if scalar.style else _ODD_SPACE.search(scalar.text)
        if found and (answer := _odd_space(text, scalar.start + found.start())):
            return answer
    return None


def _words(root: Node) -> Iterator[Node]:
    """Keys and list items that are scalars: the places where an indentation can go astray."""
    todo = [root]
    while todo:
        node = todo.pop()
        words = node.items[::2] if node.kind == "map" else node.items
        yield from (word for word in words if word.kind == "scalar")
        todo.extend(child for child in reversed(node.items) if child.kind != "scalar")


def _line(text: str, index: int) -> tuple[int, str]:
    start = text.rfind("\n", 0, index) + 1
    end = text.find("\n", index)
    return start, text[start : len(text) if end < 0 else end]


def _fenced(text: str, fences: list[re.Match[str]], fault: Fault) -> tuple[Finding, Fix | None]:
    """Take the one fenced spec, or the one before a lone closing fence; never one of two specs."""
    blocks, opener = _blocks(fences)
    opened = [block[0] for block in blocks] + ([opener] if opener else [])
    places = [(first.start(), last.end()) for first, last in blocks]
    if opener:
        places.append(opener.span())
    outside = "\n".join(text[a:b] for a, b in _gaps(places, len(text) if blocks else places[-1][1]))
    has_spec = bool(_SPEC_KEY.search(outside))
    # The fences of a spec may stand in its duties; then the fault lies elsewhere and is mended there.
    marks = [fault.finding.index] + ([] if fault.context is None else [fault.context])
    at_fence = any(fence.start() <= mark <= fence.end() for fence in fences for mark in marks)
    if has_spec and not at_fence:
        answer = _unfenced(text, fault)
        if answer[1] is not None:
            return answer
    if len(opened) > 1:
        return _ambiguous(opened[1].start(), "more than one fenced block"), None
    first = opened[0]
    if blocks:
        if has_spec:
            return _ambiguous(first.start(), "a spec outside the fence"), None
        start, end = first.end(), blocks[0][1].start()
    else:
        after = text[first.end() :]
        if has_spec and _SPEC_KEY.search(after):
            return _ambiguous(first.start(), "a spec on both sides of one fence"), None
        if has_spec and not at_fence and fault.finding.index > first.end():
            # What follows was read as part of the spec, so it is not prose to be dropped.
            return _unfenced(text, fault)[0], None
        lone_closer = has_spec or not after.strip()
        start, end = (0, first.start()) if lone_closer else (first.end(), len(text))
    dropped = _FENCE.sub("", text[:start] + "\n" + text[end:])
    names = ("strip_prose", "strip_fence") if dropped.strip("\ufeff \t\r\n") else ("strip_fence",)
    finding = Finding(
        code="E_FENCE",
        index=fences[0].start(),
        message="the spec stands in a code fence",
        hint="write the YAML alone, without ``` and without other text",
        repair=names[-1],
    )
    return finding, Fix((Splice(end, len(text) - end, ""), Splice(0, start, "")), names)


def _blocks(
    fences: list[re.Match[str]],
) -> tuple[list[tuple[re.Match[str], re.Match[str]]], re.Match[str] | None]:
    """The pairs of an opening and a closing fence, and an opener that nothing closes."""
    blocks: list[tuple[re.Match[str], re.Match[str]]] = []
    opener: re.Match[str] | None = None
    for fence in fences:
        if opener is None:
            opener = fence
        elif fence["mark"].startswith(opener["mark"]) and not fence["info"].strip():
            blocks.append((opener, fence))
            opener = None
    return blocks, opener


def _gaps(places: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What lies before, between and behind these places, up to `end`."""
    starts = [0, *(b for _, b in places)]
    return list(zip(starts, [*(a for a, _ in places), end], strict=True))


def _ambiguous(index: int, message: str) -> Finding:
    return Finding(code="E_AMBIGUOUS", index=index, message=message, hint="write one spec only")


def _tab(text: str, index: int) -> tuple[Finding, Fix] | None:
    start, line = _line(text, index)
    margin = line[: len(line) - len(line.lstrip(" \t"))]
    indent: str | None = None
    if text[index : index + 1] == "\t" and index >= start + len(margin):
        at, run = index, re.match(r"\t+", text[index:]).group()  # type: ignore[union-attr]
        if line[: index - start] == margin + "-":
            indent = " " + "  " * (len(run) - 1)  # the dash itself is the first column
    elif "\t" in margin:
        at, run = start, margin
    else:
        return None
    finding = Finding(
        code="E_TAB",
        index=at + run.index("\t"),
        message="a tab is used as indentation",
        hint="indent by spaces",
        repair="tabs_to_spaces",
    )
    # Two columns a tab, the width of "- ", so that `\t- id` and `\t\tname` stay aligned.
    new = run.replace("\t", "  ") if indent is None else indent
    return finding, Fix((Splice(at, len(run), new),), ("tabs_to_spaces",))


def _odd_space(text: str, index: int) -> tuple[Finding, Fix] | None:
    start, line = _line(text, index)
    head = _KEY_HEAD.match(line).group()  # type: ignore[union-attr]  # every part is optional: it always matches
    found = _ODD_SPACE.search(head)
    if not found:
        return None
    finding = Finding(
        code="E_CHAR",
        index=start + found.start(),
        message=f"character U+{ord(found.group()):04X} is used as a space",
        hint="use an ordinary space",
        repair="normalise_characters",
    )
    splice = Splice(start, len(head), _ODD_SPACE.sub(" ", head))
    return finding, Fix((splice,), ("normalise_characters",))


def _surrogate_pair(text: str, index: int) -> tuple[Finding, Fix] | None:
    """JSON writes an emoji as two escapes, which YAML does not join."""
    match = _PAIR.search(text, max(0, index - 2), index + 12)
    if not match:
        return None
    pair = bytes.fromhex(match[1] + match[2]).decode("utf-16-be")
    finding = Finding(
        code="E_CHAR",
        index=match.start(),
        message=f"U+{ord(pair):04X} is written as two surrogate escapes",
        hint="write the character itself",
        repair="join_surrogates",
    )
    return finding, Fix((Splice(match.start(), len(match.group()), pair),), ("join_surrogates",))


def _unquoted(text: str, fault: Fault) -> tuple[Finding, Fix | None]:
    """A name or duty whose characters mean something to YAML: quoted as a whole, nothing altered."""
    finding = fault.finding
    index = finding.index
    # An unclosed `{` or `[` is noticed lines later; a block mapping's context is only its first key.
    if fault.context is not None and text[fault.context : fault.context + 1] in tuple("{[*&!"):
        index = fault.context
    start, line = _line(text, index)
    match = _TEXT_FIELD.fullmatch(line.rstrip(" \t\r"))
    if not match:
        return finding, None
    value = match["value"]
    finding = replace(finding, path=(match["key"],), index=index)
    if finding.code == "E_SYNTAX":
        message = f"the value of {match['key']} is not valid YAML: {finding.message}"
        finding = replace(finding, message=message, hint="quote the value or use |")
    if finding.code != "E_SYNTAX" and _REFERENCE.fullmatch(value) and not re.fullmatch(r"![\w-]+", value):
        return finding, None
    splice = Splice(start + match.start("value"), len(value), quote(value))
    return replace(finding, repair="quote_text"), Fix((splice,), ("quote_text",))
