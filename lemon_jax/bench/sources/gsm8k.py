"""GSM8K (Cobbe et al. 2021): word problems of two to eight steps. The number after "####" is the gold.

Splits: the two official files. The family of G-Designer reads the test file alone: it trains on the first
40 problems and scores the others (its scripts leave out a last batch that is not full).
"""

import re
from dataclasses import replace
from typing import Any

from lemon_jax.bench.sources.source import DataFile, Protocol, Rows, Source, Splits, read_tasks, some, text_of
from lemon_jax.bench.task import Task
from lemon_jax.errors import LemonError

_GOLD = re.compile(r"-?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")


def _train_and_test(files: list[Rows]) -> Splits:
    return read_tasks(files[0], "gsm8k-train", _task), read_tasks(files[1], "gsm8k-test", _task)


def _forty_of_test(files: list[Rows]) -> Splits:
    tasks = read_tasks(files[0], "gsm8k-test", _task)
    return tasks[:40], tasks[40:]


def _task(row: dict[str, Any], task_id: str) -> Task:
    gold = _gold_text(row)
    if not _GOLD.fullmatch(gold):
        raise LemonError(f"{task_id}: after #### stands {gold!r}, expected a whole number")
    question = text_of(row, "question", task_id)
    return Task(id=task_id, bench="gsm8k", question=question, gold=gold.replace(",", ""), kind="number")


def _gold_text(row: dict[str, Any]) -> str:
    _, mark, gold = str(row.get("answer", "")).rpartition("####")
    return gold.strip() if mark else ""


def _row_faults(files: list[Rows], splits: tuple[str, ...] = ("train", "test")) -> list[str]:
    faults = []
    for split, rows in zip(splits, files, strict=True):
        golds = [(f"gsm8k-{split}-{i}", _gold_text(row)) for i, row in enumerate(rows)]
        grouped = [task_id for task_id, gold in golds if "," in gold]
        negative = [task_id for task_id, gold in golds if gold.startswith("-")]
        faults += [
            f"{split}: {len(grouped)} golds have thousands separators ({some(grouped)}); read without them",
            f"{split}: {len(negative)} golds are negative ({some(negative)})",
        ]
    return faults


FULL = Source(
    kind="number",
    files=(
        DataFile(
            path="gsm8k/train.jsonl",
            url="openai/grade-school-math/master/grade_school_math/data/train.jsonl",
            sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        ),
        DataFile(
            path="gsm8k/test.jsonl",
            url="openai/grade-school-math/master/grade_school_math/data/test.jsonl",
            sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        ),
    ),
    split=_train_and_test,
    n_train=7473,
    n_test=1319,
    licence="MIT",
    row_faults=_row_faults,
)
GSM8K: dict[Protocol, Source] = {
    "full": FULL,
    "lemon": FULL,
    "gdesigner": replace(
        FULL,
        files=FULL.files[1:],
        split=_forty_of_test,
        n_train=40,
        n_test=1279,
        row_faults=lambda files: _row_faults(files, ("test",)),
        note="train is the first 40 of the test problems; the other 1279 are scored",
    ),
}
