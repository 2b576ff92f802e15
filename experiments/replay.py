"""A replayable run beside its replay: what is compared, and the verdict."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shipped import EXECUTIONS, POLICY, TRAINED, read_rows

TOLERANCE = 1e-3  # of metrics computed with other versions or on another processor, relative and absolute
# Whether a call was asked or looked up, and times: of the run that was recorded, not of what it computed.
NOT_COMPARED = ("recorded_calls", "wall_s")
# Of an execution, in plain text. No gold answer: it is the benchmark's; no reply: the recorded calls hold it.
WRITTEN = (
    "phase",
    "method",
    "step",
    "task",
    "group_index",
    "round",
    "edit",
    "sample",
    "bench",
    "spec",
    "valid",
)
CAME_OF_IT = (
    "phase",
    "method",
    "step",
    "task",
    "answer",
    "correct",
    "cost",
    "reward",
    "contrast",
    "contrast_se",
)
WHERE = ("phase", "method", "step", "task")
DIGEST = "line_sha256"  # of all else too, such as the agents' tokens: of the whole line but for NOT_IN_IT
NOT_IN_IT = ("gold", "output")
WHOLE_LINES = "agents, tokens, faults"  # of executions, by their digests
# What of a manifest decides the last bits of floats.
ENVIRONMENT = ("processor", "device", "scale", "versions")
NOT_ARITHMETIC = ("lemon_jax", "xllamacpp")
_SHOWN = 70  # characters of a value


def kept(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a line of executions.jsonl, what is exported and compared."""
    whole = {name: value for name, value in row.items() if name not in NOT_IN_IT}
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return _of(row, tuple(dict.fromkeys((*WRITTEN, *CAME_OF_IT)))) | {DIGEST: digest}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row of the verdict. `close`: what differs are floats, within the tolerance."""

    name: str
    recorded: str
    replayed: str
    difference: str = ""  # the first one, with both values
    close: bool = False

    @property
    def verdict(self) -> str:
        if not self.difference:
            return "equal"
        return f"within {TOLERANCE:g}" if self.close else "DIFFERENT"


def print_verdict(shipped: Path, replayed: Path, *, partial: bool = False) -> bool:
    """Compare a replayable run with its replay and print the table; `partial` if the replay broke off.

    True if all is equal bit for bit; or, where versions or processor differ, if specs, answers, rewards and
    results are equal exactly and metrics within the tolerance.
    """
    from rich.console import Console
    from rich.table import Table

    parts = compare(shipped, replayed)
    other = other_environment(_json(shipped / "manifest.json"), _json(replayed / "manifest.json"))
    table = Table("compared", "recorded", "replayed", "", box=None)
    for part in parts:
        table.add_row(part.name, part.recorded, part.replayed, part.verdict)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for part in parts:
        if part.difference:
            console.print(f"{part.name}, first difference: {part.difference}", markup=False)
    print("versions and processor: " + ("; ".join(other) if other else "as recorded"))
    if not any(part.name == WHOLE_LINES for part in parts):
        console.print(f"not compared: {WHOLE_LINES}; this export is from before it held their digests")
    exact = not any(part.difference for part in parts)
    # The parameters' digest is one bit pattern: with other low bits it says nothing.
    near = bool(other) and all(part.close or not part.difference for part in parts[:-1])
    if exact and not partial:
        print("verdict: equal, bit for bit")
    elif near and not partial:
        digest = "differs" if parts[-1].difference else "is equal"
        print(
            "verdict: equal up to rounding (all but metrics and parameters exactly, metrics within "
            f"{TOLERANCE:g}; the parameters' digest {digest})"
        )
    else:
        print("verdict: DIFFERENT")
    return (exact or near) and not partial


def compare(shipped: Path, replayed: Path) -> list[Part]:
    """The parts of the verdict, the digest of the parameters last."""
    from lemon_jax.train.run_dir import METRICS, RunDir

    run = RunDir(replayed)
    before, now = read_rows(shipped / EXECUTIONS), [kept(row) for row in run.read("executions.jsonl")]
    results, results_now = _json(shipped / "summary.json"), _json(replayed / "summary.json")
    executed = {"specs as written": WRITTEN, "answers, rewards, contrasts": CAME_OF_IT}
    if any(DIGEST in row for row in before):
        executed[WHOLE_LINES] = (*WHERE, DIGEST)
    digest = _json(shipped / POLICY / "manifest.json").get(TRAINED, "none")
    digest_now = _json(replayed / POLICY / "manifest.json").get("params_sha256", "none")
    differs = digest != digest_now
    return [
        *(_rows(name, _only(before, of), _only(now, of)) for name, of in executed.items()),
        _rows("metrics.jsonl", RunDir(shipped).read(METRICS), run.read(METRICS), floats=True),
        _rows("results", results.get("eval", []), results_now.get("eval", [])),
        _rows("totals of training and search", _totals(results, results), _totals(results_now, results)),
        Part(
            name="parameters, SHA-256",
            recorded=digest[:12],
            replayed=digest_now[:12],
            difference=f"{digest} and {digest_now}" if differs else "",
        ),
    ]


def _rows(
    name: str, before: list[dict[str, Any]], now: list[dict[str, Any]], *, floats: bool = False
) -> Part:
    found = list(differences(before, now))
    return Part(
        name=name,
        recorded=f"{len(before):,} lines",
        replayed=f"{len(now):,} lines",
        difference=_first(before, *found[0]) if found else "",
        close=floats and all(_close(a, b) for _, a, b in found),
    )


def differences(
    before: Any, now: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """(where, recorded value, replayed value) of whatever differs between two JSON values, in order."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            if name not in NOT_COMPARED:
                yield from differences(before.get(name, "nothing"), now.get(name, "nothing"), (*path, name))
    elif isinstance(before, list) and isinstance(now, list):
        for index in range(max(len(before), len(now))):
            a, b = (rows[index] if index < len(rows) else "nothing" for rows in (before, now))
            yield from differences(a, b, (*path, index))
    elif before != now:
        yield path, before, now


