"""`lemon data list`, `lemon data fetch` and `lemon data check`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ..errors import LemonError
from .data import OFFICIAL_URL, Dataset, build, cached_files, data_cache, named_file, named_folder
from .download import Unreachable, sha256_of
from .sources import PROTOCOLS, SOURCES, DataFile, find_source

_LINE_EVERY_S = 10.0


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `data` with its subcommands; each sets `func(args) -> exit code`."""
    data = subparsers.add_parser("data", help="list, fetch and check the benchmark files")
    commands = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="the benchmarks, their protocols and where their files are")
    listing.set_defaults(func=run_list)
    fetching = commands.add_parser("fetch", help="download official files to the cache")
    fetching.set_defaults(func=run_fetch)
    checking = commands.add_parser("check", help="check files: digests, counts, splits, known faults")
    checking.set_defaults(func=run_check)
    for parser in (listing, checking):
        parser.add_argument(
            "--data", type=Path, metavar="DIR", help="folder of benchmark files (LEMON_DATA, cache)"
        )
    fetching.add_argument("bench", metavar="BENCH", choices=[*SOURCES, "all"], help=_names())
    checking.add_argument(
        "bench",
        metavar="BENCH",
        nargs="?",
        default="all",
        choices=[*SOURCES, "all"],
        help=f"{_names()} (all)",
    )


def _names() -> str:
    return f"{', '.join(SOURCES)} or all"


def run_list(args: argparse.Namespace) -> int:
    """One line a benchmark and protocol; a test set that has no train split shows 0 train."""
    folder, place = _place(args.data)
    print(f"files: {place}")
    rows = [("bench", "kind", "protocol", "train", "test", "files", "licence", "note")]
    for bench in SOURCES:
        for protocol, sources in PROTOCOLS.items():
            source = sources[bench]
            rows.append(
                (
                    bench,
                    source.kind,
                    protocol,
                    str(source.n_train),
                    str(source.n_test),
                    _state(folder, source.files),
                    source.licence,
                    source.note,
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Download the files of all protocols of a benchmark; what is there and right is not fetched again.

    Raises:
        LemonError: files that cannot be got or are not the official ones, after the others were fetched.
    """
    cache, show = data_cache(), _ShowProgress()
    base_url = os.environ.get("LEMON_DATA_URL") or OFFICIAL_URL
    failed = []
    for bench in _benches(args.bench):
        files = _files(bench)
        try:
            cached_files(files, cache, on_progress=show)
        except (Unreachable, LemonError) as error:
            failed.append(f"{bench}: {error}")
            continue
        print(f"{bench}: {len(files)} official file{'s' * (len(files) > 1)} in {cache / bench}")
    if folder := os.environ.get("LEMON_DATA"):
        print(f"LEMON_DATA is set: runs read {folder}, not the cache")
    if failed:
        advice = "get the files another way and name their folder (--data DIR or LEMON_DATA)"
        raise LemonError(f"{'; '.join(failed)}; fetched from {base_url}; {advice}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """What is known of the files, a line a fault; 0 if they are the official ones, else 2 and the reason."""
    folder, place = _place(args.data)
    failed = False
    for bench in _benches(args.bench):
        try:
            datasets = _datasets(bench, args.data)
        except Unreachable:
            print(f"error: {bench}: not in {folder}; run `lemon data fetch {bench}`", file=sys.stderr)
            failed = True
        except LemonError as error:
            print(f"error: {bench}: {error}", file=sys.stderr)
            failed = True
        else:
            _report(bench, datasets, place)
    return 2 if failed else 0


def _datasets(bench: str, data_dir: Path | None) -> list[Dataset]:
    """The benchmark under each protocol, from files that are there; nothing is downloaded."""
    folder, named_by = named_folder(data_dir)
    datasets = []
    for protocol in PROTOCOLS:
        source = find_source(bench, protocol)
        if folder:
            paths = [named_file(folder, named_by, file) for file in source.files]
        else:
            paths = cached_files(source.files, data_cache(), download=False)
        datasets.append(build(bench, source, paths, protocol))
    return datasets


def _report(bench: str, datasets: list[Dataset], place: str) -> None:
    n_files = len(_files(bench))
    print(f"{bench}: {n_files} official file{'s' * (n_files > 1)}, {place}")
    for data in datasets:
        note = f" ({data.note})" if data.note else ""
        print(f"  {data.protocol}: {len(data.train)} train, {len(data.test)} test{note}")
    found: dict[str, list[str]] = {}
    for data in datasets:
        for fault in data.faults:
            found.setdefault(fault, []).append(data.protocol)
    for fault, protocols in found.items():
        where = "" if len(protocols) == len(datasets) else f" [{', '.join(protocols)}]"
        print(f"  fault: {fault}{where}")


def _benches(name: str) -> Iterable[str]:
    return SOURCES if name == "all" else (name,)


def _files(bench: str) -> tuple[DataFile, ...]:
    """The files of all protocols, each once."""
    return tuple(dict.fromkeys(file for sources in PROTOCOLS.values() for file in sources[bench].files))


def _place(data_dir: Path | None) -> tuple[Path, str]:
    folder, named_by = named_folder(data_dir)
    return (
        (folder, f"{folder} (named by {named_by})") if folder else (data_cache(), f"{data_cache()} (cache)")
    )


def _state(folder: Path, files: tuple[DataFile, ...]) -> str:
    there = [file for file in files if (folder / file.path).is_file()]
    if len(there) < len(files):
        return f"{len(there)} of {len(files)}" if there else "missing"
    return "official" if all(sha256_of(folder / f.path) == f.sha256 for f in there) else "wrong"


class _ShowProgress:
    """A `download.Progress` on stderr: one line that grows on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._last: tuple[str, float] = ("", 0.0)

    def __call__(self, name: str, done: int, total: int | None) -> None:
        finished = done == total
        text = (
            f"{name}: {done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else f"{name}: {done / 1e6:.1f} MB"
        )
        if sys.stderr.isatty():
            print(f"\r{text}\x1b[K", end="\n" if finished else "", file=sys.stderr, flush=True)
            return
        last, when = self._last
        now = time.monotonic()
        if finished or name != last or now - when >= _LINE_EVERY_S:
            self._last = (name, now)
            print(text, file=sys.stderr)
