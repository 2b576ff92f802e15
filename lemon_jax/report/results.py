"""Results, headline numbers and run facts of the HTML report."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from .comparison import OURS, Comparison, compare, interval_text, p_text, several_benches
from .run_files import RunFiles, number, objects
from .svg import compact, esc, interval_mark, percent
from .table import (
    accuracy_text,
    best,
    calls_line,
    has_regret,
    interval,
    regret_text,
    setting_keys,
    shown_faults,
    warnings,
)


def results_section(run: RunFiles, reference: str = OURS) -> str:
    """The table of methods, how they compare task by task, and what must be known to quote them."""
    rows = objects(run.summary.get("eval"))
    said = warnings({"simulated": run.simulated} | run.summary)  # of a run without a summary too
    loud = "".join(f'<p class="loud">{esc(text)}</p>' for text in said)
    if not rows:
        return loud
    faults = shown_faults(rows)
    regret = [("regret per task", "regret_per_task")] if has_regret(rows) else []
    heads = [
        "prompt tokens",
        "generated tokens",
        "cost per task",
        *(header for header, _ in (*faults, *regret)),
        "wall s",
    ]
    keys = [
        "prompt_tokens_per_task",
        "generated_tokens_per_task",
        "cost_per_task",
        *(key for _, key in (*faults, *regret)),
        "wall_s",
    ]
    top = {"accuracy": best(rows, "accuracy", max), "cost_per_task": best(rows, "cost_per_task", min)}
    setting = setting_keys(rows, every=True)
    head = "".join(f'<th scope="col">{esc(h)}</th>' for h in ("method", *setting))
    head += '<th scope="col" colspan="2">accuracy, 95 % interval</th>'
    head += "".join(f'<th scope="col" class="n">{esc(h)}</th>' for h in ("n", *heads))
    marked = [{key for key, marks in top.items() if marks[i]} for i in range(len(rows))]
    body = "".join(_row(*row, setting, keys) for row in zip(rows, marked, strict=True))
    calls = calls_line(run.summary)
    note = "Token counts and cost are per task; bold: best accuracy, lowest cost"
    note += " of each bench. " if "bench" in setting_keys(rows, every=False) else ". "
    note += calls[:1].upper() + calls[1:]
    table = f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    table = f'<div class="scroll">{table}</div><p class="note">{esc(note)}</p>'
    return f"<section><h2>Results</h2>{loud}{table}{_comparisons(run, reference)}</section>"


def tiles(run: RunFiles) -> str:
    """The few numbers a reader looks for first."""
    rows = objects(run.summary.get("eval"))
    one_bench = len({str(row.get("bench")) for row in rows}) < 2  # else no number speaks for all
    by_method = {row.get("method"): row for row in rows}
    ours = by_method.get(OURS) if one_bench else None
    train = run.summary.get("train") or {}
    found = []
    accuracy = number(ours.get("accuracy")) if ours else None
    if ours and accuracy is not None:
        bounds = interval(ours)
        within = f"95 % interval {100 * bounds[0]:.0f} to {100 * bounds[1]:.0f}" if bounds else ""
        found.append((f"{OURS} accuracy", percent(accuracy), within))
    comparisons = compare(run.executions)
    if comparisons and one_bench:
        c = max(comparisons, key=lambda c: -c.difference)
        verdict = "inside the noise" if c.inside_noise else f"p {p_text(c.p)}"
        found.append((f"vs {c.other}, the best other", f"{100 * c.difference:+.1f} points", verdict))
        if c.cost_ratio is not None:
            found.append(("cost, same tasks", f"{c.cost_ratio:.2f} ×", f"that of {c.other}"))
    first, last = number(train.get("reward_first")), number(train.get("reward_last"))
    if first is not None and last is not None:
        found.append(("mean reward", f"{first:.2f} → {last:.2f}", "first and last fifth of the steps"))
    wall = number(run.summary.get("wall_s"))
    if wall is not None:
        steps = number(run.summary.get("steps"))
        found.append(
            ("wall time", _duration(wall), f"{steps:,.0f} training steps" if steps is not None else "")
        )
    cells = "".join(
        f'<div class="tile"><span>{esc(name)}</span><b>{esc(value)}</b><small>{esc(more)}</small></div>'
        for name, value, more in found
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def facts_section(run: RunFiles) -> str:
    """Everything the manifest says, nested keys joined by dots, one group for each of its top-level keys."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in run.manifest.items():
        if isinstance(value, dict):
            groups[key] = [(name, text) for name, text in _flat(value)]
        else:
            groups.setdefault("run", []).append((key, _scalar(value)))
    blocks = []
    for name in sorted(groups, key=lambda name: name != "run"):
        rows = "".join(f"<dt>{esc(key)}</dt><dd>{esc(text)}</dd>" for key, text in groups[name])
        blocks.append(f"<div><h3>{esc(name)}</h3><dl>{rows}</dl></div>")
    return (
        f'<section><h2>Run facts</h2><div class="facts">{"".join(blocks)}</div></section>' if blocks else ""
    )


