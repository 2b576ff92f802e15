"""What there is to learn on simulated workers: what one-agent specs are worth; how large the best are.

python experiments/ablations/landscape.py --benches multiarith,gsm8k

A policy that writes the same one-agent spec for every task sits on one of these values, and the curves of
simulated.py show them as plateaus. The last column says how much luck hides: pairs of executions of the same
tasks, one of this spec and one of the best of one agent, until the difference of their mean rewards is twice
its standard error. No language model answers: nothing here is a result of a benchmark.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from lab import Lab, base_config, open_lab

from lemon_jax.errors import LemonError
from lemon_jax.spec import CAPACITIES, ROLES, Agent, Spec
from lemon_jax.train.regret import search_roles

ERRORS = 2.0  # standard errors between two specs that count as told apart


@dataclass(frozen=True, kw_only=True)
class Worth:
    """Of one spec on the held-out tasks: expected rewards and probabilities of success, [tasks] each."""

    label: str
    rewards: np.ndarray
    right: np.ndarray

    def pairs(self, better: Worth) -> float:
        """Pairs of executions until the two are told apart; infinite for equal ones."""
        gap = float(np.mean(better.rewards - self.rewards))
        # Given the task only success is left to luck.
        variance = float(np.mean(better.right * (1 - better.right) + self.right * (1 - self.right)))
        return ERRORS**2 * variance / gap**2 if gap else float("inf")


def single_specs() -> Iterator[Spec]:
    """One agent with its role's own duty, every role of the search at every capacity."""
    for role, capacity in itertools.product(search_roles(), CAPACITIES):
        agent = Agent(id="a1", name=role, role=role, duty=ROLES[role].default_duty, capacity=capacity)
        yield Spec(agents=(agent,), output="a1")


def worths(lab: Lab) -> list[Worth]:
    """Those of `single_specs`, the best first."""
    optimum, found = lab.regret.optimum, []
    for spec in single_specs():
        (agent,) = spec.agents
        right = np.array([optimum.p_correct(spec, task) for task in lab.held_out])
        rewards = np.array([optimum.expected_reward(spec, task) for task in lab.held_out])
        found.append(Worth(label=f"{agent.role}, {agent.capacity}", rewards=rewards, right=right))
    return sorted(found, key=lambda worth: -float(worth.rewards.mean()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--benches", default="multiarith,svamp,gsm8k,aqua,mmlu", metavar="NAMES", help="all but humaneval")
    add("--held-out", type=int, default=40, metavar="N", help="test tasks (40)")
    add("--top", type=int, default=6, metavar="N", help="specs of one agent to show (6)")
    add("--data", type=Path, metavar="DIR", help="folder of benchmark files (LEMON_DATA, cache, download)")
    args = parser.parse_args()
    if min(args.held_out, args.top) < 1:
        parser.error("--held-out and --top are at least 1")
    try:
        for bench in args.benches.split(","):
            lab = open_lab(base_config(bench, 1), "small", held_out=args.held_out, every=1, data=args.data)
            print("\n".join(lines(bench, lab, args.top)), flush=True)
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def lines(bench: str, lab: Lab, top: int) -> list[str]:
    """The table of a bench."""
    best = lab.optimum()
    sizes = Counter(len(lab.regret.best_spec(task).spec.agents) for task in lab.held_out)
    start, _ = lab.value(lab.policy, constrained=True)
    ranked = worths(lab)
    counts = ", ".join(f"{n} of {size} agent{'s' * (size > 1)}" for size, n in sorted(sizes.items()))
    out = [
        f"{bench}: the best specs of {len(lab.held_out)} held-out tasks are worth {best:.3f} on average "
        f"({counts}); the policy begins at {start / best:.0%}",
        "",
        "| one agent for all tasks | of the optimum | right | pairs to tell it from the first |",
        "|---|---|---|---|",
    ]
    for worth in ranked[:top]:
        pairs = worth.pairs(ranked[0])
        shown = "–" if worth is ranked[0] else f"{pairs:,.0f}"
        share, right = worth.rewards.mean() / best, worth.right.mean()
        out.append(f"| {worth.label:28s} | {share:14.1%} | {right:5.0%} | {shown:>31s} |")
    return [*out, ""]


if __name__ == "__main__":
    sys.exit(main())
