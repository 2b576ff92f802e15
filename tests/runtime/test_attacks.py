"""No attack gets out of the sandbox, passes, outlives its limits or leaves a process behind."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
from attack_runner import Case, Witness, cases, no_survivors, run
from attacks import ATTACKS, ESCAPES, FAKES, HONEST, PROMPT, TEST, Attack

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools import LEVELS, box, check_candidate, reached

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="attacks by x86_64 Linux calls"
)


@pytest.fixture(scope="module")
def witness() -> Iterator[Witness]:
    with no_survivors(), Witness() as found:
        yield found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_attacks_fail(case: Case, witness: Witness) -> None:
    outcome = asyncio.run(run(case, witness))
    assert not outcome.won, outcome


# Without namespaces and without Landlock a program reads what its user may; sandbox.py says so.
READS = {
    "environment of others",
    "installed packages read",
    "memory of the parent",
    "project imported",
    "secret file read",
    "system files read",
}


@pytest.mark.parametrize("layers", [("namespaces", "landlock", "seccomp"), ("landlock", "seccomp")])
@pytest.mark.parametrize("attack", ESCAPES, ids=lambda attack: attack.name)
def test_escapes_fail_at_weaker_levels(
    attack: Attack, layers: tuple[str, ...], witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "LAYERS", layers)
    if reached() not in ("namespaces+seccomp", "landlock+seccomp"):
        pytest.skip(f"this machine does not allow {'+'.join(layers)}")
    outcome = asyncio.run(run(Case(attack=attack, form="program"), witness))
    assert not outcome.won, outcome


@pytest.mark.parametrize("attack", ESCAPES, ids=lambda attack: attack.name)
def test_where_reading_is_not_confined_no_program_runs_unasked(
    attack: Attack, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "LAYERS", ("seccomp",))
    if reached() != "seccomp":
        pytest.skip("this machine does not allow seccomp")
    case = Case(attack=attack, form="program")
    with pytest.raises(LemonError, match=r"level 'seccomp'.*--allow-unsandboxed"):
        asyncio.run(run(case, witness))
    if attack.name not in READS:
        outcome = asyncio.run(run(case, witness, accept="seccomp"))
        assert not outcome.won, outcome


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("tcp", "reached a server"),
        ("udp", "reached a server"),
        ("abstract socket", "reached a server"),
        ("socket pair", ""),
        ("secret file read", ""),
        ("files changed", "changed a file"),
        ("linked outside", "changed a file"),
        ("memory of the parent", ""),
        ("harness signalled", ""),
        ("child process", ""),
        ("death signal cleared", ""),
        ("own session", ""),
        ("system files read", ""),
        ("installed packages read", ""),
        ("project imported", ""),
        ("spawned process", ""),
        ("daemon", ""),
        ("shell", ""),
        ("signal by file", ""),
        ("files watched", ""),
        ("namespaces entered", ""),
        ("files in memory", ""),
        ("limits raised", ""),
        ("calls of 32 bits", ""),
    ],
)
def test_attacks_do_get_out_where_nothing_isolates(
    name: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harmless ones: else the tests above would pass for attacks that never work."""
    monkeypatch.setattr(box, "LAYERS", ())
    (attack,) = [attack for attack in ESCAPES if attack.name == name]
    with Witness() as witness:
        outcome = asyncio.run(run(Case(attack=attack, form="program"), witness, accept="rlimits"))
        assert outcome.won == "got out", outcome
        assert witness.seen() == seen


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
