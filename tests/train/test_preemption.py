"""SIGTERM is heard while the main thread computes, and ends every process of a run in time."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from lemon_jax.errors import EXIT_FAULT, LemonError
from lemon_jax.train import preemption
from lemon_jax.train.hosts import Hosts, Preempted, of_all
from lemon_jax.train.preemption import EXIT_FAILED, EXIT_PREEMPTED, preemptible

PREAMBLE = """
import asyncio, sys
import jax
from lemon_jax.train.hosts import Hosts, connect
from lemon_jax.train.preemption import preemptible

index, count, port = map(int, sys.argv[1:])
hosts = connect(f"127.0.0.1:{port}", count, index) if count > 1 else Hosts()
"""
# A computation that does not end; the process says when it has begun.
ENDLESS = """
endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 7, lambda x: (3 * x + 1) % 7, x))
endless = endless.lower(1).compile()

async def run():
    with preemptible(hosts, grace_s=1.0):
        print("begun", flush=True)
        endless(1).block_until_ready()

asyncio.run(run())
"""
# Computations of all processes, one after another, between which nobody asks for a stop.
TOGETHER = """
async def run():
    with preemptible(hosts, grace_s=1.0):
        hosts.gather(0)
        print("begun", flush=True)
        while True:
            hosts.gather(0)

asyncio.run(run())
"""


# Process {alone} fails, and the other waits for it.
ALONE = """
from lemon_jax.errors import LemonError

async def run():
    with preemptible(hosts):
        hosts.gather(0)
        print("begun", flush=True)
        if index == {alone}:
            raise LemonError("disk full; make room")
        hosts.gather(0)

asyncio.run(run())
"""


def _ended(script, count, number=None):
    """How the processes of a run end, and what they say, after the last one alone got a signal, if any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUMPY", "XLA_"))}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + script, str(index), str(count), str(port)],
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
        if number is not None:
            both[-1].send_signal(number)
        errors = [process.communicate(timeout=60)[1] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    return [process.returncode for process in both], errors


@pytest.mark.parametrize("count", [1, 2])
def test_a_computation_that_does_not_end_is_left(count):
    codes, errors = _ended(ENDLESS, count, signal.SIGTERM)
    assert codes == [EXIT_PREEMPTED] * count, errors
    for error in errors:
        assert "what was being computed did not end within 1 s; continue with --resume" in error


def test_who_computes_with_a_process_that_has_left_leaves_as_it_did():
    codes, errors = _ended(TOGETHER, 2, signal.SIGTERM)
    assert codes == [EXIT_PREEMPTED] * 2, errors
    for error in errors:
        assert "stopped by SIGTERM: " in error


def test_who_computes_with_a_process_that_was_killed_says_so_at_once():
    codes, (error, _) = _ended(TOGETHER, 2, signal.SIGKILL)
    assert codes == [EXIT_FAILED, -signal.SIGKILL], error
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("error: ")
    assert "; continue with --resume" in error.splitlines()[-1]


@pytest.mark.parametrize("alone", [0, 1])
def test_who_fails_alone_says_so_in_a_line_and_nobody_waits(alone):
    started = time.monotonic()
    codes, errors = _ended(ALONE.format(alone=alone), 2)
    assert codes[alone] == EXIT_FAULT, errors
    assert errors[alone].splitlines()[-1] == "error: disk full; make room"
    assert "Traceback" not in errors[alone]
    assert codes[1 - alone] != 0
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (LemonError("gone"), ("error: gone", EXIT_FAULT)),
        (
            OSError(errno.ENOSPC, "No room", "calls"),
            ("error: calls: No room; make room", EXIT_FAULT),
        ),
        (ValueError("bug"), ("error: bug; continue with --resume", EXIT_FAILED)),
        (of_all(LemonError("gone")), None),
        (of_all(ValueError("bug")), None),
        (Preempted("stop"), None),
    ],
    ids=str,
)
def test_what_all_raise_is_raised_and_all_else_leaves(error, left, monkeypatch):
    said = []
    monkeypatch.setattr(preemption, "_leave", lambda _, text, code: said.append((text, code)) or sys.exit())

    async def run():
        with preemptible(Hosts(1, 2)):
            raise error

    with pytest.raises(type(error) if left is None else SystemExit):
        asyncio.run(run())
    assert len(said) == (left is not None)
    if left is not None:
        assert said[0][0].startswith(left[0])
        assert said[0][1] == left[1]


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
