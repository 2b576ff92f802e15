"""Attack the sandbox: what got out, passed without solving, outlived its limits or left a process behind.

python experiments/attacks.py                                  # the table; exit code 1 if any attack won
python experiments/attacks.py --canonical HumanEval.jsonl.gz   # the counter-check: honest code passes

Linux on x86_64, 2 CPU cores, about a minute; the attacks are in tests/runtime/attack_texts/.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gzip
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "runtime"))

from attack_runner import Case, Outcome, Witness, cases, processes, run, survivors

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools import ACCEPTED, LEVELS, CandidateResult, check_candidate, require


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--canonical", type=Path, metavar="FILE", help="check the canonical solutions of this file instead")
    add("--only", default="", metavar="TEXT", help="attacks whose kind or name holds TEXT")
    add("--accept-isolation", default=ACCEPTED, choices=LEVELS, help=f"least ({ACCEPTED})")
    args = parser.parse_args()
    try:
        level = require(args.accept_isolation)
        print(f"isolation: {level}")
        if args.canonical:
            return asyncio.run(check_canonical(args.canonical, args.accept_isolation))
        return asyncio.run(attack(args.only, args.accept_isolation))
    except (LemonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def attack(only: str, accept: str) -> int:
    chosen = [case for case in cases() if only in str(case)]
    width = max((len(case.attack.name) for case in chosen), default=0)
    before, started = set(processes()), time.monotonic()

    async def one(case: Case) -> Outcome:
        outcome = await run(case, witness, accept)
        print(
            f"{case.attack.name:{width}}  {case.attack.kind:8} {case.form:9}  {outcome.won or 'held':12}  "
            f"{outcome.status:13}  {outcome.isolation:19}  {outcome.seconds:6.2f} s",
            flush=True,
        )
        return outcome

    with Witness() as witness:
        outcomes = await asyncio.gather(*(one(case) for case in chosen))
        won = sum(bool(outcome.won) for outcome in outcomes)
        touched = witness.seen()
    left = survivors(before)
    kinds = collections.Counter(f"{o.case.attack.kind}s" for o in outcomes)
    names = {o.case.attack.name for o in outcomes}
    print(
        f"{len(names)} attacks in {len(outcomes)} runs ({', '.join(f'{n} {k}' for k, n in kinds.items())}): "
        f"{won} won, {len(left)} processes left behind, {touched or 'nothing touched outside'}; "
        f"{time.monotonic() - started:.1f} s"
    )
    return int(bool(won or left or touched))


async def check_canonical(path: Path, accept: str) -> int:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    started = time.monotonic()

    async def one(row: dict) -> CandidateResult:
        result = await check_candidate(
            prompt=row["prompt"], entry_point=row["entry_point"], test=row["test"],
            completion=row["canonical_solution"], accept=accept,
        )  # fmt: skip
        if not result.passed:
            print(f"{row['task_id']}: {result.status} {result.reason}")
        return result

    results = await asyncio.gather(*map(one, rows))
    passed = sum(result.passed for result in results)
    seconds = sorted(result.seconds for result in results)
    print(
        f"{passed} of {len(rows)} canonical solutions pass in {time.monotonic() - started:.1f} s; "
        f"a check takes {seconds[len(rows) // 2]:.3f} s (median), {seconds[-1]:.3f} s (slowest)"
    )
    return int(passed < len(rows))


if __name__ == "__main__":
    sys.exit(main())
