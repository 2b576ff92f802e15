"""`lemon report` and `lemon export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..errors import LemonError
from .comparison import OURS, check_method, comparison_lines
from .export import FORMATS, export_human_eval, export_lm_eval
from .html import write_page
from .run_files import load_run, plain
from .table import WIDE, results_table

HUB = "hub"
_SHOWN_FAILURES = 10


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `report` and `export`; each sets `func(args) -> exit code`."""
    report = subparsers.add_parser("report", help="show the results of a run and write its report.html")
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run directory, e.g. runs/<id>")
    report.add_argument(
        "--reference", metavar="METHOD", default=OURS, help=f"method to compare with the others ({OURS})"
    )
    report.set_defaults(func=run_report)

    export = subparsers.add_parser(
        "export",
        help="write a run's graded replies or policy for other tools",
        description=run_export.__doc__,
    )
    export.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        help="a run directory, e.g. runs/<id>; hub: or a policy folder",
    )
    export.add_argument("--format", required=True, choices=(*FORMATS, HUB), help="which tool's format")
    export.add_argument(
        "--method", metavar="NAME", help=f"one method (lm-eval: all of them; human-eval: {OURS})"
    )
    export.add_argument(
        "--out", required=True, metavar="PATH", type=Path, help="folder (lm-eval, hub) or file (human-eval)"
    )
    export.add_argument(
        "--data", metavar="DIR", type=Path, help="folder of benchmark files (LEMON_DATA, cache, download)"
    )
    export.set_defaults(func=run_export)


def run_report(args: argparse.Namespace) -> int:
    """Print the results table and the comparisons, write report.html, print its path."""
    run = load_run(args.run_dir)
    if args.reference != OURS:
        check_method(run.executions, args.reference)
    path = write_page(run, args.reference)
    print_results(run.summary, run.executions, reference=args.reference)
    print(f"report: {path}")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write the per-task results of an evaluation as other tools read them: lm-evaluation-harness sample
    files (FOLDER/METHOD/samples_BENCH_DATE.jsonl), or human-eval's samples.jsonl. The format "hub" writes the
    trained policy instead, as transformers and vLLM load it."""
    if args.format == HUB:
        if args.method or args.data:
            raise LemonError(
                "--method and --data choose graded replies; --format hub writes a policy, without"
            )
        from ..policy_export import export_policy  # imports JAX, which no other report needs

        print(f"{export_policy(args.run_dir, args.out)}: the policy, for transformers and vLLM")
        return 0
    run = load_run(args.run_dir)
    if args.format == "human-eval":
        written = [export_human_eval(run, args.out, args.method or OURS, data_dir=args.data)]
    else:
        written = export_lm_eval(run, args.out, args.method, data_dir=args.data)
    for file in written:
        masked = f", {file.left_out} that failed on a server left out" if file.left_out else ""
        print(f"{file.path}: {file.rows} tasks{masked}")
    return 0


def print_results(
    summary: dict, executions: list[dict], console: Console | None = None, *, reference: str = OURS
) -> None:
    """The results table and the paired comparisons, on standard output unless a console is given."""
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:  # a file has no width of its own
            console.width = max(console.width, WIDE)
    if not summary.get("eval"):
        console.print("no results yet: summary.json is missing or holds no evaluation")
        return
    console.print(results_table(summary, wide=console.width >= WIDE))
    for line in comparison_lines(executions, reference):
        console.print(Text(line), soft_wrap=True)


def print_failures(executions: list[dict], again: str) -> None:
    """Which tasks of an evaluation have no verdict, and why, on standard output; `again` asks them again."""
    evaluated = [row for row in executions if row["phase"] == "eval"]
    failed = [row for row in evaluated if row["infra_failed"]]
    if not failed:
        return
    out = Console(highlight=False, soft_wrap=True)
    head = f"INFRA_FAILED: {len(failed)} of {len(evaluated)} tasks, not counted as wrong"
    out.print(Text(f"{head}; {again} asks them again", style="bold red"))
    for row in failed[:_SHOWN_FAILURES]:
        agent = next(a for a in row["agents"] if a["status"] == "INFRA_FAILED")
        out.print(Text(f"  {plain(row['task'])}: {plain(agent['id'])}: {plain(agent['note'])}"))
    if len(failed) > _SHOWN_FAILURES:
        out.print(f"  and {len(failed) - _SHOWN_FAILURES} more in executions.jsonl")
