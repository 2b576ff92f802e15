"""No attack gets out of the sandbox, passes, outlives its limits or leaves a process behind."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from attack_runner import Case, Witness, cases, processes, run
from attacks import ATTACKS, FAKES, HONEST, PROMPT, TEST

from lemon_jax.runtime.tools import LEVELS, check_candidate, reached

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="attacks by x86_64 Linux calls"
)


@pytest.fixture(scope="module")
def witness() -> Iterator[Witness]:
    before = set(processes())
    with Witness() as found:
        yield found
    deadline = time.monotonic() + 3
    while (left := set(processes()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize("case", cases(), ids=str)
def test_attacks_fail(case: Case, witness: Witness) -> None:
    outcome = asyncio.run(run(case, witness))
    assert not outcome.won, outcome


def test_there_are_many_and_each_has_its_own_name() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) > 100


def test_an_honest_candidate_passes_the_same_test() -> None:
    result = asyncio.run(check_candidate(prompt=PROMPT, entry_point="f", test=TEST, completion=HONEST))
    assert result.passed or reached() in LEVELS[: LEVELS.index("namespaces+seccomp")]


@pytest.mark.parametrize("attack", [a for a in FAKES if a.naive], ids=lambda a: a.name)
def test_fakes_do_pass_where_all_share_a_process(attack) -> None:
    script = f"{attack.candidate}\n{TEST}\ncheck(f)"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, timeout=20)
    assert ended.returncode == 0, ended.stderr
