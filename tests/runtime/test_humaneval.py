from __future__ import annotations

import asyncio
import gzip
import json
import os
import secrets
import socket
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attack_runner import survivors

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools import LEVELS, CandidateResult, Limits, box, check_candidate, isolation, sandbox
from lemon_jax.runtime.tools import CandidateStatus as S

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the isolation layers are Linux's"),
    pytest.mark.usefixtures("nothing_left_behind"),
]

PROMPT = 'def f(x):\n    """double"""\n'
TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('ab') == 'abab'\n"
QUICK = Limits(wall_s=60, cpu_s=1)  # the wall is far away unless it is what is tested


def check(
    completion: str,
    *,
    prompt: str = PROMPT,
    test: str = TEST,
    limits: Limits = QUICK,
    accept: str = "seccomp",
) -> CandidateResult:
    return asyncio.run(
        check_candidate(
            prompt=prompt, entry_point="f", test=textwrap.dedent(test), completion=completion,
            limits=limits, accept=accept,
        )
    )  # fmt: skip


FULL = "def f(x):\n    return x * 2\n"


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        pytest.param("    return x * 2\n", S.PASSED, id="body"),
        pytest.param(FULL, S.PASSED, id="full function"),
        pytest.param(f"```python\n{FULL}```", S.PASSED, id="fenced"),
        pytest.param(f"Sure!\n\n```python\n{FULL}```\nIt doubles.", S.PASSED, id="fence and prose"),
        pytest.param(f"def h(y):\n    return y * 2\n\n\n{FULL.replace('x * 2', 'h(x)')}", S.PASSED, id="two"),
        pytest.param("def g(x):\n    return x * 2\n", S.MISSING_ENTRY, id="renamed"),
        pytest.param(
            "class Solution:\n    def f(self, x):\n        return x * 2\n", S.MISSING_ENTRY, id="class"
        ),
        pytest.param("```python\n    return x * 2\n```", S.PASSED, id="fenced body"),
        pytest.param("return x * 2", S.PASSED, id="body without its margin"),
        pytest.param("y = x\n    return y * 2", S.PASSED, id="first line without its margin"),
        pytest.param("  y = x\n  return y * 2", S.PASSED, id="body with another margin"),
        pytest.param("\ty = x\n\treturn y * 2", S.PASSED, id="body with tabs"),
        pytest.param(
            "    def g():\n        return x\n    return g() * 2", S.PASSED, id="function in the body"
        ),
        pytest.param("    return h(x)\n\ndef h(y):\n    return y * 2\n", S.PASSED, id="helper after"),
        pytest.param("    return x * 2\n```\nThis doubles.", S.PASSED, id="body, then a closing fence"),
        pytest.param("f = lambda x: x * 2", S.PASSED, id="lambda"),
        pytest.param(
            f"```python\n{FULL}```\nUse it:\n```python\nprint(f(2))\n```", S.PASSED, id="usage after"
        ),
        pytest.param(
            f"from __future__ import annotations\n{FULL}\nif __name__ == '__main__':\n    raise SystemExit\n",
            S.PASSED,
            id="main guard",
        ),
        pytest.param("", S.FAILED, id="empty"),
        pytest.param("```python\n```", S.FAILED, id="empty block"),
        pytest.param("I cannot do that.", S.FAILED, id="prose alone"),
        pytest.param("def f(x:\n    return", S.FAILED, id="syntax error"),
        pytest.param("    return x * 3\n", S.FAILED, id="wrong"),
        pytest.param("f = 3", S.MISSING_ENTRY, id="no function"),
        pytest.param("    return \0", S.FAILED, id="NUL"),
        pytest.param("    return '\ud800'", S.FAILED, id="half a surrogate"),
    ],
)
def test_completion_shapes(completion: str, status: S) -> None:
    result = check(completion)
    assert result.status is status, result
    assert result.passed == (status is S.PASSED) == (not result.reason)
    assert "\n" not in result.reason


def test_the_prompts_imports_and_helpers_serve_a_whole_function() -> None:
    prompt = (
        "import math\nfrom typing import List\n\n\ndef half(y):\n    return y / 2\n\n\n"
        'def f(x: List[float]) -> float:\n    """double"""\n'
    )
    test = "def check(candidate):\n    assert half(candidate([3.0])) == math.floor(3.5) == half(6)\n"
    for completion in ("    return half(x[0] * 4)\n", "def f(x: List[float]):\n    return half(x[0] * 4)\n"):
        assert check(completion, prompt=prompt, test=test).passed
    # The test's helper is the prompt's, whatever the completion makes of that name.
    fake = "def half(y):\n    return 3\n\n\ndef f(x):\n    return 1.0\n"
    assert check(fake, prompt=prompt, test=test).status is S.FAILED


