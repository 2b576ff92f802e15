"""Which requests share the engine's next step: admission, prompts in parts, decoding, ends. No JAX, no clock.

A reply never depends on these decisions: the engine's rows are independent, and what a request holds in its
pages is the same wherever it was computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lemon_jax.backends.pages import PagePool
from lemon_jax.backends.types import Finish

# Steps that a part of a prompt waits for others to share its call, while there is something to decode.
_PATIENCE = 6


class Shape(Protocol):
    """Sizes of an engine (`model.serving.ServingShape`)."""

    @property
    def slots(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def page(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def most_pages(self) -> int: ...


class Engine(Protocol):
    """What computes (`model.serving.ServingEngine`)."""

    @property
    def shape(self) -> Shape: ...

    def rows(self, count: int) -> int: ...

    def prefill(self, tokens_RxC: np.ndarray, table_RxM: np.ndarray, index_R: np.ndarray) -> None: ...

    def decode(
        self,
        tokens_S: np.ndarray,
        positions_S: np.ndarray,
        table_SxM: np.ndarray,
        temperature_S: np.ndarray,
        seed_S: np.ndarray,
        drawn_S: np.ndarray,
    ) -> np.ndarray: ...


@dataclass(kw_only=True, eq=False)
class Job:
    """One request: what is asked, what has been drawn, and, at the end, how it ended."""

    prompt: tuple[int, ...]
    max_new: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int = 0  # below 2**32
    drawn: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None

    @property
    def position(self) -> int:
        """Of the token that is fed next."""
        return len(self.prompt) - 1 + len(self.drawn)


@dataclass(kw_only=True, eq=False)
class _Part:
    """A page of a prompt that is still to be computed."""

    tokens: Sequence[int]
    table: Sequence[int]
    index: int


class Scheduler:
    """Runs jobs on an engine, one step a call. Not to be used by two threads at once.

    `text_of` decodes token ids; `eos_ids` end a reply. A job holds the pages it needs so far; when the pool
    runs out, the job that came last gives its own back and starts anew later, to the same reply.
    """

    def __init__(
        self, engine: Engine, text_of: Callable[[Sequence[int]], str], eos_ids: Sequence[int]
    ) -> None:
        self._engine = engine
        self._shape = engine.shape
        if self._shape.pages <= self._shape.most_pages:
            raise ValueError(f"{self._shape.pages - 1} pages hold no context of {self._shape.context} tokens")
        self._text_of = text_of
        self._eos_ids = frozenset(eos_ids)
        self._pool = PagePool(self._shape.pages, self._shape.page)
        self._waiting: deque[Job] = deque()
        self._order: list[Job] = []  # running jobs, in the order in which they came
        self._parts: dict[int, _Part] = {}  # by their page, first come, first computed
        self._waited = 0
        self.prefill_steps = self.decode_steps = self.parts_computed = self.restarts = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._order)

    def submit(self, job: Job) -> None:
        """Queue a job. Its prompt must be shorter than the context, which also bounds what it may draw."""
        room = self._shape.context - len(job.prompt)
        if room < 1 or job.max_new < 1 or not job.prompt:
            raise ValueError(f"a prompt of {len(job.prompt)} tokens and {job.max_new} new ones do not fit")
        job.max_new = min(job.max_new, room)
        self._waiting.append(job)

    def cancel(self, job: Job) -> None:
        """Take a job out, wherever it is."""
        if job in self._order:
            self._leave(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def step(self) -> list[Job]:
        """Compute parts of prompts, or one token of every job that is ready; returns the jobs that ended."""
        self._admit()
        ready = [job for job in self._order if self._is_ready(job)]
        full = len(self._parts) >= self._shape.parts
        if self._parts and (full or not ready or self._waited >= _PATIENCE):
            self._prefill()
            self._waited = 0
            return []
        self._waited += 1 if self._parts else 0
        return self._decode(self._with_room(ready))

    def _admit(self) -> None:
        while self._waiting and len(self._order) < self._shape.slots:
            job = self._waiting[0]
            cached = job.prompt[:-1]  # the last token is fed to the first decoding step
            pages = self._pool.begin(cached)
            needed = -(-len(job.prompt) // self._shape.page) - len(pages)
            # Every running job may soon need one more; the first one is let in whatever is left.
            own = None
            if not self._order or self._pool.available >= needed + len(self._order):
                own = self._pool.take(needed)
            if own is None:
                self._pool.release(pages)
                return
            self._waiting.popleft()
            job.pages = pages + own
            for index in range(len(pages), -(-len(cached) // self._shape.page)):
                tokens = cached[index * self._shape.page : (index + 1) * self._shape.page]
                self._parts[job.pages[index]] = _Part(
                    tokens=tokens, table=job.pages[: index + 1], index=index
                )
            self._pool.know(cached, job.pages)
            self._order.append(job)

    def _is_ready(self, job: Job) -> bool:
        return not any(page in self._parts for page in job.pages)

    def _prefill(self) -> None:
        shape = self._shape
        tokens_RxC = np.zeros((shape.parts, shape.page), np.int32)
        table_RxM = np.zeros((shape.parts, shape.most_pages), np.int32)
        index_R = np.zeros(shape.parts, np.int32)
        for row, page in enumerate(list(self._parts)[: shape.parts]):
            part = self._parts.pop(page)
            tokens_RxC[row, : len(part.tokens)] = part.tokens
            table_RxM[row, : len(part.table)] = part.table
            index_R[row] = part.index
            self.parts_computed += 1
        self._engine.prefill(tokens_RxC, table_RxM, index_R)
        self.prefill_steps += 1

    def _with_room(self, ready: list[Job]) -> list[Job]:
        """Of the ready jobs those that have a page for their next token, in the order in which they came."""
        kept = []
        for job in ready:
            if job not in self._order:  # has made room for another
                continue
            while job in self._order and job.position // self._shape.page >= len(job.pages):
                if page := self._pool.take(1):
                    job.pages += page
                else:
                    self._restart(self._order[-1])
            if job in self._order:
                kept.append(job)
        return kept

    def _restart(self, job: Job) -> None:
        """Give a job's room to those that came before it. What it drew it will draw again."""
        self._leave(job)
        job.drawn = []
        self._waiting.appendleft(job)
        self.restarts += 1

    def _decode(self, jobs: list[Job]) -> list[Job]:
        rows = self._engine.rows(len(jobs))
        tokens_S, positions_S, drawn_S = (np.zeros(rows, np.int32) for _ in range(3))
        table_SxM = np.zeros((rows, self._shape.most_pages), np.int32)
        temperature_S, seed_S = np.zeros(rows, np.float32), np.zeros(rows, np.uint32)
        for row, job in enumerate(jobs):
            tokens_S[row] = job.drawn[-1] if job.drawn else job.prompt[-1]
            positions_S[row], drawn_S[row] = job.position, len(job.drawn)
            table_SxM[row, : len(job.pages)] = job.pages
            temperature_S[row], seed_S[row] = job.temperature, job.seed
        next_S = self._engine.decode(tokens_S, positions_S, table_SxM, temperature_S, seed_S, drawn_S)
        self.decode_steps += 1
        for job, token in zip(jobs, next_S, strict=False):
            self._advance(job, int(token))
        ended = [job for job in jobs if job.finish]
        for job in ended:
            self._leave(job)
        return ended

    def _advance(self, job: Job, token: int) -> None:
        job.drawn.append(token)
        if token in self._eos_ids:
            job.finish, job.text = "stop", self._text_of(job.drawn[:-1])
        elif len(job.drawn) >= job.max_new:
            # The bytes that are missing of a character at the end will not come.
            job.finish, job.text = "length", self._text_of(job.drawn).rstrip("\ufffd")
        elif self._stop_is_near(job):
            job.text = self._text_of(job.drawn)
        starts = [at for stop in job.stop if (at := job.text.find(stop)) >= 0]
        if starts:
            job.finish, job.text = "stop", job.text[: min(starts)]

    def _stop_is_near(self, job: Job) -> bool:
        """Whether the last tokens spell a stop text; far cheaper than all of them at every step."""
        if not job.stop:
            return False
        # A token is a byte or more, but for a few that spell nothing; a cut character adds some.
        tail = self._text_of(job.drawn[-max(len(stop.encode()) for stop in job.stop) - 8 :])
        return any(stop in tail for stop in job.stop)

    def _leave(self, job: Job) -> None:
        self._order.remove(job)
        pages, job.pages = job.pages, []
        self._pool.release(pages, forget=[page for page in pages if page in self._parts])
        # A part that others wait for is computed for them.
        for page in pages:
            if page in self._parts and not self._pool.held(page):
                del self._parts[page]
