"""Running short programs at each isolation level."""

from __future__ import annotations

import asyncio
import textwrap

from lemon_jax.runtime.tools import box
from lemon_jax.runtime.tools.box import Limits
from lemon_jax.runtime.tools.sandbox import ProgramResult, run_program

QUICK = Limits(wall_s=1.5, cpu_s=1, output_bytes=4096)
LEVELS = {
    "bwrap+seccomp": box.LAYERS,
    "namespaces+seccomp": ("namespaces", "landlock", "seccomp"),
    "landlock+seccomp": ("landlock", "seccomp"),
    "seccomp": ("seccomp",),
    "namespaces": ("namespaces",),
    "rlimits": (),
}


def run(code: str, limits: Limits = QUICK, *, allow: bool = False) -> ProgramResult:
    return asyncio.run(run_program(textwrap.dedent(code), limits=limits, allow_unsandboxed=allow))


def reads_confined(level: str) -> bool:
    return level not in ("seccomp", "rlimits")
