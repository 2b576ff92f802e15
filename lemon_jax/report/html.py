"""report.html: one file that needs nothing else, made from the files of a run directory."""

from __future__ import annotations

from pathlib import Path

from ..errors import LemonError
from .comparison import OURS
from .curves import curves_section
from .results import facts_section, results_section, tiles
from .run_files import RunFiles, load_run
from .specs import examples_section, usage_section
from .svg import esc
from .table import title_line

_STYLE = Path(__file__).with_name("report.css")
# Should a text of a run ever escape its escaping, the browser still runs and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(run_dir: Path) -> Path:
    """Write report.html into a run directory, finished or not, and return its path.

    Parts whose files are missing are left out.

    Raises:
        LemonError: no run is there, a file of it is damaged, or the report cannot be written.
    """
    return write_page(load_run(run_dir))


def write_page(run: RunFiles, reference: str = OURS) -> Path:
    """`write_report` for a run that is read already; `reference` is compared with the other methods."""
    path = run.path / "report.html"
    try:
        path.write_text(report_page(run, reference), encoding="utf-8")
    except OSError as error:
        raise LemonError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def report_page(run: RunFiles, reference: str = OURS) -> str:
    """The whole page as text; every text that comes from the run is escaped."""
    name = run.path.resolve().name
    facts = title_line(run.summary) if run.summary else "the run has not finished"
    policy = run.summary.get("policy")
    notes = "".join(f'<p class="note">{esc(note)}</p>' for note in run.notes)
    sections = (
        results_section(run, reference),
        curves_section(run),
        usage_section(run),
        examples_section(run),
        facts_section(run),
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{esc(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{esc(name)} - lemon report</title>",
            f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head>",
            "<body><main>",
            f'<header class="top"><h1>{esc(name)}</h1><p>{esc(facts)}'
            f"{f', {esc(policy)} policy' if policy else ''}</p></header>",
            notes,
            tiles(run),
            *sections,
            "</main></body></html>",
            "",
        )
    )
