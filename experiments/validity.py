"""How many sampled specs are strictly valid: the warm-started policy on held-out tasks.

python experiments/validity.py --policy warmstart --specs 200
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import sys
from pathlib import Path

import jax
from run_arguments import prices_of
from shipped import shipped_folder

from lemon_jax.bench import SOURCES, load, wilson
from lemon_jax.errors import LemonError
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.train.config import UpdateConfig
from lemon_jax.train.prices import with_price_line

GROUP = 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", default="warmstart", help="a policy folder, or a name in checkpoints/ (warmstart)")
    add("--bench", nargs="+", default=list(SOURCES), help="whose test tasks, as many of each (all)")
    add("--specs", type=int, default=200, help="specs to sample, 4 a task (200)")
    add("--temperature", type=float, default=UpdateConfig.temperature, help="as in training (0.7)")
    add("--constrained", action="store_true", help="sample within the spec language (off)")
    add("--prices", metavar="S,M,L", help="prices that the policy is told before each task (none)")
    add("--seed", type=int, default=0, help="of tasks and sampling (0)")
    add("--data", type=Path, default=None, help="folder of benchmark files (LEMON_DATA, cache, download)")
    args = parser.parse_args()
    try:
        policy = Orchestrator.load(shipped_folder(args.policy))
        prices = None if args.prices is None else prices_of(args.prices)
        tests = [load(bench, data_dir=args.data).test for bench in args.bench]
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count = math.ceil(args.specs / GROUP / len(tests))
    rng = random.Random(f"validity-{args.seed}")
    chosen = [task for tasks in tests for task in rng.sample(tasks, min(count, len(tasks)))]
    rollouts = policy.write(
        [t.prompt() if prices is None else with_price_line(t.prompt(), prices) for t in chosen],
        jax.random.key(args.seed),
        group=GROUP,
        temperature=args.temperature,
        constrained=args.constrained,
    )
    valid = sum(r.valid for r in rollouts)
    low, high = wilson(valid, len(rollouts))
    faults = collections.Counter(
        r.parsed.issues[0].code if r.parsed.issues else "unfinished" for r in rollouts if not r.valid
    )
    distinct = len({r.text for r in rollouts})
    print(
        f"{valid} of {len(rollouts)} specs strictly valid ({100 * valid / len(rollouts):.1f} %, "
        f"95 % interval {100 * low:.1f} to {100 * high:.1f}); {distinct} distinct; "
        f"temperature {args.temperature}, seed {args.seed}, {', '.join(args.bench)} test tasks"
        + ("" if prices is None else f", prices {args.prices} told")
    )
    for code, number in faults.most_common():
        print(f"  {code}: {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
