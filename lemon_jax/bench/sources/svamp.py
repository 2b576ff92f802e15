"""SVAMP (Patel et al. 2021): 1000 one-step problems with varied wordings, in one file without splits.

Splits: the usual ones by order, train the first 700 and test the last 300. LEMON's table scores all 1000; the
family of G-Designer trains on the first 40 and scores the others.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from lemon_jax.bench.sources.source import DataFile, Protocol, Rows, Source, Splits, read_tasks, text_of
from lemon_jax.bench.task import Task
from lemon_jax.errors import LemonError
from lemon_jax.numbers import format_number


def _tasks(files: list[Rows]) -> list[Task]:
    return read_tasks(files[0], "svamp", _task)


def _usual(files: list[Rows]) -> Splits:
    tasks = _tasks(files)
    return tasks[:700], tasks[700:]


def _all(files: list[Rows]) -> Splits:
    return [], _tasks(files)


def _forty(files: list[Rows]) -> Splits:
    tasks = _tasks(files)
    return tasks[:40], tasks[40:]


def _task(row: dict[str, Any], task_id: str) -> Task:
    answer = row.get("Answer")
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise LemonError(f"{task_id}: Answer is {answer!r}, expected a number")
    question = f"{text_of(row, 'Body', task_id)} {text_of(row, 'Question', task_id)}"
    gold = format_number(Fraction(repr(answer)))
    return Task(id=task_id, bench="svamp", question=question, gold=gold, kind="number")


def _row_faults(files: list[Rows]) -> list[str]:
    rows = files[0]
    floats = [row["Answer"] for row in rows if isinstance(row["Answer"], float)]
    whole = sum(value.is_integer() for value in floats)
    open_ended = sum(not row["Body"].rstrip().endswith((".", "!", "?")) for row in rows)
    return [
        f"{len(floats)} golds are written as floats (51.0), {whole} of them are whole numbers; read exactly",
        f"{open_ended} stories lack a full stop before the question",
    ]


FULL = Source(
    kind="number",
    files=(
        DataFile(
            path="svamp/SVAMP.json",
            url="arkilpatel/SVAMP/main/SVAMP.json",
            sha256="5be77703a6d891ae476d7c082787ad361392aa02453b132516cdd5f4e7934e3e",
        ),
    ),
    split=_usual,
    n_train=700,
    n_test=300,
    licence="MIT",
    row_faults=_row_faults,
)
SVAMP: dict[Protocol, Source] = {
    "full": FULL,
    "lemon": replace(
        FULL,
        split=_all,
        n_train=0,
        n_test=1000,
        note="for evaluation only: the 1000 test problems hold the 700 train problems of the full protocol",
    ),
    "gdesigner": replace(
        FULL,
        split=_forty,
        n_train=40,
        n_test=960,
        note="train is the first 40 problems; the other 960 are scored",
    ),
}
