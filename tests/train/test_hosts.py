"""What processes of a run agree on, in two real processes and in one."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lemon_jax.errors import LemonError
from lemon_jax.train.hosts import Hosts, Preempted

SCRIPT = Path(__file__).with_name("hosts_script.py")


def test_two_processes_agree_on_everything(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    strict = ("JAX_NUMPY", "XLA_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(strict)}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    folder = tmp_path / "checkpoints"
    command = [sys.executable, str(SCRIPT)]
    both = [
        subprocess.Popen(
            [*command, str(index), str(port), str(folder)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for index in range(2)
    ]
    try:
        texts = [process.communicate(timeout=600)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    for process, text in zip(both, texts, strict=True):
        assert process.returncode == 0, text
        assert "all equal" in text
        assert f"{folder / '2'}: skipped a damaged checkpoint (process " in text


def test_one_process_gathers_nothing_and_keeps_its_exceptions():
    hosts = Hosts()
    assert hosts.gather("x") == ["x"]
    assert hosts.on_first(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        hosts.agree(lambda: 1 // 0)

    async def fail():
        raise LemonError("gone")

    with pytest.raises(LemonError, match=r"^gone$"):
        asyncio.run(hosts.run(fail))


def test_a_stop_breaks_the_work_off_and_refuses_more():
    hosts = Hosts()
    reached = []

    async def work():
        asyncio.get_running_loop().call_soon(hosts.stop)
        reached.append("begun")
        await asyncio.sleep(300)
        reached.append("ended")

    with pytest.raises(Preempted, match=r"^the run was told to stop$"):
        asyncio.run(hosts.run(work))
    with pytest.raises(Preempted):
        asyncio.run(hosts.run(work))
    with pytest.raises(Preempted):
        asyncio.run(hosts.check())
    assert reached == ["begun"]


def test_what_is_cancelled_otherwise_stays_cancelled():
    """Ctrl-C is no preemption: nothing is saved."""
    hosts = Hosts()

    async def interrupted():
        task = asyncio.create_task(hosts.run(lambda: asyncio.sleep(300)))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert not hosts.stopping
