"""Verdicts on answers: by reading them, or by running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lemon_jax.bench import Grade, Task, gdesigner, grade
from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools import ACCEPTED, CandidateStatus, check_candidate, require


@dataclass(frozen=True, kw_only=True)
class Grader:
    """`extractor` is the rule that reads answers (`bench.EXTRACTORS`); `accept_isolation` the lowest level of
    `runtime.tools.LEVELS` under which the code of an answer may run."""

    extractor: str = "lemon"
    accept_isolation: str = ACCEPTED

    @classmethod
    def of(cls, protocol: str, accept_isolation: str = ACCEPTED) -> Grader:
        """A protocol's own rule: answers of the G-Designer family's sets are read as that family does."""
        extractor = "gdesigner" if protocol == "gdesigner" else "lemon"
        return cls(extractor=extractor, accept_isolation=accept_isolation)

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise LemonError where the machine isolates too little for the answers of these tasks."""
        if any(task.kind == "code" for task in tasks):
            require(self.accept_isolation)

    async def grade(self, task: Task, text: str) -> Grade:
        """Grade the text that a system of agents ended with.

        A function is right if it passes its task's test in the sandbox; its `answer` is how that ended.

        Raises:
            LemonError: an unknown extractor; a test that does not run; too little isolation here.
        """
        if task.kind != "code":
            if self.extractor == "gdesigner":
                text = gdesigner.announced(text)
            return grade(task, text, self.extractor)
        result = await check_candidate(
            prompt=task.question,
            entry_point=task.entry_point,
            test=task.test,
            completion=text,
            accept=self.accept_isolation,
        )
        if result.status in (CandidateStatus.TEST_ERROR, CandidateStatus.SANDBOX_REFUSED):
            raise LemonError(f"{task.id}: {result.status}: {result.reason}")
        return Grade(
            correct=result.passed,
            answer=result.status.value,
            fallback=False,
            no_answer=not text.strip() or result.status is CandidateStatus.MISSING_ENTRY,
            extractor=self.extractor,
        )
