"""Compiled programs kept on disk, so that a second run does not compile them anew. Imports JAX."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from lemon_jax.cache import cache_folder

LEAST_COMPILE_S = 1.0  # what is compiled faster is not worth a file
MOST_BYTES = 2 << 30  # the programs that were not used for longest make room


@contextmanager
def compilation_cache_on_disk() -> Iterator[None]:
    """Read and write compiled programs in the user's cache folder, unless JAX has been given a folder.

    JAX keeps one folder for the whole process; afterwards it is as it was.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        yield
        return
    # A program is made for one kind of processor, and a cache folder may be shared by several.
    folder = cache_folder("compiled") / _processor()
    _mend(folder)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": LEAST_COMPILE_S,
        "jax_compilation_cache_max_size": MOST_BYTES,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def _mend(folder: Path) -> None:
    """Give a program that a killed process left without its time of use one.

    JAX writes the two files one after the other, and where one of them is missing it stores nothing any more.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("-cache") + "-atime")
        with contextlib.suppress(OSError):  # a cache is a convenience
            if not used.exists():
                used.write_bytes(time.time_ns().to_bytes(8, "little"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about = "".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        )
    except OSError:
        about = platform.processor()
    return hashlib.sha256(f"{platform.machine()}{about}".encode()).hexdigest()[:12]