@pytest.mark.parametrize(
    ("completion", "status", "reason"),
    [
        ("    while True: pass\n", S.CPU_LIMIT, "1 s of CPU time"),
        ("while True: pass\n" + FULL, S.CPU_LIMIT, "1 s of CPU time"),
        (
            "    while True:\n      try:\n        while True: pass\n      except BaseException: pass\n",
            S.CPU_LIMIT,
            "1 s of CPU time",
        ),
        ("    import time\n    time.sleep(60)\n", S.TIMEOUT, "1.5 s"),
        ("import time\ntime.sleep(60)\n" + FULL, S.TIMEOUT, "1.5 s"),
        ("    return bytearray(10**11)\n", S.MEMORY, "Memory"),
        ("x = bytearray(10**11)\n" + FULL, S.MEMORY, "memory"),
        ("    while True: print('x' * 1000)\n", S.OUTPUT, "65536 bytes"),
        ("    import os\n    os._exit(0)\n", S.CRASHED, "exit code 0"),
        ("    import ctypes\n    ctypes.string_at(0)\n", S.CRASHED, "exit code -11"),
        ("    import sys\n    sys.exit(0)\n", S.FAILED, "SystemExit"),
        ("import no_such_module\n" + FULL, S.FAILED, "ModuleNotFoundError"),
        ("    return {}[x]\n", S.FAILED, "KeyError: '2' at: assert candidate(2) == 4"),
        ("    return f(x)\n", S.FAILED, "RecursionError"),
        ("    return x * 3\n", S.FAILED, "AssertionError: at: assert candidate(2) == 4"),
        ("    return f\n", S.FAILED, "returned a function"),
        ("    return input()\n", S.FAILED, "EOFError"),
        ("#" * 70_000, S.FAILED, "65536 bytes"),
    ],
)
def test_statuses(completion: str, status: S, reason: str) -> None:
    limits = Limits(wall_s=1.5, cpu_s=20) if status is S.TIMEOUT else QUICK
    result = check(completion, limits=limits)
    assert result.status is status, result
    assert reason in result.reason, result


@pytest.mark.parametrize(
    "start",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(30,)).start()\n",
        "import subprocess\ntry: subprocess.Popen(['/bin/sleep', '30.MARK'])\nexcept OSError: pass\n",
    ],
)
@pytest.mark.parametrize("layers", [box.LAYERS, ()], ids=["all", "rlimits"])
def test_what_is_left_running_does_not_delay_a_pass(
    start: str, layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "LAYERS", layers)
    mark = f"{secrets.randbelow(10**15):015}"  # digits, which change nothing for sleep
    result = check(start.replace("MARK", mark) + FULL, accept="seccomp" if layers else "rlimits")
    assert result.passed, result
    assert result.seconds < 15  # not 30; a busy machine is slow to start two processes
    assert not survivors(mark=f"30.{mark}")


@pytest.mark.parametrize("layers", [("namespaces",), ()], ids=["namespaces", "rlimits"])
@pytest.mark.parametrize(("end", "status"), [("", S.PASSED), ("os._exit(3)\n", S.CRASHED)])
def test_children_left_behind_end_with_the_candidate(
    layers: tuple[str, ...], end: str, status: S, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no filter keeps it from making them. They hold its pipes open, which must delay nobody."""
    monkeypatch.setattr(box, "LAYERS", layers)
    child = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(30)\n    os._exit(0)\n"
    result = check(f"import os, time\n{child}{end}{FULL}", accept="rlimits")
    assert result.status is status, result
    assert result.seconds < 15
    # the fixture checks that the children are gone within seconds


def test_an_always_equal_object_fails() -> None:
    same = "class Same{0}:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    for base in ("", "(int)", "(str)", "(list)"):
        result = check(same.format(base) + "def f(x): return Same()\n")
        assert result.status is S.FAILED, result
    # Right content in a class of its own is right: what is compared is the content.
    assert check(same.format("(str)") + "def f(x): return Same(x * 2) if x != 2 else 4\n").passed


def test_values_keep_their_kind() -> None:
    test = """
        def check(candidate):
            values = [1, True, None, 1.5, 2j, "é", b"", [1, [2]], (1, ()), {1: {2}}, frozenset({3}), range(9)]
            for value in values:
                result = candidate(value)
                assert result == value and type(result) is type(value)
            assert list(candidate("iterator")) == [0, 1, 4]
            try: candidate("raise")
            except KeyError as error: assert "gone" in str(error)
            else: assert False
    """
    body = (
        "    if x == 'raise': raise KeyError('gone')\n"
        "    return (i * i for i in range(3)) if x == 'iterator' else x\n"
    )
    result = check(body, test=test)
    assert result.passed, result


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("def check(candidate): assert True", "never calls"),
        ("def check(candidate): candidate(len)", "hands over a builtin_function_or_method"),
        ("def check(candidate:", "does not load: SyntaxError"),
        ("x = 1", "does not load: KeyError"),
    ],
)
def test_a_faulty_test_is_not_the_candidates_fault(test: str, reason: str) -> None:
    result = check(FULL, test=test)
    assert result.status is S.TEST_ERROR
    assert reason in result.reason


def test_a_test_that_catches_everything_gives_no_pass_to_a_dead_candidate() -> None:
    test = "def check(candidate):\n    try: candidate(1)\n    except BaseException: pass\n"
    assert check("    import os\n    os._exit(0)\n", test=test).status is S.CRASHED


def test_state_is_kept_between_calls_and_arguments_are_copies() -> None:
    test = """
        def check(candidate):
            given = [1]
            assert candidate(given) == [1, 0] and given == [1]
            assert candidate(given) == [1, 1]
    """
    assert check("n = []\ndef f(x):\n    x.append(len(n))\n    n.append(0)\n    return x\n", test=test).passed


def test_environment_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-42")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
            import os, socket
            reached = "secret-42" in str(os.environ)
            for reach in (lambda: open("../x", "w"), lambda: open({str(tmp_path / "x")!r}, "w"),
                          lambda: socket.create_connection(("127.0.0.1", {port}), 1)):
                try: reach()
                except OSError: continue
                reached = True
            def f(x): return None if reached else x * 2
        """
        assert check(textwrap.dedent(code)).passed
    assert not (tmp_path / "x").exists()


def test_below_the_accepted_isolation_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "LAYERS", ())
    result = check(FULL, accept="seccomp")
    assert result.status is S.SANDBOX_REFUSED
    assert result.isolation == ""
    assert "'rlimits', below the accepted 'seccomp'" in result.reason
    assert isolation.reached() == "rlimits"
    with pytest.raises(LemonError, match="--accept-isolation rlimits"):
        isolation.require("seccomp")
    assert isolation.require("rlimits") == "rlimits"
    result = check(FULL, accept="rlimits")
    assert (result.status, result.isolation) == (S.PASSED, "rlimits")


