"""What is wrong in a spec, and where: one frozen record an issue, one line each for people."""

from __future__ import annotations

from dataclasses import dataclass

Path = tuple[str | int, ...]  # ("agents", 1, "capacity"); positions count from 0 in the order of the text


@dataclass(frozen=True, kw_only=True)
class Issue:
    """One strict fault. `line` and `col` count from 1, in characters of the text as it was given."""

    code: str
    path: Path
    line: int
    col: int
    message: str
    hint: str = ""


def format_path(path: Path) -> str:
    """("agents", 1, "capacity") -> "agents[1].capacity"; the root is "spec"."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".") or "spec"


def format_issue(issue: Issue, filename: str) -> str:
    """One line `file:line:col: CODE path: message (hint)`."""
    hint = f" ({issue.hint})" if issue.hint else ""
    where = f"{filename}:{issue.line}:{issue.col}"
    return f"{where}: {issue.code} {format_path(issue.path)}: {issue.message}{hint}"


def shown(value: str, limit: int = 40) -> str:
    """The value as a message prints it: quoted, control characters escaped, long ones cut."""
    return repr(value if len(value) <= limit else value[: limit - 1] + "…")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault on its way to an `Issue`: an index into the text instead of a line.

    `repair` names the repair that mends it; None says that nothing here may mend it.
    """

    code: str
    index: int
    message: str
    hint: str = ""
    path: Path = ()
    repair: str | None = None


class Fault(Exception):
    """A fault that stops the reader. `context` is where the construct it stands in began, if known."""

    def __init__(self, finding: Finding, context: int | None = None):
        super().__init__(finding.message)
        self.finding = finding
        self.context = context
