"""Does a completion solve its HumanEval problem? Asked of untrusted code, so that it cannot answer itself.

Two sandboxed processes (`humaneval_child.py`). One executes the completion. The other executes the
problem's test and calls the first through pipes; only plain values come back, and only this process holds
the nonce that makes a pass, given after the last assertion. A completion that exits, prints, patches
built-ins, searches its process for secrets or returns objects that equal everything therefore gains
nothing: the one way to a pass is to return right values.

What differs from executing all in one process, as openai/human-eval does:

- Arguments and results are copies: a test that checks how a list was changed in place sees no change.
  Results are rebuilt as `wire.py` says; one of a class of the candidate's own fails.
- A test cannot hand over a function (TEST_ERROR); an exception arrives as its nearest built-in kind.
- Helper functions of the prompt that a test calls are the prompt's own.

None of that touches a HumanEval test: all 164 canonical solutions pass.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from enum import StrEnum

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools.box import ACCEPTED, LEVELS, Box, Limits, Report, levels_from, watch
from lemon_jax.runtime.tools.programs import MAX_CODE, extract_completion
from lemon_jax.runtime.tools.sandbox import not_started, workers

CANDIDATE_LIMITS = Limits(wall_s=15.0, cpu_s=5)
"""A candidate's own: the CPU limit is what ends a loop, the wall clock is for one that sleeps."""

_MODULES = ("sandbox_child", "wire", "completion", "humaneval_child")
_TEST_GRACE_S = 2.0  # by which the test outlives the candidate's wall clock, to see it end


class CandidateStatus(StrEnum):
    """How a check ended. Only TEST_ERROR and SANDBOX_REFUSED say nothing about the candidate."""

    PASSED = "PASSED"
    FAILED = "FAILED"  # a wrong value, an exception, no valid source
    MISSING_ENTRY = "MISSING_ENTRY"  # no function of the wanted name at the outermost level
    TIMEOUT = "TIMEOUT"  # wall clock
    CPU_LIMIT = "CPU_LIMIT"
    MEMORY = "MEMORY"
    OUTPUT = "OUTPUT"  # printed too much
    CRASHED = "CRASHED"  # its process ended before the test did
    TEST_ERROR = "TEST_ERROR"  # the test itself does not run, or cannot run across processes
    SANDBOX_REFUSED = "SANDBOX_REFUSED"  # the machine's isolation is below what is accepted


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """What one candidate did. `reason` is one line, empty for PASSED; it may quote the test."""

    status: CandidateStatus
    reason: str = ""
    isolation: str = ""  # one of box.LEVELS: the weaker of its two processes'
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status is CandidateStatus.PASSED


async def check_candidate(
    *,
    prompt: str,
    entry_point: str,
    test: str,
    completion: str,
    limits: Limits = CANDIDATE_LIMITS,
    accept: str = ACCEPTED,
) -> CandidateResult:
    """Run `completion` against `test`, which defines `check(candidate)`.

    The completion may be the function's body, or modules and replies as models write them: a whole
    function with or without helpers, in a fenced block, prose around it. `limits` hold for the candidate
    and, with a wall clock of two seconds more, for the test. `accept` is the lowest of `box.LEVELS` under
    which to run it. As with `run_program`, checks beyond the number of cores wait, which counts in no
    time; cancelling ends both processes; no fault of the candidate raises. LemonError: `accept` is no
    level, or the interpreter does not start.
    """
    accepted = levels_from(accept)
    source = extract_completion(completion, entry_point)
    if not source.strip():
        return CandidateResult(status=CandidateStatus.FAILED, reason="an empty completion")
    if len(source.encode("utf-8", "replace")) > MAX_CODE:
        return CandidateResult(
            status=CandidateStatus.FAILED, reason=f"a completion of more than {MAX_CODE} bytes"
        )
    problem = {"prompt": prompt, "entry_point": entry_point}
    job = _Check(problem | {"completion": source}, problem | {"test": test}, limits, accepted)
    try:
        return await asyncio.get_running_loop().run_in_executor(workers(), job.run)
    except asyncio.CancelledError:
        job.cancel()
        raise


