"""Worker models in this process, on JAX: many requests in one batch of fixed shape.

Nothing here imports JAX before the first request needs it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from lemon_jax.backends import wire
from lemon_jax.backends.concurrency import answer_all
from lemon_jax.backends.engine_thread import EngineThread, ServedModel
from lemon_jax.backends.gate import ExclusiveGate
from lemon_jax.backends.model_files import Progress
from lemon_jax.backends.scheduler import Job
from lemon_jax.backends.types import Reply, Request
from lemon_jax.errors import LemonError

_LONGEST_STOP_S = 20.0  # of a model that loads: its longest part is the compilation of a program


class JaxBackend:
    """A worker model on `model.serving`, loaded at the first request.

    `locate` returns the model file, downloading it if need be, and `load` makes a served model of it, calling
    its second argument between parts; both run in the engine's thread. A reply depends on its request alone,
    not on what else is asked. Identity: "jax:", the head of the file's digest, and the type of the weights.
    """

    def __init__(
        self,
        name: str,
        locate: Callable[[Progress], Path],
        load: Callable[[Path, Callable[[], None]], ServedModel],
        identity: str,
        gate: ExclusiveGate,
        *,
        slots: int = 32,
        on_progress: Progress | None = None,
    ) -> None:
        self.identity = identity
        self._name = name
        self._locate = locate
        self._load = load
        self._gate = gate
        self._on_progress = on_progress
        # As many again wait inside the engine, so that a slot that is free is filled at once.
        self._limit = asyncio.Semaphore(2 * slots)
        self._thread: EngineThread | None = None
        self._closed = threading.Event()

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index, reply)` as replies arrive.

        Raises:
            LemonError: the model cannot be had or loaded, or its chat template refuses the messages.
        """
        return answer_all(requests, self._answer, self._limit)

    async def aclose(self) -> None:
        """End the thread after the step it is in; requests that are open have failed.

        One that loads ends after the tensor or the program it is at; 20 s are waited for that. Not to wait
        at all is no way: a process that ends while JAX works in another thread may abort.
        """
        self._closed.set()
        if self._thread is not None:
            self._thread.stop()
            patience = None if self._thread.loaded.done() else _LONGEST_STOP_S
            await asyncio.to_thread(self._thread.join, patience)

    async def _answer(self, request: Request) -> Reply:
        # Loading and compiling compute too, so they belong inside the turn.
        async with self._gate.turn(self._name):
            model = await self._model()
            start = time.monotonic()
            ids = await asyncio.to_thread(model.prompt_ids, request.messages)
            if len(ids) >= model.context:
                error = f"{wire.OVERFLOW}: {len(ids)} tokens where the context holds {model.context}"
                return wire.overflow_reply(error, len(ids), time.monotonic() - start)
            job = Job(
                prompt=tuple(ids),
                max_new=request.max_tokens,
                stop=request.stop,
                temperature=request.temperature if request.sample_index else 0.0,  # index 0 is greedy
                seed=wire.seed_of(request),
            )
            assert self._thread is not None
            try:
                await asyncio.wrap_future(self._thread.submit(job))
            except Exception as failure:
                what = f"{type(failure).__name__}: {failure}"
                return Reply(text="", finish="error", seconds=time.monotonic() - start, error=what)
            assert job.finish is not None  # set when a job ends
            return Reply(
                text=job.text,
                finish=job.finish,
                prompt_tokens=len(ids),
                generated_tokens=len(job.drawn),
                seconds=time.monotonic() - start,
            )

    async def _model(self) -> ServedModel:
        """The model, loaded at the first call; a failure to load is every caller's."""
        if self._closed.is_set():
            raise LemonError(f"models.{self._name}: the worker pool is closed")
        if self._thread is None:
            self._thread = EngineThread(
                lambda go_on: self._load(self._locate(self._progress), go_on), self._name
            )
            self._thread.start()
        loaded = asyncio.wrap_future(self._thread.loaded)
        # Where all callers are cancelled, nobody asks why the load ended: that is no news then.
        loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        # One caller that is cancelled must not take the model from the others.
        return await asyncio.shield(loaded)

    def _progress(self, done: int, total: int, what: str) -> None:
        if self._closed.is_set():
            raise LemonError("the download was stopped")
        if self._on_progress:
            self._on_progress(done, total, f"{self._name}: {what}")
