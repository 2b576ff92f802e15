"""What two processes do together, as test_hosts starts them: python hosts_script.py INDEX PORT FOLDER."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from lemon_jax.backends import Reply
from lemon_jax.errors import LemonError
from lemon_jax.model.sharding import fetch, make_mesh, place
from lemon_jax.runtime import CallStore
from lemon_jax.train.checkpoint import Checkpoints
from lemon_jax.train.config import UpdateConfig
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.evaluate import Work
from lemon_jax.train.hosts import CHUNK, Hosts, Preempted, connect, is_of_all
from lemon_jax.train.preemption import preemptible
from lemon_jax.train.update import init_state


def gathering(hosts: Hosts) -> None:
    assert hosts.gather({"host": hosts.index}) == [{"host": 0}, {"host": 1}]
    sizes = [0, 2 * CHUNK + 3]  # several exchanges, of which one host needs none
    found = hosts.gather(bytes([hosts.index]) * sizes[hosts.index])
    assert found == [b"", b"\x01" * sizes[1]]
    assert hosts.on_first(lambda: f"from {hosts.index}") == "from 0"


def comparing(hosts: Hosts) -> None:
    hosts.same({"data": 1, "workers": "a"})
    with pytest.raises(LemonError, match=r"^process 1 .* has other workers than process 0; give all"):
        hosts.same({"data": 1, "workers": hosts.index})


def failing(hosts: Hosts) -> None:
    def work() -> int:
        if hosts.index == 1:
            raise LemonError("a server is gone")
        return 7

    own, other = "a server is gone", "process 1 of this run failed: a server is gone"
    for attempt in (
        lambda: hosts.agree(work),
        lambda: asyncio.run(hosts.run(lambda: asyncio.to_thread(work))),
    ):
        with pytest.raises(LemonError) as error:
            attempt()
        assert str(error.value) == (own if hosts.index == 1 else other)
        assert is_of_all(error.value)
    store = CallStore(None)
    if hosts.first:
        store.put("key", "here", Reply(text="x", finish="stop"))
    else:
        store._db.execute("pragma query_only = 1")  # as on a full disk
    with pytest.raises(LemonError, match="readonly database; make room, then go on"):
        hosts.sync(store)
    store.close()


def sharing(hosts: Hosts) -> None:
    """Whole tasks, then single specs; equal calls end in both stores, whoever asked."""
    store = CallStore(None)
    done: list[str] = []

    def work(task: str, spec: int) -> Work:
        async def execute() -> str:
            done.append(f"{task}{spec}")
            store.put(f"{task}{spec}", "here", Reply(text=f"host {hosts.index}", finish="stop"))
            return f"{task}{spec}"

        return Work(task, spec, execute)  # type: ignore[arg-type]

    two = [work("a", 0), work("a", 1), work("b", 2), work("b", 3), work("a", 1)]
    assert asyncio.run(hosts.share(store, two)) == ["a0", "a1", "b2", "b3", "a1"]
    assert done == (["a0", "a1", "a1"] if hosts.index == 0 else ["b2", "b3"])
    done.clear()
    one = [work("c", 0), work("c", 1), work("c", 2), work("c", 1)]  # the last is an edit of the second
    assert asyncio.run(hosts.share(store, one)) == ["c0", "c1", "c2", "c1"]
    assert done == (["c0", "c2"] if hosts.index == 0 else ["c1", "c1"])
    replies = {key: reply.text for key, reply in store.replies().items()}
    second = {"b2", "b3", "c1"}
    assert replies == {k: f"host {int(k in second)}" for k in ("a0", "a1", "b2", "b3", "c0", "c1", "c2")}
    store.close()


def checkpoints(hosts: Hosts, folder: Path) -> None:
    """A part that one process alone reads is damaged: both skip that checkpoint."""
    rng = np.random.default_rng(0)
    whole = nnx.State({"embed": rng.normal(size=(64, 32)).astype(np.float32)})
    state = init_state(place(whole, make_mesh(fsdp=4)), UpdateConfig())
    writer = Checkpoints(folder, hosts)
    for step in (1, 2):
        writer.save(step, state, EditSampler())
    writer.close()
    if hosts.first:
        for part in (folder / "2" / "state" / "ocdbt.process_1" / "d").iterdir():
            part.unlink()
    hosts.gather(None)
    reader = Checkpoints(folder, hosts)
    restored = reader.restore(state, EditSampler())
    assert restored is not None
    assert restored[0] == 1
    np.testing.assert_array_equal(fetch(restored[1].params)["embed"], whole["embed"])
    reader.close()


def stopping(hosts: Hosts) -> None:
    """One process gets SIGTERM; the other, which waits for its workers, learns of it."""

    async def work() -> None:
        if hosts.index == 1:
            asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)
        await asyncio.sleep(300)

    async def run() -> None:
        with preemptible(hosts):
            await hosts.run(work)

    with pytest.raises(Preempted):
        asyncio.run(run())


if __name__ == "__main__":
    index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
    hosts = connect(f"127.0.0.1:{port}", 2, index)
    assert (hosts.index, hosts.count, jax.device_count()) == (index, 2, 4)
    gathering(hosts)
    comparing(hosts)
    failing(hosts)
    sharing(hosts)
    checkpoints(hosts, folder)
    stopping(hosts)
    print("all equal")