class _Check:
    """One run; `cancel` may be called from another thread at any time."""

    def __init__(self, candidate: dict, test: dict, limits: Limits, accepted: tuple[str, ...]) -> None:
        self._jobs = {"candidate": candidate, "test": test}
        self._limits = limits
        self._accepted = accepted
        self._boxes: tuple[Box, ...] = ()
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        for box in self._boxes:
            box.cancel()

    def run(self) -> CandidateResult:
        started = time.monotonic()
        calls, replies = os.pipe(), os.pipe()
        ends = [*calls, *replies]
        try:
            candidate = self._box("candidate", self._limits, calls[0], replies[1])
            patient = replace(self._limits, wall_s=self._limits.wall_s + _TEST_GRACE_S)
            test = self._box("test", patient, calls[1], replies[0])
            self._boxes = (candidate, test)
            if self._cancelled:
                self.cancel()
            with candidate, test:
                while ends:  # each end is now in one process alone, which is what makes hanging up visible
                    os.close(ends.pop())
                candidate.feed()
                test.feed()
                watch([candidate, test], until=test)
                hurry = bool(test.cut or candidate.cut)
                test.close(now=hurry)
                seen = test.report()
                # One that ended before the test is given the moment it takes to say how.
                candidate.close(now=hurry or seen.verdict[:1] not in ((), ("lost",)))
                other = candidate.report()
        finally:
            for fd in ends:
                os.close(fd)
        status, reason = _judge(other, seen, self._limits, self._accepted[0])
        levels = [report.level for report in (other, seen) if report.level]
        return CandidateResult(
            status=status, reason=reason, isolation=min(levels, key=LEVELS.index, default=""),
            seconds=time.monotonic() - started,
        )  # fmt: skip

    def _box(self, role: str, limits: Limits, calls: int, replies: int) -> Box:
        return Box(
            role, self._jobs[role] | {"calls": calls, "replies": replies}, limits=limits,
            accepted=self._accepted, modules=_MODULES, fds=(calls, replies),
        )  # fmt: skip


_VERDICTS = {
    "passed": CandidateStatus.PASSED,
    "failed": CandidateStatus.FAILED,
    "foul": CandidateStatus.FAILED,
    "missing": CandidateStatus.MISSING_ENTRY,
    "memory": CandidateStatus.MEMORY,
    "test_error": CandidateStatus.TEST_ERROR,
}


def _judge(candidate: Report, test: Report, limits: Limits, least: str) -> tuple[CandidateStatus, str]:
    if refused := candidate.refused or test.refused:
        return CandidateStatus.SANDBOX_REFUSED, f"isolation here is {refused!r}, below the accepted {least!r}"
    if candidate.cut == "limit":
        return CandidateStatus.OUTPUT, f"more than {limits.output_bytes} bytes of output"
    kind, reason = test.verdict if test.verdict else ("lost", "")
    if kind in _VERDICTS:
        return _VERDICTS[kind], reason
    return _end_of(candidate, test, limits)


def _end_of(candidate: Report, test: Report, limits: Limits) -> tuple[CandidateStatus, str]:
    """Without a verdict on its values: why the candidate's process, or the test's, ended too early."""
    for report, who in ((candidate, "it"), (test, "the test, given its values,")):
        if report.exit and report.exit.timed_out:
            return CandidateStatus.TIMEOUT, f"still running after {limits.wall_s:g} s"
        if report.exit and report.exit.used_up(limits):
            return CandidateStatus.CPU_LIMIT, f"{who} took more than {limits.cpu_s:g} s of CPU time"
    if test.cut == "timeout":
        return CandidateStatus.TIMEOUT, f"still running after {limits.wall_s:g} s"
    if test.cut == "limit":
        return CandidateStatus.OUTPUT, "the test, given its values, printed too much"
    for report in (candidate, test):
        if not report.level:
            raise LemonError(not_started(report))
    if candidate.exit is None:
        return CandidateStatus.CRASHED, "it hung up on the test"
    return CandidateStatus.CRASHED, f"it ended before the test did (exit code {candidate.exit.code})"
