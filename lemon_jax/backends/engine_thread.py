"""The thread that loads a model and then computes, so that the event loop never waits for a step."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from lemon_jax.backends.scheduler import Engine, Job, Scheduler
from lemon_jax.backends.types import Message
from lemon_jax.errors import LemonError


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What serving needs of a model that has been loaded."""

    engine: Engine
    prompt_ids: Callable[[Sequence[Message]], list[int]]
    text_of: Callable[[Sequence[int]], str]
    eos_ids: tuple[int, ...]
    context: int  # tokens of one request


class EngineThread(threading.Thread):
    """Calls `load`, then runs the jobs it is given until `stop`.

    `load` calls what it is given between its parts, which ends it by a `LemonError` after `stop`. `loaded`
    becomes the model, or the exception of `load`. A step that fails ends all jobs, also later ones.
    """

    def __init__(self, load: Callable[[Callable[[], None]], ServedModel], name: str) -> None:
        # A run that ends without closing must not hang in a step.
        super().__init__(name=f"jax worker {name}", daemon=True)
        self.loaded: Future[ServedModel] = Future()
        self._load = load
        self._changed = threading.Condition()
        self._asked: deque[tuple[Job, Future[Job]]] = deque()
        self._cancelled: deque[Job] = deque()
        self._futures: dict[int, Future[Job]] = {}
        self._stopping = False
        self._failure: Exception | None = None

    def submit(self, job: Job) -> Future[Job]:
        """Run a job; the future becomes the job when it has ended. Cancelling it frees the job's slot."""
        future: Future[Job] = Future()
        with self._changed:
            if self._stopping:
                future.set_exception(self._failure or _closed())
            else:
                self._asked.append((job, future))
                self._changed.notify()
        future.add_done_callback(lambda done: self._cancel(job) if done.cancelled() else None)
        return future

    def stop(self) -> None:
        """Let the thread end after its step or the part it loads, and fail the jobs that are open."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Load, then work."""
        try:
            model = self._load(self._go_on)
        except BaseException as failure:
            self.loaded.set_exception(failure)
            return
        self.loaded.set_result(model)
        scheduler = Scheduler(model.engine, model.text_of, model.eos_ids)
        try:
            while self._take_orders(scheduler):
                for job in scheduler.step():
                    self._settle(job)
        except Exception as failure:
            self._fail(failure)
        finally:
            self._fail(_closed())

    def _go_on(self) -> None:
        with self._changed:
            if self._stopping:
                raise _closed()

    def _take_orders(self, scheduler: Scheduler) -> bool:
        """Wait until there is something to do; whether there is, or it is time to end."""
        with self._changed:
            while not (self._asked or self._cancelled or scheduler.busy or self._stopping):
                self._changed.wait()
            if self._stopping:
                return False
            asked, cancelled = list(self._asked), list(self._cancelled)
            self._asked.clear()
            self._cancelled.clear()
        for job, future in asked:
            try:
                scheduler.submit(job)
                self._futures[id(job)] = future
            except ValueError as misfit:  # its own failure, not the engine's
                future.set_exception(misfit)
        for job in cancelled:
            if self._futures.pop(id(job), None) is not None:
                scheduler.cancel(job)
        return True

    def _settle(self, job: Job) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled a moment ago
            self._futures.pop(id(job)).set_result(job)

    def _cancel(self, job: Job) -> None:
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    def _fail(self, failure: Exception) -> None:
        """End all jobs with the first failure, those to come too."""
        with self._changed:
            self._stopping = True
            self._failure = self._failure or failure
            futures = [*self._futures.values(), *(future for _, future in self._asked)]
            self._futures.clear()
            self._asked.clear()
        for future in futures:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(self._failure)


def _closed() -> LemonError:
    return LemonError("the worker pool was closed")
