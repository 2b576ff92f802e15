"""SIGTERM is heard at once, whatever the process computes, and ends all processes of a run in time.

A handler in Python waits until the main thread is free, which an update or a sampling that is under way keeps
busy. So a thread of its own listens, tells the other processes, and counts the time.
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
from collections.abc import Iterator

from lemon_jax.train.hosts import Hosts

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: start it again
GRACE_S = 20.0  # of the 30 s that clouds give; the rest is for saving
POLL_S = 0.5  # how soon a process learns that another was told to stop


@contextlib.contextmanager
def preemptible(hosts: Hosts, *, grace_s: float = GRACE_S) -> Iterator[None]:
    """Within it, inside the event loop, SIGTERM to any process of the run calls `hosts.stop` on all.

    Where they have not all stopped `grace_s` seconds later, because a computation does not end, the process
    ends at once with EXIT_PREEMPTED: what was saved before stays, and the step is lost. Main thread only.
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
            _leave(grace_s)


def _leave(grace_s: float) -> None:
    print(
        f"stopped by SIGTERM: what was being computed did not end within {grace_s:g} s; "
        "continue with --resume from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_PREEMPTED)  # the main thread cannot be interrupted
