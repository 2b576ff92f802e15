"""Reading the files of each bench: formats, and rows that are not what they should be."""

import gzip
import json

import pytest

from lemon_jax.bench.sources import find_source, read_rows
from lemon_jax.bench.sources.source import some
from lemon_jax.errors import LemonError


def test_json_lines_and_arrays_are_read_alike_also_gzipped(tmp_path):
    rows = [{"a": 1}, {"a": "x\u2028y"}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "lines").write_text(lines, encoding="utf-8")
    (tmp_path / "array").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "lines.gz").write_bytes(gzip.compress(lines.encode()))
    assert read_rows(tmp_path / "lines") == read_rows(tmp_path / "array") == rows
    assert read_rows(tmp_path / "lines.gz") == rows
    (tmp_path / "bad").write_text('{"a": 1}\n{"a": ', encoding="utf-8")
    with pytest.raises(LemonError, match="bad:2: not JSON"):
        read_rows(tmp_path / "bad")
    (tmp_path / "numbers").write_text("1\n2")
    with pytest.raises(LemonError, match="numbers: found 1, expected JSON objects"):
        read_rows(tmp_path / "numbers")


@pytest.mark.parametrize("content", [b"\xff\xfe", gzip.compress(b"{}")[:-3], b"no gzip"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.csv"])
def test_broken_files_are_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    if name == "rows.csv" and content == b"no gzip":
        assert read_rows(path) == [{"file": "rows", "cells": ["no gzip"]}]
        return
    with pytest.raises(LemonError, match=f"{name}.*(cannot be read|not JSON)"):
        read_rows(path)


def test_csv_cells_keep_commas_quotes_and_line_breaks(tmp_path):
    path = tmp_path / "anatomy_dev.csv"
    path.write_bytes(b'"a ""b"", c","x\ny",2,3,4,D\r\nnext,1,2,3,4,A')
    assert read_rows(path) == [
        {"file": "anatomy_dev", "cells": ['a "b", c', "x\ny", "2", "3", "4", "D"]},
        {"file": "anatomy_dev", "cells": ["next", "1", "2", "3", "4", "A"]},
    ]
    path.write_bytes(b'"a" b,1,2,3,4,A')
    with pytest.raises(LemonError, match="cannot be read"):
        read_rows(path)


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f(x):\n",
    "entry_point": "f",
    "canonical_solution": "    return x\n",
    "test": "def check(candidate):\n    assert candidate(1) == 1\n",
}
SVAMP = {"Body": "A.", "Question": "B?", "Answer": 3.0}
VAL = {"subject": "s", "question": "q", "answer": "choice_a"} | {f"choice_{c}": c for c in "abcd"}
CSV = {"file": "s_dev", "cells": ["q", "1", "2", "3", "4", "A"]}


@pytest.mark.parametrize(
    ("bench", "row", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "so 5"}, "gsm8k-train-0: after #### stands ''"),
        ("gsm8k", {"question": "q", "answer": "#### 1,00"}, "stands '1,00', expected a whole number"),
        ("gsm8k", {"question": "q", "answer": "#### 5\nor 6"}, "expected a whole number"),
        ("gsm8k", {"question": " ", "answer": "#### 5"}, "question is ' ', expected a text"),
        ("svamp", SVAMP | {"Answer": "3"}, "svamp-0: Answer is '3', expected a number"),
        ("svamp", SVAMP | {"Answer": True}, "Answer is True, expected a number"),
        ("svamp", SVAMP | {"Body": None}, "Body is None, expected a text"),
        ("multiarith", {"sQuestion": "q", "lSolutions": [1, 2]}, "expected a list of one number"),
        ("humaneval", HUMANEVAL | {"task_id": "HumanEval/1"}, "humaneval-0: task_id is 'HumanEval/1'"),
        ("humaneval", HUMANEVAL | {"entry_point": "g"}, "entry_point is 'g', which prompt does not define"),
        ("humaneval", HUMANEVAL | {"test": "pass"}, r"test does not define check\(candidate\)"),
        ("humaneval", HUMANEVAL | {"prompt": ""}, "prompt is '', expected a text"),
    ],
)
def test_a_row_that_breaks_a_promise_is_named(bench, row, message):
    source = find_source(bench)
    with pytest.raises(LemonError, match=message):
        source.split([[row], *[[] for _ in source.files[1:]]])


@pytest.mark.parametrize(
    ("dev", "val", "message"),
    [
        ([CSV | {"cells": ["q", "1", "2", "3", "A"]}], [], "mmlu-dev-s-0: 5 cells, expected a question"),
        ([CSV | {"cells": ["q", "1", "2", "3", "4", "E"]}], [], "the gold is 'E', expected a letter A to D"),
        ([CSV, CSV | {"cells": ["q", "1", "", "3", "4", "A"]}], [], "mmlu-dev-s-1: choice_b is ''"),
        ([], [VAL, VAL | {"answer": "a"}], "mmlu-val-s-1: answer is 'a', expected one of choice_a, choice_b"),
        ([], [VAL | {"subject": ""}], "mmlu-val-0: subject is ''"),
    ],
)
def test_a_bad_row_of_mmlu_is_named(dev, val, message):
    files = [dev, *[[] for _ in range(56)], val]
    with pytest.raises(LemonError, match=message):
        find_source("mmlu", "lemon").split(files)


def test_good_rows_become_tasks():
    (task,) = find_source("humaneval").split([[HUMANEVAL]])[0]
    assert (task.prompt(), task.entry_point, task.gold) == ("def f(x):\n", "f", "    return x\n")
    (train,), (test,) = find_source("mmlu", "lemon").split([[CSV], *[[] for _ in range(56)], [VAL]])
    assert (train.id, train.subject, train.options, train.gold) == (
        "mmlu-dev-s-0",
        "s",
        ("1", "2", "3", "4"),
        "A",
    )
    assert test.prompt() == "q\nA) a\nB) b\nC) c\nD) d"


def test_mmlu_names_114_csv_files_of_one_archive():
    files = find_source("mmlu").files
    assert len(files) == 114
    assert len({file.sha256 for file in files}) == 114
    assert {file.archive for file in files} == {"https://people.eecs.berkeley.edu/~hendrycks/data.tar"}
    assert files[0].member == "data/dev/abstract_algebra_dev.csv"
    assert all(file.path == f"mmlu/{file.member.removeprefix('data/')}" for file in files)


def test_long_lists_are_cut():
    assert some(["a", "b"]) == "a, b"
    assert some(map(str, range(5)), 3) == "0, 1, 2 and 2 more"
