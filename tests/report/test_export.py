"""Evaluations in the formats of lm-evaluation-harness and human-eval."""

import hashlib
import json
import os
import re
from datetime import datetime
from pathlib import Path
from textwrap import indent

import pytest
from report_helpers import write_lines, write_object

from lemon_jax.bench import Dataset, Task, load
from lemon_jax.cli import main
from lemon_jax.errors import LemonError
from lemon_jax.report import load_run
from lemon_jax.report.export import export_human_eval, human_eval_completion, lm_eval_sample
from lemon_jax.runtime.tools import extract_completion
from lemon_jax.runtime.tools.completion import sources

# Fields of a line as lm-evaluation-harness 0.4 writes it (`evaluator.evaluate`, then
# `EvaluationTracker.save_results_samples`), with the JSON types its readers count on; the metric comes last.
FIELDS = {
    "doc_id": int,
    "doc": dict,
    "target": str,
    "arguments": dict,
    "resps": list,
    "filtered_resps": list,
    "filter": str,
    "metrics": list,
    "doc_hash": str,
    "prompt_hash": str,
    "target_hash": str,
}
# samples_TASK_DATE.jsonl; the harness takes the date behind the last underscore and the task before it.
FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(\.\d+)?)\.jsonl")


@pytest.fixture
def tasks(monkeypatch):
    """Four AQuA-like tasks in the place of the official files; `load` itself has tests of its own."""
    made = tuple(
        Task(
            id=f"aqua-test-{i}",
            bench="aqua",
            question=f"What is {i} + 1, “exactly”?",
            options=tuple(str(i + k) for k in range(5)),
            gold="B",
            kind="choice",
        )
        for i in range(4)
    )
    dataset = Dataset(bench="aqua", source="official", train=(), test=made, sha256="ab" * 32, faults=())
    monkeypatch.setattr(
        "lemon_jax.report.export.load",
        lambda bench, **options: dataset if bench == "aqua" else load(bench, **options),
    )
    return made


def line(method, task, answer, *, output=None, failed=False):
    return {
        "phase": "eval",
        "method": method,
        "step": None,
        "task": task,
        "answer": answer,
        "correct": answer == "B",
        "infra_failed": failed,
        "output": f"I think so.\nAnswer: {answer}" if output is None else output,
        "agents": [],
    }


@pytest.fixture
def run(tmp_path, tasks):
    """An evaluation of two methods on three of the tasks, in the order in which a seeded shuffle put them."""
    folder = tmp_path / "run"
    folder.mkdir()
    facts = {"source": "official", "sha256": "ab" * 32}
    write_object(folder / "manifest.json", {"config": {"bench": "aqua"}, "data": facts})
    rows = [
        {"phase": "train", "method": "lemon", "step": 0, "task": "aqua-dev-0", "correct": True},
        line("lemon", "aqua-test-3", "B"),
        line("lemon", "aqua-test-0", None, output=""),
        line("lemon", "aqua-test-1", "C", output="Überlegung \ud800 “x”"),
        line("cot", "aqua-test-3", "B"),
        line("cot", "aqua-test-0", None, output="", failed=True),
    ]
    write_lines(folder / "executions.jsonl", rows)
    evaluated = [{"method": m, "extractor": "lemon", "protocol": "full"} for m in ("lemon", "cot")]
    write_object(folder / "summary.json", {"bench": "aqua", "eval": evaluated})
    return folder


def samples(folder):
    """method -> (file name, rows)"""
    found = {}
    for path in folder.rglob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        assert text.endswith("\n")
        found[str(path.parent.relative_to(folder))] = (path.name, list(map(json.loads, text.splitlines())))
    return found