def _row(row: Mapping[str, Any], marked: Collection[str], setting: list[str], keys: list[str]) -> str:
    """`marked` are the keys of what is best."""
    accuracy = number(row.get("accuracy"))
    ours = row.get("method") == OURS
    mark = interval_mark(accuracy, interval(row), strong=ours) if accuracy is not None else ""
    cells = [
        f'<th scope="row">{esc(row.get("method", "-"))}</th>',
        *(f'<td class="setting">{esc(row.get(key, "-"))}</td>' for key in setting),
        f"<td{_bold('accuracy' in marked)}>{esc(accuracy_text(row))}</td><td>{mark}</td>",
    ]
    for key in ["n", *keys]:
        value = number(row.get(key))
        text = "-" if value is None else regret_text(row) if key == "regret_per_task" else compact(value)
        cells.append(f'<td class="n{" best" if key in marked else ""}">{text}</td>')
    return f"<tr{' class=ours' if ours else ''}>{''.join(cells)}</tr>"


def _bold(strong: bool) -> str:
    return ' class="best"' if strong else ""


def _comparisons(run: RunFiles, reference: str) -> str:
    found = compare(run.executions, reference)
    if not found:
        return ""
    several = several_benches(found)
    rows = "".join(_comparison(c, c.bench if several else "") for c in found)
    ours = esc(reference)
    heads = (
        "on the same tasks",
        "accuracy",
        "95 % interval",
        f"only {ours} right",
        "only other right",
        "p",
        "",
        "cost ratio",
        "n",
    )
    head = "".join(f'<th scope="col"{" class=n" if i else ""}>{h}</th>' for i, h in enumerate(heads))
    note = (
        "Interval of the difference: paired bootstrap, 10,000 resamples of the tasks. p: exact McNemar test, "
        "two-sided; from 0.05 on, chance alone makes such differences. Tasks on which a server "
        f"failed for either method are left out. Cost ratio: {ours}'s cost over the other's."
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p class="note">{note}</p>'
    )


def _comparison(c: Comparison, where: str) -> str:
    verdict = '<span class="chip">inside the noise</span>' if c.inside_noise else ""
    ratio = "-" if c.cost_ratio is None else f"{c.cost_ratio:.2f}"
    numbers = (
        f"{100 * c.difference:+.1f} points",
        interval_text(c),
        c.only_ours,
        c.only_other,
        esc(p_text(c.p)),
    )
    cells = "".join(f'<td class="n">{text}</td>' for text in numbers)
    return (
        f'<tr><th scope="row">{esc(where and f"{where}: ")}{esc(c.ours)} vs {esc(c.other)}</th>{cells}'
        f'<td>{verdict}</td><td class="n">{ratio}</td><td class="n">{c.n}</td></tr>'
    )


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            found += _flat(item, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", _scalar(item)))
    return found


def _scalar(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
