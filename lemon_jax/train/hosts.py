"""The processes ("hosts") of one run: who executes what, how all learn of it, and how all stop together.

Every host runs the same program on the same tasks, and computes the same rewards and the same update. Only
worker calls are divided: a host executes its share of a step's specs and gathers the others' outcomes. What
differs from host to host (a failing server, a SIGTERM) is gathered too, before anyone acts on it: otherwise
one host would wait in a collective that the others never enter. A run of one host gathers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore
from lemon_jax.train.evaluate import Scored, Work, alone

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
CHUNK = 4 << 20  # bytes of one exchange: on an accelerator they pass through its memory, once per host
_STOP = "lemon_jax/stop"
_OF_ALL = "lemon_jax_of_all"  # of an exception: every host raises it


class Preempted(Exception):
    """The run was told to stop by SIGTERM, and all its hosts have stopped at the same point."""


def of_all(error: E) -> E:
    """Mark an exception that every host raises at the same point. One without the mark is of a host that has
    failed alone, and for which the others would wait in vain; `preemptible` tells them apart."""
    vars(error)[_OF_ALL] = True
    return error


def is_of_all(error: Exception) -> bool:
    return isinstance(error, Preempted) or _OF_ALL in vars(error)


@dataclass
class Hosts:
    """This process among those of the run; `Hosts()` is a run of one process."""

    index: int = 0
    count: int = 1
    stopping: bool = field(default=False, init=False)
    stopped: bool = field(default=False, init=False)  # all hosts are, at the same point
    _working: asyncio.Task[Any] | None = field(default=None, init=False, repr=False)
    _computing: asyncio.Future[Any] | None = field(default=None, init=False, repr=False)
    _sent: int = field(default=0, init=False, repr=False)  # calls up to this one every host's store holds

    @property
    def first(self) -> bool:
        """The first host writes the run's files."""
        return self.index == 0

    def stop(self) -> None:
        """Break off the work under way; it, or the next, ends in `Preempted` on all hosts."""
        self.stopping = True
        if self._working is not None:
            self._working.cancel()

    def tell(self) -> None:
        """Let the other hosts know that this one is to stop. From any thread, as `told`."""
        if self.count > 1:
            with contextlib.suppress(Exception):  # without it they learn of it when this step ends
                _client().key_value_set(_STOP, "1", allow_overwrite=True)

    def told(self) -> bool:
        """Whether one of the hosts has called `tell`."""
        if self.count > 1:
            with contextlib.suppress(Exception):  # the key is not there: none has
                return bool(_client().key_value_try_get(_STOP))
        return False

    def gather(self, value: T) -> list[T]:
        """The values of all hosts, in their order. Each host must call it, with a value that pickles.

        Pickled, because the hosts are one program: what they exchange is trusted and must come back exact.
        """
        if self.count == 1:
            return [value]
        mine = pickle.dumps(value)
        sizes = multihost_utils.process_allgather(np.array([len(mine)], np.int32)).ravel()
        longest = int(sizes.max())
        # Few sizes, since each is compiled: powers of two up to a whole chunk.
        width = min(CHUNK, 1 << max(longest - 1, 1).bit_length())
        rows = [bytearray() for _ in range(self.count)]
        for start in range(0, longest, width):
            piece = np.zeros(width, np.uint8)
            here = np.frombuffer(mine[start : start + width], np.uint8)
            piece[: len(here)] = here
            for row, found in zip(rows, multihost_utils.process_allgather(piece), strict=True):
                row += found.tobytes()
        return [pickle.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]

    def agree(self, work: Callable[[], T]) -> T:
        """This host's result of a `work` that each does. Raises LemonError on all where it fails on one."""
        if self.count == 1:
            return work()
        with self._caught() as caught:
            value = work()
        self._agreed(caught)
        return value

    def on_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on the first host, which alone does it. Fails as `agree`."""
        value = self.agree(lambda: work() if self.first else None)
        return self.gather(value)[0]  # type: ignore[return-value]

    def same(self, facts: Mapping[str, Any]) -> None:
        """Raises LemonError on all hosts, naming what differs, where one has read something else."""
        first, *others = self.gather(dict(facts))
        for index, found in enumerate(others, start=1):
            if other := [name for name, value in first.items() if found[name] != value]:
                raise of_all(
                    LemonError(
                        f"process {index} of this run has other {', '.join(other)} than process 0; give all "
                        "the same data, policy and worker file"
                    )
                )

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
        """The results of an asynchronous `work` on every host.

        Raises:
            Preempted: `stop` was called on one of them.
            LemonError: it failed on one of them; on a run of one host, whatever it failed with.
        """
        with self._caught() as caught:
            if not self.stopping:
                caught.value = await self._stoppable(work)
        if self._computing is not None and (self.count > 1 or self.stopping):
            await asyncio.wait([self._computing])
        return self._agreed(caught)

    async def beside(self, compute: Callable[[], T]) -> T:
        """What a computation of all hosts gives, in a thread, so that worker calls go on meanwhile.

        Until it ends no host gathers: two threads would enter their collectives in another order on each.
        """
        self._computing = asyncio.ensure_future(asyncio.to_thread(compute))
        try:
            return await self._computing
        finally:
            self._computing = None

    async def run_on_first(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What an asynchronous `work` gives on the first host. Fails as `run`."""
        return (await self.run(lambda: work() if self.first else _nothing()))[0]  # type: ignore[return-value]

    async def check(self) -> None:
        """Raises Preempted on all hosts if one was told to stop."""
        await asyncio.sleep(0)  # lets a stop be heard that came while this thread computed
        if self.count > 1 or self.stopping:
            await self.run(_nothing)

    async def share(self, store: CallStore, work: Sequence[Work]) -> list[Scored]:
        """The results of all executions in order, each done by one host; see `evaluate.Work`.

        A host takes whole tasks, or specs where there are fewer tasks than hosts. Afterwards every store
        holds the calls of all, so that later steps find them wherever they execute.
        """
        by_task = len({one.task for one in work}) >= self.count
        owner: dict[str | int, int] = {}
        owners = [owner.setdefault(w.task if by_task else w.spec, len(owner) % self.count) for w in work]
        mine = [one for one, host in zip(work, owners, strict=True) if host == self.index]
        parts = [iter(part) for part in await self.run(partial(alone, mine))]
        self.sync(store)
        return [next(parts[host]) for host in owners]

    def sync(self, store: CallStore) -> None:
        """Bring all hosts' call stores to the same calls."""
        if self.count == 1:
            return
        parts = self.gather(store.rows(after=self._sent))
        others = [row for index, rows in enumerate(parts) if index != self.index for row in rows]
        self.agree(lambda: store.add(others))
        self._sent = store.last_row()

    async def _stoppable(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """The result of `work`; None if `stop` broke it off."""
        self._working = asyncio.create_task(work())
        try:
            return await self._working
        except asyncio.CancelledError:
            if not self.stopping:  # Ctrl-C
                raise
            return None
        finally:
            self._working = None

    @contextlib.contextmanager
    def _caught(self) -> Iterator[_Outcome]:
        outcome = _Outcome()
        try:
            yield outcome
        except Exception as error:
            if self.count == 1:
                raise
            outcome.error = error

    def _agreed(self, mine: _Outcome) -> list[Any]:
        """Every host's value, or the same exception on every host."""
        reason = None if mine.error is None else str(mine.error) or type(mine.error).__name__
        outcomes = self.gather((mine.value if reason is None else None, reason, self.stopping))
        if mine.error is not None:
            raise of_all(mine.error)
        for index, (_, other, _) in enumerate(outcomes):
            if other is not None:
                raise of_all(LemonError(f"process {index} of this run failed: {other}"))
        if any(stopping for *_, stopping in outcomes):
            self.stopped = True
            others = "another process of this run was stopped"
            raise Preempted(others if self.count > 1 else "the run was told to stop")
        return [value for value, *_ in outcomes]


@dataclass
class _Outcome:
    value: Any = None
    error: Exception | None = None


async def _nothing() -> None: ...


def _client() -> Any:
    """The key-value service of the processes; JAX has no public name for it, Orbax and Flax use this one."""
    from jax._src import distributed

    return distributed.global_state.client


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Hosts:
    """Join the other processes of the run; nothing of JAX may have been used before.

    On Cloud TPU, Slurm, Open MPI and Kubernetes all three are found without being given.

    Raises LemonError where the others cannot be found or do not come.
    """
    # Its handler would take SIGTERM away from ours, which stops a step that is under way.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        # Who ends early waits for the others no longer than that they would take to notice.
        jax.distributed.initialize(coordinator, num_processes, process_id, shutdown_timeout_seconds=120)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LemonError(
            f"--distributed: cannot join the run's processes ({reason:.200}); where JAX does not find "
            "them by itself give --coordinator HOST:PORT, --num-processes and --process-id on each"
        ) from error
    return Hosts(index=jax.process_index(), count=jax.process_count())
