"""MMLU (Hendrycks et al. 2021): questions with four options from 57 subjects.

Splits: train is the official dev split (5 questions a subject). Test is the official test split in the full
protocol, the official validation split in LEMON's table; the family of G-Designer scores the first 153 of
the validation questions after a permutation with seed 888.

Where the files come from: the authors publish one tar archive (ARCHIVE, about 166 MB, most of it an extra
training set that is not used); the dev and test files are taken out of it. Their digests are those of copies,
as there is no official list. The validation split is read from a copy in JSON lines, at a fixed commit of a
public repository: the archive has it as 57 CSV files too, but no digest of those is known. A file with
another digest is refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lemon_jax.bench.sources.source import DataFile, Protocol, Rows, Source, Splits, text_of
from lemon_jax.bench.task import LETTERS, Task
from lemon_jax.errors import LemonError

ARCHIVE = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
N_SUBJECTS = 57
_DIGESTS = Path(__file__).with_name("mmlu.sha256")  # as sha256sum writes them
_CHOICES = [f"choice_{letter}" for letter in "abcd"]


def _csv_files(split: str) -> tuple[DataFile, ...]:
    files = []
    for line in _DIGESTS.read_text(encoding="utf-8").splitlines():
        sha256, path = line.split()
        if path.startswith(f"mmlu/{split}/"):
            member = f"data/{path.removeprefix('mmlu/')}"
            files.append(DataFile(path=path, url=path, sha256=sha256, archive=ARCHIVE, member=member))
    return tuple(files)


_DEV, _TEST = _csv_files("dev"), _csv_files("test")
_VAL = DataFile(
    path="mmlu/val/mmlu_validation.jsonl",
    url="epec254/dspy_examples/ed787d55f40fca9334b19f931aaa35f938606797/mmlu_validation.jsonl",
    sha256="184b7a6686e3019cb7d777fffa68e11ee4dbfdd5d5b7acacf68a398c13578d86",
)


def _dev_and_test(files: list[Rows]) -> Splits:
    return _csv_tasks(files[:N_SUBJECTS], "dev"), _csv_tasks(files[N_SUBJECTS:], "test")


def _dev_and_val(files: list[Rows]) -> Splits:
    return _csv_tasks(files[:N_SUBJECTS], "dev"), _val_tasks(files[N_SUBJECTS])


def _dev_and_153(files: list[Rows]) -> Splits:
    import numpy as np  # only this protocol needs it

    tasks = _val_tasks(files[N_SUBJECTS])
    order = np.random.default_rng(888).permutation(len(tasks))
    return _csv_tasks(files[:N_SUBJECTS], "dev"), [tasks[i] for i in order[:153]]


def _csv_tasks(files: list[Rows], split: str) -> list[Task]:
    tasks: list[Task] = []
    for rows in files:
        for i, row in enumerate(rows):
            subject = row["file"].removesuffix(f"_{split}")
            task_id, cells = f"mmlu-{split}-{subject}-{i}", row["cells"]
            if len(cells) != 6:
                raise LemonError(f"{task_id}: {len(cells)} cells, expected a question, 4 options, a letter")
            named = dict(zip(["question", *_CHOICES], cells, strict=False))
            tasks.append(_task(named, task_id, subject, gold=cells[5]))
    return tasks


def _val_tasks(rows: Rows) -> list[Task]:
    tasks: list[Task] = []
    of_subject: dict[str, int] = {}
    for row in rows:
        subject = text_of(row, "subject", f"mmlu-val-{len(tasks)}")
        i = of_subject[subject] = of_subject.get(subject, -1) + 1
        task_id, answer = f"mmlu-val-{subject}-{i}", row.get("answer")
        if answer not in _CHOICES:
            raise LemonError(f"{task_id}: answer is {answer!r}, expected one of {', '.join(_CHOICES)}")
        tasks.append(_task(row, task_id, subject, gold=LETTERS[_CHOICES.index(answer)]))
    return tasks


def _task(row: dict[str, Any], task_id: str, subject: str, *, gold: str) -> Task:
    if len(gold) != 1 or gold not in LETTERS[:4]:
        raise LemonError(f"{task_id}: the gold is {gold!r}, expected a letter A to D")
    return Task(
        id=task_id,
        bench="mmlu",
        question=text_of(row, "question", task_id),
        options=tuple(text_of(row, choice, task_id) for choice in _CHOICES),
        gold=gold,
        kind="choice",
        subject=subject,
    )


FULL = Source(
    kind="choice",
    files=(*_DEV, *_TEST),
    split=_dev_and_test,
    n_train=285,
    n_test=14042,
    licence="MIT",
)
MMLU: dict[Protocol, Source] = {
    "full": FULL,
    "lemon": replace(
        FULL,
        files=(*_DEV, _VAL),
        split=_dev_and_val,
        n_test=1531,
        note="test is the official validation split",
    ),
    "gdesigner": replace(
        FULL,
        files=(*_DEV, _VAL),
        split=_dev_and_153,
        n_test=153,
        note="test is 153 questions of the official validation split, drawn with seed 888",
    ),
}
