"""Table and chart of the curves that simulated.py wrote; the chart needs matplotlib.

python experiments/ablations/table.py experiments/logs/ablations/simulated --chart curves.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

SHARE = 0.95  # of the optimum, unless --share says otherwise
LASTING = 5  # valuations
GRPO, FULL = "no-counterfactuals", "full"
_MARKDOWN = "| {:24s} | {:>16s} | {:>16s} | {:>22s} | {:>18s} | {:>8s} |"

Curve = dict[str, Any]


def read(folder: Path) -> dict[str, dict[int, Curve]]:
    """The curves of every arm by seed, the full method first, then GRPO alone."""
    found: dict[str, dict[int, Curve]] = defaultdict(dict)
    for path in sorted(folder.glob("*-s*.json")):
        curve = json.loads(path.read_text(encoding="utf-8"))
        found[curve["arm"]][curve["seed"]] = curve
    return dict(sorted(found.items(), key=lambda item: (item[0] != FULL, item[0] != GRPO, item[0])))


def fraction(curve: Curve, point: dict[str, float]) -> float:
    return point["value"] / curve["optimum"]


def tokens_to(curve: Curve, share: float = SHARE) -> float:
    """Worker tokens until the policy's value is at least `share` of the optimum, at this valuation and on
    average over the LASTING from it on; infinite if it never is, or too late in the run to tell."""
    values = [fraction(curve, p) for p in curve["points"]]
    for i, point in enumerate(curve["points"][: len(values) - LASTING + 1]):
        if values[i] >= share and float(np.mean(values[i : i + LASTING])) >= share:
            return point["worker_tokens"]
    return math.inf


def tokens_of(curve: Curve) -> float:
    return curve["points"][-1]["worker_tokens"]


def average(curve: Curve) -> float:
    """Mean regret over the worker tokens of the run, as a share of the optimum: the area above the curve."""
    x = np.array([p["worker_tokens"] for p in curve["points"]], float)
    y = np.array([1 - fraction(curve, p) for p in curve["points"]])
    return float(np.trapezoid(y, x) / x[-1])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval by Student's t; the half is NaN for one value."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), math.nan
    half = stats.t.ppf(0.975, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return float(np.mean(values)), float(half)


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over paired seeds of one arm's tokens to a share by another's; its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int
    sign: str  # "≥" where runs of the arm ended before they came there, "≤" where the other's did, else ""

    def __str__(self) -> str:
        between = f" [{self.low:.2f}, {self.high:.2f}]" if self.n > 1 else ""  # one pair has no interval
        return f"{self.sign}{self.mean:.2f}{between} n {self.n}"


def paired(curves: dict[int, Curve], others: dict[int, Curve], share: float = SHARE) -> Ratio | None:
    """How many tokens `curves` need for each of `others`, seed by seed.

    A run that never came there counts with all its tokens, which it needs at least, and the ratio is marked
    as a bound. Seeds in which both never came there are left out, and where some on either side did not, all
    of these are: they would bound nothing.
    """
    logs, bounds = [], []
    for seed in sorted(curves.keys() & others.keys()):
        mine, theirs = tokens_to(curves[seed], share), tokens_to(others[seed], share)
        if 0 in (mine, theirs) or mine == theirs == math.inf:
            continue
        sign = "≥" if mine == math.inf else "≤" if theirs == math.inf else ""
        mine, theirs = min(mine, tokens_of(curves[seed])), min(theirs, tokens_of(others[seed]))
        logs.append(math.log(mine / theirs))
        bounds.append(sign)
    signs = set(bounds) - {""}
    if len(signs) > 1:  # neither a lower nor an upper bound
        logs, signs = [x for x, sign in zip(logs, bounds, strict=True) if not sign], set()
    if not logs:
        return None
    mean, half = interval(logs)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs), "".join(signs))


def rows(arms: dict[str, dict[int, Curve]], share: float = SHARE) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = []
    for arm, curves in arms.items():
        end, end_half = interval([fraction(c, c["points"][-1]) for c in curves.values()])
        area, area_half = interval([average(c) for c in curves.values()])
        reached = sorted(t for c in curves.values() if (t := tokens_to(c, share)) < math.inf)
        tokens = f"{np.median(reached):,.0f} ({len(reached)} of {len(curves)})" if reached else "never"
        ratio = None if arm == GRPO else paired(curves, arms.get(GRPO, {}), share)
        extra = np.mean([c["points"][-1]["counterfactual_tokens"] / tokens_of(c) for c in curves.values()])
        out.append(
            (
                arm,
                _plus_minus(end, end_half),
                _plus_minus(area, area_half),
                tokens,
                str(ratio or "–"),
                f"{extra / (1 - extra):.1%}",
            )
        )
    return out


def _plus_minus(mean: float, half: float) -> str:
    return f"{mean:.1%}" if math.isnan(half) else f"{mean:.1%} ± {half:.1%}"


def chart(arms: dict[str, dict[int, Curve]], path: Path, share: float = SHARE) -> None:
    """Regret against worker tokens: the mean over seeds, with its 95 % interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(arms)
    columns = 4
    height = max(1, math.ceil((len(names) - 1) / columns))
    figure, axes = plt.subplots(
        height, columns, figsize=(13, 2.9 * height), sharex=True, sharey=True, squeeze=False
    )
    for axis, name in zip(axes.flat, names[1:], strict=False):
        for shown, colour in ((FULL, "#1f5fa8"), (name, "#c8501e")):
            _draw(axis, arms[shown], shown, colour)
        axis.axhline(100 * (1 - share), color="#999999", linewidth=0.8, linestyle=":")
        axis.legend(frameon=False, fontsize=8)
        axis.set_ylim(0, 40)
    for axis in axes.flat[len(names) - 1 :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("regret, % of optimum", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("worker tokens, thousands", fontsize=9)
    figure.suptitle(
        f"Simulated workers: regret of the greedy policy on held-out tasks (dotted: {share:.0%} of optimum)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw(axis: Any, curves: dict[int, Curve], name: str, colour: str) -> None:
    limit = min(tokens_of(c) for c in curves.values())
    grid = np.linspace(0, limit, 60)
    lines = np.array(
        [
            np.interp(
                grid,
                [p["worker_tokens"] for p in c["points"]],
                [100 * (1 - fraction(c, p)) for p in c["points"]],
            )
            for c in curves.values()
        ]
    )
    mean = lines.mean(axis=0)
    axis.plot(grid / 1e3, mean, color=colour, label=name, linewidth=1.6)
    if len(lines) > 1:
        half = stats.t.ppf(0.975, len(lines) - 1) * lines.std(axis=0, ddof=1) / math.sqrt(len(lines))
        axis.fill_between(grid / 1e3, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of simulated.py's curves")
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="write the curves there (no chart)")
    parser.add_argument(
        "--share", type=float, default=SHARE, metavar="X", help=f"of the optimum, to be reached ({SHARE})"
    )
    args = parser.parse_args()
    if not 0 < args.share < 1:
        parser.error("--share is between 0 and 1")
    arms = read(args.folder)
    if not arms:
        print(f"error: {args.folder}: no curves; simulated.py writes them", file=sys.stderr)
        return 2
    titles = (
        "arm",
        "end, of optimum",
        "mean regret",
        f"tokens to {args.share:.0%}",
        "ratio to GRPO",
        "contrasts",
    )
    print(_MARKDOWN.format(*titles))
    print("|---" * len(titles) + "|")
    for row in rows(arms, args.share):
        print(_MARKDOWN.format(*row))
    versions = sorted({str(c.get("git_sha")) for curves in arms.values() for c in curves.values()})
    if len(versions) > 1:
        print(f"note: the curves are from {len(versions)} versions of the code: {', '.join(versions)}")
    if args.chart:
        chart(arms, args.chart, args.share)
        print(f"chart: {args.chart}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
