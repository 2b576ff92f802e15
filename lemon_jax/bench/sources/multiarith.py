"""MultiArith (Roy and Roth 2015): 600 problems of two steps, in one file without splits.

Splits: those of the copies in common use, which are the 600 in the order of `random.Random(42).shuffle`,
cut at 420. (The file itself is sorted by kind of problem: cut in its own order, train and test would hold
other kinds.) LEMON's table scores all 600; the family of G-Designer trains on 40 of them, drawn with seed
42, and scores the others. A task's id is its place in the file.
"""

from dataclasses import replace
from random import Random
from typing import Any

from lemon_jax.bench.sources.source import DataFile, Protocol, Rows, Source, Splits, read_tasks, text_of
from lemon_jax.bench.task import Task
from lemon_jax.errors import LemonError
from lemon_jax.numbers import format_number, parse_number


def _tasks(files: list[Rows]) -> list[Task]:
    return read_tasks(files[0], "multiarith", _task)


def _shuffled(files: list[Rows]) -> list[Task]:
    tasks = _tasks(files)
    Random(42).shuffle(tasks)
    return tasks


def _usual(files: list[Rows]) -> Splits:
    tasks = _shuffled(files)
    return tasks[:420], tasks[420:]


def _all(files: list[Rows]) -> Splits:
    return [], _tasks(files)


def _forty(files: list[Rows]) -> Splits:
    tasks = _shuffled(files)
    return tasks[:40], tasks[40:]


def _task(row: dict[str, Any], task_id: str) -> Task:
    solutions = row.get("lSolutions")
    gold = parse_number(str(solutions[0])) if isinstance(solutions, list) and len(solutions) == 1 else None
    if gold is None:
        raise LemonError(f"{task_id}: lSolutions is {solutions!r}, expected a list of one number")
    question = text_of(row, "sQuestion", task_id)
    return Task(id=task_id, bench="multiarith", question=question, gold=format_number(gold), kind="number")


FULL = Source(
    kind="number",
    files=(
        DataFile(
            path="multiarith/MultiArith.json",
            url="kojima-takeshi188/zero_shot_cot/main/dataset/MultiArith/MultiArith.json",
            sha256="dc9db1b6cc68b1ecc2dec830d15aaf8c9a0932aa31d5ffce88ef3628179d36f4",
        ),
    ),
    split=_usual,
    n_train=420,
    n_test=180,
    licence="none stated",
)
MULTIARITH: dict[Protocol, Source] = {
    "full": FULL,
    "lemon": replace(
        FULL,
        split=_all,
        n_train=0,
        n_test=600,
        note="for evaluation only: the 600 test problems hold the 420 train problems of the full protocol",
    ),
    "gdesigner": replace(
        FULL,
        split=_forty,
        n_train=40,
        n_test=560,
        note="train is 40 of the problems, drawn with seed 42; the other 560 are scored",
    ),
}
