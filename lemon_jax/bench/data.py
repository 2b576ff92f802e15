"""The benchmarks in memory: where their files are found, what must hold of them, and what is wrong in them.

Order: the folder given, the folder in LEMON_DATA, the user's cache, the official address. A named folder
that is incomplete or damaged is an error. The built-in sample is used only when no folder was named and the
official files cannot be reached, and `Dataset.banner` then says so.

LEMON_DATA_URL replaces the official address (a mirror in a closed network: the paths of `DataFile.url`, the
same digests), LEMON_CACHE the user's cache folder.
"""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lemon_jax.bench.download import Member, Progress, Unreachable, fetch, fetch_members, sha256_of
from lemon_jax.bench.sample import generate
from lemon_jax.bench.sources import DataFile, Source, find_source, read_rows
from lemon_jax.bench.sources.source import some
from lemon_jax.bench.task import Task
from lemon_jax.cache import cache_folder
from lemon_jax.errors import LemonError

OFFICIAL_URL = "https://raw.githubusercontent.com"
SAMPLE_SIZE = 64  # tasks in each split of the sample
MAX_OVERLAP = 0.05  # share of the test split that may stand in train too, and is then taken out of train


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A benchmark in memory. `sha256` covers the digests of its files; `banner` is empty if official.

    `train` is empty where the protocol is for evaluation only; `note` says what its sets are.
    """

    bench: str
    source: Literal["official", "sample"]
    train: tuple[Task, ...]
    test: tuple[Task, ...]
    sha256: str
    faults: tuple[str, ...]
    banner: str = ""
    protocol: str = "full"
    note: str = ""


def load(
    bench: str,
    *,
    protocol: str = "full",
    data_dir: Path | None = None,
    download: bool = True,
    on_progress: Progress | None = None,
    base_url: str | None = None,
    cache_dir: Path | None = None,
) -> Dataset:
    """Load the sets of a benchmark under a protocol; `data_dir` holds e.g. aqua/dev.json.

    `base_url` and `cache_dir` come before LEMON_DATA_URL and LEMON_CACHE.

    Raises:
        LemonError: unknown bench or protocol; a named folder is incomplete or damaged; a download has another
            digest; the contents break a promise (counts, golds, train and test apart); a code bench cannot be
            reached, of which there is no sample.
    """
    source = find_source(bench, protocol)
    folder, named_by = named_folder(data_dir)
    if folder:
        paths = [named_file(folder, named_by, file) for file in source.files]
    else:
        try:
            paths = cached_files(source.files, cache_dir or data_cache(), download, on_progress, base_url)
        except Unreachable as error:
            return _sample(bench, protocol, source, str(error))
    return build(bench, source, paths, protocol)


def named_folder(data_dir: Path | None = None) -> tuple[Path | None, str]:
    """The folder of benchmark files that was named, and by what: --data comes before LEMON_DATA."""
    if data_dir:
        return Path(data_dir), "--data"
    named = os.environ.get("LEMON_DATA")
    return (Path(named) if named else None), "LEMON_DATA"


def data_cache() -> Path:
    """Where downloaded files are kept."""
    return cache_folder("data")


def named_file(folder: Path, named_by: str, file: DataFile) -> Path:
    """The path of a file in a folder.

    Raises:
        LemonError: it is missing, or not the official one.
    """
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


def cached_files(
    files: tuple[DataFile, ...],
    cache: Path,
    download: bool = True,
    on_progress: Progress | None = None,
    base_url: str | None = None,
) -> list[Path]:
    """The paths of files in the cache; what is missing or damaged there is downloaded first.

    Raises:
        Unreachable: a file is not there and cannot be got.
        LemonError: a download has another digest; the cache cannot be written.
    """
    base_url = (base_url or os.environ.get("LEMON_DATA_URL") or OFFICIAL_URL).rstrip("/")
    try:
        missing = [file for file in files if not _is_there(cache / file.path, file.sha256)]
        if missing and not download:
            raise Unreachable(f"{cache / missing[0].path}: not in the cache, and downloads are off")
        archived: dict[str, list[Member]] = {}
        for file in missing:
            if file.archive and base_url == OFFICIAL_URL:
                member = Member(name=file.member, target=cache / file.path, sha256=file.sha256)
                archived.setdefault(file.archive, []).append(member)
            else:
                fetch(f"{base_url}/{file.url}", cache / file.path, file.sha256, on_progress=on_progress)
        for url, members in archived.items():
            fetch_members(url, cache, members, on_progress=on_progress)
    except OSError as error:
        raise LemonError(f"{cache}: {error}; name a folder with the files instead (--data DIR)") from error
    return [cache / file.path for file in files]


def _is_there(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def build(bench: str, source: Source, paths: list[Path], protocol: str = "full") -> Dataset:
    """Read checked files into a Dataset: counts asserted, train kept apart from test, faults listed."""
    rows = [read_rows(path) for path in paths]
    train, test = source.split(rows)
    if (len(train), len(test)) != (source.n_train, source.n_test):
        raise LemonError(
            f"{bench}: {len(train)} train and {len(test)} test items in {some(map(str, paths), 3)}, "
            f"expected {source.n_train} and {source.n_test}"
        )
    train, faults = _without_overlap(bench, train, test)
    for name, tasks in (("train", train), ("test", test)):
        faults += _faults_of(name, tasks)
    faults += source.row_faults(rows) if source.row_faults else []
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
        protocol=protocol,
        note=source.note,
    )


def _key(task: Task) -> str:
    """The question without case, punctuation and spacing: equal keys are the same problem.

    Code differs by punctuation alone; questions of MMLU repeat stock phrases and differ by their options.
    """
    if task.kind == "code":
        return "".join(task.question.split())
    text = task.prompt() if task.subject else task.question
    return "".join(c for c in text.casefold() if c.isalnum())


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


def _sample(bench: str, protocol: str, source: Source, reason: str) -> Dataset:
    if source.kind == "code":
        raise LemonError(
            f"{bench}: {reason}; there is no sample of code tasks, name a folder with the official files "
            f"(--data DIR) or fetch them (lemon data fetch {bench})"
        )
    train = generate(source.kind, SAMPLE_SIZE, 0, split="train") if source.n_train else ()
    test = generate(source.kind, SAMPLE_SIZE, 0, split="test")
    text = "\n".join(f"{task.prompt()}\n{task.gold}" for task in (*train, *test))
    return Dataset(
        bench=bench,
        source="sample",
        train=train,
        test=test,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        faults=(),
        banner=f"SAMPLE DATA, not {bench}: {len(train)} + {len(test)} made-up problems, because {reason}",
        protocol=protocol,
    )