def test_lm_eval_sample_files(run, tasks, tmp_path, capsys):
    argv = ["export", str(run), "--format", "lm-eval", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    found = samples(tmp_path / "out")
    assert set(found) == {"lemon", "cot"}
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith(": 3 tasks")
    assert out[1].endswith(": 1 tasks, 1 that failed on a server left out")

    name, rows = found["lemon"]
    match = FILE.fullmatch(name)
    assert match is not None
    assert match["task"] == "aqua"
    written = datetime.fromtimestamp((run / "executions.jsonl").stat().st_mtime)
    assert match["date"] == written.isoformat().replace(":", "-")
    assert [row["doc_id"] for row in rows] == [0, 1, 3]  # the place in the test split, in its order
    assert [row["acc"] for row in rows] == [0.0, 0.0, 1.0]
    assert [row["filtered_resps"] for row in rows] == [["[invalid]"], ["C"], ["B"]]
    assert [row["resps"] for row in rows] == [[[""]], [["Überlegung ? “x”"]], [["I think so.\nAnswer: B"]]]
    for row in rows:
        check_sample(row, tasks[row["doc_id"]])
    assert [row["doc_id"] for row in found["cot"][1]] == [3]


def check_sample(row, task):
    assert list(row)[: len(FIELDS)] == list(FIELDS)
    for name, kind in FIELDS.items():
        assert type(row[name]) is kind, name
    assert set(row) - set(FIELDS) == set(row["metrics"])
    assert all(type(row[metric]) is float for metric in row["metrics"])
    # One request a document: generate_until(prompt, settings).
    assert row["arguments"] == {"gen_args_0": {"arg_0": task.prompt(), "arg_1": {"until": []}}}
    assert [len(row["resps"]), len(row["resps"][0]), len(row["filtered_resps"])] == [1, 1, 1]
    assert row["doc"] == {
        "id": task.id,
        "question": task.question,
        "options": list(task.options),
        "gold": task.gold,
        "kind": task.kind,
    }
    assert row["target"] == task.gold
    assert row["filter"] == "lemon"
    text = json.dumps(row["doc"], indent=2, ensure_ascii=False)
    for name, hashed in (("doc", text), ("prompt", task.prompt()), ("target", task.gold)):
        assert row[f"{name}_hash"] == hashlib.sha256(hashed.encode()).hexdigest()


@pytest.mark.parametrize(("kind", "metric"), [("number", "exact_match"), ("choice", "acc")])
def test_the_metric_is_the_one_of_such_tasks(kind, metric):
    task = Task(id="t", bench="b", question="1 + 1?", gold="2", kind=kind)
    row = lm_eval_sample(7, task, {"output": "2", "answer": "2", "correct": True}, extractor="strict")
    assert (row["doc_id"], row["metrics"], row[metric], row["filter"]) == (7, [metric], 1.0, "strict")


def test_one_method(run, tmp_path):
    argv = ["export", str(run), "--format", "lm-eval", "--out", str(tmp_path / "out")]
    assert main([*argv, "--method", "cot"]) == 0
    assert set(samples(tmp_path / "out")) == {"cot"}


def test_a_method_name_cannot_lead_out_of_the_folder(run, tmp_path):
    text = (run / "executions.jsonl").read_text().replace('"cot"', '"../../up"')
    (run / "executions.jsonl").write_text(text)
    out = tmp_path / "deep" / "er" / "out"
    assert main(["export", str(run), "--format", "lm-eval", "--out", str(out)]) == 0
    assert sorted(p.name for p in (tmp_path / "deep").rglob("*") if p.is_dir()) == [
        "_.._up",
        "er",
        "lemon",
        "out",
    ]


def changed(path, change):
    value = json.loads(path.read_text())
    change(value)
    write_object(path, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda run: changed(run / "manifest.json", lambda m: m["data"].update(source="sample")),
            "the built-in sample",
        ),
        (
            lambda run: changed(run / "manifest.json", lambda m: m["data"].update(sha256="0")),
            "data.sha256 is 0, that of",
        ),
        (
            lambda run: changed(run / "manifest.json", lambda m: m["config"].update(bench="x")),
            "bench 'x' is unknown",
        ),
        (lambda run: (run / "executions.jsonl").unlink(), "no method"),
        (
            lambda run: write_lines(run / "executions.jsonl", [line("lemon", "aqua-test-9", "B")]),
            "task aqua-test-9 is not in the test split of aqua",
        ),
        (
            lambda run: write_lines(
                run / "executions.jsonl", [line("cot", "aqua-test-0", "B") | {"output": None}]
            ),
            "cot on aqua-test-0 has no key 'output', as in older runs; experiments/run.py --resume",
        ),
    ],
)
def test_faults_are_one_line(change, message, run, tmp_path, capsys):
    change(run)
    out = tmp_path / "out"
    assert main(["export", str(run), "--format", "lm-eval", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not out.exists()


def test_unknown_method_and_unwritable_place(run, tmp_path, capsys):
    argv = ["export", str(run), "--format", "lm-eval", "--out"]
    assert main([*argv, str(tmp_path / "out"), "--method", "tree"]) == 2
    assert (
        "no method 'tree' in this run's executions.jsonl; evaluated were: lemon, cot"
        in capsys.readouterr().err
    )
    (tmp_path / "file").write_text("")
    assert main([*argv, str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_human_eval_is_for_human_eval(run, tmp_path, capsys):
    assert main(["export", str(run), "--format", "human-eval", "--out", str(tmp_path / "s.jsonl")]) == 2
    error = capsys.readouterr().err
    assert (
        "human-eval reads completions of HumanEval, this run's bench is aqua; use --format lm-eval" in error
    )


BODY = "    return x + 1\n"
WHOLE = "def add_one(x):\n    return x + 1"


@pytest.fixture
def functions(monkeypatch):
    """HumanEval with three problems that ask for `add_one`."""
    made = tuple(
        Task(id=f"humaneval-{i}", bench="humaneval", question="def add_one(x):\n", gold="", kind="code",
             entry_point="add_one")
        for i in (0, 2, 12)
    )  # fmt: skip
    dataset = Dataset(bench="humaneval", source="official", train=(), test=made, sha256="ab" * 32, faults=())
    monkeypatch.setattr("lemon_jax.report.export.load", lambda bench, **options: dataset)


def test_human_eval_completions(tmp_path, capsys, functions):
    facts = {"source": "official", "sha256": "ab" * 32}
    write_object(tmp_path / "manifest.json", {"config": {"bench": "humaneval"}, "data": facts})
    rows = [
        line("lemon", "humaneval-12", None, output=f"Here it is:\n```python\n{WHOLE}\n```\nDone."),
        line("lemon", "humaneval-2", None, output=BODY),
        line("lemon", "humaneval-0", None, failed=True),
        line("cot", "humaneval-2", None, output=WHOLE),
    ]
    write_lines(tmp_path / "executions.jsonl", rows)
    out = tmp_path / "new" / "samples.jsonl"
    assert main(["export", str(tmp_path), "--format", "human-eval", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 2 tasks, 1 that failed on a server left out\n"
    assert [json.loads(text) for text in out.read_text().splitlines()] == [
        {"task_id": "HumanEval/2", "completion": BODY.strip("\n")},
        {"task_id": "HumanEval/12", "completion": "\n" + WHOLE},
    ]
    other = export_human_eval(load_run(tmp_path), tmp_path / "cot.jsonl", "cot")
    assert (other.rows, other.left_out) == (1, 0)
    write_lines(tmp_path / "executions.jsonl", [line("lemon", "humaneval-3", None, output=BODY)])
    with pytest.raises(LemonError, match="humaneval-3 is no test problem"):
        export_human_eval(load_run(tmp_path), tmp_path / "lemon.jsonl", "lemon")


@pytest.mark.parametrize(
    "output",
    [
        BODY,
        WHOLE,
        f"```python\n{WHOLE}\n```",
        f"```\n{BODY}```",
        f"First try:\n```py\ndef add_one(x):\n    return x\n```\nBetter:\n```python\n{WHOLE}\n```",
        f"import math\n\n\n{WHOLE}\n",
        f"```python\n{WHOLE}\n```\nA test:\n```python\nassert add_one(1) == 2\n```",  # a test
        f"```py title=x\n{WHOLE}\n```",
        BODY.strip(),  # as the executor strips every reply
        "y = x\n    return y + 1",
        "# Add one.\n\n    y = x\n    return y + 1",
        "if x > 0:\n        return x + 1\n    return x",
        "for i in range(9):\n        if i > x:\n            return i",
        "if x > 0:\n    return x + 1\nreturn x",
        "```python\nreturn x + 1\n```",
        "```python\ny = x\nreturn y + 1\n```",
        "```python\n  y = x\n  return y + 1\n```",
        "```python\n\ty = x\n\treturn y + 1\n```",
        f"```python\n{indent(WHOLE, '    ')}\n```",
        f"```python\n    import math\n\n{indent(WHOLE, '    ')}\n```",
        "    def one():\n        return 1\n    return x + one()",
        "def one():\n        return 1\n    return x + one()",
        "    def add_one(y):\n        return y + 1\n    return add_one(x)",
        "def add_one(y):\n        return y + 1\n    return add_one(x)",
        "```python\n    return x + one()\n\ndef one():\n    return 1\n```",
        "add_one = lambda x: x + 1",
        "add_one = x\nreturn add_one + 1",
    ],
)
def test_a_completion_passes_as_graded_and_as_the_official_checker_puts_it_together(output):
    prompt = 'def add_one(x: int) -> int:\n    """Return x plus one."""\n'
    test = "def check(candidate):\n    assert candidate(1) == 2\n"
    program = prompt + human_eval_completion(output, "add_one") + "\n" + test + "\n" + "check(add_one)"
    graded = [*sources(prompt, "add_one", extract_completion(output, "add_one")), test, "check(add_one)"]
    for texts in ([program], graded):
        names = {}
        for text in texts:
            exec(compile(text, "program", "exec"), names)


@pytest.mark.parametrize("output", ["", "I cannot do that.", "def add_one(x:\n    return", "(" * 5000, "\0"])
def test_what_is_no_code_is_exported_as_it_is(output):
    assert human_eval_completion(output, "add_one").strip() == output.strip()


def test_a_faulty_escape_in_a_reply_is_no_warning():
    assert human_eval_completion("t = '\\d'\n    return t", "add_one") == "    t = '\\d'\n    return t"


@pytest.mark.skipif(not os.environ.get("LEMON_DATA"), reason="LEMON_DATA names no folder with the files")
def test_the_official_files(tmp_path, monkeypatch, capsys):
    folder = os.environ["LEMON_DATA"]
    monkeypatch.delenv("LEMON_DATA")
    dataset = load("multiarith", data_dir=Path(folder))
    write_object(
        tmp_path / "manifest.json",
        {"config": {"bench": "multiarith"}, "data": {"source": "official", "sha256": dataset.sha256}},
    )
    write_lines(tmp_path / "executions.jsonl", [line("lemon", task.id, task.gold) for task in dataset.test])
    argv = ["export", str(tmp_path), "--format", "lm-eval", "--out", str(tmp_path / "out"), "--data"]
    assert main([*argv, str(tmp_path)]) == 2
    assert "no such file (folder named by --data)" in capsys.readouterr().err
    assert main([*argv, folder]) == 0
    (_, rows) = samples(tmp_path / "out")["lemon"]
    assert [row["doc"]["id"] for row in rows] == [task.id for task in dataset.test]
    assert (rows[0]["doc"]["id"], rows[0]["doc_id"]) == ("multiarith-123", 0)
