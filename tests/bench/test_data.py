import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lemon_jax.bench import SOURCES, load
from lemon_jax.bench.data import build
from lemon_jax.bench.download import sha256_of
from lemon_jax.bench.sources import DataFile, read_rows
from lemon_jax.errors import LemonError

real_data = pytest.mark.skipif(
    not os.environ.get("LEMON_DATA"), reason="LEMON_DATA names no folder with the files"
)


@pytest.fixture
def no_env(monkeypatch):
    monkeypatch.delenv("LEMON_DATA", raising=False)


def aqua_row(i, question=None, correct="B", options=None):
    options = options or [f"{letter}){i + k}" for k, letter in enumerate("ABCDE")]
    return {
        "question": question or f"What is {i} + 1?",
        "options": options,
        "rationale": "",
        "correct": correct,
    }


def write_aqua(folder: Path, train, test):
    """Two files of JSON lines and a Source that expects just them."""
    source = SOURCES["aqua"]
    paths, files = [], []
    for file, rows in zip(source.files, (train, test), strict=True):
        path = folder / file.path
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        paths.append(path)
        files.append(DataFile(path=file.path, url=file.url, sha256=sha256_of(path)))
    return paths, replace(source, files=tuple(files), n_train=len(train), n_test=len(test))


@real_data
@pytest.mark.parametrize(("bench", "n_train", "n_test"), [("aqua", 254, 254), ("multiarith", 420, 180)])
def test_case_67_official_counts_splits_and_digests(bench, n_train, n_test):
    data = load(bench)
    assert (data.source, data.banner) == ("official", "")
    assert (len(data.train), len(data.test)) == (n_train, n_test)
    assert len({task.id for task in (*data.train, *data.test)}) == n_train + n_test
    assert load(bench, data_dir=Path(os.environ["LEMON_DATA"])).sha256 == data.sha256
    questions = {task.question for task in data.test}
    assert not [task for task in data.train if task.question in questions]


@real_data
def test_known_faults_are_reported():
    faults = "\n".join(load("aqua").faults)
    assert "test: 7 items have two options with the same text" in faults
    assert "some golds are wrong" in faults
    assert "20 items repeat an earlier question" in "\n".join(load("multiarith").faults)


def test_case_67_wrong_count_fails(tmp_path):
    paths, source = write_aqua(
        tmp_path, [aqua_row(i) for i in range(3)], [aqua_row(i) for i in range(50, 53)]
    )
    assert len(build("aqua", source, paths).train) == 3
    with pytest.raises(LemonError, match=r"3 train and 3 test items .* expected 4 and 3"):
        build("aqua", replace(source, n_train=4), paths)


def test_case_67_small_overlap_is_dropped_and_named(tmp_path):
    test = [aqua_row(i) for i in range(100, 130)]
    train = [aqua_row(0), aqua_row(1, question="what is 105  +1"), aqua_row(2)]
    paths, source = write_aqua(tmp_path, train, test)
    data = build("aqua", source, paths)
    assert [task.id for task in data.train] == ["aqua-dev-0", "aqua-dev-2"]
    assert data.faults[0] == "aqua-dev-1 repeats aqua-test-5; it was taken out of train"


def test_case_67_mixed_up_splits_fail_loudly(tmp_path):
    rows = [aqua_row(i) for i in range(30)]
    paths, source = write_aqua(tmp_path, rows, rows)
    with pytest.raises(LemonError, match="30 of 30 test items stand in train too"):
        build("aqua", source, paths)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (aqua_row(1, correct="F"), "correct is 'F', expected a letter A to E"),
        (aqua_row(1, options=["A)1", "B)2"]), "expected five texts"),
        (aqua_row(1, options=["A)1", "C)2", "B)3", "D)4", "E)5"]), "expected five texts"),
        (aqua_row(1, question=" "), "question is ' ', expected a text"),
        ({"question": "x"}, "options are None"),
    ],
)
def test_mislabelled_rows_name_the_item(tmp_path, row, message):
    paths, source = write_aqua(tmp_path, [aqua_row(0), row], [aqua_row(50)])
    with pytest.raises(LemonError, match=f"aqua-dev-1: .*{message}"):
        build("aqua", source, paths)


def test_json_lines_and_arrays_are_read_alike(tmp_path):
    rows = [{"a": 1}, {"a": "x\u2028y"}]
    (tmp_path / "lines").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )
    (tmp_path / "array").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    assert read_rows(tmp_path / "lines") == read_rows(tmp_path / "array") == rows
    (tmp_path / "bad").write_text('{"a": 1}\n{"a": ', encoding="utf-8")
    with pytest.raises(LemonError, match="bad:2: not JSON"):
        read_rows(tmp_path / "bad")


def test_unknown_bench_lists_the_known_ones():
    with pytest.raises(LemonError, match="'gsm' is unknown, expected one of: aqua, multiarith"):
        load("gsm")


@pytest.mark.parametrize("by_env", [True, False])
def test_a_named_folder_never_falls_back(tmp_path, monkeypatch, by_env):
    monkeypatch.setenv("LEMON_DATA", str(tmp_path) if by_env else "/nowhere")
    folder = None if by_env else tmp_path
    named_by = "LEMON_DATA" if by_env else "--data"
    with pytest.raises(LemonError, match=rf"dev.json: no such file \(folder named by {named_by}\)"):
        load("aqua", data_dir=folder)
    write_aqua(tmp_path, [aqua_row(0)], [aqua_row(1)])
    with pytest.raises(LemonError, match=r"dev.json: SHA-256 is \w{64}, expected 4a52301d"):
        load("aqua", data_dir=folder)


@pytest.mark.usefixtures("no_env")
@pytest.mark.parametrize("bench", ["aqua", "multiarith"])
def test_without_any_file_the_sample_says_so(tmp_path, bench):
    data = load(bench, download=False, cache_dir=tmp_path)
    assert data.source == "sample"
    assert data.banner.startswith(f"SAMPLE DATA, not {bench}")
    assert "downloads are off" in data.banner
    assert len(data.train) >= 64
    assert len(data.test) >= 64
    assert {task.question for task in data.train}.isdisjoint(task.question for task in data.test)
    assert data == load(bench, download=False, cache_dir=tmp_path)
