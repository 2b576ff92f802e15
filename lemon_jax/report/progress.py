"""What a run is doing, and about how long it will still take: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from .run_files import number, plain

_LINE_EVERY_S = 10.0
_FACTS_EVERY_S = 1.0  # steps of a simulated pool take milliseconds: a line each would bury the log
_REDRAW_S = 0.1
_FACTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward": ("reward", lambda v: f"{v:.2f}"),
    "regret": ("regret", lambda v: f"{v:.3f}"),
    "accuracy": ("acc", lambda v: f"{v:.2f}"),
    "invalid_rate": ("invalid", lambda v: f"{100 * v:.0f} %"),
    "cost_per_task": ("cost", lambda v: f"{v:,.0f}"),
    "worker_tokens": ("worker tokens", lambda v: f"{v:,.0f}"),
    "infra_failed": ("failed on workers", lambda v: f"{v:,.0f}"),
    "loss": ("loss", lambda v: f"{v:.3f}"),
}


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """A report about the work must not end the work: whatever goes wrong in it stays inside."""

    @functools.wraps(method)
    def guarded(self: RunProgress, *args: Any, **kwargs: Any) -> None:
        try:
            with self._lock:
                method(self, *args, **kwargs)
        except (Exception, SystemExit):
            # A closed pipe (which rich answers with SystemExit) or an odd fact loses a line, nothing else.
            return

    return guarded


class _Console(Console):
    """A console that falls silent when its reader goes away, where rich would close stdout and exit."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class _Bars(Progress):
    """Bars, and below them the facts of the last step: beside them they would not fit 80 columns."""

    facts = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.facts:
            yield Text(self.facts, style="dim", no_wrap=True, overflow="ellipsis")


@dataclass
class _Phase:
    name: str
    label: str
    total: float | None
    now: float
    unit_bytes: bool = False
    done: float = 0.0
    facts: str = ""
    step_s: float | None = None
    printed: float = -math.inf
    task: TaskID | None = None
    _seconds: float = field(default=0.0, repr=False)
    _units: float = field(default=0.0, repr=False)

    def move(self, n: float, now: float) -> None:
        """Count n more units; their pace enters an exponential average, for steps get cheaper."""
        elapsed, self.now = max(0.0, now - self.now), now
        self.done += n
        self.step_s = elapsed / n if n > 0 else None
        window = max(4.0, (self.total or 40) / 10)
        keep = math.exp(-max(n, 0) / window)
        self._seconds = keep * self._seconds + elapsed
        self._units = keep * self._units + n

    def left(self) -> str:
        if self.total is None or self._units <= 0 or self.done >= self.total:
            return ""
        return f"about {clock_text((self.total - self.done) * self._seconds / self._units)} left"

    @property
    def complete(self) -> bool:
        return self.total is not None and self.done >= self.total

    def count(self) -> str:
        if self.unit_bytes:
            return f"{self.done / 1e6:,.0f}/{(self.total or 0) / 1e6:,.0f} MB"
        if self.total is None:
            return f"{self.done:,.0f}"
        total = f"{self.total:,.0f}"
        return f"{f'{self.done:,.0f}':>{len(total)}}/{total}"