def test_the_level_reached_is_the_level_a_run_has() -> None:
    found = isolation.require("rlimits")
    assert found in LEVELS
    assert check(FULL, accept=found).isolation == found
    with pytest.raises(LemonError, match="no isolation level 'docker'"):
        isolation.require("docker")
    with pytest.raises(LemonError, match="weakest first: rlimits, seccomp"):
        check(FULL, accept="docker")


def test_cancelling_ends_both_processes() -> None:
    async def scenario() -> None:
        checking = check_candidate(
            prompt=PROMPT, entry_point="f", test=TEST, accept="seccomp",
            completion="    import time\n    time.sleep(20)\n", limits=Limits(wall_s=20),
        )  # fmt: skip
        await asyncio.wait_for(checking, 0.5)

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    # the fixture checks that they are gone within seconds


def test_an_interpreter_that_does_not_start_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "LAYERS", ())
    monkeypatch.setattr(box.sys, "executable", "/bin/false")
    with pytest.raises(LemonError, match="/bin/false did not start"):
        check(FULL, accept="rlimits")


def test_two_hundred_by_sixteen_workers_after_jax_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors in this project, so JAX's warning of os.fork would fail this test."""
    jax = pytest.importorskip("jax")
    jax.numpy.ones(3).block_until_ready()
    forks: list[str] = []
    monkeypatch.setattr(os, "fork", lambda: forks.append("fork"))
    with ThreadPoolExecutor(16) as sixteen:
        monkeypatch.setattr(sandbox, "_pool", sixteen)

        async def scenario() -> list[CandidateResult]:
            return await asyncio.gather(
                *(
                    check_candidate(
                        prompt=PROMPT, entry_point="f", test=TEST, accept="seccomp",
                        completion=f"    return x * {2 + i % 2}\n", limits=Limits(wall_s=60, cpu_s=5),
                    )
                    for i in range(200)
                )
            )  # fmt: skip

        results = asyncio.run(scenario())
    assert [r.passed for r in results] == [i % 2 == 0 for i in range(200)]
    assert not forks


@pytest.mark.slow
def test_all_canonical_solutions_pass() -> None:
    path = Path(os.environ.get("LEMON_DATA", "")) / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip("LEMON_DATA names no folder with humaneval/HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 164

    async def scenario() -> list[CandidateResult]:
        # By turns as a body and as a fenced whole function; and a result that is wrong everywhere.
        shapes = ("{solution}", "```python\n{prompt}{solution}\n```")
        right = [
            shapes[i % 2].format(prompt=r["prompt"], solution=r["canonical_solution"])
            for i, r in enumerate(rows)
        ]
        return await asyncio.gather(
            *(
                check_candidate(
                    prompt=r["prompt"], entry_point=r["entry_point"], test=r["test"], accept="seccomp",
                    completion=completion,
                )
                for r, solution in zip(rows, right, strict=True)
                for completion in (solution, "    return 'no'\n")
            )
        )  # fmt: skip

    results = asyncio.run(scenario())
    assert [result.status for result in results] == [S.PASSED, S.FAILED] * 164
