"""What the benchmarks share: the machine in words, and competitors timed in turn within one run."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp


def machine() -> str:
    """Processor, cores and load: what a figure of speed cannot be read without."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    known = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags]
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    device = jax.devices()[0].device_kind
    name = named[0] if named else platform.machine()
    return f"{name}, {cores} cores ({', '.join(known)}), {device}, load {load:.1f}"


def versions(*packages: str) -> str:
    """Their installed versions, and Python's."""

    def one(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} not installed"

    return ", ".join([f"Python {platform.python_version()}", *map(one, packages)])


def in_turn(competitors: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` of each, one after the other in turn: a machine that slows down slows
    all of them. A first call of each, not counted, compiles and warms up."""
    for call in competitors.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(rounds):
        for name, call in competitors.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def spread(seconds: list[float]) -> str:
    """The median with the fastest and the slowest."""
    return f"{median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, n {len(seconds)})"


def matrix_product(n: int = 2048) -> tuple[Callable[[], object], float]:
    """A call that multiplies two fp32 matrices of n x n, and its floating-point operations."""
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    return lambda: product(a).block_until_ready(), 2.0 * n**3


def peak_rss() -> int:
    """The most memory that this process ever held, in bytes."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib if sys.platform == "darwin" else kib * 1024
