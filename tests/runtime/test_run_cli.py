"""`lemon run` with scripted workers: what is printed where, and the exit codes."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from lemon_jax import __version__
from lemon_jax.backends import Reply, ScriptedBackend
from lemon_jax.cli import main
from lemon_jax.runtime.show_progress import ShowProgress

SPEC = """\
version: 1
agents:
  - id: eq
    name: Writer
    role: equation_writer
    duty: "Write it."
    capacity: large
    depends_on: []
  - id: s
    name: "Final\\nsolver"
    role: math_solver
    duty: "Solve it."
    capacity: medium
    depends_on: [eq]
output: s
"""
TASK = ["--task", "Tom has 3 apples and finds 4. How many?", "--workers", "scripted"]


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "plan.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def script(monkeypatch):
    """script(function) -> all scripted workers answer by it; a Reply stands for itself."""

    def use(answer):
        async def _answer(self, request):
            found = answer(request)
            return found if isinstance(found, Reply) else await original(self, request)

        original = ScriptedBackend._answer
        monkeypatch.setattr("lemon_jax.backends.scripted.pseudo_worker", answer)
        monkeypatch.setattr(ScriptedBackend, "_answer", _answer)

    return use


def test_a_run(write, script, capsys):
    script(lambda request: "3 + 4" if "Expression:" in request.messages[0].content else "So.\nAnswer: 7")
    assert main(["run", write(SPEC), *TASK]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    spent = r"{} prompt tokens \(\d+ of them fixed prefix\), {} generated, cost [\d.]+, \d+\.\d s"
    expected = [
        r"eq Writer \(equation_writer, large\): OK",
        *(r"  3 \+ 4", r"  Answer: 7", r"  answer 7"),
        "  5 calls, " + spent.format(r"\d+", 15),
        r"s Final solver \(math_solver, medium\): OK",
        *(r"  So\.", r"  Answer: 7", r"  answer 7"),
        "  1 call, " + spent.format(r"\d+", 3),
        r"",
        r"Answer: 7",
        "total: 2 agents, 6 calls, " + spent.format(r"\d+", 18),
    ]
    for line, pattern in zip(out.splitlines(), expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    *agents, total = [int(n) for n in re.findall(r"(\d+) prompt tokens", out)]
    assert sum(agents) == total


def test_options(write, script, capsys):
    script(lambda request: "3 + 4" if "Expression:" in request.messages[0].content else "Answer: (B)")
    assert main(["run", write(SPEC), *TASK, "--options", "-6", "7 apples [bold]"]) == 0
    assert "\nAnswer: B) 7 apples [bold]\n" in capsys.readouterr().out


def test_the_pseudo_worker_answers_the_same_each_time(write, capsys, tmp_path):
    outs = []
    for extra in (
        [],
        [],
        ["--store", str(tmp_path / "calls.sqlite")],
        ["--store", str(tmp_path / "calls.sqlite")],
    ):
        assert main(["run", write(SPEC), *TASK, *extra]) == 0
        outs.append(re.sub(r"\d+\.\d s", "", capsys.readouterr().out))
    assert len(set(outs)) == 1


def test_a_store_is_reused(write, script, tmp_path):
    calls = []
    script(lambda request: calls.append(request) or "Answer: 7")
    for _ in range(2):
        assert main(["run", write(SPEC), *TASK, "--store", str(tmp_path / "calls.sqlite")]) == 0
    asked = len(calls)
    assert main(["run", write(SPEC), *TASK]) == 0
    assert len(calls) == 2 * asked


def test_task_from_standard_input(write, script, monkeypatch, capsys):
    questions = []
    script(lambda request: questions.append(request.messages[1].content) or "Answer: 7")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("¿3 + 4?\n".encode())))
    assert main(["run", write(SPEC), "--task", "-", "--workers", "scripted"]) == 0
    assert "Question: ¿3 + 4?\nExpression:" in questions


def test_a_repairable_spec_is_run_and_each_repair_named(write, capsys):
    path = write("```yaml\n" + SPEC.replace("capacity: large", "capacity: Large") + "```\n")
    assert main(["run", path, *TASK]) == 0
    out, err = capsys.readouterr()
    assert f"{path}: repaired: strip_fence\n" in err
    assert f"{path}: repaired: fold_case\n" in err
    assert "E_FENCE" in err
    assert "E_ENUM" in err
    assert "(equation_writer, large): OK" in out


@pytest.mark.parametrize("text", [SPEC.replace("[eq]", "[s]"), "", "x" * 20_000, "é" * 20_000])
def test_a_spec_beyond_repair(write, capsys, text):
    path = write(text)
    assert main(["run", path, *TASK]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{path}:")
    assert err.endswith(f"{path}: cannot be repaired\n")


def test_a_worker_that_cannot_be_reached(write, script, capsys):
    script(lambda request: Reply(text="", finish="error", error="HTTP 503"))
    assert main(["run", write(SPEC), *TASK]) == 1
    out = capsys.readouterr().out
    assert "eq Writer (equation_writer, large): INFRA_FAILED, HTTP 503\n" in out
    assert "s Final solver (math_solver, medium): SKIPPED, depends on eq, which did not finish\n" in out
    assert "\nRun failed: 1 failed, 1 skipped, 0 completed\n" in out
    assert "\nAnswer:" not in out


def test_no_answer_is_said_and_no_failure(write, script, capsys):
    script(lambda request: "I cannot tell")
    assert main(["run", write(SPEC), *TASK]) == 0
    out = capsys.readouterr().out
    assert "NO_ANSWER, calculator: 'I cannot tell' is no arithmetic\n" in out
    assert "\nNo answer found in the last output\n" in out


def test_a_reply_cannot_command_the_terminal(write, script, capsys):
    script(lambda request: "\x1b[2J\x1b]0;title\x07[bold]Answer: 7[/bold]\r")
    assert main(["run", write(SPEC), *TASK]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold]Answer: 7[/bold]" in out


UNREACHABLE = """\
[models.m]
backend = "openai"
base_url = "http://127.0.0.1:9/v1"
model = "m"
""" + "".join(f'[capacities.{level}]\nmodel = "m"\nprice = 1.0\n' for level in ("small", "medium", "large"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", " ", "--workers", "scripted"], "--task: found nothing"),
        (["--task", "\udcff", "--workers", "scripted"], "expected UTF-8 text"),
        (["--task", "x", "--workers", "missing.toml"], "missing.toml: cannot read the worker file"),
        ([*TASK, "--store", "missing/calls.sqlite"], "missing/calls.sqlite: unable to open"),
        ([*TASK, "--options", *"abcdefghijklmnopqrstuvwxyz0"], "--options: found 27, expected at most 26"),
        (["--task", "x", "--workers", "down.toml"], "cannot reach the server"),
    ],
    ids=["empty", "bytes", "workers", "store", "options", "down"],
)
def test_faults_to_mend_are_one_line(write, monkeypatch, tmp_path, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "down.toml").write_text(UNREACHABLE)
    assert main(["run", write(SPEC), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_spec_and_task_cannot_both_be_standard_input(capsys):
    assert main(["run", "-", "--task", "-"]) == 2
    assert "SPEC is read from standard input already" in capsys.readouterr().err


def test_a_missing_spec(capsys):
    assert main(["run", "missing.yaml", *TASK]) == 2
    assert "missing.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("allow", [False, True])
def test_the_sandbox_is_left_only_on_request(write, monkeypatch, allow):
    given = []

    class Stop(Exception):
        pass

    def executor(*_, allow_unsandboxed):
        given.append(allow_unsandboxed)
        raise Stop

    monkeypatch.setattr("lemon_jax.runtime.cli.Executor", executor)
    with pytest.raises(Stop):
        main(["run", write(SPEC), *TASK, *["--allow-unsandboxed"] * allow])
    assert given == [allow]


def test_help_and_version(capsys):
    for words, expected in ((["--version"], f"lemon {__version__}"), (["--help"], "run a spec on one task")):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "--allow-unsandboxed" in capsys.readouterr().out


def test_ctrl_c_is_no_traceback(write, script):
    def stop(_):
        raise KeyboardInterrupt

    script(stop)
    assert main(["run", write(SPEC), *TASK]) == 130


def test_running_does_not_import_jax():
    code = "import sys, lemon_jax.runtime.cli; print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("lemon_jax.runtime.show_progress.time.monotonic", lambda: now[0])
    with ShowProgress() as progress:
        for step in range(40):
            now[0] += 1
            progress(step * 10**7, 4 * 10**8, "small: from the model hub")
        progress(0, 4 * 10**8, "small: verifying")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        *(f"small: from the model hub: {done} of 400 MB" for done in (0, 100, 200, 300)),
        "small: verifying: 0 of 400 MB",
    ]


def test_progress_on_a_terminal_is_a_bar_a_model(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with ShowProgress() as progress:
        progress(10**7, 4 * 10**8, "small: from the model hub")
        progress(2 * 10**7, 4 * 10**8, "small: from the package index")
        progress(10**7, 10**9, "medium: from the model hub")
        progress.make_way()
        progress(4 * 10**8, 4 * 10**8, "small: verifying")
    out, err = capsys.readouterr()
    assert out == ""
    assert "small: from the package index" in err
    assert "small: verifying" in err
    assert "1.0 GB" in err
