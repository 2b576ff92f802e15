"""What the orchestrator wrote: roles and capacities early and late, and example specs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..bench.stats import fifth
from .run_files import RunFiles, mapping, number, objects
from .svg import compact, esc

_CAPACITIES = ("small", "medium", "large")
_MOST_ROLES = 14
_KEY = re.compile(r"^([ -]*)(\w+)(:)", re.MULTILINE)

Executions = Sequence[dict[str, Any]]


def usage_section(run: RunFiles) -> str:
    """Shares of the agents by role and by capacity, first against last fifth of the training steps."""
    steps = _training_steps(run)
    if len(steps) < 2:
        return ""
    size = fifth(len(steps))
    order = sorted(steps)
    early = _agents([e for step in order[:size] for e in steps[step]])
    late = _agents([e for step in order[-size:] for e in steps[step]])
    if not early or not late:
        return ""
    roles = _shares(early, late, "role", ())[:_MOST_ROLES]
    capacities = _shares(early, late, "capacity", _CAPACITIES)
    span = f"first fifth ({_steps_text(order[:size])})", f"last fifth ({_steps_text(order[-size:])})"
    legend = (
        f'<ul class="legend"><li class="early">{esc(span[0])}</li><li class="late">{esc(span[1])}</li></ul>'
    )
    bars = _bars("Base roles, share of agents", roles) + _bars("Capacities, share of agents", capacities)
    return f'<section><h2>What the specs use</h2>{legend}<div class="usage">{bars}</div></section>'


def examples_section(run: RunFiles) -> str:
    """The best, the middle and the worst of the different specs of the last training step."""
    steps = _training_steps(run)
    if not steps:
        return ""
    last = max(steps)
    different = {str(e.get("spec") or ""): e for e in steps[last]}
    ranked = sorted((e for text, e in different.items() if text.strip()), key=_reward, reverse=True)
    if not ranked:
        return ""
    picked = dict.fromkeys((0, len(ranked) // 2, len(ranked) - 1))
    names = (
        ("best reward", "middle", "lowest reward") if len(picked) == 3 else ("best reward", "lowest reward")
    )
    cards = "".join(_example(ranked[i], name) for i, name in zip(picked, names, strict=False))
    return (
        f'<section><h2>Specs of the last step ({last:,.0f})</h2><div class="examples">{cards}</div></section>'
    )


def _training_steps(run: RunFiles) -> dict[float, list[dict[str, Any]]]:
    found: dict[float, list[dict[str, Any]]] = {}
    for execution in run.executions:
        step = number(execution.get("step"))
        if execution.get("phase") == "train" and step is not None:
            found.setdefault(step, []).append(execution)
    return found


def _agents(executions: Executions) -> list[dict[str, Any]]:
    return [agent for execution in executions for agent in objects(execution.get("agents"))]


def _shares(
    early: Executions, late: Executions, key: str, order: Sequence[str]
) -> list[tuple[str, float, float]]:
    before = Counter(str(agent.get(key, "-")) for agent in early)
    after = Counter(str(agent.get(key, "-")) for agent in late)
    rows = [(name, before[name] / len(early), after[name] / len(late)) for name in before | after]
    if order:
        place = {name: i for i, name in enumerate(order)}
        return sorted(rows, key=lambda row: place.get(row[0], len(place)))
    return sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))


def _bars(title: str, rows: Sequence[tuple[str, float, float]]) -> str:
    most = max((max(early, late) for _, early, late in rows), default=0.0) or 1.0
    lines = []
    for name, early, late in rows:
        tip = esc(f"{name}: {100 * early:.0f} % → {100 * late:.0f} %")
        bars = (
            f'<svg viewBox="0 0 100 14" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect class="early" x="0" y="0" width="{100 * early / most:.1f}" height="6"/>'
            f'<rect class="late" x="0" y="7" width="{100 * late / most:.1f}" height="7"/></svg>'
        )
        change = f"{100 * early:.0f} → <b>{100 * late:.0f} %</b>"
        label = f"<span>{esc(name.replace('_', ' '))}</span>"
        lines.append(f'<div class="bar" title="{tip}">{label}{bars}<em>{change}</em></div>')
    return f"<div><h3>{esc(title)}</h3>{''.join(lines)}</div>"


def _steps_text(steps: Sequence[float]) -> str:
    return f"step {steps[0]:,.0f}" if len(steps) == 1 else f"steps {steps[0]:,.0f} to {steps[-1]:,.0f}"


def _reward(execution: dict[str, Any]) -> float:
    total = number(mapping(execution.get("reward")).get("total"))
    return float("-inf") if total is None else total


def _example(execution: dict[str, Any], name: str) -> str:
    reward = mapping(execution.get("reward"))
    total = number(reward.get("total"))
    terms = [(key, number(reward.get(key))) for key in ("success", "efficiency", "structure", "invalid")]
    chips = "".join(f'<span class="chip">{key} {v:+.2f}</span>' for key, v in terms if v)
    correct, valid = execution.get("correct"), execution.get("valid")
    if valid is False:
        verdict = "invalid spec"
    else:
        verdict = ("right" if correct else "wrong") if isinstance(correct, bool) else "not graded"
    mark = {"right": "good", "wrong": "bad", "invalid spec": "bad"}.get(verdict, "")
    errors = execution.get("errors")
    faults = "".join(f"<li>{esc(fault)}</li>" for fault in errors[:5]) if isinstance(errors, list) else ""
    return (
        f"<article><header><span>{esc(name)}</span><b>{'-' if total is None else f'{total:.2f}'}</b></header>"
        f'<p class="note">task {esc(execution.get("task", "-"))}</p>'
        f'<p><span class="chip {mark}">{esc(verdict)}</span>{chips}</p>'
        f"{f'<ul class=errors>{faults}</ul>' if faults else ''}"
        f"<pre>{_spec_text(execution.get('spec'))}</pre>{_agent_table(objects(execution.get('agents')))}</article>"
    )


def _spec_text(spec: object) -> str:
    # Keys are marked in the text that is escaped already: what the pattern matches cannot be markup.
    return _KEY.sub(r"\1<i>\2</i>\3", esc(spec or "").strip())


def _agent_table(agents: Executions) -> str:
    if not agents:
        return ""
    rows = []
    for agent in agents:
        status, answer = str(agent.get("status", "-")), agent.get("answer")
        tokens = [number(agent.get(key)) for key in ("prompt_tokens", "generated_tokens")]
        cost = number(agent.get("cost"))
        rows.append(
            f"<tr><td>{esc(agent.get('id', '-'))}</td><td>{esc(status)}</td>"
            f"<td>{'-' if answer is None else esc(answer)}</td>"
            f'<td class="n">{" + ".join("-" if t is None else compact(t) for t in tokens)}</td>'
            f'<td class="n">{"-" if cost is None else compact(cost)}</td></tr>'
        )
    head = "<th>agent</th><th>status</th><th>answer</th>"
    head += '<th class="n">tokens in + out</th><th class="n">cost</th>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'
