"""AQuA-RAT (Ling et al. 2017): algebraic word problems with five options.

Splits: train is the file dev.json, test the file test.json; the 97,467 problems of the file train.json are
not used. The family of G-Designer trains on 40 of the 254 test problems, drawn with seed 42, and scores the
others.
"""

from dataclasses import replace
from random import Random
from typing import Any

from lemon_jax.bench.sources.source import DataFile, Protocol, Rows, Source, Splits, read_tasks, text_of
from lemon_jax.bench.task import LETTERS, Task
from lemon_jax.errors import LemonError


def _dev_and_test(files: list[Rows]) -> Splits:
    return read_tasks(files[0], "aqua-dev", _task), read_tasks(files[1], "aqua-test", _task)


def _forty_of_test(files: list[Rows]) -> Splits:
    tasks = read_tasks(files[0], "aqua-test", _task)
    Random(42).shuffle(tasks)
    return tasks[:40], tasks[40:]


def _task(row: dict[str, Any], task_id: str) -> Task:
    options, gold = row.get("options"), row.get("correct")
    expected = [f"{letter})" for letter in LETTERS[:5]]
    if not isinstance(options, list) or [str(option)[:2] for option in options] != expected:
        raise LemonError(f"{task_id}: options are {options!r}, expected five texts that begin A) to E)")
    if not isinstance(gold, str) or len(gold) != 1 or gold not in LETTERS[:5]:
        raise LemonError(f"{task_id}: correct is {gold!r}, expected a letter A to E")
    texts = tuple(str(option)[2:].strip() for option in options)
    question = text_of(row, "question", task_id)
    return Task(id=task_id, bench="aqua", question=question, options=texts, gold=gold, kind="choice")


FULL = Source(
    kind="choice",
    files=(
        DataFile(
            path="aqua/dev.json",
            url="google-deepmind/AQuA/master/dev.json",
            sha256="4a52301d8a49ae0b286f8e697f9c5da1b109b247b825b47b4c6de34312dceec5",
        ),
        DataFile(
            path="aqua/test.json",
            url="google-deepmind/AQuA/master/test.json",
            sha256="de41581881ef95c5588c44ddc701c77fd480839241dd422a0d181262af24520c",
        ),
    ),
    split=_dev_and_test,
    n_train=254,
    n_test=254,
    licence="Apache-2.0",
    known_faults=("some golds are wrong (aqua-dev-0: 32400 where 9 is right); they are scored as given",),
)
AQUA: dict[Protocol, Source] = {
    "full": FULL,
    "lemon": FULL,
    "gdesigner": replace(
        FULL,
        files=FULL.files[1:],
        split=_forty_of_test,
        n_train=40,
        n_test=214,
        known_faults=("some golds are wrong; they are scored as given",),
        note="train is 40 of the test problems, drawn with seed 42; the other 214 are scored",
    ),
}
