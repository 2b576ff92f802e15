"""How the download of a worker model is shown: bars on a terminal, else a line now and then."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 10.0


class ShowProgress:
    """A `backends.Progress` that writes to stderr; may be called from any thread.

    Its context manager takes the bars away at the end.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> ShowProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.make_way()

    def __call__(self, done: int, total: int, what: str) -> None:
        """`done` of `total` bytes; `what` is "model: what is being done"."""
        with self._lock:
            if self._console.is_terminal:
                self._bar(done, total, what)
            else:
                self._line(done, total, what)

    def make_way(self) -> None:
        """Take the bars off the terminal, for what is printed next; a later call draws them anew."""
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def _bar(self, done: int, total: int, what: str) -> None:
        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        model = what.partition(":")[0]  # one bar a model: the next source takes over the bar of the last
        if model not in self._tasks:
            self._tasks[model] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[model], completed=done, total=total, description=what)

    def _line(self, done: int, total: int, what: str) -> None:
        last, when = self._last
        now = time.monotonic()
        if what != last or now - when >= _LINE_EVERY_S:
            self._last = (what, now)
            self._console.print(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", markup=False)
