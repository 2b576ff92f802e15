"""What happened in a run: progress while it goes on, then a table and an HTML report from its files."""

from .comparison import Comparison, compare, comparison_lines
from .html import write_report
from .progress import RunProgress
from .run_files import RunFiles, load_run
from .table import results_table

__all__ = [
    "Comparison",
    "RunFiles",
    "RunProgress",
    "compare",
    "comparison_lines",
    "load_run",
    "results_table",
    "write_report",
]
