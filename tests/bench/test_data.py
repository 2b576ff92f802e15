import json
from dataclasses import replace
from pathlib import Path

import pytest

from lemon_jax.bench import SOURCES, generate, load
from lemon_jax.bench.data import build
from lemon_jax.bench.download import sha256_of
from lemon_jax.bench.sources import DataFile
from lemon_jax.errors import LemonError


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
@pytest.mark.parametrize("bench", ["aqua", "multiarith", "gsm8k", "svamp", "mmlu"])
def test_without_any_file_the_sample_says_so(tmp_path, bench):
    data = load(bench, download=False, cache_dir=tmp_path)
    assert data.source == "sample"
    assert data.banner.startswith(f"SAMPLE DATA, not {bench}: 64 + 64 made-up problems")
    assert "downloads are off" in data.banner
    assert len(data.train) == len(data.test) == 64
    assert {task.kind for task in (*data.train, *data.test)} == {SOURCES[bench].kind}
    assert {task.question for task in data.train}.isdisjoint(task.question for task in data.test)
    assert data == load(bench, download=False, cache_dir=tmp_path)


@pytest.mark.usefixtures("no_env")
def test_the_sample_of_a_protocol_for_evaluation_only_has_no_train_split(tmp_path):
    data = load("svamp", protocol="lemon", download=False, cache_dir=tmp_path)
    assert (data.train, len(data.test), data.protocol) == ((), 64, "lemon")
    assert data.banner.startswith("SAMPLE DATA, not svamp: 0 + 64 made-up problems")


@pytest.mark.usefixtures("no_env")
def test_there_is_no_sample_of_code_tasks(tmp_path):
    with pytest.raises(LemonError, match=r"humaneval: .*downloads are off; there is no sample of code tasks"):
        load("humaneval", download=False, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="no templates of code tasks"):
        generate("code", 1, 0)


def test_a_failed_build_names_three_files_at_most(tmp_path):
    paths, source = write_aqua(tmp_path, [aqua_row(0)], [aqua_row(1)])
    many = replace(source, files=source.files * 57, split=lambda rows: ([], []))
    with pytest.raises(LemonError, match=r"test.json, \S+dev.json and 111 more, expected 1 and 1"):
        build("aqua", many, paths * 57)
