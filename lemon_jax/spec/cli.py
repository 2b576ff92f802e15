"""`lemon spec check` and `lemon spec schema`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import LemonError
from .dag import edges
from .dump import dump
from .errors import format_issue
from .parse import parse
from .reader import MAX_BYTES
from .schema import json_schema
from .types import Spec

READ_LIMIT = MAX_BYTES + 1  # one byte more than parse accepts is enough for it to refuse the text


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `spec` with its subcommands; each sets `func(args) -> exit code`."""
    spec = subparsers.add_parser("spec", help="check specs, print their schema")
    commands = spec.add_subparsers(dest="spec_command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="report every issue of a spec, with line and column")
    check.add_argument("file", metavar="FILE", help="a YAML file, or - for standard input")
    check.add_argument("--repair", action="store_true", help="print the repaired spec in canonical form")
    check.set_defaults(func=run_check)
    schema = commands.add_parser("schema", help="print the JSON Schema (2020-12) of a spec")
    schema.set_defaults(func=run_schema)


def run_check(args: argparse.Namespace) -> int:
    """0 if the spec is valid, or was repaired on request; 1 with one line an issue otherwise."""
    name = "<stdin>" if args.file == "-" else args.file
    parsed = parse(read_text(args.file, name, READ_LIMIT))
    report = sys.stderr if args.repair else sys.stdout  # with --repair, stdout is the spec and nothing else
    for issue in parsed.issues:
        print(format_issue(issue, name), file=report)
    if not args.repair:
        if parsed.strict_ok and parsed.spec:
            print(f"{name}: ok, {_summary(parsed.spec)}")
        return 0 if parsed.strict_ok else 1
    if parsed.spec is None:
        print(f"{name}: cannot be repaired", file=sys.stderr)
        return 1
    if parsed.repairs:
        print(f"{name}: repaired: {', '.join(parsed.repairs)}", file=sys.stderr)
    sys.stdout.write(dump(parsed.spec))
    return 0


def run_schema(args: argparse.Namespace) -> int:
    """Print the schema as JSON."""
    print(json.dumps(json_schema(), indent=2))
    return 0


def read_text(file: str, name: str, limit: int = -1) -> str:
    """Text of a file, or of standard input for "-"; at most `limit` bytes where that is not negative.

    Raises:
        LemonError: it cannot be read, or is not UTF-8.
    """
    try:
        if file == "-":
            data = sys.stdin.buffer.read(limit)
        else:
            with Path(file).open("rb") as stream:
                data = stream.read(limit)
    except OSError as error:
        raise LemonError(f"{name}: cannot be read: {error.strerror}; give the path of a YAML file") from None
    try:
        # A read that stopped at the limit may have cut a character in two; spaces keep it too long.
        return data.decode("utf-8", "ignore") + " " * 4 if len(data) == limit else data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        message = f"{name}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8; save the file as UTF-8"
        raise LemonError(message) from None


def _summary(spec: Spec) -> str:
    agents, dependencies = len(spec.agents), edges(spec)
    return (
        f"{agents} agent{'s' * (agents != 1)}, "
        f"{dependencies} dependenc{'ies' if dependencies != 1 else 'y'}, output {spec.output}"
    )
