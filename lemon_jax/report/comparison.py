"""The trained orchestrator against each other method, task by task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..bench.stats import mcnemar_exact
from .run_files import number, objects, plain

OURS = "lemon"
NOISE_P = 0.05


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`OURS` against `other` on the tasks that both have answered."""

    other: str
    n: int
    only_ours: int  # tasks that only OURS solved
    only_other: int
    p: float  # McNemar, exact, two-sided
    cost_ratio: float | None  # OURS / other; None where the other cost nothing

    @property
    def difference(self) -> float:
        """Accuracy of OURS minus that of the other, in [-1, 1]."""
        return (self.only_ours - self.only_other) / self.n

    @property
    def inside_noise(self) -> bool:
        """Whether so small a difference is expected by chance alone in one of twenty comparisons."""
        return self.p >= NOISE_P


def compare(executions: Iterable[Mapping[str, Any]]) -> list[Comparison]:
    """One comparison per other method, in the order in which the methods were evaluated.

    Reads the lines of executions.jsonl with phase "eval". A task on which a server failed says nothing about
    either method and is left out; of a task evaluated twice the last execution counts.
    """
    solved: dict[str, dict[str, tuple[bool, float]]] = {}
    for execution in executions:
        if execution.get("phase") != "eval":
            continue
        tasks = solved.setdefault(str(execution.get("method")), {})
        task, correct = str(execution.get("task")), execution.get("correct")
        agents = objects(execution.get("agents"))
        if not isinstance(correct, bool) or any(a.get("status") == "INFRA_FAILED" for a in agents):
            tasks.pop(task, None)
            continue
        tasks[task] = (correct, sum(number(a.get("cost")) or 0.0 for a in agents))
    ours = solved.pop(OURS, {})
    found = []
    for method, tasks in solved.items():
        shared = [(*ours[task], *tasks[task]) for task in ours if task in tasks]
        if not shared:
            continue
        only_ours = sum(mine and not theirs for mine, _, theirs, _ in shared)
        only_other = sum(theirs and not mine for mine, _, theirs, _ in shared)
        our_cost, other_cost = sum(pair[1] for pair in shared), sum(pair[3] for pair in shared)
        found.append(
            Comparison(
                other=method,
                n=len(shared),
                only_ours=only_ours,
                only_other=only_other,
                p=mcnemar_exact(only_ours, only_other),
                cost_ratio=our_cost / other_cost if other_cost > 0 else None,
            )
        )
    return found


def comparison_lines(executions: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line of plain ASCII per comparison, under 80 columns for methods of up to ten letters.

    # "lemon vs vanilla  +12.0 points  p 0.29   inside the noise  cost x1.42  n 50"
    """
    found = compare(executions)
    width = max((len(plain(c.other)) for c in found), default=0)
    lines = []
    for c in found:
        verdict = "inside the noise" if c.inside_noise else ""
        cost = "" if c.cost_ratio is None else f"cost x{c.cost_ratio:.2f}"
        lines.append(
            f"{OURS} vs {plain(c.other):<{width}}  {100 * c.difference:+5.1f} points"
            f"  p {p_text(c.p):<6} {verdict:<16}  {cost:<10}  n {c.n}"
        )
    return lines


def p_text(p: float) -> str:
    """A p value with two significant digits; what is smaller than 0.001 as such.

    # In: 0.0312, 0.73, 0.0002   Out: "0.031", "0.73", "<0.001"
    """
    if p < 0.001:
        return "<0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
