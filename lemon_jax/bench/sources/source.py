"""What a benchmark's files are, and how they are read."""

import csv
import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lemon_jax.bench.task import Kind, Task
from lemon_jax.errors import LemonError

Protocol = Literal["full", "lemon", "gdesigner"]
Rows = list[dict[str, Any]]
Splits = tuple[list[Task], list[Task]]


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One official file: its place in a data folder, its place under OFFICIAL_URL, its digest.

    `archive` is the address of the official tar archive where the file is not published by itself, and
    `member` its name in there; `url` is then where a mirror keeps it.
    """

    path: str
    url: str
    sha256: str
    archive: str = ""
    member: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a benchmark is read under one protocol. `split` makes (train, test) of the rows of `files`, in
    their order; with `n_train` 0 the protocol is for evaluation only.

    `known_faults` and what `row_faults` finds in the rows are reported, never mended; `note` says what the
    sets of this protocol are, where that is not plain.
    """

    kind: Kind
    files: tuple[DataFile, ...]
    split: Callable[[list[Rows]], Splits]
    n_train: int
    n_test: int
    licence: str = ""
    note: str = ""
    known_faults: tuple[str, ...] = ()
    row_faults: Callable[[list[Rows]], list[str]] | None = None


def read_rows(path: Path) -> Rows:
    """The objects of a JSON array or of JSON lines (both are found under the name .json), also gzipped.

    A .csv file has no header: each of its rows becomes {"file": its name without .csv, "cells": [...]}.
    """
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                return [{"file": path.stem, "cells": cells} for cells in csv.reader(file, strict=True)]
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except (UnicodeDecodeError, csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise LemonError(f"{path}: cannot be read ({error}); replace it with the official file") from error
    if text.lstrip().startswith("["):
        numbered = [("", text)]
    else:
        numbered = [(f":{i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows: Rows = []
    for where, piece in numbered:
        try:
            value = json.loads(piece)
        except json.JSONDecodeError as error:
            raise LemonError(f"{path}{where}: not JSON ({error})") from error
        rows.extend(value if isinstance(value, list) else [value])
    if wrong := [row for row in rows if not isinstance(row, dict)]:
        raise LemonError(f"{path}: found {wrong[0]!r:.60}, expected JSON objects")
    return rows


def read_tasks(rows: Rows, name: str, read: Callable[[dict[str, Any], str], Task]) -> list[Task]:
    """The tasks of one file; `read` is given each row and its task id, `name`-0, `name`-1 and so on."""
    return [read(row, f"{name}-{i}") for i, row in enumerate(rows)]


def text_of(row: dict[str, Any], key: str, task_id: str) -> str:
    """A text that is not blank, without the space around it."""
    return raw_text_of(row, key, task_id).strip()


def raw_text_of(row: dict[str, Any], key: str, task_id: str) -> str:
    """A text that is not blank, as it stands."""
    text = row.get(key)
    if not isinstance(text, str) or not text.strip():
        raise LemonError(f"{task_id}: {key} is {text!r}, expected a text")
    return text


def some(items: Iterable[str], limit: int = 20) -> str:
    """A list for a message, cut where it gets long."""
    items = list(items)
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
