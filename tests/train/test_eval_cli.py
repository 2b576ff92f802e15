"""`lemon eval`: its files, its exit codes, and that it goes on where it was stopped."""

from __future__ import annotations

import html
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backends"))
from fault_server import chat, serving

from lemon_jax.cli import main
from lemon_jax.report import load_run
from lemon_jax.spec import baselines, dump
from lemon_jax.train import cli

SPEC = dump(baselines("small")["cot"])
SAMPLE = ["--bench", "sample", "--workers", "scripted"]
CAPACITIES = "".join(f'[capacities.{c}]\nmodel = "m"\nprice = 1\n' for c in ("small", "medium", "large"))
KEY = "k3y-that-must-not-be-seen"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "executions.jsonl").read_text().splitlines()]


def summary(folder) -> dict:
    return json.loads((Path(folder) / "summary.json").read_text())


def table(folder) -> dict:
    (row,) = summary(folder)["eval"]
    return {key: value for key, value in row.items() if key != "wall_s"}


def test_a_baseline_on_the_sample(capsys):
    assert main(["eval", "cot", *SAMPLE, "--tasks", "20", "--out", "r"]) == 0
    out, err = capsys.readouterr()
    heading = "sample, test split, n 20, seed 0, sample data, extractor lemon, protocol full"
    assert out.splitlines()[0].strip() == heading
    assert "run directory: r" in err
    assert sorted(p.name for p in Path("r").iterdir()) == [
        "calls.sqlite",
        "executions.jsonl",
        "manifest.json",
        "report.html",
        "summary.json",
    ]
    row = table("r")
    assert (row["method"], row["n"], row["infra_failed"], row["calls"]) == ("cot", 20, 0, 20)
    assert f"{100 * row['accuracy']:.1f} %" in out
    lines = rows("r")
    assert len({line["task"] for line in lines}) == 20
    assert {line["spec"] for line in lines} == {dump(baselines()["cot"])}
    assert row["accuracy"] == sum(line["correct"] for line in lines) / 20
    found = load_run(Path("r"))
    assert found.manifest["config"]["method"] == "cot"
    assert found.summary["steps"] == 0
    assert main(["report", "r"]) == 0


def test_it_starts_no_jax():
    code = (
        "import sys; from lemon_jax.cli import main; "
        f"code = main(['eval', 'vanilla', *{SAMPLE!r}, '--tasks', '3', '--out', 'r']); "
        "sys.exit(code or 3 * ('jax' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_same_command_makes_no_call_again():
    command = ["eval", "sc", *SAMPLE, "--tasks", "6", "--out", "r"]
    assert main(command) == 0
    first = table("r"), rows("r"), summary("r")["train"]["live_calls"]
    assert main(command) == 0
    assert (table("r"), rows("r")) == first[:2]
    assert (first[2], summary("r")["train"]["live_calls"]) == (6 * 5 + 1, 0)


def test_a_folder_of_another_evaluation_is_left_as_it_was(capsys):
    assert main(["eval", "cot", *SAMPLE, "--tasks", "6", "--out", "r"]) == 0
    before = {p.name: p.read_bytes() for p in Path("r").iterdir()}
    for change in (["--tasks", "7"], ["--tasks", "6", "--seed", "1"]):
        assert main(["eval", "cot", *SAMPLE, *change, "--out", "r"]) == 2
        assert (
            "r: holds another evaluation (config, data differ from its manifest.json)"
            in capsys.readouterr().err
        )
    assert main(["eval", "vanilla", *SAMPLE, "--tasks", "6", "--out", "r"]) == 2
    assert "(config differ" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in Path("r").iterdir()} == before
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("mine")
    assert main(["eval", "cot", *SAMPLE, "--out", "notes"]) == 2
    assert [p.name for p in Path("notes").iterdir()] == ["mine.txt"]


