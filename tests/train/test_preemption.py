"""SIGTERM is heard while the main thread computes, and ends every process of a run in time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from lemon_jax.train.hosts import Hosts, Preempted
from lemon_jax.train.preemption import EXIT_PREEMPTED, preemptible

# A computation that does not end; the process says when it has begun.
ENDLESS = """
import asyncio, sys, time
import jax
from lemon_jax.train.hosts import Hosts, connect
from lemon_jax.train.preemption import preemptible

index, count, port = map(int, sys.argv[1:])
hosts = connect(f"127.0.0.1:{port}", count, index) if count > 1 else Hosts()
endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 7, lambda x: (3 * x + 1) % 7, x))
endless = endless.lower(1).compile()

async def run():
    with preemptible(hosts, grace_s=1.0):
        print("begun", flush=True)
        endless(1).block_until_ready()

asyncio.run(run())
"""


@pytest.mark.parametrize("count", [1, 2])
def test_a_computation_that_does_not_end_is_left(count):
    """SIGTERM goes to the last process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUMPY", "XLA_"))}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(index), str(count), str(port)],
            env=env | {"JAX_PLATFORMS": "cpu"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(count)
    ]
    try:
        for process in both:
            line = process.stdout.readline()
            while line and line.strip() != "begun":  # gloo prints whom it is connected to
                line = process.stdout.readline()
        both[-1].send_signal(signal.SIGTERM)
        errors = [process.communicate(timeout=60)[1] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    for process, error in zip(both, errors, strict=True):
        assert process.returncode == EXIT_PREEMPTED, error
        assert "what was being computed did not end within 1 s; continue with --resume" in error


def test_what_stops_in_time_may_take_as_long_to_save_as_it_takes():
    """And before and after, SIGTERM means what it meant."""
    hosts, before = Hosts(), signal.getsignal(signal.SIGTERM)

    async def work():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        await asyncio.sleep(60)

    async def run():
        with preemptible(hosts, grace_s=1.0):
            try:
                await hosts.run(work)
            finally:
                time.sleep(2)

    with pytest.raises(Preempted):
        asyncio.run(run())
    assert hosts.stopped
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
