"""The `lemon` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .errors import EXIT_FAULT, LemonError
from .spec import cli as spec_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A fault the user can mend is one line and code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser(words).parse_args(words)
    try:
        return args.func(args)
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return 130  # as a shell reports a command that Ctrl-C ended


def _parser(words: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lemon", description="Write, check and run multi-agent specs for a pool of LLM workers."
    )
    parser.add_argument("--version", action="version", version=f"lemon {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    spec_cli.add_parser(subparsers)
    if words[:1] == ["spec"]:
        return parser
    # Imported here, not above: checking a spec starts without the HTTP client that downloads need, and what
    # `data` does without the runtime.
    from .bench import cli as bench_cli

    bench_cli.add_parser(subparsers)
    if words[:1] != ["data"]:
        from .report import cli as report_cli
        from .runtime import cli as runtime_cli
        from .train import cli as train_cli

        runtime_cli.add_parser(subparsers)
        train_cli.add_parser(subparsers)
        report_cli.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