def _first(rows: list[dict[str, Any]], path: tuple[Any, ...], before: Any, now: Any) -> str:
    """In: (3, "spec"), two texts  Out: line 4 (phase train, step 0, task aqua-7), spec: 'a…' and 'b…'"""
    line, *names = path
    row = rows[line] if line < len(rows) else {}
    of = ", ".join(f"{name} {row[name]}" for name in WHERE if row.get(name) is not None)
    if isinstance(before, str) and isinstance(now, str):  # of two specs the first lines that differ
        pairs = zip(before.split("\n"), now.split("\n"), strict=False)
        before, now = next(((a, b) for a, b in pairs if a != b), (before, now))
    where = f"line {line + 1}" + (f" ({of})" if of else "") + "".join(f", {name}" for name in names)
    return f"{where}: {_shown(before)} and {_shown(now)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _close(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    return numbers and math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def other_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs of that which decides the last bits of floats."""
    if not now:  # the replay broke off before it was written
        return []
    one, other = ({name: facts.get(name) for name in ENVIRONMENT} for facts in (before, now))
    found = differences(one, other)
    return [f"{path[-1]} was {a}, here {b}" for path, a, b in found if path[-1] not in NOT_ARITHMETIC]


def _totals(summary: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a summary says of training and search, as rows; no more than the recorded one does."""
    return [
        {"phase": phase} | _of(summary.get(phase, {}), tuple(recorded[phase]))
        for phase in ("train", "search")
        if phase in recorded
    ]


def _only(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [_of(row, names) for row in rows]


def _of(row: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}


def _json(path: Path) -> dict[str, Any]:
    """A JSON file; empty where a replay that broke off did not come to write it."""
    from lemon_jax.train.run_dir import RunDir

    return RunDir(path.parent).read_json(path.name) if path.exists() else {}
