"""A bound on the CPU time of a piece of code, which what other tests have left in memory does not touch."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Assert that the block takes less CPU time.

    The garbage collector waits: in a whole run it walks over the objects of every module that was imported,
    several times as long as the block itself takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    start = time.process_time()
    try:
        yield
        spent = time.process_time() - start
    finally:
        if enabled:
            gc.enable()
    assert spent < seconds
