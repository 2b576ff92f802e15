"""SIGTERM is heard at once, whatever the process computes, and ends all processes of a run in time.

A handler in Python waits until the main thread is free, which an update or a sampling that is under way keeps
busy. So a thread of its own listens, tells the other processes, and counts the time.

Where one process fails alone, as on a full disk, the others get an error from what they compute with it. All
leave at once then: JAX's own way out waits minutes for the others, and aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

from lemon_jax.errors import EXIT_FAULT, fault_line
from lemon_jax.train.hosts import Hosts, is_of_all

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: start it again
EXIT_FAILED = 1  # as of an exception that nobody catches
GRACE_S = 20.0  # of the 30 s that clouds give; the rest is for saving
_WAY_ON = "; continue with --resume from the last checkpoint"
POLL_S = 0.5  # how soon a process learns that another was told to stop


@contextlib.contextmanager
def preemptible(hosts: Hosts, *, grace_s: float = GRACE_S) -> Iterator[None]:
    """Within it, inside the event loop, SIGTERM to any process of the run calls `hosts.stop` on all.

    Where they have not all stopped `grace_s` seconds later, because a computation does not end, the process
    ends at once with EXIT_PREEMPTED: what was saved before stays, and the step is lost. So does one of
    several processes that fails, since the others cannot go on: with EXIT_FAULT where the user can mend it,
    else with EXIT_FAILED unless one of them was told to stop. What `hosts.of_all` marks is raised. Main
    thread only.
    """
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    # What the interpreter's own handler writes there does not wait for the main thread, as a function would.
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(ours, loop, hosts, grace_s), daemon=True)
    listener.start()
    try:
        yield
    except Exception as error:
        if hosts.count > 1 and not is_of_all(error):
            _leave_failed(hosts, error)
        raise
    finally:
        signal.set_wakeup_fd(fd)
        signal.signal(signal.SIGTERM, handler)
        theirs.close()  # which ends the listener
        listener.join()
        ours.close()


def _listen(signals: socket.socket, loop: asyncio.AbstractEventLoop, hosts: Hosts, grace_s: float) -> None:
    signals.settimeout(POLL_S)
    deadline = math.inf
    while True:
        try:
            heard = signals.recv(64)
            if not heard:
                return
        except TimeoutError:
            heard = b""
        if deadline == math.inf and (signal.SIGTERM in heard or hosts.told()):
            deadline = time.monotonic() + grace_s
            loop.call_soon_threadsafe(hosts.stop)
            hosts.tell()
        if time.monotonic() > deadline and not hosts.stopped:
            reason = f"what was being computed did not end within {grace_s:g} s"
            _leave(hosts, f"stopped by SIGTERM: {reason}{_WAY_ON}", EXIT_PREEMPTED)


def _leave_failed(hosts: Hosts, error: Exception) -> NoReturn:
    if (line := fault_line(error)) is not None:
        _leave(hosts, f"error: {line}", EXIT_FAULT)
    reason = f"{(str(error).strip() or type(error).__name__).splitlines()[0]:.300}"
    if hosts.told():
        _leave(hosts, f"stopped by SIGTERM: {reason}{_WAY_ON}", EXIT_PREEMPTED)
    traceback.print_exception(error)
    _leave(hosts, f"error: {reason}{_WAY_ON}", EXIT_FAILED)


def _leave(hosts: Hosts, text: str, code: int) -> NoReturn:
    """End this process now, though its main thread may compute."""
    print(text, file=sys.stderr, flush=True)
    if hosts.count > 1 and hosts.first:
        time.sleep(2 * POLL_S)  # with it goes the service of the others, whom JAX then aborts
    os._exit(code)
