"""Which isolation this machine reaches, and a refusal to run candidates under less than is accepted."""

from __future__ import annotations

from functools import cache

from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools import box
from lemon_jax.runtime.tools.box import LEVELS, Box, Limits, levels_from, watch
from lemon_jax.runtime.tools.sandbox import not_started


def reached() -> str:
    """The level of `box.LEVELS` that a sandboxed process gets here, found by starting one (once)."""
    return _reached(box.LAYERS)


@cache
def _reached(layers: tuple[str, ...]) -> str:
    with Box("program", {"code": "answer = 1"}, limits=Limits(wall_s=20.0), accepted=LEVELS) as trial:
        trial.feed()
        watch([trial], until=trial)
        trial.close(now=bool(trial.cut))
        report = trial.report()
    if not report.level:
        raise LemonError(not_started(report))
    return report.level


def require(least: str) -> str:
    """The level reached; LemonError if it is below `least`, which may be any of `box.LEVELS`."""
    found = reached()
    if found not in levels_from(least):
        raise LemonError(
            f"this machine isolates programs at level {found!r}, below {least!r}: run where namespaces and "
            f"seccomp are allowed, install bubblewrap, or accept it with --accept-isolation {found}"
        )
    return found
