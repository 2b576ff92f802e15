"""HumanEval (Chen et al. 2021): 164 Python functions to complete, each with its test.

Splits: there is no official train split. Train is the first 40 problems, test the other 124, which is the
number of problems in LEMON's table.
The family of G-Designer reads a reworded file of 161 problems, in another order, which lacks 32, 38 and 50
(their prompts define helper functions): it trains on the first 40 of that file and scores the other 121. Here
the same problems are read with their official texts.
"""

from dataclasses import replace
from typing import Any

from lemon_jax.bench.sources.source import DataFile, Protocol, Rows, Source, Splits, raw_text_of
from lemon_jax.bench.task import Task
from lemon_jax.errors import LemonError

# The first 40 problems of the family's file, in its order.
_FAMILY_TRAIN = (
    23, 89, 95, 85, 140, 63, 151, 22, 41, 17, 79, 14, 53, 159, 115, 160, 27, 105, 25, 96,
    34, 74, 35, 132, 103, 113, 109, 107, 138, 62, 126, 161, 130, 36, 29, 84, 129, 98, 120, 24,
)  # fmt: skip
_NOT_IN_THE_FAMILY = (32, 38, 50)


def _forty(files: list[Rows]) -> Splits:
    tasks = _tasks(files)
    return tasks[:40], tasks[40:]


def _family(files: list[Rows]) -> Splits:
    tasks = _tasks(files)
    left_out = {*_FAMILY_TRAIN, *_NOT_IN_THE_FAMILY}
    return [tasks[i] for i in _FAMILY_TRAIN], [task for i, task in enumerate(tasks) if i not in left_out]


def _tasks(files: list[Rows]) -> list[Task]:
    return [_task(row, i) for i, row in enumerate(files[0])]


def _task(row: dict[str, Any], i: int) -> Task:
    task_id = f"humaneval-{i}"
    if row.get("task_id") != f"HumanEval/{i}":
        raise LemonError(f"{task_id}: task_id is {row.get('task_id')!r}, expected 'HumanEval/{i}'")
    question, test = raw_text_of(row, "prompt", task_id), raw_text_of(row, "test", task_id)
    entry_point = raw_text_of(row, "entry_point", task_id)
    if f"def {entry_point}(" not in question:
        raise LemonError(f"{task_id}: entry_point is {entry_point!r}, which prompt does not define")
    if "def check(candidate)" not in test:
        raise LemonError(f"{task_id}: test does not define check(candidate)")
    return Task(
        id=task_id,
        bench="humaneval",
        question=question,
        gold=raw_text_of(row, "canonical_solution", task_id),
        kind="code",
        entry_point=entry_point,
        test=test,
    )


FULL = Source(
    kind="code",
    files=(
        DataFile(
            path="humaneval/HumanEval.jsonl.gz",
            url="openai/human-eval/master/data/HumanEval.jsonl.gz",
            sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
    ),
    split=_forty,
    n_train=40,
    n_test=124,
    licence="MIT",
    known_faults=(
        "the prompts of humaneval-47 and humaneval-116 show results that their tests contradict",
        "the tests of humaneval-32, 38 and 50 call helper functions of their prompts",
        "the tests of humaneval-38 and 50 draw their inputs at random, without a seed",
    ),
    note="there is no official train split: train is the first 40 problems",
)
HUMANEVAL: dict[Protocol, Source] = {
    "full": FULL,
    "lemon": FULL,
    "gdesigner": replace(
        FULL,
        split=_family,
        n_test=121,
        note="161 problems, without 32, 38 and 50: the 40 that the family trains on, the other 121 scored",
    ),
}
