"""The front end: text in, two verdicts out (strict for the reward, repaired for execution)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import LemonError
from . import repair
from .check import Checker, Spans
from .dump import dump
from .errors import Fault, Finding, Issue, format_issue
from .reader import Node, check_text, compose
from .types import Spec

MAX_TEXT_REPAIRS = 128  # more than the lines of a full-size spec; each repair costs one more reading


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """Both verdicts on one text.

    `spec` is the strict spec if `strict_ok`, else the repaired one, or None where no repair is possible.
    `spans` maps the path of every field value, such as ("agents", 1, "capacity") or
    ("agents", 1, "depends_on", 0), to its (start, end) in characters of `text`. `text` is the input
    itself if `strict_ok`, the canonical text of a repaired spec, and the input, without spans, otherwise.
    """

    strict_ok: bool
    issues: tuple[Issue, ...]
    spec: Spec | None
    repairs: tuple[str, ...]
    spans: Spans
    text: str


def parse(text: str) -> Parsed:
    """Read, check and, where possible, repair a spec. Never raises for anything a text can hold."""
    findings = check_text(text)
    if findings:
        return _refused(text, findings)
    findings, node, current, splices, names = _read(text)
    if any(f.repair is None for f in findings):
        return _refused(text, findings)
    checker = Checker(current)
    spec = checker.check(node)
    if not findings and not checker.findings:
        return Parsed(strict_ok=True, issues=(), spec=spec, repairs=(), spans=checker.spans, text=text)
    names += [f.repair for f in checker.findings if f.repair]
    found = [replace(f, index=repair.original_index(f.index, splices)) for f in checker.findings]
    findings = sorted(findings + found, key=lambda f: f.index)
    if spec is None:
        return _refused(text, findings)
    canonical = dump(spec)
    again = Checker(canonical)
    again.check(compose(canonical))
    return Parsed(
        strict_ok=False,
        issues=_issues(text, findings),
        spec=spec,
        repairs=tuple(dict.fromkeys(names)),
        spans=again.spans,
        text=canonical,
    )


def parse_strict(text: str, filename: str = "spec") -> Spec:
    """The spec of a strictly valid text. Raises LemonError that lists every issue, one a line."""
    parsed = parse(text)
    if not parsed.strict_ok or parsed.spec is None:
        raise LemonError("\n".join(format_issue(issue, filename) for issue in parsed.issues))
    return parsed.spec


def _read(text: str) -> tuple[list[Finding], Node | None, str, list[repair.Splice], list[str]]:
    """Compose, mending the text one fault at a time; stops at the first that has no repair."""
    findings: list[Finding] = []
    splices: list[repair.Splice] = []
    names: list[str] = []
    current = text
    for _ in range(MAX_TEXT_REPAIRS):
        node: Node | None = None
        fix: repair.Fix | None
        try:
            node = compose(current)
        except Fault as fault:
            finding, fix = repair.diagnose(current, fault)
        else:
            stray = repair.stray_space(current, node) if node else None
            if stray is None:
                return findings, node, current, splices, names
            finding, fix = stray
        findings.append(replace(finding, index=repair.original_index(finding.index, splices)))
        if fix is None:
            return findings, None, current, splices, names
        current = fix.apply(current)
        splices += fix.splices
        names += fix.names
    findings.append(Finding(code="E_LIMIT", index=0, message="too many faults to repair"))
    return findings, None, current, splices, names


def _refused(text: str, findings: list[Finding]) -> Parsed:
    return Parsed(strict_ok=False, issues=_issues(text, findings), spec=None, repairs=(), spans={}, text=text)


def _issues(text: str, findings: list[Finding]) -> tuple[Issue, ...]:
    return tuple(_issue(text, f) for f in findings)


def _issue(text: str, f: Finding) -> Issue:
    index = min(f.index, len(text))
    line = text.count("\n", 0, index) + 1
    col = index - text.rfind("\n", 0, index)
    return Issue(code=f.code, path=f.path, line=line, col=col, message=f.message, hint=f.hint)
