"""One method, the trained orchestrator unless told otherwise, against each other one, task by task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..bench.stats import mcnemar_exact, paired_bootstrap
from ..errors import LemonError
from .run_files import number, objects, plain

OURS = "lemon"
NOISE_P = 0.05


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`ours` against `other` on the tasks of one bench that both have answered."""

    bench: str  # "" in the logs of older runs, which are of one bench
    ours: str
    other: str
    n: int
    only_ours: int  # tasks that only `ours` solved
    only_other: int
    p: float  # McNemar, exact, two-sided
    interval: tuple[float, float]  # of the difference, 95 %, by the paired bootstrap
    cost_ratio: float | None  # ours / other; None where one is not known, or the other cost nothing

    @property
    def difference(self) -> float:
        """Accuracy of `ours` minus that of `other`, in [-1, 1]."""
        return (self.only_ours - self.only_other) / self.n

    @property
    def inside_noise(self) -> bool:
        """Whether so small a difference is expected by chance alone in one of twenty comparisons.

        The exact test decides: with few disagreements it is stricter than the interval, which leaves 0
        out at five wins of fifty without a loss (p 0.0625).
        """
        return self.p >= NOISE_P


def compare(executions: Iterable[Mapping[str, Any]], ours: str = OURS) -> list[Comparison]:
    """One comparison of `ours` with each other method on each bench, in the order of their evaluation.

    Reads the lines of executions.jsonl with phase "eval". A task on which a server failed for one of the two
    says nothing about them and is left out; of a task evaluated twice the last execution counts.
    """
    solved: dict[str, dict[str, dict[str, tuple[bool, float | None]]]] = {}
    for execution in executions:
        if execution.get("phase") != "eval":
            continue
        methods = solved.setdefault(str(execution.get("bench", "")), {})
        tasks = methods.setdefault(str(execution.get("method")), {})
        task, correct = str(execution.get("task")), execution.get("correct")
        agents = objects(execution.get("agents"))
        failed = execution.get("infra_failed") is True or any(
            a.get("status") == "INFRA_FAILED" for a in agents
        )
        if failed or not isinstance(correct, bool):
            tasks.pop(task, None)
            continue
        # None: its server reported no tokens.
        tasks[task] = (correct, _total(number(a.get("cost", 0.0)) for a in agents))
    return [c for bench, methods in solved.items() for c in _on_bench(bench, methods, ours)]


def _on_bench(
    bench: str, solved: dict[str, dict[str, tuple[bool, float | None]]], ours: str
) -> Iterator[Comparison]:
    """The comparisons of one bench, by what each method made of each task: (correct, cost)."""
    reference = solved.pop(ours, {})
    for method, tasks in solved.items():
        shared = [(*reference[task], *tasks[task]) for task in reference if task in tasks]
        if not shared:
            continue
        only_ours = sum(mine and not theirs for mine, _, theirs, _ in shared)
        only_other = sum(theirs and not mine for mine, _, theirs, _ in shared)
        our_cost, other_cost = (_total(pair[i] for pair in shared) for i in (1, 3))
        yield Comparison(
            bench=bench,
            ours=ours,
            other=method,
            n=len(shared),
            only_ours=only_ours,
            only_other=only_other,
            p=mcnemar_exact(only_ours, only_other),
            interval=paired_bootstrap(only_ours, only_other, len(shared)),
            cost_ratio=our_cost / other_cost if our_cost is not None and other_cost else None,
        )


def several_benches(found: Iterable[Comparison]) -> bool:
    """Whether a comparison must say on which bench it is."""
    return len({c.bench for c in found}) > 1


def _total(costs: Iterable[float | None]) -> float | None:
    """Their sum; None where one of them is not known."""
    total = 0.0
    for cost in costs:
        if cost is None:
            return None
        total += cost
    return total


def check_method(executions: Iterable[Mapping[str, Any]], method: str) -> None:
    """Raise LemonError if no task was evaluated with this method."""
    known = dict.fromkeys(str(e.get("method")) for e in executions if e.get("phase") == "eval")
    if method not in known:
        there = ", ".join(map(plain, known)) or "none"
        raise LemonError(f"no method {method!r} in this run's executions.jsonl; evaluated were: {there}")


def comparison_lines(executions: Iterable[Mapping[str, Any]], ours: str = OURS) -> list[str]:
    """One line of plain ASCII per comparison, under 110 columns for methods of up to ten letters; the bench
    comes first where there are several.

    # "lemon vs vanilla  +12.0 points [ -4.0, +28.0]  p 0.29   inside the noise  cost x1.42  n 50"
    """
    found = compare(executions, ours)
    width = max((len(plain(c.other)) for c in found), default=0)
    several = several_benches(found)
    lines = []
    for c in found:
        verdict = "inside the noise" if c.inside_noise else ""
        cost = "" if c.cost_ratio is None else f"cost x{c.cost_ratio:.2f}"
        where = f"{plain(c.bench)}: " if several else ""
        lines.append(
            f"{where}{plain(c.ours)} vs {plain(c.other):<{width}}  {100 * c.difference:+5.1f} points"
            f" {interval_text(c)}  p {p_text(c.p):<6} {verdict:<16}  {cost:<10}  n {c.n}"
        )
    return lines


def interval_text(comparison: Comparison) -> str:
    """The interval of the difference in points.

    # In: interval=(-0.04, 0.28)   Out: "[ -4.0, +28.0]"
    """
    low, high = (100 * bound for bound in comparison.interval)
    return f"[{low:+5.1f}, {high:+5.1f}]"


def p_text(p: float) -> str:
    """A p value with two significant digits; what is smaller than 0.001 as such.

    # In: 0.0312, 0.73, 0.0002   Out: "0.031", "0.73", "<0.001"
    """
    if p < 0.001:
        return "<0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