def test_specs_from_a_file_and_from_standard_input(capsys, monkeypatch):
    Path("plan.yaml").write_text(SPEC.replace("capacity: small", "capacity: SMALL"))
    assert main(["eval", "plan.yaml", *SAMPLE, "--tasks", "5", "--out", "file"]) == 0
    err = capsys.readouterr().err
    assert "plan.yaml:7:15: E_ENUM" in err
    assert "plan.yaml: repaired: fold_case" in err
    assert table("file")["method"] == "plan"

    class Stdin:
        buffer = io.BytesIO(SPEC.encode())

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert main(["eval", "-", *SAMPLE, "--tasks", "5", "--out", "stdin"]) == 0
    assert table("stdin") == table("file") | {"method": "stdin"}
    assert [r["answer"] for r in rows("stdin")] == [r["answer"] for r in rows("file")]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (
            ["nonsense", *SAMPLE],
            2,
            "error: nonsense: neither a file nor one of vanilla, cot, sc, chain, star",
        ),
        (["none.yaml", *SAMPLE], 2, "error: none.yaml: cannot be read"),
        (["broken.yaml", *SAMPLE], 1, "broken.yaml: cannot be repaired"),
        (["cot", *SAMPLE, "--tasks", "0"], 2, "error: --tasks is 0, it must be at least 1"),
        (["cot", *SAMPLE, "--tasks", "5001"], 2, "error: --tasks is 5001, the sample has at most 5000"),
        (
            ["cot", "--bench", "sample", "--workers", "no.toml"],
            2,
            "error: no.toml: cannot read the worker file",
        ),
        (["cot", "--bench", "multiarith", "--workers", "scripted", "--data", "no"], 2, "no such file"),
    ],
)
def test_what_a_person_can_mend_is_one_line_and_leaves_nothing(arguments, code, expected, capsys):
    Path("broken.yaml").write_text("agents: 5")
    assert main(["eval", *arguments, "--out", "r"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err.splitlines()[-1]
    assert not Path("r").exists()


def test_an_unknown_bench_names_the_known(capsys):
    with pytest.raises(SystemExit) as e:
        main(["eval", "cot", "--bench", "gsm", "--workers", "scripted"])
    assert e.value.code == 2
    assert "'humaneval', 'sample'" in capsys.readouterr().err


def worker_file(url, extra=""):
    text = f'[models.m]\nbackend = "openai"\nbase_url = "{url}/v1"\nmodel = "x"\nidentity = "x:1"\n{extra}'
    Path("w.toml").write_text(text + CAPACITIES)
    return ["eval", "cot", "--bench", "sample", "--workers", "w.toml", "--tasks", "12", "--out", "r"]


def test_tasks_that_workers_failed_on_are_listed_and_asked_again(capsys):
    down = {"on": True}

    def step(state, body):
        user = body["messages"][1]["content"]
        if down["on"] and len(user) > 1 and len(user) % 3 == 0:
            return 400, {"error": {"message": "\x1b[2J not this one"}}
        return chat("Answer: 7", usage=(20, 3))

    with serving(steps=[step]) as (url, state):
        command = worker_file(url)
        assert main(command) == 1
        out = capsys.readouterr().out
        failed = [row["task"] for row in rows("r") if row["infra_failed"]]
        assert 0 < len(failed) < 10
        assert f"INFRA_FAILED: {len(failed)} of 12 tasks, not counted as wrong; the same command" in out
        for task in failed:
            assert f"  {task}: a1: HTTP 400: " in out
        assert "\x1b" not in out
        assert table("r")["infra_failed"] == len(failed)
        assert len({row["task"] for row in rows("r")}) == len(rows("r")) == 12
        calls = len(state["bodies"])
        down["on"] = False
        assert main(command) == 0
        assert len(state["bodies"]) == calls + len(failed)
    assert "INFRA_FAILED" not in capsys.readouterr().out
    assert table("r")["infra_failed"] == 0
    assert summary("r")["train"]["live_calls"] == len(failed)


def test_tasks_whose_prompt_does_not_fit_have_a_verdict(capsys):
    def step(state, body):
        user = body["messages"][1]["content"]
        if len(user) > 1 and len(user) % 3 == 0:
            return 400, {"error": {"type": "exceed_context_size_error", "n_prompt_tokens": 700, "n_ctx": 512}}
        return chat("Answer: 7", usage=(20, 3))

    with serving(steps=[step]) as (url, state):
        command = worker_file(url)
        assert main(command) == 0
        calls, lines = len(state["bodies"]), rows("r")
        assert main(command) == 0
        assert len(state["bodies"]) == calls
    long = [row for row in lines if row["agents"][0]["note"] == "context overflow: a prompt of 700 tokens"]
    assert 0 < len(long) == table("r")["context_overflows"] < 12
    assert rows("r") == lines
    out = capsys.readouterr().out
    assert "INFRA_FAILED" not in out
    said = f"a prompt that did not fit its worker's context: cot {len(long)}"
    assert said in " ".join(out.split())
    assert said in html.unescape(Path("r/report.html").read_text())


def test_a_key_reaches_neither_terminal_nor_run_directory(monkeypatch, capsys, caplog):
    monkeypatch.setenv("EVAL_TEST_KEY", KEY)

    def step(state, body):
        told = f"I was given {KEY}. Answer: 7"
        return chat(told) if len(body["messages"][1]["content"]) % 2 else (401, told.encode())

    with caplog.at_level("DEBUG"), serving(steps=[step]) as (url, state):
        assert main(worker_file(url, extra='api_key_env = "EVAL_TEST_KEY"\n')) == 1
    assert {headers["Authorization"] for headers in state["headers"]} == {f"Bearer {KEY}"}
    printed = "".join(capsys.readouterr()) + caplog.text
    assert "I was given [redacted]" in printed
    assert KEY not in printed
    for path in Path("r").iterdir():
        assert KEY.encode() not in path.read_bytes(), path


def test_interrupted_by_a_person(monkeypatch, capsys):
    async def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "evaluate", interrupted)
    assert main(["eval", "cot", *SAMPLE, "--out", "r"]) == 130
    assert "the same command with the same --out goes on" in capsys.readouterr().err
