"""The files of a run directory, read with every fault named by file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LemonError


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run has written so far; a file that is not there yet is empty."""

    path: Path
    manifest: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]  # one a step, in step order
    timings: list[dict[str, Any]]
    executions: list[dict[str, Any]]
    notes: tuple[str, ...]  # what was left out, for the reader of the report

    @property
    def simulated(self) -> bool:
        """Whether no language model answered, by the identities of the run's workers."""
        identities = mapping(mapping(self.manifest.get("workers")).get("identities"))
        return any(str(name).startswith("simulated:") for name in identities.values())


def load_run(run_dir: Path) -> RunFiles:
    """Read a run directory, finished or not.

    Raises:
        LemonError: there is no run in that directory, or a file of it is damaged.
    """
    if not run_dir.is_dir():
        raise LemonError(f"{run_dir}: no such directory; give a run directory, e.g. runs/<id>")
    notes: list[str] = []
    run = RunFiles(
        path=run_dir,
        manifest=_object(run_dir / "manifest.json"),
        summary=_summary(run_dir / "summary.json"),
        metrics=_by_step(_lines(run_dir / "metrics.jsonl", notes)),
        timings=_by_step(_lines(run_dir / "timings.jsonl", notes)),
        executions=_lines(run_dir / "executions.jsonl", notes),
        notes=tuple(notes),
    )
    if not (run.manifest or run.summary or run.metrics or run.executions):
        raise LemonError(
            f"{run_dir}: no run found: manifest.json, metrics.jsonl, executions.jsonl and summary.json are "
            "missing or empty; give a directory that a run has written"
        )
    return run


def number(value: object) -> float | None:
    """A finite number as float; None for anything else (null, NaN, text, true)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def mapping(value: object) -> dict[str, Any]:
    """The value if it is an object, else an empty one: a missing part of a file is no fault."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[dict[str, Any]]:
    """The objects of a list; empty for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def mean(values: Iterable[object]) -> float | None:
    """Mean of the finite numbers among the values; None if there is none."""
    found = [v for v in map(number, values) if v is not None]
    return sum(found) / len(found) if found else None


def plain(value: object) -> str:
    """Text that is safe on a terminal and in a file: control characters and lone surrogates replaced."""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return "".join(
        c if c in "\n\t" or c.isprintable() or (c.isspace() and ord(c) > 0x9F) else "�" for c in text
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LemonError(f"{path}: cannot be read: {error.strerror or error}") from None


def _object(path: Path) -> dict[str, Any]:
    data = _read(path)
    return {} if data is None else _parse(data, path, None)


def _summary(path: Path) -> dict[str, Any]:
    summary = _object(path)
    for key, kind, word in (
        ("eval", list, "a list"),
        ("train", dict, "an object"),
        ("data", dict, "an object"),
    ):
        found = summary.get(key)
        if found is not None and not isinstance(found, kind):
            raise LemonError(f"{path}: key {key!r}: found {type(found).__name__}, expected {word}")
    for i, row in enumerate(summary.get("eval") or []):
        if not isinstance(row, dict):
            raise LemonError(f"{path}: key 'eval', entry {i + 1}: found {row!r:.40}, expected an object")
    return summary


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    data = _read(path) or b""
    found = []
    lines = data.split(b"\n")
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            found.append(_parse(line, path, i + 1))
        except LemonError:
            # A run that is writing, or was killed while it wrote, leaves half a line: only the last, unended.
            if i < len(lines) - 1:
                raise
            notes.append(f"{path.name}: line {i + 1} is cut off and was left out (the run was still writing)")
    return found


def _parse(data: bytes, path: Path, line: int | None) -> dict[str, Any]:
    where = str(path) if line is None else f"{path}:{line}"
    mend = "restore the file from the run, or delete it to report without it"
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        at = f"{path}:{error.lineno}" if line is None else where
        raise LemonError(f"{at}: not JSON at column {error.colno}: {error.msg}; {mend}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of 5,000 digits, 100,000 brackets
        raise LemonError(f"{where}: not readable as JSON: {error}; {mend}") from None
    if not isinstance(value, dict):
        raise LemonError(f"{where}: found {type(value).__name__}, expected a JSON object; {mend}")
    return value


def _by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in step order, the last one of each step: a resumed run writes a step again."""
    by_step: dict[float, dict[str, Any]] = {}
    for i, row in enumerate(rows):
        step = number(row.get("step"))
        step = float(i) if step is None else step
        by_step[step] = row | {"step": step}
    return [by_step[step] for step in sorted(by_step)]
