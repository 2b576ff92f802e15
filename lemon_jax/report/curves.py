"""Training curves of the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.stats import fifth
from .run_files import RunFiles, mean, number
from .svg import Format, Series, compact, esc, line_chart, percent


@dataclass(frozen=True, kw_only=True)
class _Chart:
    title: str
    keys: tuple[str, ...]  # one line each; a key that ends in "/" is all keys that begin so
    form: Format = compact
    low: float | None = None
    high: float | None = None


_CHARTS = (
    _Chart(title="Reward", keys=("reward",)),
    _Chart(title="Regret against the best spec", keys=("regret",), low=0.0),
    _Chart(title="Accuracy", keys=("accuracy",), form=percent, low=0.0, high=1.0),
    _Chart(title="Cost per task", keys=("cost_per_task",), low=0.0),
    _Chart(title="Worker tokens", keys=("worker_tokens",), low=0.0),
    _Chart(title="Invalid specs", keys=("invalid_rate",), form=percent, low=0.0, high=0.1),
    _Chart(
        title="Groups of equal reward",
        keys=("frac_reward_zero_std",),
        form=percent,
        low=0.0,
        high=1.0,
    ),
    _Chart(title="Entropy, nats a token", keys=("entropy",), low=0.0),
    _Chart(title="KL to the reference policy", keys=("kl",), low=0.0),
    _Chart(title="Edit probability by family", keys=("edit_prob/",), form=percent, low=0.0),
    _Chart(title="Mean |contrast| by family", keys=("contrast/",), low=0.0),
    _Chart(
        title="Agents and dependencies per spec", keys=("agents_per_spec", "dependencies_per_spec"), low=0.0
    ),
    _Chart(title="Seconds a step", keys=("sample_s", "execute_s", "update_s"), low=0.0),
)
_FAMILIES = ("delete_dependency", "restore_duty", "lower_capacity")


def curves_section(run: RunFiles) -> str:
    """Small charts over the steps, one for each quantity the run has logged; "" without metrics."""
    timings = {row["step"]: row for row in run.timings}
    rows = [timings.get(row["step"], {}) | row for row in run.metrics]
    cards = "".join(_card(chart, rows) for chart in _CHARTS)
    if not cards:
        return ""
    note = "Numbers beside a title: mean of the first and of the last fifth of the steps with a value."
    if len(rows) >= 15:
        note += " Faint: each step; strong: exponential average."
    return f'<section><h2>Training</h2><div class="charts">{cards}</div><p class="note">{note}</p></section>'


def _card(chart: _Chart, rows: Sequence[dict[str, Any]]) -> str:
    series = [
        Series(name=_name(key), points=[(row["step"], number(row.get(key))) for row in rows])
        for key in _keys(chart, rows)
    ]
    series = [s for s in series if any(y is not None for _, y in s.points)]
    picture = line_chart(
        series, label=f"{chart.title} over training steps", form=chart.form, low=chart.low, high=chart.high
    )
    if not picture:
        return ""
    ends, legend = "", ""
    if len(series) == 1:
        values = [y for _, y in series[0].points if y is not None]  # as summary.json counts the rewards
        size = fifth(len(values))
        first, last = mean(values[:size]), mean(values[-size:])
        ends = " → ".join(chart.form(v) for v in (first, last) if v is not None) if len(values) > 1 else ""
    else:
        names = "".join(f'<li class="s{i % 8}">{esc(s.name)}</li>' for i, s in enumerate(series))
        legend = f'<ul class="legend">{names}</ul>'
    caption = f"<figcaption><span>{esc(chart.title)}</span><b>{esc(ends)}</b></figcaption>"
    return f"<figure>{caption}{picture}{legend}</figure>"


def _keys(chart: _Chart, rows: Sequence[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for key in chart.keys:
        if not key.endswith("/"):
            found.append(key)
            continue
        logged = {k for row in rows for k in row if k.startswith(key)}
        known = [key + family for family in _FAMILIES if key + family in logged]
        found += known + sorted(logged.difference(known))
    return found


def _name(key: str) -> str:
    name = key.rpartition("/")[2]
    return name.removesuffix("_per_spec").removesuffix("_s").replace("_", " ")
