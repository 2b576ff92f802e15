"""`lemon report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .comparison import comparison_lines
from .html import write_page
from .run_files import load_run
from .table import results_table


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `report`, which sets `func(args) -> exit code`."""
    parser = subparsers.add_parser("report", help="show the results of a run and write its report.html")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run directory, e.g. runs/<id>")
    parser.set_defaults(func=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Print the results table and the comparisons, write report.html, print its path."""
    run = load_run(args.run_dir)
    path = write_page(run)
    print_results(run.summary, run.executions)
    print(f"report: {path}")
    return 0


def print_results(summary: dict, executions: list[dict], console: Console | None = None) -> None:
    """The results table and the paired comparisons, on standard output unless a console is given."""
    console = console or Console(highlight=False)
    if not summary.get("eval"):
        console.print("no results yet: summary.json is missing or holds no evaluation")
        return
    console.print(results_table(summary))
    for line in comparison_lines(executions):
        console.print(Text(line), soft_wrap=True)
