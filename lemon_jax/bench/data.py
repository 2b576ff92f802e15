"""The benchmarks: where their files are found, what must hold of them, and what is known to be wrong in them.

Order: the folder given, the folder in LEMON_DATA, the user's cache, the official address. A named folder
that is incomplete or damaged is an error. The built-in sample is used only when no folder was named and the
official files cannot be reached, and `Dataset.banner` then says so.

LEMON_DATA_URL replaces the official address (a mirror in a closed network: the same paths, the same digests),
LEMON_CACHE the user's cache folder.
"""

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path

from lemon_jax.bench.download import Progress, Unreachable, fetch, sha256_of
from lemon_jax.bench.sample import generate
from lemon_jax.bench.task import LETTERS, Kind, Task
from lemon_jax.errors import LemonError
from lemon_jax.numbers import format_number, parse_number

OFFICIAL_URL = "https://raw.githubusercontent.com"
SAMPLE_SIZE = 64  # tasks in each split of the sample
MAX_OVERLAP = 0.05  # share of the test split that may stand in train too, and is then taken out of train

Rows = list[dict[str, Any]]
Splits = tuple[list[Task], list[Task]]


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One official file: its place in a data folder, its place under OFFICIAL_URL, its digest."""

    path: str
    url: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """How a benchmark is read. `split` makes (train, test) of the rows of `files`, in their order."""

    kind: Kind
    files: tuple[DataFile, ...]
    split: Callable[[list[Rows]], Splits]
    n_train: int
    n_test: int
    known_faults: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A benchmark in memory. `sha256` covers the digests of its files; `banner` is empty if official."""

    bench: str
    source: Literal["official", "sample"]
    train: tuple[Task, ...]
    test: tuple[Task, ...]
    sha256: str
    faults: tuple[str, ...]
    banner: str = ""


def _aqua(files: list[Rows]) -> Splits:
    train, test = (
        [_aqua_task(row, f"aqua-{split}-{i}") for i, row in enumerate(rows)]
        for split, rows in zip(("dev", "test"), files, strict=True)
    )
    return train, test


def _aqua_task(row: dict[str, Any], task_id: str) -> Task:
    options, gold = row.get("options"), row.get("correct")
    expected = [f"{letter})" for letter in LETTERS[:5]]
    if not isinstance(options, list) or [str(option)[:2] for option in options] != expected:
        raise LemonError(f"{task_id}: options are {options!r}, expected five texts that begin A) to E)")
    if not isinstance(gold, str) or len(gold) != 1 or gold not in LETTERS[:5]:
        raise LemonError(f"{task_id}: correct is {gold!r}, expected a letter A to E")
    texts = tuple(str(option)[2:].strip() for option in options)
    question = _text(row, "question", task_id)
    return Task(id=task_id, bench="aqua", question=question, options=texts, gold=gold, kind="choice")


def _multiarith(files: list[Rows]) -> Splits:
    """The split that is in use everywhere: the 600 in the order of `random.Random(42).shuffle`, cut at 420.

    The file itself is sorted by kind of problem: cut in its own order, train and test would hold other kinds.
    A task's id is its place in the file.
    """
    tasks = [_multiarith_task(row, f"multiarith-{i}") for i, row in enumerate(files[0])]
    random.Random(42).shuffle(tasks)
    return tasks[:420], tasks[420:]


def _multiarith_task(row: dict[str, Any], task_id: str) -> Task:
    solutions = row.get("lSolutions")
    gold = parse_number(str(solutions[0])) if isinstance(solutions, list) and len(solutions) == 1 else None
    if gold is None:
        raise LemonError(f"{task_id}: lSolutions is {solutions!r}, expected a list of one number")
    question = _text(row, "sQuestion", task_id)
    return Task(id=task_id, bench="multiarith", question=question, gold=format_number(gold), kind="number")


def _text(row: dict[str, Any], key: str, task_id: str) -> str:
    text = row.get(key)
    if not isinstance(text, str) or not text.strip():
        raise LemonError(f"{task_id}: {key} is {text!r}, expected a text")
    return text.strip()


SOURCES = {
    "aqua": Source(
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
        split=_aqua,
        n_train=254,
        n_test=254,
        known_faults=("some golds are wrong (aqua-dev-0: 32400 where 9 is right); they are scored as given",),
    ),
    "multiarith": Source(
        kind="number",
        files=(
            DataFile(
                path="multiarith/MultiArith.json",
                url="kojima-takeshi188/zero_shot_cot/main/dataset/MultiArith/MultiArith.json",
                sha256="dc9db1b6cc68b1ecc2dec830d15aaf8c9a0932aa31d5ffce88ef3628179d36f4",
            ),
        ),
        split=_multiarith,
        n_train=420,
        n_test=180,
    ),
}