class RunProgress:
    """Progress of a run through its phases. No method raises; all may be called from any thread.

    ```
    with RunProgress() as progress:
        progress.phase("training", 20, unit="step")
        for ...:
            progress.advance(reward=1.02, accuracy=0.56, invalid_rate=0.0)
    # not a terminal: "step  7/20  reward 1.02  acc 0.56  invalid 0 %  12.1 s  about 2:40 left"
    ```
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.RLock()
        self._console = console or _Console(stderr=True, highlight=False)
        self._clock = clock
        self._phase: _Phase | None = None
        self._downloads: dict[str, _Phase] = {}
        self._bars: _Bars | None = None

    def __enter__(self) -> RunProgress:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @_never_raises
    def phase(self, name: str, total: int | None = None, *, unit: str = "") -> None:
        """Begin a phase of `total` units (None: unknown); `unit` names one of them in plain lines."""
        self._phase = self._begin(_Phase(plain(name), plain(unit or name), total, self._clock()))
        if self._bars is not None:
            self._bars.facts = ""
        else:
            self._console.print(Text(plain(name) + (f": {total:,} to do" if total else "")), soft_wrap=True)

    @_never_raises
    def advance(self, n: int = 1, **facts: object) -> None:
        """Count n more units of the phase; facts (reward=..., accuracy=...) are shown beside it.

        A fact that is None or not finite is left out.
        """
        if self._phase is None:
            self._phase = self._begin(_Phase("working", "working", None, self._clock()))
        self._phase.move(n, self._clock())
        if facts:
            self._phase.facts = facts_text(facts)
        self._show(self._phase, _FACTS_EVERY_S if facts else _LINE_EVERY_S)

    @_never_raises
    def note(self, text: str) -> None:
        """Print one line, above the bars where there are any."""
        self._console.print(Text(plain(text)), soft_wrap=True)

    @_never_raises
    def file(self, name: str, done: int, total: int | None) -> None:
        """`download` in the order of words of `bench.load`; a total that is unknown is None."""
        self.download(done, total or 0, name)

    def download(self, done: int, total: int, what: str) -> None:
        """Callback of a download: bytes done, bytes in all, and what is being done. May be called often."""
        phase = self._downloads.get(what)
        if phase is None or done < phase.done:  # begun anew, e.g. from another source
            fresh = _Phase(plain(what), plain(what), total, self._clock(), unit_bytes=True)
            # Bytes that an earlier run has fetched say nothing about the pace of this one.
            fresh.done = done
            fresh.task = phase.task if phase else None
            phase = self._downloads[what] = self._begin(fresh) if phase is None else fresh
        now = self._clock()
        if done == phase.done and not phase.complete:
            return
        if now - phase.now < _REDRAW_S and done < total:
            return
        phase.total = total
        phase.move(done - phase.done, now)
        self._show(phase, _LINE_EVERY_S)

    @_never_raises
    def _start(self) -> None:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bars = _Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[count]}", markup=False, justify="right"),
                TextColumn("{task.fields[left]}", markup=False),
                console=self._console,
                refresh_per_second=2,
            )
            self._bars.start()

    @_never_raises
    def _stop(self) -> None:
        if self._bars is not None:
            bars, self._bars = self._bars, None
            bars.stop()

    def _begin(self, phase: _Phase) -> _Phase:
        if self._bars is not None:
            phase.task = self._bars.add_task(phase.name, total=phase.total, count="", left="")
        return phase

    def _show(self, phase: _Phase, every_s: float) -> None:
        if self._bars is not None and phase.task is not None:
            self._bars.facts = phase.facts or self._bars.facts
            self._bars.update(
                phase.task,
                total=phase.total,
                completed=phase.done,
                count=phase.count(),
                left=phase.left(),
            )
            return
        if phase.now - phase.printed < every_s and not phase.complete:
            return
        phase.printed = phase.now
        step = "" if phase.step_s is None or phase.unit_bytes else f"{phase.step_s:.1f} s"
        parts = (f"{phase.label} {phase.count()}", phase.facts, step, phase.left())
        self._console.print(Text("  ".join(part for part in parts if part)), soft_wrap=True)


def facts_text(facts: dict[str, object]) -> str:
    """Facts of a step in one line; what is None or not finite is left out.

    # In: {"reward": 1.02, "invalid_rate": 0.0, "kl": None}   Out: "reward 1.02  invalid 0 %"
    """
    parts = []
    for key, value in facts.items():
        name, form = _FACTS.get(key, (plain(key).replace("_", " "), lambda v: f"{v:.4g}"))
        # Arrays of one number (numpy, JAX) count as numbers.
        found = number(value.item() if hasattr(value, "item") else value)
        if found is not None:
            parts.append(f"{name} {form(found)}")
        elif isinstance(value, str) and value:
            parts.append(f"{name} {plain(value)}")
    return "  ".join(parts)


def clock_text(seconds: float) -> str:
    """Minutes and seconds, with hours from one hour on.

    # In: 160.4, 3725   Out: "2:40", "1:02:05"
    """
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