def load(
    bench: str,
    *,
    data_dir: Path | None = None,
    download: bool = True,
    on_progress: Progress | None = None,
    base_url: str | None = None,
    cache_dir: Path | None = None,
) -> Dataset:
    """Load a benchmark; `data_dir` holds e.g. aqua/dev.json.

    `base_url` and `cache_dir` come before LEMON_DATA_URL and LEMON_CACHE.

    Raises:
        LemonError: unknown bench; a named folder is incomplete or damaged; a download has another digest; the
            contents break a promise (counts, golds, train and test apart).
    """
    if bench not in SOURCES:
        raise LemonError(f"bench {bench!r} is unknown, expected one of: {', '.join(SOURCES)}")
    source = SOURCES[bench]
    named = (data_dir, "--data") if data_dir else (os.environ.get("LEMON_DATA"), "LEMON_DATA")
    if named[0]:
        return build(bench, source, [_named_file(Path(named[0]), named[1], file) for file in source.files])
    cache = cache_dir or _cache()
    base_url = (base_url or os.environ.get("LEMON_DATA_URL") or OFFICIAL_URL).rstrip("/")
    paths = []
    for file in source.files:
        try:
            paths.append(_cached_file(cache, file, download, on_progress, base_url))
        except Unreachable as error:
            return _sample(bench, source, str(error))
        except OSError as error:
            raise LemonError(
                f"{cache}: {error}; name a folder with the files instead (--data DIR)"
            ) from error
    return build(bench, source, paths)


def _cache() -> Path:
    root = os.environ.get("LEMON_CACHE")
    return (Path(root).expanduser() if root else user_cache_path("lemon_jax")) / "data"


def _named_file(folder: Path, named_by: str, file: DataFile) -> Path:
    path = folder / file.path
    if not path.is_file():
        raise LemonError(
            f"{path}: no such file (folder named by {named_by}); expected the official {file.path}"
        )
    if (found := sha256_of(path)) != file.sha256:
        raise LemonError(
            f"{path}: SHA-256 is {found}, expected {file.sha256}; the file is damaged or another version "
            f"(folder named by {named_by}), replace it with the official one"
        )
    return path


def _cached_file(
    cache: Path, file: DataFile, download: bool, on_progress: Progress | None, base_url: str
) -> Path:
    path = cache / file.path
    if path.is_file() and sha256_of(path) == file.sha256:
        return path
    if not download:
        raise Unreachable(f"{path}: not in the cache, and downloads are off")
    fetch(f"{base_url}/{file.url}", path, file.sha256, on_progress=on_progress)
    return path


def build(bench: str, source: Source, paths: list[Path]) -> Dataset:
    """Read checked files into a Dataset: counts asserted, train kept apart from test, faults listed."""
    train, test = source.split([read_rows(path) for path in paths])
    if (len(train), len(test)) != (source.n_train, source.n_test):
        raise LemonError(
            f"{bench}: {len(train)} train and {len(test)} test items in {', '.join(map(str, paths))}, "
            f"expected {source.n_train} and {source.n_test}"
        )
    train, faults = _without_overlap(bench, train, test)
    for name, tasks in (("train", train), ("test", test)):
        faults += _faults_of(name, tasks)
    digests = "".join(
        f"{sha256_of(path)}  {file.path}\n" for path, file in zip(paths, source.files, strict=True)
    )
    return Dataset(
        bench=bench,
        source="official",
        train=tuple(train),
        test=tuple(test),
        sha256=hashlib.sha256(digests.encode()).hexdigest(),
        faults=(*faults, *source.known_faults),
    )


def read_rows(path: Path) -> Rows:
    """The objects of a JSON array, or of JSON lines: both are found under the name .json."""
    text = path.read_text(encoding="utf-8-sig")
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


def _key(task: Task) -> str:
    """The question without case, punctuation and spacing: equal keys are the same problem."""
    return "".join(c for c in task.question.casefold() if c.isalnum())


def _without_overlap(bench: str, train: list[Task], test: list[Task]) -> tuple[list[Task], list[str]]:
    in_test = {_key(task): task.id for task in test}
    shared = [(task.id, in_test[_key(task)]) for task in train if _key(task) in in_test]
    n_test_items = len({test_id for _, test_id in shared})
    if n_test_items > MAX_OVERLAP * len(test):
        raise LemonError(
            f"{bench}: {n_test_items} of {len(test)} test items stand in train too, expected at most "
            f"{MAX_OVERLAP:.0%}; the splits are mixed up, use the official files"
        )
    dropped = {train_id for train_id, _ in shared}
    faults = [f"{train_id} repeats {test_id}; it was taken out of train" for train_id, test_id in shared]
    return [task for task in train if task.id not in dropped], faults


def _faults_of(split: str, tasks: list[Task]) -> list[str]:
    faults = []
    if same := [task.id for task in tasks if len(set(task.options)) < len(task.options)]:
        faults.append(f"{split}: {len(same)} items have two options with the same text ({', '.join(same)})")
    if repeated := sum(n - 1 for n in Counter(map(_key, tasks)).values()):
        faults.append(f"{split}: {repeated} items repeat an earlier question")
    return faults


def _sample(bench: str, source: Source, reason: str) -> Dataset:
    train = generate(source.kind, SAMPLE_SIZE, 0, split="train")
    test = generate(source.kind, SAMPLE_SIZE, 0, split="test")
    text = "\n".join(f"{task.prompt()}\n{task.gold}" for task in (*train, *test))
    return Dataset(
        bench=bench,
        source="sample",
        train=train,
        test=test,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        faults=(),
        banner=f"SAMPLE DATA, not {bench}: {SAMPLE_SIZE} + {SAMPLE_SIZE} made-up problems, because {reason}",
    )
